"""What one connection of a client holds, and when it stops reading and its answers stop being written."""

from __future__ import annotations

import asyncio
from typing import Any

MAX_HELD_BYTES = 1 << 16
"""Of what the client has sent; then reading pauses."""
MAX_UNREAD_BYTES = 1 << 16
"""Of answers that the client has not read; then writers wait, and the next request does."""
READ_BYTES = 1 << 18
"""Most that the event loop reads at a time."""


class ConnectionMemory:
    """The bytes that one connection holds: requests that were sent ahead, the present one's body until the application
    takes it, and answers that the client has not read.

    The first two are at most `MAX_HELD_BYTES` and one read, the last `MAX_UNREAD_BYTES` and one write. Nothing else
    pauses or resumes reading.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_ahead = 0
        """Bytes of the next requests."""
        self.num_body = 0
        """Bytes of the present request's body."""
        self.read_paused = self.write_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        if transport.get_extra_info("ssl_object") is not None:  # such transports have larger limits of their own
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
        """So many bytes of the next requests are kept now."""
        self.num_ahead = num_bytes
        if (num_bytes + self.num_body > MAX_HELD_BYTES) != self.read_paused:
            self._switch()

    def add_body(self, num_bytes: int) -> None:
        """More of the present request's body is kept; a negative number: less."""
        self.num_body += num_bytes
        if (self.num_ahead + self.num_body > MAX_HELD_BYTES) != self.read_paused:
            self._switch()

    def _switch(self) -> None:
        """Pause reading, or go on."""
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
        """The client has read most of its answers, or is gone."""
        self.write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        """Wait until writing goes on."""
        await self._writable.wait()
