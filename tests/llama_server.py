"""A llama.cpp server with a model of random weights that it makes itself: `python llama_server.py FOLDER PORT`.

Needs `xllamacpp` and `gguf`. It says words of three letters, which mean nothing and which its tokenizer finds again
in a text; all else is a real engine's.
"""

from __future__ import annotations

import itertools
import string
import sys
import time
from pathlib import Path

import numpy as np

HIDDEN, LAYERS, HEADS, FEED, CONTEXT = 128, 2, 4, 256, 4096
SPACE = "\u0120"
"""As GPT-2's tokenizers spell it."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def _byte_tokens() -> list[str]:
    """Bytes as GPT-2's tokenizers spell them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def write_model(path: Path, seed: int = 0) -> None:
    """A small llama; its tokens are bytes, an end, and words of three letters."""
    import gguf

    parts = [["".join(some) for some in itertools.product(string.ascii_lowercase[:10], repeat=n)] for n in (1, 2, 3)]
    begins = [SPACE + part for part in parts[0] + parts[1]]
    words = [SPACE + part for part in parts[2]]
    tokens = [*_byte_tokens(), "<|end|>", *begins, *words]
    size = len(tokens)
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] + [1] * (len(begins) + len(words)))
    writer.add_token_merges([f"{token[:-1]} {token[-1]}" for token in begins + words])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def tensor(name: str, *shape: int, silent: int = 0) -> None:
        values = (draw.standard_normal(shape) * 0.5).astype(np.float32)
        values[:silent] = 0
        writer.add_tensor(name, values)

    tensor("token_embd.weight", size, HIDDEN)
    tensor("output.weight", size, HIDDEN, silent=size - len(words))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(HIDDEN, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{i}.{name}.weight", HIDDEN, HIDDEN)
        tensor(f"blk.{i}.ffn_gate.weight", FEED, HIDDEN)
        tensor(f"blk.{i}.ffn_up.weight", FEED, HIDDEN)
        tensor(f"blk.{i}.ffn_down.weight", HIDDEN, FEED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(folder: Path) -> None:
    """Serve until killed."""
    import xllamacpp

    path = folder / f"model-{time.monotonic_ns()}.gguf"
    write_model(path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel, params.n_ctx = 4, 4 * CONTEXT
    params.cont_batching = params.endpoint_metrics = True
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.hostnames, params.port = ["127.0.0.1"], int(sys.argv[2])
    server = xllamacpp.Server(params)
    sys.stdout.write(f"listens on {server.listening_address}\n")
    sys.stdout.flush()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
