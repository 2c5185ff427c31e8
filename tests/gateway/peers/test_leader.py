"""The gateway that has the lease leads for as long as it asked for, and no longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from headway.gateway.peers.leader import Leader, uptime_s


class OneLease:
    """A lease that anybody gets."""

    def __init__(self) -> None:
        self.is_there, self.num_taken = True, 0

    async def acquire(self, lease_s: float) -> bool:
        if not self.is_there:
            raise OSError("nobody answers")
        self.num_taken += 1
        return True

    async def release(self) -> None:
        pass


def _until(story: Callable[[Leader, OneLease, list[float]], Awaitable[None]], lease_s: float) -> None:
    async def run() -> None:
        lease, now = OneLease(), [100.0]
        leader = Leader("one", lease, lease_s, lambda: now[0])
        leader.start()
        try:
            while not lease.num_taken:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            await story(leader, lease, now)
        finally:
            await leader.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("gone_s", "leads"), [(9.9, True), (10.0, False), (3600.0, False)])
def test_a_machine_that_was_suspended_does_not_lead_by_a_lease_that_has_ended(gone_s: float, leads: bool) -> None:
    async def story(leader: Leader, lease: OneLease, now: list[float]) -> None:
        assert leader.leads
        now[0] += gone_s  # no task runs meanwhile
        assert leader.leads is leads

    _until(story, 10.0)


def test_who_cannot_renew_the_lease_leads_until_its_end() -> None:
    async def story(leader: Leader, lease: OneLease, now: list[float]) -> None:
        lease.is_there = False
        await leader._renew()
        assert leader.leads
        now[0] += 10.0
        await leader._renew()
        assert not leader.leads
        lease.is_there = True
        await leader._renew()
        assert leader.leads

    _until(story, 10.0)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="the system does not tell how long it was suspended")
def test_leases_go_by_a_clock_that_counts_time_in_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_BOOTTIME: 5000.0, time.CLOCK_MONOTONIC: 1400.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert uptime_s() == 5000.0
