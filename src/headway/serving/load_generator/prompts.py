"""Prompts with an exact number of tokens.

Words that are always one token are found through a few token counts of the engine. A prompt's segment
(`core.request.Segment`) has the same text wherever its id occurs, so that shared text hits a prefix cache. Later turns
of a session contain the engine's own earlier answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct

from headway.core.request import Request
from headway.workload.random_streams import stream

Count = Callable[[str], Awaitable[int | None]]
"""The tokens of a prompt with this text, including the tokens that the engine adds; None if unknown."""
WORDS = tuple(
    f" {word}"
    for word in (
        "the of and to in is that for it as was with be by on not he his but at are this have from or had an they"
        " which one you were her all she there would their we him been has when who will more no if"
    ).split()
)
LETTERS = tuple("KLMNOPQRSTUVWXYZ")
"""Words for vocabularies without English words."""
GROUP = 8
"""Number of words that are tried together if not every word is one token."""
CHECKED = (17, 64, 257)
"""Lengths of the texts with which a vocabulary is checked."""


class Vocabulary(Struct, frozen=True):
    """Words, and their cost in tokens."""

    words: tuple[str, ...]
    extra_tokens: int = 0
    """Tokens that the engine adds to a prompt: a first token, or a chat's template."""
    tokens_per_word: float = 1.0
    note: str = ""
    """Reason why lengths are approximate; empty if they are exact."""

    def text(self, tokens: int, seed: int, name: str) -> str:
        """A text of this many tokens. Equal seeds and names give equal texts."""
        num = max(round(tokens / self.tokens_per_word), 0)
        drawn = stream(seed, name).integers(len(self.words), size=num)
        return "".join([self.words[i] for i in drawn.tolist()])


async def vocabulary(count: Count | None) -> Vocabulary:
    """Find words that are one token each. Without such words, or without a token counter, lengths are approximate."""
    if count is None:
        return Vocabulary(WORDS, note="prompt lengths are a guess, one token a word: the engine counts no tokens")
    both = await _cost(count, WORDS)
    if both is None:
        return Vocabulary(WORDS, note="prompt lengths are a guess, one token a word: the engine counts no tokens")
    cost, extra = both
    if cost == len(WORDS):
        return await _checked(count, Vocabulary(WORDS, extra))
    for candidates in (WORDS, LETTERS):
        words: list[str] = []
        for i in range(0, len(candidates), GROUP):
            group = candidates[i : i + GROUP]
            found = await _cost(count, group)
            if found is not None and found[0] == len(group):
                words, extra = [*words, *group], found[1]
        if len(words) >= GROUP:
            return await _checked(count, Vocabulary(tuple(words), extra))
    per_word = cost / len(WORDS)
    return Vocabulary(WORDS, max(extra, 0), per_word, f"prompt lengths are approximate: {per_word:.2f} tokens a word")


async def _cost(count: Count, words: Sequence[str]) -> tuple[int, int] | None:
    """(tokens of the words together, tokens of the rest of the prompt); None if unknown."""
    once, twice = await count("".join(words)), await count("".join([*words, *reversed(words)]))
    return None if once is None or twice is None else (twice - once, 2 * once - twice)


async def _checked(count: Count, found: Vocabulary) -> Vocabulary:
    """The vocabulary, with a note if its texts have the wrong length."""
    for tokens in CHECKED:
        counted = await count(found.text(tokens, 0, "load/check"))
        if counted is None or counted != tokens + found.extra_tokens:
            note = f"prompt lengths are approximate: {tokens + found.extra_tokens} tokens were counted as {counted}"
            return Vocabulary(found.words, found.extra_tokens, 1.0, note)
    return found


class Prompts:
    """Prompts of the requests of one load. Loads with different seeds or numbers share no text."""

    def __init__(self, words: Vocabulary, seed: int, is_chat: bool, num: int = 0) -> None:
        """`num`: number of this load among the loads with the same seed."""
        self._words, self._seed, self._is_chat, self._name = words, seed, is_chat, f"load/{num}"
        self._answers: dict[int, str] = {}
        """Answers that later prompts contain, by their segment's id."""

    def fields(self, request: Request) -> dict[str, Any]:
        """The prompt's part of the request's body."""
        parts = self._parts(request)
        if not self._is_chat:
            return {"prompt": "".join(text for _, text in parts)}
        messages: list[dict[str, str]] = []
        for role, text in parts:
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += text
            else:
                messages.append({"role": role, "content": text})
        return {"messages": messages}

    def keep(self, request: Request, text: str) -> None:
        """Keep an answer if a later prompt may contain it."""
        if request.output_id is not None:
            self._answers[request.output_id] = text

    def _parts(self, request: Request) -> list[tuple[str, str]]:
        """Roles and texts: the segments, then the request's own text."""
        extra, parts = self._words.extra_tokens, []
        left = max(request.prompt_tokens - extra, 1)
        for segment in request.prefix:
            if (answer := self._answers.get(segment.id)) is not None:
                parts.append(("assistant", answer))
            else:
                tokens = min(segment.tokens, left)
                parts.append(("user", self._words.text(tokens, self._seed, f"{self._name}/segment/{segment.id}")))
            left = max(left - segment.tokens, 0)
        if left or not parts:
            parts.append(("user", self._words.text(max(left, 1), self._seed, f"{self._name}/request/{request.id}")))
        return parts
