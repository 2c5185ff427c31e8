"""Copies of streams. A client's retry after a broken connection continues from the copy.

A stream is copied if its client has named it, by the header `Idempotency-Key` or `X-Request-Id`. Another request with
the same name, API key, path and body continues the stream: the response begins with the data that was already sent.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

MAX_BYTES = 64 << 20
"""Memory limit of all copies, of running and of ended streams."""
MAX_STREAM_BYTES = 1 << 20
"""Maximum length of a stream that is copied. The copy of a longer stream is given up."""
KEEP_S = 60.0
"""Time in which a client may retry after the end of its stream."""
_TOKEN_BYTES = 40
"""Memory of one token id."""
_MAX_NAME = 255
NAMES = frozenset(("idempotency-key", "x-request-id"))
"""The headers by which clients name streams."""


class StreamKey(Struct, array_like=True, frozen=True, gc=False):
    """The properties that a request and its retry share."""

    digest: bytes
    keeps_finished: bool
    """Whether the copy of a complete answer is also kept. Several requests that all expect an answer may share one
    `X-Request-Id`."""


class Answer(Protocol):
    """The parts of an answer so far that a copy stores for another engine (`partial_answer.PartialAnswer`)."""

    tokens: int
    token_ids: list[int] | None
    prompt_ids: list[int] | None


class StreamPart(Struct, array_like=True, gc=False):
    """A part of a stream, and the state of its answer after the part."""

    data: bytes
    """Events in the client's format."""
    tokens: int
    token_ids: list[int] | None
    """Ids of the part's tokens; None if some are unknown."""
    prompt_ids: list[int] | None


class CopyListener(Protocol):
    """The interface of an object that is called for the events of one copy."""

    def added(self, part: StreamPart) -> None:
        """Data was sent to the client."""

    def kept(self) -> None:
        """The stream has ended, and a retry may continue it."""

    def resumed(self) -> None:
        """A retry of the request continues the stream."""

    def dropped(self) -> None:
        """No retry can continue the stream any more."""


class StreamCopy:
    """The data that the client of one stream has received. In a worker: only the parts that were not taken out yet."""

    def __init__(self, copies: StreamCopies | None = None) -> None:
        """`copies` counts the memory of all copies."""
        self._copies = copies
        self.data = bytearray()
        self.tokens = 0
        self.token_ids: list[int] | None = []
        self.prompt_ids: list[int] | None = None
        self._num_ids = 0
        """Number of the answer's token ids that were added so far."""
        self.is_usable = True
        self.listener: CopyListener | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.data) + _TOKEN_BYTES * (len(self.token_ids or ()) + len(self.prompt_ids or ()))

    def append(self, data: bytes, answer: Answer) -> None:
        """Add data sent to the client. `answer` is the state after it."""
        if not self.is_usable:
            return
        ids = None if answer.token_ids is None else answer.token_ids[self._num_ids :]
        self._num_ids = len(answer.token_ids or ())
        self.extend(StreamPart(data, answer.tokens, ids, answer.prompt_ids))

    def extend(self, part: StreamPart) -> None:
        """Add a part taken out of another copy of the stream."""
        if not self.is_usable:
            return
        before = self.num_bytes
        self.data += part.data
        self.tokens, self.prompt_ids = part.tokens, self.prompt_ids or part.prompt_ids
        if part.token_ids is None or self.token_ids is None:
            self.token_ids = None
        else:
            self.token_ids += part.token_ids
        if self.listener is not None:
            self.listener.added(part)
        if self._copies is not None:
            self._copies.count(self, self.num_bytes - before)
        elif self.num_bytes > MAX_STREAM_BYTES:
            self.give_up()

    def take(self) -> StreamPart:
        """Take out everything added since the last call."""
        part = self.as_part()
        self.data.clear()
        self.token_ids = None if self.token_ids is None else []
        return part

    def as_part(self) -> StreamPart:
        return StreamPart(bytes(self.data), self.tokens, self.token_ids, self.prompt_ids)

    def go_on_after(self, part: StreamPart) -> None:
        """Continue the stream from this part: its answer begins with the part's ids."""
        self._num_ids = len(part.token_ids or ())
        if part.token_ids is None:
            self.token_ids = None

    def give_up(self) -> None:
        """Free the memory. No retry can then continue the stream."""
        self.data.clear()
        self.is_usable, self.token_ids, self.prompt_ids = False, None, None
        if self.listener is not None:
            self.listener.dropped()
            self.listener = None


class StreamCopies:
    """The copies of all streams, within `MAX_BYTES`. Copies of ended streams are dropped first, oldest first."""

    def __init__(self, clock: Callable[[], float], max_bytes: int = MAX_BYTES) -> None:
        self._clock, self._max_bytes = clock, max_bytes
        self.num_bytes = 0
        self._ended: OrderedDict[bytes, tuple[StreamCopy, float]] = OrderedDict()
        """Maps each key to (copies of ended streams, time until which they are kept), in order of this time."""
        self.listen: Callable[[bytes], CopyListener] | None = None
        """Returns the listener of each new copy, by its key's digest."""

    def count(self, copy: StreamCopy, num_bytes: int) -> None:
        """Count the growth of a copy. The copy is given up if there is no room."""
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and self._ended:
            self._forget(next(iter(self._ended)))
        if copy.num_bytes > MAX_STREAM_BYTES or self.num_bytes > self._max_bytes:
            self._discard(copy)

    def _discard(self, copy: StreamCopy) -> None:
        self.num_bytes -= copy.num_bytes
        copy.give_up()

    def begin(self, key: StreamKey | None) -> tuple[StreamCopy | None, StreamPart | None]:
        """The copy of a new stream, and the data sent earlier of the stream that it continues; None without a key."""
        if key is None:
            return None, None
        self._forget_old()
        found = self._ended.pop(key.digest, None)
        if found is None:
            copy = StreamCopy(self)
            if self.listen is not None:
                copy.listener = self.listen(key.digest)
            return copy, None
        copy = found[0]
        if copy.listener is not None:
            copy.listener.resumed()
        copy.go_on_after(part := copy.as_part())
        return copy, part

    def end(self, key: StreamKey | None, copy: StreamCopy | None, is_finished: bool) -> None:
        """Keep the copy of an ended stream if a retry can continue it."""
        if key is None or copy is None:
            return
        self._forget_old()
        if not copy.is_usable or not copy.tokens or (is_finished and not key.keeps_finished):
            self._discard(copy)
            return
        self._forget(key.digest)
        self._ended[key.digest] = copy, self._clock() + KEEP_S
        if copy.listener is not None:
            copy.listener.kept()

    def has(self, digest: bytes) -> bool:
        """Whether a retry of this stream would continue the stream."""
        return digest in self._ended

    def adopt(self, digest: bytes, parts: Sequence[StreamPart]) -> None:
        """Keep a stream that another gateway was sending and does not continue."""
        self._forget(digest)
        copy = StreamCopy(self)
        for part in parts:
            copy.extend(part)
        if not copy.is_usable or not copy.tokens:
            self._discard(copy)
            return
        if self.listen is not None:
            copy.listener = self.listen(digest)
        self._ended[digest] = copy, self._clock() + KEEP_S

    def _forget(self, digest: bytes) -> None:
        if (found := self._ended.pop(digest, None)) is not None:
            self._discard(found[0])

    def _forget_old(self) -> None:
        now = self._clock()
        while self._ended:
            digest, (_, until_s) = next(iter(self._ended.items()))
            if until_s > now:
                return
            self._forget(digest)


def stream_key(owner: str, headers: Mapping[str, str], path: str, body: bytes) -> StreamKey | None:
    """The key of a stream that its client has named; None if it has no name."""
    name, is_idempotent = headers.get("idempotency-key", ""), True
    if not name:
        name, is_idempotent = headers.get("x-request-id", ""), False
    if not name or len(name) > _MAX_NAME:
        return None
    digest = hashlib.sha256()
    for part in (
        owner.encode(),
        b"idempotency-key" if is_idempotent else b"x-request-id",
        name.encode("utf-8", "surrogatepass"),
        path.encode(),
        body,
    ):
        digest.update(len(part).to_bytes(8) + part)
    return StreamKey(digest.digest(), is_idempotent)
