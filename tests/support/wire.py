"""A connection's other end, without a network."""

from __future__ import annotations

import asyncio
from typing import Any

_HIGH_WATER, _LOW_WATER = 64 << 10, 16 << 10


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = self.is_paused = self.has_ended = False

    def write(self, data: bytes) -> None:
        assert not self.has_ended, "a write after the end"
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class UnreadWire(Wire):
    """A transport whose client reads when `read` is called."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol, self.num_read, self._is_full = protocol, 0, False
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        super().write(data)
        self.note_write()

    def note_write(self) -> None:
        """Pause the protocol's writing if the client lags behind."""
        if not self._is_full and self.get_write_buffer_size() > _HIGH_WATER:
            self._is_full = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.written) - self.num_read

    def read(self, num: int) -> None:
        self.num_read += min(num, self.get_write_buffer_size())
        if self._is_full and self.get_write_buffer_size() <= _LOW_WATER:
            self._is_full = False
            self._protocol.resume_writing()

    def abort(self) -> None:
        self.is_aborted = True


class Timers:
    """An event loop whose time passes when `advance` is called."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._now_s = loop, 0.0
        self._due: list[tuple[float, asyncio.Handle]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Any, *args: Any) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._loop)
        self._due.append((self._now_s + delay_s, handle))
        return handle

    def advance(self, seconds: float) -> None:
        end_s = self._now_s + seconds
        while due := [each for each in self._due if each[0] <= end_s and not each[1].cancelled()]:
            first = min(due, key=lambda each: each[0])
            self._due.remove(first)
            self._now_s = first[0]
            first[1]._run()
        self._now_s = end_s
