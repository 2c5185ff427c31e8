"""What processes on one machine take while they run: a port, and the numbers of GPUs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from headway.core.errors import HeadwayError

HOST = "127.0.0.1"


class Gpus:
    """Those of a machine that several pools share."""

    def __init__(self, num: int) -> None:
        self._num, self._free = num, set(range(num))
        self._freed = asyncio.Event()

    async def take(self, num: int) -> tuple[int, ...]:
        """So many, once there are."""
        while len(self._free) < num:
            self._freed.clear()
            await self._freed.wait()
        chosen = self._side_by_side(num) or tuple(sorted(self._free)[:num])
        self._free -= set(chosen)
        return chosen

    def _side_by_side(self, num: int) -> tuple[int, ...] | None:
        """Numbers next to each other, which links between GPUs go by."""
        groups = (range(first, first + num) for first in range(0, self._num - num + 1, num))
        return next((tuple(group) for group in groups if self._free.issuperset(group)), None)

    def give(self, gpus: Sequence[int]) -> None:
        """A process is gone."""
        self._free |= set(gpus)
        self._freed.set()


class Ports:
    """A range of them, that pools which say the same share."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self._last = first, last
        self._taken: set[int] = set()

    def take(self) -> int:
        """One that is free. HeadwayError where none is."""
        for port in range(self.first, self._last + 1):
            if port not in self._taken and _is_free(port):
                self._taken.add(port)
                return port
        raise HeadwayError(f"no port from {self.first} to {self._last} is free")

    def give(self, port: int) -> None:
        """A process is gone."""
        self._taken.discard(port)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """One that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
