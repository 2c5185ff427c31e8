"""A llama.cpp server whose iterations last milliseconds, as its model is large enough: `python bench_llama.py PORT`.

With LLAMA_BATCH_DEBUG=2 in the environment, it writes to stderr which sequences each pass has.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import tiny_llama

tiny_llama.HIDDEN, tiny_llama.LAYERS, tiny_llama.HEADS, tiny_llama.FEED = 512, 6, 8, 1024
if "LLAMA_BATCH_DEBUG" in os.environ:
    tiny_llama.VERBOSITY = 9
TOKEN_IDS = (300, 1300)


def write_config(path: Path) -> None:
    """The model's config.json, as Hugging Face has it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": tiny_llama.HIDDEN,
        "intermediate_size": tiny_llama.FEED,
        "num_hidden_layers": tiny_llama.LAYERS,
        "num_attention_heads": tiny_llama.HEADS,
        "num_key_value_heads": tiny_llama.HEADS,
        "vocab_size": len(tiny_llama.vocabulary()[0]),
        "max_position_embeddings": tiny_llama.CONTEXT,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    path.write_text(json.dumps(config))


if __name__ == "__main__":
    tiny_llama.main(int(sys.argv[1]), None)
