"""Elects the gateway that scales: the holder of the lease."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from headway.gateway.errors import logged
from headway.gateway.peers.store import PeerStore

log = logging.getLogger("headway.gateway")
_NAME = "scaling"


def uptime_s() -> float:
    """Seconds since the machine started. On Linux, time in suspension counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Lease(Protocol):
    """A lease that one gateway holds at a time. Every method raises an OSError if the store does not answer."""

    async def acquire(self, lease_s: float) -> bool:
        """Take or renew the lease for `lease_s`, unless another gateway holds it."""

    async def release(self) -> None:
        """Release the lease, so that another gateway can take the lease at once."""


class StoreLease:
    """A lease in the store."""

    def __init__(self, store: PeerStore) -> None:
        self._store = store

    async def acquire(self, lease_s: float) -> bool:
        return await self._store.acquire_lease(_NAME, lease_s)

    async def release(self) -> None:
        await self._store.release_lease(_NAME)


class Leader:
    """Whether this gateway leads. It leads from the time of a granted request, for the requested duration."""

    def __init__(self, name: str, lease: Lease, lease_s: float, now_s: Callable[[], float] = uptime_s) -> None:
        """`now_s()` must include the time while the machine is suspended, because the lease may expire in that time."""
        self._name, self._lease, self._lease_s, self._now_s = name, lease, lease_s, now_s
        self._until_s = float("-inf")
        self._was_leader = False
        self._task: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        return self._now_s() < self._until_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Release the lease, so that another gateway can lead at once."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self.leads:
            self._until_s = float("-inf")
            with suppress(OSError):
                await self._lease.release()

    async def _run(self) -> None:
        while True:
            with logged("peers: the lease"):
                await self._renew()
            await asyncio.sleep(self._lease_s / 4)

    async def _renew(self) -> None:
        sent_s = self._now_s()
        try:
            # The lease begins at its grant, so it outlasts the same duration counted from the request.
            self._until_s = sent_s + self._lease_s if await self._lease.acquire(self._lease_s) else float("-inf")
        except OSError as error:
            log.debug("peers: nobody answers who leads: %s", error)
        if self.leads != self._was_leader:
            self._was_leader = self.leads
            log.info(
                "peers: %s %s", self._name, "scales from now on" if self._was_leader else "does not scale any more"
            )
