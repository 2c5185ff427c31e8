"""Words as tokens, and a model that says one word after the other: the next follows from the last and its place.

So an answer continued elsewhere, by its token ids or by its text, is the answer that it would have been. Each word
is a token; ids 0 to 2 begin and end reasoning, and begin an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any
from zlib import crc32

THINK, THINK_END, ASSISTANT = range(3)
_NAMES = ("<think>", "</think>", "<assistant>")
_VOCABULARY = 32_000
_FIRST = len(_NAMES)


def encode(text: str) -> list[int]:
    """A text's tokens."""
    return [_token(word) for word in text.split()]


def _token(word: str) -> int:
    if word in _NAMES:
        return _NAMES.index(word)
    if word[0] == "w" and word[1:].isdecimal() and _FIRST <= int(word[1:]) < _VOCABULARY:
        return int(word[1:])
    return _FIRST + crc32(word.encode()) % (_VOCABULARY - _FIRST)


def decode(ids: Iterable[int]) -> str:
    """Tokens' text: each begins with a space."""
    return "".join(f" {_NAMES[id]}" if id < _FIRST else f" w{id}" for id in ids)


def chat(messages: Iterable[Mapping[str, Any]], reasons: bool, goes_on: bool) -> list[int]:
    """A chat's tokens, ready for an answer; with `goes_on`, the last message is the beginning of it."""
    messages = list(messages)
    last = messages.pop() if goes_on else None
    ids = [id for message in messages for id in encode(f"{message.get('role', '')} {_text(message)}")]
    if last is not None:
        return [*ids, ASSISTANT, *encode(_text(last))]
    return [*ids, ASSISTANT, *([THINK] if reasons else [])]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def luck(prompt: list[int]) -> float:
    """Above 0, at most 1: the same for the same question, however much of an answer is there already."""
    began = _last_of(prompt, ASSISTANT)
    question = prompt if began is None else prompt[:began]
    digest = blake2b(repr(question).encode(), digest_size=4).digest()
    return (1 + int.from_bytes(digest, "big")) / (1 << 32)


class Writer:
    """One sequence as it is written."""

    def __init__(self, prompt: list[int], output_tokens: int, reasoning_tokens: int) -> None:
        self.num = len(prompt)
        self._last = prompt[-1] if prompt else 0
        began = _last_of(prompt, ASSISTANT)
        self.left: int | None = None
        """Tokens until the answer is over by itself; None: it never is."""
        if began is not None:
            written = prompt[began + 1 :]
            self.left = max(output_tokens - len(written) + (written[:1] == [THINK]), 1)
        thinks = _last_of(prompt, THINK)
        thought = thinks is not None and _last_of(prompt[thinks:], THINK_END) is not None
        self.reasoning_left = 0
        if thinks is not None and not thought:
            self.reasoning_left = max(reasoning_tokens - (self.num - thinks - 1), 1)

    def write(self, num: int) -> list[int]:
        """The next so many tokens."""
        ids = []
        for _ in range(num):
            if self.reasoning_left == 1:
                self._last = THINK_END
            else:
                self._last = _FIRST + (self._last * 48_271 + self.num * 69_621) % (_VOCABULARY - _FIRST)
            self.reasoning_left = max(self.reasoning_left - 1, 0)
            self.num += 1
            ids.append(self._last)
        return ids


def _last_of(ids: list[int], wanted: int) -> int | None:
    return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] == wanted), None)
