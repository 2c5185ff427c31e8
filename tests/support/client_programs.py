"""Programs that public clients of OpenAI's API run as, each in the environment that `HEADWAY_CLIENTS` names.

`python client_programs.py CLIENT URL MODEL` prints what the client got as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

QUESTION = "why do buses bunch"
TOKENS = 24


def main() -> None:
    client, url, model = sys.argv[1:]
    result = {"litellm": litellm, "langchain": langchain, "tokenizer": tokenizer}[client](url, model)
    sys.stdout.write(json.dumps(result) + "\n")


def litellm(url: str, model: str) -> dict[str, Any]:
    """A completion and a stream by LiteLLM as a library."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    from litellm import completion

    options: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "any",
        "max_tokens": TOKENS,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    whole = completion(**options)
    chunks = [chunk.choices[0].delta.content or "" for chunk in completion(**options, stream=True) if chunk.choices]
    return {"text": whole.choices[0].message.content, "streamed": "".join(chunks), "num": whole.usage.completion_tokens}


def langchain(url: str, model: str) -> dict[str, Any]:
    """A message and a stream by LangChain's ChatOpenAI."""
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="any", max_tokens=TOKENS, temperature=0)  # type: ignore[arg-type]
    whole = chat.invoke(QUESTION)
    streamed = "".join(str(chunk.content) for chunk in chat.stream(QUESTION))
    usage = whole.usage_metadata or {"output_tokens": 0}
    return {"text": whole.content, "streamed": streamed, "num": usage["output_tokens"]}


def tokenizer(folder: str, _: str) -> dict[str, Any]:
    """Write a tokenizer of single characters, for load generators that would load one from a hub."""
    from tokenizers import Tokenizer, decoders, models

    letters = [chr(i) for i in range(32, 127)] + ["\n", "<unk>"]
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[], unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    Path(folder).mkdir()
    made.save(str(Path(folder, "tokenizer.json")))
    special = dict.fromkeys(("unk_token", "eos_token", "bos_token"), "<unk>")
    Path(folder, "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )
    return {"num": len(letters)}


if __name__ == "__main__":
    main()
