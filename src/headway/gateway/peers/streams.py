"""Copies of streams in the store. Another gateway uses them to continue a stream whose gateway is gone."""

from __future__ import annotations

import asyncio

from msgspec import MsgspecError, msgpack

from headway.gateway.peers.store import OVER, PeerStore
from headway.gateway.scheduling.stream_copy import StreamCopies, StreamCopy, StreamPart

_PART = msgpack.Decoder(StreamPart)
_MOST_ROWS = 256
"""Maximum number of parts that one statement writes."""
_TRIES, _TRY_S = 20, 0.05
"""(number of times, interval in seconds) to ask the store whether another gateway continues a stream."""


class StoredStream:
    """The unwritten parts of one stream. Implements `stream_copy.CopyListener`."""

    def __init__(self, streams: StoredStreams, digest: bytes, num_parts: int) -> None:
        self._streams, self._digest = streams, digest
        self._pending = StreamCopy()
        self._num_parts = num_parts
        self._has_prompt = False

    def added(self, part: StreamPart) -> None:
        self._pending.extend(part)
        self._streams.changed[self._digest] = self

    def kept(self) -> None:
        """The stream is over at this gateway. Any gateway may continue the stream when the client asks for it."""
        self._streams.over.add(self._digest)

    def resumed(self) -> None:
        """The stream continues at this gateway."""
        self._streams.over.discard(self._digest)
        self._streams.resumed.add(self._digest)

    def dropped(self) -> None:
        self._streams.changed.pop(self._digest, None)
        self._streams.over.discard(self._digest)
        if self._num_parts:
            self._streams.removed.add(self._digest)

    def take(self) -> tuple[bytes, int, bytes] | None:
        """The row of the content added since the last call; None if the stream has become too long to store."""
        if not self._pending.is_usable:
            return None
        part = self._pending.take()
        if self._has_prompt:
            part.prompt_ids = None
        self._has_prompt |= part.prompt_ids is not None
        row = self._digest, self._num_parts, msgpack.encode(part)
        self._num_parts += 1
        return row


class StoredStreams:
    """The named streams of one gateway, in the store."""

    def __init__(self, store: PeerStore, copies: StreamCopies) -> None:
        self._store, self._copies = store, copies
        self.changed: dict[bytes, StoredStream] = {}
        self.over: set[bytes] = set()
        self.resumed: set[bytes] = set()
        self.removed: set[bytes] = set()
        self._restored: dict[bytes, int] = {}
        """Maps the digest of each stream that was read from the store, and is about to begin, to its number of
        parts."""
        copies.listen = self._listen

    def _listen(self, digest: bytes) -> StoredStream:
        return StoredStream(self, digest, self._restored.pop(digest, 0))

    async def write(self) -> None:
        """Write the changes. Content that cannot be written is lost; the answer to a retry is then generated again."""
        changed, self.changed = self.changed, {}
        over, self.over = self.over, set()
        resumed, self.resumed = self.resumed - over, set()
        removed, self.removed = self.removed, set()
        rows = [row for stream in changed.values() if (row := stream.take()) is not None]
        rows += [(digest, OVER, b"") for digest in over]
        for start in range(0, len(rows), _MOST_ROWS):
            await self._store.add_parts(rows[start : start + _MOST_ROWS])
        if resumed:
            await self._store.resume_streams(list(resumed))
        if removed:
            await self._store.remove_streams(list(removed))

    async def restore(self, digest: bytes) -> None:
        """Fetch a stream of another gateway, unless that gateway continues it."""
        if self._copies.has(digest):
            return
        parts = await self._left_parts(digest)
        if not parts or [number for number, _ in parts] != list(range(len(parts))):
            return
        try:
            found = [_PART.decode(body) for _, body in parts]
        except MsgspecError:
            return  # written by another version of Headway
        self._restored[digest] = len(parts)
        self._copies.adopt(digest, found)
        await self._store.take_stream(digest)

    async def _left_parts(self, digest: bytes) -> list[tuple[int, bytes]]:
        """Numbers and contents of a stream's parts; empty if its gateway continues the stream. A retrying client is
        often faster than the news that its connection or its gateway is gone."""
        for _ in range(_TRIES):
            rows = await self._store.parts(digest)
            parts = [(number, body) for number, _, body in rows if number != OVER]
            if not parts or len(rows) > len(parts) or not await self._store.is_alive(rows[-1][1]):
                return parts
            await asyncio.sleep(_TRY_S)
        return []
