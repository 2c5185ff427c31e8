from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from headway.control import token_blocks
from headway.emulator import tokens
from headway.gateway.kv_events import checked_tokenizer
from headway.gateway.kv_events.checked_tokenizer import CheckedTokenizer
from headway.gateway.settings import Api
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.engine import EngineEndpoint
from tokenizing import TEMPLATE, write_model

CHAT = {"messages": [{"role": "user", "content": "w5 w6"}]}
TEXT = {"prompt": "w5 w6 w7"}
Tokenize = Callable[[dict[str, Any]], list[int] | None]


class Engine(EngineEndpoint):
    """An engine that makes tokens by a function."""

    def __init__(self, tokenize: Tokenize, api: Api = "vllm") -> None:
        super().__init__(0, "pool", "tiny", "http://127.0.0.1:1", ADAPTERS[api], 1000)
        self._tokens_of, self.num_asked = tokenize, 0

    async def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        self.num_asked += 1
        return self._tokens_of(body)


def emulated(body: dict[str, Any]) -> list[int] | None:
    """The tokens of an emulated engine."""
    if "messages" in body:
        return tokens.chat(body["messages"], reasons=False, continues=False)
    return tokens.encode(body["prompt"])


async def settle(tokenizer: CheckedTokenizer, engine: Engine) -> None:
    tokenizer.check([engine])
    while tokenizer._task is not None:
        await asyncio.wait([tokenizer._task])
        await asyncio.sleep(0)  # for what follows the task


async def named(tokenizer: CheckedTokenizer, engine: Engine) -> tuple[bool, bool]:
    """Whether a text and a chat are tokenized locally."""
    found = [await tokenizer.blocks(body, 2, "", [engine]) for body in (TEXT, CHAT)]
    expected = [token_blocks.segments(emulated(body) or [], 2) for body in (TEXT, CHAT)]
    assert all(each is None or each[1] == blocks for each, blocks in zip(found, expected, strict=True))
    return found[0] is not None, found[1] is not None


def judged(path: Path, engine: Engine) -> tuple[bool, bool]:
    async def story() -> tuple[bool, bool]:
        tokenizer = CheckedTokenizer(str(path))
        assert await named(tokenizer, engine) == (False, False), "not before it was checked"
        await settle(tokenizer, engine)
        num_asked = engine.num_asked
        found = await named(tokenizer, engine)
        await settle(tokenizer, engine)
        assert engine.num_asked == num_asked, "it is checked once"
        return found

    return asyncio.run(story())


@pytest.fixture(autouse=True)
def _log_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway.gateway")


def test_a_tokenizer_that_makes_an_engines_tokens_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert judged(write_model(tmp_path), Engine(emulated)) == (True, True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"tokenizer {tmp_path}: tokenizes texts and chats as pool/0 does"


def test_chats_of_another_template_are_tokenized_by_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = TEMPLATE.replace("m['role']", "m['role'] | upper")
    model = write_model(tmp_path, ["USER", "ASSISTANT", "SYSTEM"], other)
    assert judged(model, Engine(emulated)) == (True, False)
    (line, used) = [record.getMessage() for record in caplog.records]
    assert "pool/0 is asked instead: chats have other tokens there" in line and "after 0 equal ones" in line
    assert used.endswith("tokenizes texts as pool/0 does")


def test_a_model_without_a_template_names_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert judged(write_model(tmp_path, template=None), Engine(emulated)) == (True, False)
    assert "pool/0 is asked instead: for a chat, as the model's files have no chat template" in caplog.text


def test_another_models_tokenizer_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Engine(lambda body: [id + 1 for id in emulated(body) or []])
    assert judged(write_model(tmp_path), other) == (False, False)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_an_engine_that_refuses_chats(tmp_path: Path) -> None:
    texts_only = Engine(lambda body: None if "messages" in body else emulated(body))
    assert judged(write_model(tmp_path), texts_only) == (True, False)


def test_engines_that_tell_no_tokens_leave_nothing_to_compare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(lambda body: None, "sglang")
    assert judged(write_model(tmp_path), engine) == (True, True) and not engine.num_asked
    assert "tokenizes prompts; unchecked" in caplog.text


def test_a_silent_engine_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before a while has passed."""
    is_silent, now_s = True, 100.0
    monkeypatch.setattr(checked_tokenizer.time, "monotonic", lambda: now_s)

    async def story() -> None:
        nonlocal is_silent, now_s
        engine = Engine(lambda body: None if is_silent else emulated(body))
        tokenizer = CheckedTokenizer(str(write_model(tmp_path)))
        await settle(tokenizer, engine)
        assert "not used yet, as no engine tells the tokens" in caplog.text
        is_silent = False
        await settle(tokenizer, engine)
        assert await named(tokenizer, engine) == (False, False)
        now_s += checked_tokenizer.RETRY_S
        await settle(tokenizer, engine)
        assert await named(tokenizer, engine) == (True, True)

    asyncio.run(story())


def test_files_that_vanish_after_the_start_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert judged(tmp_path, Engine(emulated)) == (False, False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "engines tokenize all prompts" in line and "no such file" in line


def test_what_the_template_cannot_make_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        tokenizer, engine = CheckedTokenizer(str(write_model(tmp_path))), Engine(emulated)
        await settle(tokenizer, engine)
        for _ in range(3):
            assert await tokenizer.blocks({**CHAT, "tools": [{"type": "function"}]}, 2, "", [engine]) is None

    asyncio.run(story())
    assert caplog.text.count("tokenized by the engine: a chat with `tools`") == 1
