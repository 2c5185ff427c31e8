#!/usr/bin/env bash
# llama.cpp's server (xllamacpp 2026.10.11549) with two LoRA adapters, three slots and requests that name their adapter in `lora`.
#
# Expected: requests of different adapters cannot share a batch, as the server's page says, so that they take turns and each is
# slower. vLLM and SGLang compute them in one batch.
#
# Seen: they take no turns. While requests of one adapter (or of the base model) run, a request of another adapter waits in its
# slot, and gets no token before the last of them has ended. Requests of the running adapter that come later start at once
# and overtake it: as long as one of them is always running, it never starts. `/metrics` counts it as processing, not as
# deferred, and its slot as busy, so that a router takes it for one that is served.
#
# six requests of adapter 0, each starting half-way through the one before; B comes after the first
# B of adapter 0    first token before the second of the six starts
# B of adapter 1    first token after all six have ended; meanwhile 0 requests deferred
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

folder = Path(sys.argv[1])
model = folder / "random.gguf"
WIDTH, CONTEXT = 64, 8192
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


def adapter(name, seed):
    """Writes a LoRA adapter of rank 4 on the queries of the one layer, switched off unless a request names it."""
    draw, file = np.random.default_rng(seed), gguf.GGUFWriter(folder / name, "llama")
    file.add_type("adapter")
    file.add_string("adapter.type", "lora")
    file.add_float32("adapter.lora.alpha", 4.0)
    for part, shape in (("lora_a", (4, WIDTH)), ("lora_b", (WIDTH, 4))):
        file.add_tensor(f"blk.0.attn_q.weight.{part}", (draw.standard_normal(shape) * 0.3).astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    info = xllamacpp.CommonAdapterLoraInfo()
    info.path, info.scale = str(folder / name), 0.0
    return info


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
params = xllamacpp.CommonParams()
params.model.path = str(model)
params.n_parallel, params.n_ctx, params.kv_unified = 3, 3 * CONTEXT, False
params.lora_adapters = [adapter("zero.gguf", 1), adapter("one.gguf", 2)]
params.endpoint_metrics = True
params.warmup = False
params.cpuparams.n_threads = 1
params.verbosity = 0
params.hostnames, params.port = ["127.0.0.1"], port
server = xllamacpp.Server(params)


def deferred():
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = dict(line.split() for line in page.read().decode().splitlines() if line.startswith("llamacpp:"))
    return float(lines["llamacpp:requests_deferred"])


class Ask(threading.Thread):
    """A streamed request of an adapter. `times` has when its chunks came."""

    def __init__(self, adapter, max_tokens):
        super().__init__()
        self.body = {"prompt": "ab" * 10, "max_tokens": max_tokens, "logit_bias": {"256": -100}, "stream": True}
        self.body["lora"] = [{"id": adapter, "scale": 1.0}]
        self.times = []
        self.start()

    def run(self):
        data, kind = json.dumps(self.body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, kind)
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    self.times.append(time.monotonic())

    def wait_for(self, chunks):
        while len(self.times) < chunks and self.is_alive():
            time.sleep(0.001)


def trial(adapter):
    """How many of the six began, and ended, between B's coming and its first token; requests deferred meanwhile."""
    six = [Ask(0, 3000)]
    six[0].wait_for(50)
    came, other = time.monotonic(), Ask(adapter, 100)
    time.sleep(0.05)
    waiting = deferred()
    for _ in range(5):
        six[-1].wait_for(1000)
        six.append(Ask(0, 3000))
    for one in [*six, other]:
        one.join()
    first = other.times[0]
    return sum(came < one.times[0] < first for one in six), sum(one.times[-1] < first for one in six), waiting


seen = []
for number in (0, 1):
    began, ended, waiting = trial(number)
    seen.append((began, ended, waiting))
    print(f"B of adapter {number}: before its first token {began} of the six began, {ended} ended; {waiting:.0f} deferred")
sys.stdout.flush()
raise SystemExit(0 if seen == [(0, 0, 0), (5, 6, 0)] else "CHANGED: not what was seen with 2026.10.11549")
PYTHON
echo "as seen"
