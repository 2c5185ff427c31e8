"""How late the event loop runs what is due."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from headway.gateway.clock import Clock
from headway.gateway.telemetry.loop_delay import PERIOD_S, LoopDelay

STALL_S = 0.3
CLOCK: Any = SimpleNamespace(now=50_000.0)


def test_a_stall_of_the_loop_is_seen_with_its_time_and_taken_once() -> None:
    async def run() -> tuple[LoopDelay, float]:
        clock = Clock(asyncio.get_running_loop())
        delay = LoopDelay(clock, num_taken=8)
        delay.start()
        time.sleep(STALL_S + PERIOD_S)
        end_s = clock.now
        while not delay.recent_s():
            await asyncio.sleep(0)
        delay.stop()
        return delay, end_s

    delay, end_s = asyncio.run(run())
    assert delay.recent_s() >= STALL_S and delay.at(end_s) == delay.at(end_s - STALL_S) == delay.recent_s()
    taken = delay.take()
    assert [late_s >= STALL_S for _, late_s in taken] == [True] and delay.take() == []
    other = LoopDelay(CLOCK)
    other.add(taken)
    assert other.at(end_s) == delay.at(end_s), "a worker's delays count where they are reported"


def test_delays_reach_from_the_sample_before_to_their_end_and_the_longest_counts() -> None:
    delay = LoopDelay(CLOCK)
    delay.add([(10.0, 0.5), (10.2, 0.25)])
    assert [delay.at(at_s) for at_s in (9.85, 9.95, 10.3, 10.5, 10.65)] == [0.0, 0.5, 0.5, 0.5, 0.0]


def test_old_delays_are_forgotten() -> None:
    delay = LoopDelay(CLOCK)
    delay.add((float(due_s), 0.01) for due_s in range(49_000))
    delay.add([(CLOCK.now - 4010, 4000.0)])
    assert len(delay._worst_s) < 40_000 and delay.at(0.0) == 0.0 and delay.at(CLOCK.now - 10) == 4000.0
