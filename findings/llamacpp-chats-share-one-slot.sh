#!/usr/bin/env bash
# llama.cpp's server (xllamacpp 2026.10.11549), four slots, three chats that begin with the same system prompt and take turns:
# 400 common tokens, then 1,000 of each chat's own.
#
# Expected: each chat gets a slot, as there are four, and its next turn computes the new question alone.
#
# Seen: all three go to ONE slot, and the other three slots stay empty. A prompt goes to the idle slot whose text it shares most
# of, if that is a tenth of the prompt (`--slot-prompt-similarity`), even if another slot is empty: a common system prompt or tool
# list of some length is enough, and each chat overwrites the one before. By default a copy of the overwritten chat is kept in
# host memory (`--cache-ram`, 8 GiB) and copied back: of a model with 128 KiB of KV for each token that is two chats of 32,000
# tokens, however much of the GPU's memory is reserved for slots. Without it (`--cache-ram 0`) every turn computes the
# whole chat again but for the system prompt, though the memory for all three is there. Only requests that overlap get slots of
# their own. A higher `--slot-prompt-similarity` gives each chat a slot. The number of slots does not tell a router how
# many chats an engine keeps.
#
# server                         slots used    tokens computed in the third turn, of 1,516 each
# default                        1             66, 63, 67
# --cache-ram 0                  1             1124, 1124, 1127
# --cache-ram 0, similarity 0.5  3             62, 61, 58
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import socket
import sys
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

model = Path(sys.argv[1]) / "random.gguf"
WIDTH, CONTEXT, SLOTS = 64, 4096, 4
COMMON, OWN, ANSWER, QUESTION, TURNS = 400, 1000, 8, 50, 3
"""Tokens of the common prompt, of what each chat begins with, of each answer and each further question."""
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


def start(cache_ram_mib, similarity):
    """A server (None: its defaults) and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_parallel, params.n_ctx = SLOTS, SLOTS * CONTEXT
    if cache_ram_mib is not None:
        params.cache_ram_mib = cache_ram_mib
    if similarity is not None:
        params.slot_prompt_similarity = similarity
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.verbosity = 0
    params.hostnames, params.port = ["127.0.0.1"], port
    return xllamacpp.Server(params), f"http://127.0.0.1:{port}"


def ask(url, prompt):
    """The slot, the number of prompt tokens that were computed, and the answer."""
    body = {"prompt": prompt, "n_predict": ANSWER, "logit_bias": [[256, -100]]}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as page:
        answer = json.loads(page.read())
    return answer["id_slot"], answer["timings"]["prompt_n"], answer["content"]


def text(num):
    """Random letters, each a token but for some pairs."""
    return "".join(chr(97 + int(each)) for each in draw.integers(0, 26, num))


def trial(cache_ram_mib=None, similarity=None):
    """The slots that were used, and what the chats' last turns computed."""
    server, url = start(cache_ram_mib, similarity)
    common = text(COMMON)
    chats = [common + text(OWN) for _ in range(3)]
    slots = set()
    for _ in range(TURNS):
        computed = []
        for i, chat in enumerate(chats):
            slot, num, answer = ask(url, chat)
            slots.add(slot)
            computed.append(num)
            chats[i] = chat + answer + text(QUESTION)
    del server
    return slots, computed


trials = {"default": trial(), "cache_ram 0": trial(0), "cache_ram 0, similarity 0.5": trial(0, 0.5)}
for name, (slots, computed) in trials.items():
    print(f"{name:30}slots used: {len(slots)} of {SLOTS}; tokens computed in turn {TURNS}: {computed}")
(kept, few), (lost, many), (apart, none) = trials.values()
as_seen = (len(kept), len(lost), len(apart)) == (1, 1, 3) and max(few + none) < 2 * QUESTION and min(many) > OWN
sys.stdout.flush()
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with 2026.10.11549")
PYTHON
echo "as seen"
