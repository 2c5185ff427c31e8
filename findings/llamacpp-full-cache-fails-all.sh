#!/usr/bin/env bash
# llama.cpp's server (xllamacpp 2026.10.11549) whose slots share one KV cache, as those of a server without `--parallel` do.
#
# Expected: when the KV cache is full, an engine makes room at one request's cost: it preempts the request that came last and
# computes it again later, as vLLM and SGLang do, or fails that one. And a router can read from `/props` how many tokens fit.
#
# Seen: when the shared cache is full, ALL requests that are running fail at the same moment, with 500 "Context size has been
# exceeded." after what they had made so far, though each is within the context that `/props` and `/slots` promise to it.
# The next request is served. A server whose slots share 4,096 tokens and one whose slots have 4,096 tokens each answer
# `/props`, `/slots` and `/v1/models` alike, and `/metrics` has no gauge of the cache, so that no client can tell a quarter
# of the memory from all of it. Where each slot has a cache of its own, an answer ends at the slot's end: `length`, 200.
#
# four requests of 500 + 3,000 tokens   reported            answered
# shared, n_ctx 4,096                   4 slots of 4,096    0 of 4; 500 for all of them
# own, n_ctx 4 x 4,096                  4 slots of 4,096    4 of 4
# shared: one request after it                              answered, 3,000 tokens
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import socket
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

model = Path(sys.argv[1]) / "random.gguf"
WIDTH, CONTEXT, SLOTS, ASKED = 64, 4096, 4, 3000
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


def start(n_parallel, n_ctx):
    """A server (-1: the default of `--parallel`, four slots that share) and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel, params.n_ctx = n_parallel, n_ctx
    params.endpoint_slots = params.endpoint_metrics = True
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.verbosity = 0
    params.hostnames, params.port = ["127.0.0.1"], port
    return xllamacpp.Server(params), f"http://127.0.0.1:{port}"


def get(url):
    with urllib.request.urlopen(url, timeout=60) as page:
        return page.read().decode()


def ask(url, number):
    """Status, and the number of tokens or the message of the error."""
    body = {"prompt": "ab" * (500 + number), "max_tokens": ASKED, "logit_bias": {"256": -100}}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.loads(answer.read())["usage"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]


def trial(n_parallel, n_ctx):
    """What the server says of itself, its four answers, and the answer after them."""
    server, url = start(n_parallel, n_ctx)
    props = json.loads(get(f"{url}/props"))
    (said,) = json.loads(get(f"{url}/v1/models"))["data"]
    reported = (
        props["total_slots"], props["default_generation_settings"]["n_ctx"], said["meta"]["n_ctx"],
        tuple(each["n_ctx"] for each in json.loads(get(f"{url}/slots"))),
        any("kv_cache" in line for line in get(f"{url}/metrics").splitlines()),
    )
    with ThreadPoolExecutor(SLOTS) as threads:
        answers = list(threads.map(lambda number: ask(url, number), range(SLOTS)))
    after = ask(url, SLOTS)
    del server
    return reported, answers, after


shared, own = trial(-1, CONTEXT), trial(SLOTS, SLOTS * CONTEXT)
for name, (reported, answers, after) in (("shared", shared), ("own", own)):
    print(f"{name}: {reported[0]} slots of {reported[1]:,} tokens; answers {answers}; after them {after}")
full = (500, "Context size has been exceeded.")
as_seen = shared[0] == own[0] == (SLOTS, CONTEXT, CONTEXT, (CONTEXT,) * SLOTS, False)
as_seen &= shared[1] == [full] * SLOTS and own[1] == [(200, ASKED)] * SLOTS and shared[2] == own[2] == (200, ASKED)
sys.stdout.flush()
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with 2026.10.11549")
PYTHON
echo "as seen"
