"""Words as tokens, and a model whose next token is a function of the last token and its position.

An answer that another engine continues, from token ids or from text, therefore equals an uninterrupted answer. Each
word is a token. The ids 0 to 2 begin reasoning, end reasoning, and begin an answer.
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
    """The token ids of a text."""
    return [_token(word) for word in text.split()]


def _token(word: str) -> int:
    if word in _NAMES:
        return _NAMES.index(word)
    if word[0] == "w" and word[1:].isdecimal() and _FIRST <= int(word[1:]) < _VOCABULARY:
        return int(word[1:])
    return _FIRST + crc32(word.encode()) % (_VOCABULARY - _FIRST)


def decode(ids: Iterable[int]) -> str:
    """The text of token ids. Each word begins with a space."""
    return "".join(f" {_NAMES[id]}" if id < _FIRST else f" w{id}" for id in ids)


def chat(messages: Iterable[Mapping[str, Any]], reasons: bool, continues: bool) -> list[int]:
    """The token ids of a chat, ready for an answer. With `continues`, the last message is the beginning of the
    answer."""
    messages = list(messages)
    last = messages.pop() if continues else None
    ids = [id for message in messages for id in encode(f"{message.get('role', '')} {_text(message)}")]
    if last is not None:
        return [*ids, ASSISTANT, *encode(_text(last))]
    return [*ids, ASSISTANT, *([THINK] if reasons else [])]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def question_hash(prompt: list[int]) -> float:
    """A hash in (0, 1] of the prompt, without the beginning of an answer at its end."""
    start = _last_of(prompt, ASSISTANT)
    question = prompt if start is None else prompt[:start]
    digest = blake2b(repr(question).encode(), digest_size=4).digest()
    return (1 + int.from_bytes(digest, "big")) / (1 << 32)


class TokenSequence:
    """One sequence of tokens: a prompt and its generated answer.

    `script`: the answer's text in tokens, if it is prescribed; the reasoning is not. `variant`: selects another answer
    to the same prompt.
    """

    def __init__(
        self,
        prompt: list[int],
        output_tokens: int,
        reasoning_tokens: int,
        script: list[str] | None = None,
        variant: int = 0,
    ) -> None:
        self.num = len(prompt)
        self._last = (prompt[-1] if prompt else 0) + 7_919 * variant
        self._script = script
        self._num_scripted = 0
        self._words: dict[int, str] = {}
        """Texts of the script's tokens."""
        start = _last_of(prompt, ASSISTANT)
        self.left: int | None = None
        """Tokens until the answer ends by itself; None if it never does."""
        if start is not None:
            written = prompt[start + 1 :]
            self.left = max(output_tokens - len(written) + (written[:1] == [THINK]), 1)
        think = _last_of(prompt, THINK)
        has_reasoned = think is not None and _last_of(prompt[think:], THINK_END) is not None
        self.reasoning_left = 0
        if think is not None and not has_reasoned:
            self.reasoning_left = max(reasoning_tokens - (self.num - think - 1), 1)
        if script is not None:
            self.left = self.reasoning_left + len(script)

    def extend(self, num: int) -> list[int]:
        """Generate the next `num` tokens."""
        ids = []
        for _ in range(num):
            if self.reasoning_left == 1:
                self._last = THINK_END
            elif not self.reasoning_left and self._script is not None:
                self._last = self._next_of_script(self._script)
            else:
                self._last = _FIRST + (self._last * 48_271 + self.num * 69_621) % (_VOCABULARY - _FIRST)
            self.reasoning_left = max(self.reasoning_left - 1, 0)
            self.num += 1
            ids.append(self._last)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens of this sequence."""
        return "".join(self._words[id] if id in self._words else decode([id]) for id in ids)

    def _next_of_script(self, script: list[str]) -> int:
        """The next token of the script, with a token id of its own that maps to the token's text."""
        word = script[self._num_scripted]
        self._num_scripted += 1
        id = _VOCABULARY + crc32(word.encode()) % _VOCABULARY
        while self._words.setdefault(id, word) != word:
            id += 1
        return id


def _last_of(ids: list[int], wanted: int) -> int | None:
    return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] == wanted), None)
