"""Server-sent events as engines stream them: whole events only, and what Headway reads in them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from headway.gateway.upstream.client import EngineError

DONE = b"data: [DONE]\n\n"
_LONGEST_BYTES = 4 << 20


class Events:
    """Cuts a byte stream into events. Amortised O(1) per byte, whatever the chunks."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now, each with its blank line. EngineError for one that does not end."""
        if not self._rest and 0 < data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:  # one, as most are
            return [data]
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > _LONGEST_BYTES:
            raise EngineError("streamed an event without end")
        return [event + b"\n\n" for event in events if event]


class Delta(Struct):
    """Of a chat."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(Struct):
    """One of the answers."""

    index: int = 0
    delta: Delta | None = None
    message: Delta | None = None
    """Of a whole answer."""
    text: str | None = None
    logprobs: Any = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


Count = Annotated[int, Meta(ge=0, le=1 << 30)]


class Usage(Struct):
    """Tokens, as the engine counts them."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Timings(Struct):
    """llama.cpp's count of tokens so far: read anew, found in its cache, written."""

    prompt_n: int = 0
    cache_n: int = 0
    predicted_n: int = 0


class Part(Struct):
    """What Headway reads of an event that it passes on as it is: of `/v1/responses`, or of `/v1/messages`."""

    type: str = ""
    usage: Read | None = None
    response: Whole | None = None
    message: Whole | None = None


class Read(Struct):
    """Tokens, as those endpoints count them."""

    input_tokens: Count = 0
    output_tokens: Count = 0


class Whole(Struct):
    """An answer's state so far."""

    usage: Read | None = None


class Chunk(Struct):
    """What Headway reads of an event, or of a whole answer."""

    id: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[Choice] = field(default_factory=list)
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode
NONSENSE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What is raised where JSON is not what it should be."""


def payload(event: bytes) -> bytes | None:
    """What follows `data:`; None for comments and the like."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


ABORTED = "abort"
"""Why an answer ended that its engine gave up."""


def check_ends(chunk: Chunk) -> None:
    """EngineError where an engine gave its answer up."""
    if any(choice.finish_reason == ABORTED for choice in chunk.choices):
        raise EngineError("gave the request up")


def read(data: bytes) -> Chunk:
    """An event's payload. EngineError where it is not what an engine should say."""
    try:
        if not data.isascii():  # what is not read is not decoded, and clients would stumble over it
            data.decode()
        return _decode(data)
    except NONSENSE as error:
        raise EngineError(f"streamed what is no completion chunk ({error})") from None


def value(data: bytes) -> dict[str, Any]:
    """An event's payload, or a whole answer, with all that is in it. EngineError where it is no object."""
    try:
        found = msgspec.json.decode(data)
    except NONSENSE as error:
        raise EngineError(f"answered with what is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise EngineError("answered with JSON that is no object")
    return found


def event(value: object) -> bytes:
    """A value as an event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
