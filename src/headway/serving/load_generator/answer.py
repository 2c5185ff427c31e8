"""One request to an engine and its answer: the times of chunks, and the tokens in each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct, field

from headway.gateway.relay.choice_counts import ChoiceCounts
from headway.gateway.upstream.chunks import Chunk
from headway.gateway.upstream.client import JSON, Client, Connection
from headway.gateway.upstream.errors import (
    BrokenOffError,
    EngineError,
    ExhaustedError,
    RefusedError,
    ReportedRefusalError,
    UnreachableError,
)
from headway.gateway.upstream.sse import EventSplitter, error_of_event, is_done, payload, read_chunk

NEVER = math.nan
MAX_ERROR_BYTES = 1 << 16
"""Maximum number of bytes that are read of an error answer."""
STOPPED = "stopped"
"""The error kind of requests that were in flight when the load was stopped."""
TIMEOUT = "timeout"


class Answer(Struct):
    """The result of one request. Times are in seconds since the start of the load; NaN: never happened."""

    sent_s: float
    chunk_s: list[float] = field(default_factory=list)
    """Times of chunks with tokens."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Tokens of each of these chunks; 1 if the engine does not report them."""
    end_s: float = NEVER
    """Time at which the answer ended or failed."""
    prompt_tokens: int | None = None
    """Prompt tokens reported by the engine; None: not reported."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its prefix cache; None: not reported."""
    reported_tokens: int | None = None
    """Output tokens reported by the engine; None: not reported."""
    text: str = ""
    error: str = ""
    kind: str = ""
    """The kind of the answer's error; empty if the answer is complete."""

    @property
    def is_whole(self) -> bool:
        return not self.kind

    @property
    def output_tokens(self) -> int:
        """Output tokens by the engine's report, else by the count of the chunks."""
        return self.reported_tokens or sum(self.chunk_tokens)

    @property
    def first_s(self) -> float:
        return self.chunk_s[0] if self.chunk_s else NEVER

    @property
    def last_s(self) -> float:
        """Time at which the last token came."""
        return self.chunk_s[-1] if self.chunk_s else NEVER

    @property
    def is_merged(self) -> bool:
        """Whether a chunk has several tokens, and the engine does not report their number."""
        return self.is_whole and self.output_tokens > sum(self.chunk_tokens)

    def fail(self, kind: str, error: str) -> None:
        self.kind, self.error = kind, error


class StreamReader:
    """Reads one stream of events into an answer, for `Connection.stream_to`."""

    def __init__(self, answer: Answer, now: Callable[[], float]) -> None:
        self._answer, self._now = answer, now
        self._splitter = EventSplitter()
        self._counts = ChoiceCounts(1)
        self._num = 0
        self._has_counts = False
        """Whether chunks before the last chunk have reported usage."""
        self._texts: list[str] = []
        self.is_over = False
        """Whether the stream has sent its end, or the reason for its end."""

    def feed(self, parts: list[bytes]) -> bool:
        now = self._now()
        for event in self._splitter.split(b"".join(parts)):
            self._read(event, now)
        return True

    def close(self) -> None:
        """Handle the end of the connection. Raises BrokenOffError if the stream has not sent its end."""
        for event in self._splitter.take_rest():
            self._read(event, self._now())
        self._answer.text = "".join(self._texts)
        if not self.is_over:
            raise BrokenOffError("ended its stream without [DONE]")

    def _read(self, event: bytes, now: float) -> None:
        data = payload(event)
        if data is None:
            return
        if is_done(data):
            self.is_over = True
            return
        if (error := error_of_event(event, data)) is not None:
            raise error
        chunk, _ = read_chunk(data)
        self._count(chunk, now)

    def _count(self, chunk: Chunk, now: float) -> None:
        answer, usage = self._answer, chunk.usage
        self.is_over |= any(choice.finish_reason is not None for choice in chunk.choices)
        if usage is not None and usage.completion_tokens:
            answer.reported_tokens = usage.completion_tokens
        if usage is not None and usage.prompt_tokens:
            answer.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                answer.cached_tokens = usage.cached_tokens
        if chunk.timings is not None and chunk.timings.predicted_n:
            answer.cached_tokens = max(chunk.timings.cache_n, 0)
        if not chunk.choices:  # usage at the end of the stream: it counts earlier tokens
            return
        new, is_end = self._counts.add(chunk) - self._num, self.is_over
        if is_end and usage is not None and not self._has_counts:  # of all tokens, as above
            new = min(new, 1)
        self._has_counts |= usage is not None
        if new > 0 and (self._add_text(chunk) or chunk.timings is not None):
            self._num += new
            answer.chunk_s.append(now)
            answer.chunk_tokens.append(new)

    def _add_text(self, chunk: Chunk) -> bool:
        """Store the chunk's text. Returns whether the chunk has any text, tool call or token."""
        has_any = False
        for choice in chunk.choices:
            delta, text = choice.delta, choice.text
            if delta is not None:
                text = text or delta.content
                has_any |= bool(delta.reasoning or delta.reasoning_content or delta.tool_calls)
            has_any |= bool(text or choice.token_ids)
            self._texts.append(text or "")
        return has_any


async def ask(
    client: Client, path: str, body: dict[str, Any], now: Callable[[], float], timeout_s: float | None
) -> Answer:
    """Send a request and read its answer to the end. Errors are stored in the answer. If cancelled, the answer keeps
    its received part."""
    answer = Answer(now())
    connection: Connection | None = None
    reader = StreamReader(answer, now)
    try:
        async with asyncio.timeout(timeout_s):
            connection = await client.request("POST", path, JSON, msgspec.json.encode(body))
            if connection.status != 200:
                raise RefusedError(connection.status, await connection.read(MAX_ERROR_BYTES))
            if not connection.headers.get("content-type", "").startswith("text/event-stream"):
                read_chunk(await connection.read(MAX_ERROR_BYTES))
                raise EngineError("answered without a stream")
            await connection.stream_to(reader.feed)
            reader.close()
            if not answer.chunk_s:
                raise EngineError("answered without a token")
    except TimeoutError:
        answer.fail(TIMEOUT, f"no whole answer within {timeout_s:g} s")
    except asyncio.CancelledError:
        answer.fail(STOPPED, "in flight when the load was stopped")
    except EngineError as error:
        answer.fail(_kind(error), str(error))
    finally:
        answer.end_s = now()
        if connection is not None:
            client.release(connection)
    return answer


def _kind(error: EngineError) -> str:
    """A short name under which an error is counted."""
    if isinstance(error, UnreachableError):
        return "unreachable"
    if isinstance(error, ExhaustedError):
        return "no file descriptors left here"
    if isinstance(error, BrokenOffError):
        return "broken off"
    if isinstance(error, ReportedRefusalError):
        return f"reported {error.status} in the stream"
    if isinstance(error, RefusedError):
        return f"status {error.status}"
    text = str(error)
    return "reported an error in the stream" if text.startswith("reported an error") else text.partition(":")[0]
