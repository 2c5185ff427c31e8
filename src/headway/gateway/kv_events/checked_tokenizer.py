"""A tokenizer from a model's files, checked against an engine before use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.core.request import Segment
from headway.gateway.kv_events.chat_template import NotExactError
from headway.gateway.kv_events.local_tokenizer import LocalTokenizer, read
from headway.gateway.upstream.engine import EngineEndpoint

log = logging.getLogger("headway.gateway")
RETRY_S = 5.0
"""Minimum time between two checks while no engine has reported its tokens."""
_SENTENCE = "Hello, wörld! 1234567 of them:\n\n  def f(x):\treturn x  # 東京 🙂"
_TURNS = [
    {"role": "user", "content": _SENTENCE},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
PROBES: tuple[Mapping[str, Any], ...] = (
    {"prompt": _SENTENCE},
    {"messages": _TURNS},
    {"messages": [{"role": "system", "content": "Be brief."}, *_TURNS]},
)
"""Requests whose tokens are compared with an engine's tokens."""
_KINDS = {"prompt": "texts", "messages": "chats"}


class CheckedTokenizer:
    """One tokenizer. Until the tokenizer is read and checked, and for prompts that it cannot tokenize, the engines
    tokenize."""

    def __init__(self, path: str, read: Callable[[Path], LocalTokenizer] = read) -> None:
        self.path, self._read = path, read
        self._tokenizer: LocalTokenizer | None = None
        self._agrees: dict[str, bool] = {}
        """By kind of prompt, `prompt` or `messages`: whether an engine makes the same tokens."""
        self._task: asyncio.Task[None] | None = None
        self._checked_s = float("-inf")
        self.is_settled = False
        """Whether the files were read and compared, or cannot be read."""
        self._logged: set[str] = set()

    async def blocks(
        self, body: Mapping[str, Any], block_tokens: int, lora: str, engines: Sequence[EngineEndpoint], salt: str = ""
    ) -> tuple[int, tuple[Segment, ...]] | None:
        """The number of a prompt's tokens, and its blocks; None if an engine must tokenize it."""
        self.check(engines)
        kind = "messages" if "messages" in body else "prompt"
        if self._tokenizer is None or not self._agrees.get(kind):
            return None
        try:
            return await self._tokenizer.blocks(body, block_tokens, lora, salt)
        except NotExactError as error:
            self._log(logging.INFO, f"tokenized by the engine: {error}")
            return None

    def check(self, engines: Sequence[EngineEndpoint]) -> None:
        """Start to compare the tokenizer with one of the engines, unless a comparison is done or running."""
        if self.is_settled or self._task is not None or time.monotonic() < self._checked_s + RETRY_S:
            return
        self._task = asyncio.get_running_loop().create_task(self._check(engines))
        self._task.add_done_callback(self._check_ended)

    def _check_ended(self, task: asyncio.Task[None]) -> None:
        self._task, self._checked_s = None, time.monotonic()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.is_settled = True
            self._log(logging.WARNING, f"engines tokenize all prompts: {error}")

    async def _check(self, engines: Sequence[EngineEndpoint]) -> None:
        tokenizer = await asyncio.to_thread(self._read, Path(self.path))
        able = [each for each in engines if each.adapter.tokenize is not None and each.adapter.template is None]
        for engine in able:
            if (found := await _compare(tokenizer, engine)) is not None:
                self._agrees, differences = found
                for each in differences:
                    self._log(logging.WARNING, f"{engine.name} is asked instead: {each}")
                if kinds := [_KINDS[kind] for kind, agrees in self._agrees.items() if agrees]:
                    self._log(logging.INFO, f"tokenizes {' and '.join(kinds)} as {engine.name} does")
                break
        else:
            if able:
                self._log(logging.INFO, "not used yet, as no engine tells the tokens of a prompt")
                return
            self._agrees = dict.fromkeys(_KINDS, True)
            self._log(logging.INFO, "tokenizes prompts; unchecked, as these engines do not tell the tokens of prompts")
        self._tokenizer, self.is_settled = tokenizer, True

    def _log(self, level: int, text: str) -> None:
        """Log a line on its first occurrence."""
        if text not in self._logged:
            self._logged.add(text)
            log.log(level, "tokenizer %s: %s", self.path, text)


def _difference(reported: Sequence[int], own: Sequence[int]) -> str:
    pairs = enumerate(zip(reported, own, strict=False))
    first = next((i for i, (one, other) in pairs if one != other), min(len(reported), len(own)))
    return f"{reported[first : first + 3]} in place of {own[first : first + 3]} after {first} equal ones"


async def _compare(tokenizer: LocalTokenizer, engine: EngineEndpoint) -> tuple[dict[str, bool], list[str]] | None:
    """Compare. Returns, for each kind of prompt, whether an engine makes the same tokens, and the differences; None if
    the engine reports no tokens."""
    agrees: dict[str, bool] = {}
    differences = []
    is_silent = True
    for probe in PROBES:
        kind = next(iter(probe))
        reported = await engine.tokenize(dict(probe))
        if reported is None:  # an engine may refuse chats, or system messages
            continue
        is_silent = False
        try:
            own = tokenizer.ids(probe)
        except NotExactError as error:
            differences.append(f"for {error}")
            continue
        if own != reported and agrees.get(kind, True):
            differences.append(f"{_KINDS[kind]} have other tokens there, {_difference(reported, own)}")
        agrees[kind] = agrees.get(kind, True) and own == reported
    return None if is_silent else (agrees, differences)
