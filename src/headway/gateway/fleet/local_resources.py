"""GPUs and ports of this machine that running replicas occupy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from headway.core.errors import HeadwayError

HOST = "127.0.0.1"


class Gpus:
    """The GPUs that several pools share, by number."""

    def __init__(self, num: int) -> None:
        self._num, self._free = num, set(range(num))
        self._freed = asyncio.Event()

    async def take(self, num: int) -> tuple[int, ...]:
        """Wait for `num` free GPUs and take them. Adjacent GPUs are preferred, because they usually have the best
        links."""
        while len(self._free) < num:
            self._freed.clear()
            await self._freed.wait()
        chosen = self._adjacent(num) or tuple(sorted(self._free)[:num])
        self._free -= set(chosen)
        return chosen

    def _adjacent(self, num: int) -> tuple[int, ...] | None:
        groups = (range(first, first + num) for first in range(0, self._num - num + 1, num))
        return next((tuple(group) for group in groups if self._free.issuperset(group)), None)

    def release(self, gpus: Sequence[int]) -> None:
        self._free |= set(gpus)
        self._freed.set()


class Ports:
    """A range of ports, shared by the pools that name the same range."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self._last = first, last
        self._taken: set[int] = set()

    def take(self) -> int:
        """Take a free port. Raises HeadwayError if there is none."""
        for port in range(self.first, self._last + 1):
            if port not in self._taken and _is_free(port):
                self._taken.add(port)
                return port
        raise HeadwayError(f"no port from {self.first} to {self._last} is free")

    def release(self, port: int) -> None:
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
    """A port on which no program listens at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
