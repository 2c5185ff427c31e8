"""Files of a model whose tokenizer makes the tokens of emulated engines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from headway.emulator import tokens

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SENTENCES = (
    "user assistant system Hello, wörld! 1234567 of them: def f(x): return x # 東京 🙂 Yes. Why? Be brief. and more"
)


def write_model(folder: Path, words: Iterable[str] = (), template: str | None = TEMPLATE) -> Path:
    """A folder with a tokenizer of words and a chat template. It knows `w3` to `w999`, those
    of a few sentences, and `words`."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {word: tokens.encode(word)[0] for word in (*SENTENCES.split(), "<assistant>", *words)}
    vocabulary = {f"w{id}": id for id in range(3, 1000)} | known
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<assistant>", special=True, normalized=False)])
    saved = json.loads(tokenizer.to_str())
    saved["model"]["vocab"] = vocabulary  # with several words of one id, which the library does not save
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    config = {"eos_token": "</s>"} if template is None else {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
