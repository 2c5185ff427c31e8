#!/usr/bin/env bash
# llama.cpp's server (xllamacpp 2026.10.11549), GET /metrics.
#
# Expected: reading a page of metrics changes nothing, so that a router and a Prometheus may both read it; and counters of
# tokens grow while tokens are made, as vLLM's and SGLang's do, so that their rate is the throughput.
#
# Seen: `llamacpp:predicted_tokens_seconds` and `llamacpp:prompt_tokens_seconds` are averages since the last time that anyone
# read the page: the second reader gets 0, and with a router that reads every second a Prometheus sees 0 nearly always.
# `llamacpp:tokens_predicted_total` stands still while an answer is streamed, and grows by all of it when it ends or is
# aborted; only `llamacpp:n_decode_total` grows with each step. (Prompt tokens are counted before the answer begins.)
#
# after one answer of 50 tokens:   first reader 3684.76 tokens/s, second reader 0 tokens/s
# after 200 tokens of a stream:    1 request processing, 200 or more steps, 0 tokens predicted
# once the stream is aborted:      200 or more tokens predicted
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import socket
import sys
import time
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

model = Path(sys.argv[1]) / "random.gguf"
WIDTH, CONTEXT = 64, 32768
printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
others = iter(range(256, 512))
tokens = [chr(byte if byte in printable else next(others)) for byte in range(256)] + ["<end>", "ab"]
draw = np.random.default_rng(0)
file = gguf.GGUFWriter(model, "llama")
file.add_context_length(CONTEXT)
file.add_embedding_length(WIDTH)
file.add_block_count(1)
file.add_feed_forward_length(WIDTH)
file.add_head_count(2)
file.add_head_count_kv(2)
file.add_layer_norm_rms_eps(1e-5)
file.add_rope_dimension_count(WIDTH // 2)
file.add_vocab_size(len(tokens))
file.add_tokenizer_model("gpt2")
file.add_tokenizer_pre("gpt-2")
file.add_token_list(tokens)
file.add_token_types([1] * 256 + [3, 1])
file.add_token_merges(["a b"])
file.add_eos_token_id(256)
file.add_add_bos_token(False)
shapes = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
shapes |= {f"blk.0.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
shapes |= {
    f"blk.0.{name}": (WIDTH, WIDTH)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
}
for name, shape in shapes.items():
    values = np.ones(shape) if len(shape) == 1 else draw.standard_normal(shape) * 0.3
    file.add_tensor(f"{name}.weight", values.astype(np.float32))
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
params = xllamacpp.CommonParams()
params.model.path = str(model)
params.n_parallel, params.n_ctx = 1, CONTEXT
params.endpoint_metrics = True
params.warmup = False
params.cpuparams.n_threads = 1
params.verbosity = 0
params.hostnames, params.port = ["127.0.0.1"], port
server = xllamacpp.Server(params)


def post(**body):
    body = {"prompt": "ab", "logit_bias": {"256": -100}, **body}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


def metrics():
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = [line.split() for line in page.read().decode().splitlines() if line.startswith("llamacpp:")]
    return {name.removeprefix("llamacpp:"): float(value) for name, value in lines}


post(max_tokens=50).read()
first, second = metrics()["predicted_tokens_seconds"], metrics()["predicted_tokens_seconds"]
print(f"after one answer of 50 tokens: first reader {first} tokens/s, second reader {second} tokens/s")

before = metrics()
stream = post(max_tokens=CONTEXT - 100, stream=True)
chunks = 0
while chunks < 200:
    chunks += stream.readline().startswith(b"data: {")
during = metrics()
steps, counted = (during[name] - before[name] for name in ("n_decode_total", "tokens_predicted_total"))
running = during["requests_processing"]
print(f"after 200 tokens of a stream: {running:.0f} request processing, {steps:.0f} steps, {counted:.0f} tokens predicted")
stream.close()
for _ in range(600):
    after = metrics()
    if not after["requests_processing"]:
        break
    time.sleep(0.1)
counted_later = after["tokens_predicted_total"] - before["tokens_predicted_total"]
print(f"once the stream is aborted: {counted_later:.0f} tokens predicted")
as_seen = first > 0 and second == 0 and running == 1 and steps >= 190 and counted == 0 and counted_later >= 190
sys.stdout.flush()
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with 2026.10.11549")
PYTHON
echo "as seen"
