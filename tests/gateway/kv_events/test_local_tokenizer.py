from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

import fastokens
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headway.control import token_blocks
from headway.core.errors import HeadwayError
from headway.gateway.kv_events import local_tokenizer
from headway.gateway.kv_events.chat_template import NotExactError
from headway.gateway.kv_events.local_tokenizer import LocalTokenizer, read
from tokenizing import write_model

BLOCK = 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "the cache of a replica holds blocks, not words: 12, 345 and 6789 tokens\n\n  é 東京 🙂 don't".split(" ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of a few hundred tokens, which begins prompts with <s>."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(16)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": each} for i, each in enumerate(contents)]}


def story(chance: random.Random) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 40)))


def test_blocks_are_those_of_the_whole_prompt(folder: Path) -> None:
    """However much of a prompt was there before: chats that grow, branch, and have special tokens in their texts."""
    tokenizer, whole, chance = read(folder), Tokenizer.from_file(str(folder / "tokenizer.json")), random.Random(1)
    whole.no_truncation()
    bodies: list[dict[str, Any]] = []
    for _ in range(4):
        contents = [story(chance) for _ in range(6)]
        contents[3] += " <|im_end|> <|im_start|>" * chance.randrange(3)
        bodies += [chat(*contents[:num]) for num in range(1, 7)]
        bodies += [{"prompt": contents[0]}, {"prompt": " ".join(contents), "add_special_tokens": False}]
    chance.shuffle(bodies)
    for body in bodies:
        text, adds_special = tokenizer.text(body)
        ids = whole.encode(text, add_special_tokens=adds_special).ids
        for lora in ("", "sql"):
            found = asyncio.run(tokenizer.blocks(body, BLOCK, lora))
            assert found == (len(ids), token_blocks.segments(ids, BLOCK, lora))
        assert tokenizer.ids(body) == ids


def test_of_a_chat_that_goes_on_only_the_new_messages_are_tokenized(folder: Path) -> None:
    tokenizer = read(folder)
    contents = ["word " * 500, "Yes.", "Why?"]
    asyncio.run(tokenizer.blocks(chat(contents[0]), BLOCK, ""))
    before = tokenizer.num_tokenized
    asyncio.run(tokenizer.blocks(chat(*contents), BLOCK, ""))
    assert tokenizer.num_tokenized - before < 150, "the second and the third message, and no word of the first"
    asyncio.run(tokenizer.blocks(chat(*contents), BLOCK, ""))
    assert tokenizer.num_tokenized - before < 150, "nothing more"


def test_memory_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used least recently is forgotten, the end of a prompt before its beginning."""
    monkeypatch.setattr(local_tokenizer, "_MOST_PIECES", 8)
    monkeypatch.setattr(local_tokenizer, "_MOST_BLOCKS", 40)
    tokenizer, chance = read(folder), random.Random(2)
    bodies = [chat(*(story(chance) for _ in range(4))) for _ in range(5)]
    for body in [*bodies, *bodies]:
        count, blocks = asyncio.run(tokenizer.blocks(body, BLOCK, ""))
        assert blocks == token_blocks.segments(tokenizer.ids(body), BLOCK) and count == len(tokenizer.ids(body))
        assert len(tokenizer._prefixes) <= 8
        assert tokenizer._num_blocks == sum(len(each.blocks) for each in tokenizer._prefixes.values()) <= 40


def test_fastokens_makes_the_same_tokens(folder: Path) -> None:
    own, reference = read(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.no_truncation()
    assert own.uses_fastokens

    @given(st.text(st.characters() | st.sampled_from("ab  \n12'é東🙂")), st.booleans())
    def check(text: str, adds_special: bool) -> None:
        text = text.encode(errors="ignore").decode()
        for prompt in (text, f"{text}<s>{text}<|im_start|>"):
            expected = reference.encode(prompt, add_special_tokens=adds_special).ids
            assert own.ids({"prompt": prompt, "add_special_tokens": adds_special}) == expected

    check()


@pytest.mark.parametrize("is_read", [True, False])
def test_fastokens_is_not_used_where_it_differs(folder: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool) -> None:
    """Or where it does not read the tokenizer."""
    other = fastokens.Tokenizer.from_file(str(folder / "tokenizer.json"))  # which cuts texts at 16 tokens

    def from_json_str(text: str) -> fastokens.Tokenizer:
        if is_read:
            return other
        raise ValueError("unsupported")

    monkeypatch.setattr(local_tokenizer.fastokens, "Tokenizer", SimpleNamespace(from_json_str=from_json_str))
    own, reference = read(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert not own.uses_fastokens
    reference.no_truncation()
    text = " ".join(WORDS) * 9
    assert own.ids({"prompt": text}) == reference.encode(text).ids
    assert asyncio.run(own.blocks({"prompt": text}, BLOCK, ""))[0] == len(reference.encode(text))


@pytest.mark.parametrize("lstrip", [False, True])
def test_a_token_that_takes_spaces_beside_it_does_not_split(lstrip: bool) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<x>": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<x>", lstrip=lstrip, normalized=False)])
    own = LocalTokenizer(tokenizer, None)
    assert own._pieces("a <x> b <x>") == (["a <x> b <x>"] if lstrip else ["a ", "<x> b ", "<x>"])


def test_a_tokenizer_whose_pieces_depend_on_each_other_splits_nothing(tmp_path: Path) -> None:
    """One that puts a mark before the first word of a text alone, as some do."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "▁a": 1, "b": 2, "▁b": 3, "<x>": 4, "?": 5}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<x>", normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = read(tmp_path)
    for prompt in ("a<x>b", "<x>a", "a b<x>"):
        ids = tokenizer.encode(prompt, add_special_tokens=True).ids
        assert asyncio.run(own.blocks({"prompt": prompt}, 1, "")) == (len(ids), token_blocks.segments(ids, 1))


def test_special_tokens_at_the_end_of_a_prompt(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    own = LocalTokenizer(tokenizer, None)
    assert asyncio.run(own.blocks({"prompt": "a b </s> a"}, 1, "")) == (5, token_blocks.segments([0, 1, 2, 0, 2], 1))


def test_prompts_that_only_an_engine_can_make(tmp_path: Path) -> None:
    tokenizer = read(write_model(tmp_path, template=None))
    with pytest.raises(NotExactError, match="no chat template"):
        tokenizer.ids(chat("a"))
    with pytest.raises(NotExactError, match="not a text"):
        tokenizer.ids({"prompt": [1, 2]})
    with pytest.raises(NotExactError, match="the tokenizer does not take"):
        asyncio.run(tokenizer.blocks({"prompt": "w3 unheard"}, BLOCK, ""))
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(NotExactError, match="a chat: the chat template is not valid"):
        read(tmp_path).ids(chat("a"))


@pytest.mark.parametrize("kind", ["list", "file"])
def test_templates_and_special_tokens_of_older_files(tmp_path: Path, kind: str) -> None:
    """Several templates, of which the default counts; a token with settings; a file in place of its folder."""
    write_model(tmp_path)
    templates = [{"name": "tools", "template": "w3"}, {"name": "default", "template": "w4 {{ bos_token }}"}]
    config = {"bos_token": {"content": "w5", "lstrip": False}, "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = tmp_path if kind == "list" else tmp_path / "tokenizer.json"
    assert read(path).ids(chat("w7")) == [4, 5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json: no such file; expected a tokenizer.json, or a model's folder"),
        ("tokenizer.json", "{", "tokenizer.json: not a tokenizer that the library `tokenizers` reads"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: .*; expected the settings of a tokenizer"),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    write_model(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(HeadwayError, match=message):
        read(tmp_path)
