"""A vLLM server with the model of examples/tiny_llama.py: `python vllm_server.py VLLM PORT`, VLLM being its program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from tiny_llama import CONTEXT, END, FEED, HEADS, HIDDEN, LAYERS, TEMPLATE, THINK_END, vocabulary

OPTIONS = (
    "--host 127.0.0.1 --served-model-name qwen3-8b --dtype float32 --enforce-eager --max-num-seqs 4"
    " --scheduling-policy priority --reasoning-parser qwen3"
).split()
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def write_model(folder: Path, seed: int = 0) -> None:
    """Weights, tokenizer and configuration, as Hugging Face's libraries read them."""
    tokens, num_words = vocabulary()
    draw = np.random.default_rng(seed)

    def some(*shape: int) -> np.ndarray:
        return (draw.standard_normal(shape) * 0.5).astype(np.float32)

    size = len(tokens)
    tensors = {"model.embed_tokens.weight": some(size, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    tensors["lm_head.weight"] = np.concatenate(
        [np.zeros((size - num_words, HIDDEN), np.float32), some(num_words, HIDDEN)]
    )
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        tensors |= {f"{at}.self_attn.{name}_proj.weight": some(HIDDEN, HIDDEN) for name in "qkvo"}
        tensors |= {f"{at}.mlp.{name}_proj.weight": some(FEED, HIDDEN) for name in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = some(HIDDEN, FEED)
        for name in ("input", "post_attention"):
            tensors[f"{at}.{name}_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    _write_safetensors(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "hidden_size": HIDDEN,
        "intermediate_size": FEED, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "silu",
        "num_key_value_heads": HEADS, "head_dim": HIDDEN // HEADS, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": END, "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, tokens)


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A length, a header in JSON, and the bytes."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    content = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(
        len(content).to_bytes(8, "little") + content + b"".join(each.tobytes() for each in tensors.values())
    )


def _write_tokenizer(folder: Path, tokens: list[str]) -> None:
    """The same one as llama.cpp is given."""
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [f"{token[:-1]} {token[-1]}" for token in tokens[THINK_END + 1 :]],
    }
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    marks = [{"id": i, "content": tokens[i], "special": i == END, **plain} for i in range(END, THINK_END + 1)]
    whole = {"version": "1.0", "added_tokens": marks, "pre_tokenizer": levels, "decoder": levels, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[END],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main(program: str, port: str) -> None:
    """Serve until killed, with all that was started."""
    os.setsid()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_model(folder)
        with (folder / "log").open("wb") as log:
            command = [program, "serve", made, "--port", port, *OPTIONS]
            server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT})
        url = f"http://127.0.0.1:{port}"
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        else:
            sys.exit((folder / "log").read_text()[-5000:])
        sys.stdout.write(f"listens on {url}\n")
        sys.stdout.flush()
        server.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
