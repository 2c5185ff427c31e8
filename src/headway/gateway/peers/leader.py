"""Which of several gateways scales: the one that has the lease."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

from headway.gateway.clock import Clock
from headway.gateway.errors import logged
from headway.gateway.peers.store import UNAVAILABLE, PeerStore

log = logging.getLogger("headway.gateway")
_NAME = "scaling"


class Lease(Protocol):
    """What one gateway at a time has. Every method raises one of `store.UNAVAILABLE` if nobody answers."""

    async def lead(self, lease_s: float) -> bool:
        """Take or renew it for so long, unless another gateway has it."""

    async def give_up(self) -> None:
        """Let others take it at once."""


class StoreLease:
    """A row of the store."""

    def __init__(self, store: PeerStore) -> None:
        self._store = store

    async def lead(self, lease_s: float) -> bool:
        return await self._store.lead(_NAME, lease_s)

    async def give_up(self) -> None:
        await self._store.give_up_lead(_NAME)


class Leader:
    """Whether this gateway leads: since it asked for the lease with success, for as long as it asked for."""

    def __init__(self, name: str, lease: Lease, lease_s: float, clock: Clock) -> None:
        self._name, self._lease, self._lease_s, self._clock = name, lease, lease_s, clock
        self._until_s = float("-inf")
        self._led = False
        self._task: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        return self._clock.now < self._until_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Let others lead at once."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self.leads:
            self._until_s = float("-inf")
            with suppress(*UNAVAILABLE):
                await self._lease.give_up()

    async def _run(self) -> None:
        while True:
            with logged("peers: the lease"):
                await self._ask()
            await asyncio.sleep(self._lease_s / 4)

    async def _ask(self) -> None:
        asked_s = self._clock.now
        try:
            # The lease lasts from its grant on, so for longer than from the question.
            self._until_s = asked_s + self._lease_s if await self._lease.lead(self._lease_s) else float("-inf")
        except UNAVAILABLE as error:
            log.debug("peers: nobody answers who leads: %s", error)
        if self.leads != self._led:
            self._led = self.leads
            log.info("peers: %s %s", self._name, "scales from now on" if self._led else "does not scale any more")
