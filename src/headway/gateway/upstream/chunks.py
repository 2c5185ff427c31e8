"""The fields of a completion that Headway reads, in a stream's chunks or in an answer that is not streamed."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field


class Delta(Struct):
    """New text of a chat's message, or a whole message."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


MAX_COUNT = 1 << 30
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class PromptDetails(Struct):
    cached_tokens: Count | None = None
    """Prompt tokens found in a prefix cache."""


class Usage(Struct):
    """Token counts reported by the engine."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache; 0 if the engine does not report them."""
        details = self.prompt_tokens_details
        return 0 if details is None else min(details.cached_tokens or 0, self.prompt_tokens)


class Choice(Struct):
    """One of the answers to a request."""

    index: int = 0
    delta: Delta | None = None
    message: Delta | None = None
    """The message of an unstreamed answer; None in a stream."""
    text: str | None = None
    logprobs: Any = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    """Set if an engine reports usage for each choice."""


class Timings(Struct):
    """llama.cpp's token counts so far: computed prompt tokens, prompt tokens found in its cache, generated tokens."""

    prompt_n: int = 0
    cache_n: int = 0
    predicted_n: int = 0


class Chunk(Struct):
    """One event of a completion stream, or an answer that is not streamed."""

    id: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[Choice] = field(default_factory=list)
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None
