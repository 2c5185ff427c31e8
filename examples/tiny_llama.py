"""A llama.cpp server with a model of random weights that it makes itself: `python tiny_llama.py PORT [SLOTS_FOLDER]`.

Needs `xllamacpp` and `gguf`. It says words such as "DabCeg", which mean nothing and which its tokenizer finds again in
a text; all else is a real engine's. A chat with `"chat_template_kwargs": {"enable_thinking": true}` begins with
reasoning, which `"logit_bias": {"258": 9}` lets end sooner, as `{"256": 9}` does with the answer.
"""

from __future__ import annotations

import itertools
import signal
import string
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HIDDEN, LAYERS, HEADS, FEED, CONTEXT = 128, 2, 4, 256, 4096
VERBOSITY = 1
LETTERS = string.ascii_lowercase[:10]
END, THINK, THINK_END = 256, 257, 258
"""Token ids."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['reasoning_content'] %}"
    "<think>{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def _byte_tokens() -> list[str]:
    """Bytes as GPT-2's tokenizers spell them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def vocabulary() -> tuple[list[str], int]:
    """All tokens, and how many words there are at the end. After `THINK_END`, each is another one and a letter."""
    begins, words = ([f"{a}{''.join(rest)}" for a in LETTERS.upper() for rest in itertools.product(LETTERS, repeat=n)]
                     for n in (1, 2))  # fmt: skip
    return [*_byte_tokens(), "<|end|>", "<think>", "</think>", *begins, *words], len(words)


def write_model(path: Path, seed: int = 0) -> None:
    """A small llama; its tokens are bytes, an end, and words of three letters."""
    import gguf

    tokens, num_words = vocabulary()
    size, merged = len(tokens), tokens[THINK_END + 1 :]
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
    writer.add_token_types([1] * 256 + [3, 4, 4] + [1] * len(merged))
    writer.add_token_merges([f"{token[:-1]} {token[-1]}" for token in merged])
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def tensor(name: str, *shape: int, silent: int = 0) -> None:
        values = (draw.standard_normal(shape) * 0.5).astype(np.float32)
        values[:silent] = 0
        writer.add_tensor(name, values)

    tensor("token_embd.weight", size, HIDDEN)
    tensor("output.weight", size, HIDDEN, silent=size - num_words)
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


def main(port: int, slots: str | None) -> None:
    """Serve until ended. The model's file is there as long."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.n_parallel, params.n_ctx = 4, 4 * CONTEXT
    params.cont_batching = params.endpoint_metrics = params.endpoint_slots = True
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = False
    params.model_alias = {"tiny-llama"}
    params.enable_reasoning = 0
    params.verbosity = VERBOSITY
    params.cpuparams.n_threads = 1
    params.hostnames, params.port = ["127.0.0.1"], port
    if slots is not None:
        params.slot_save_path = f"{slots}/"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_model(path)
        params.model.path = str(path)
        server = xllamacpp.Server(params)
        sys.stdout.write(f"listens on {server.listening_address}\n")
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the model's folder is removed
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
