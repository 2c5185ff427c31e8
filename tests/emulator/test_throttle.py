"""An emulated engine on a GPU that is throttled."""

from __future__ import annotations

import asyncio

from headway import catalog
from headway.core.fleet import Pool
from headway.emulator.engine import EmulatedEngine
from headway.policies.ordering.fcfs import FcfsOrdering


def test_the_engine_is_slower_from_the_given_time_on() -> None:
    pool = Pool("one", catalog.model("llama-3.1-8b"), catalog.gpu("h100"), catalog.engine("vllm-0.15"))

    async def run() -> None:
        engine = EmulatedEngine(pool, FcfsOrdering(), speed=50.0, throttle=(0.5, 2.0))
        timeline = engine._replica.timeline
        assert timeline.slowdown == 1.0
        while timeline.slowdown == 1.0:
            await asyncio.sleep(0.001)
        assert timeline.slowdown == 2.0 and engine.now >= 0.5

    asyncio.run(run())
