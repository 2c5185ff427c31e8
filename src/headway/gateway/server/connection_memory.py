"""The memory of one client's connection: when it stops reading, and when writers must wait."""

from __future__ import annotations

import asyncio
from typing import Any

MAX_HELD_BYTES = 1 << 16
"""Maximum number of received bytes that are held. Beyond it, reading pauses."""
MAX_UNREAD_BYTES = 1 << 16
"""Maximum number of answer bytes that the client has not read. Beyond it, writers and the next request wait."""
READ_BYTES = 1 << 18
"""Maximum number of bytes that the event loop reads at a time."""


class ConnectionMemory:
    """The bytes held by one connection: requests sent ahead, the current request's body until the application takes it,
    and answers that the client has not read.

    Requests and body take at most `MAX_HELD_BYTES` and one read, answers at most `MAX_UNREAD_BYTES` and one write. No
    other code pauses or resumes reading.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_ahead = 0
        """Bytes of the next requests."""
        self.num_body = 0
        """Bytes of the current request's body."""
        self.read_paused = self.write_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        if transport.get_extra_info("ssl_object") is not None:  # such transports have larger limits by default
            transport.set_write_buffer_limits(high=MAX_UNREAD_BYTES)
            limit_reads: Any = getattr(transport, "set_read_buffer_limits", None)
            if limit_reads is not None:
                limit_reads(high=MAX_HELD_BYTES)

    @property
    def num_unread(self) -> int:
        """Bytes of answers that the client has not read."""
        return self._transport.get_write_buffer_size()

    @property
    def num_bytes(self) -> int:
        """All bytes that the connection holds."""
        return self.num_ahead + self.num_body + self.num_unread

    def keep_ahead(self, num_bytes: int) -> None:
        """Set the number of bytes of the next requests."""
        self.num_ahead = num_bytes
        if (num_bytes + self.num_body > MAX_HELD_BYTES) != self.read_paused:
            self._switch()

    def add_body(self, num_bytes: int) -> None:
        """Add held bytes of the current request's body; negative to release them."""
        self.num_body += num_bytes
        if (self.num_ahead + self.num_body > MAX_HELD_BYTES) != self.read_paused:
            self._switch()

    def _switch(self) -> None:
        """Pause or resume reading."""
        self.read_paused = not self.read_paused
        if self.read_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The transport has more than `MAX_UNREAD_BYTES` to send."""
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client has read most of its answers, or has left."""
        self.write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        """Wait until writing may go on."""
        await self._writable.wait()
