"""How soon the gateway looks after a replica that is in trouble, without a real engine or a long wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("httptools")

from headway.gateway.settings import Settings
from headway.gateway.upstream.client import Client
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import BrokenOffError, EngineError, UnreachableError
from headway.gateway.upstream.health import HealthMonitor

PERIOD_S = 1000.0
"""Nobody waits for that here."""


class Engine:
    """Answers health checks as it is told: an error to raise, or something to do first."""

    def __init__(self, *answers: EngineError | Callable[[], None]) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def fetch(self, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        """The answer to a probe. The canary fails."""
        if body is not None:
            raise EngineError("no tokens")
        self.num_asked += 1
        if self._answers:
            answer = self._answers.pop(0)
            if isinstance(answer, EngineError):
                raise answer
            answer()
        return 200, b""


def _replica(id: int, engine: Engine) -> EngineEndpoint:
    made = EngineEndpoint(id, "pool", "m", "http://engine", ADAPTERS["openai"], 9, cast(Client, engine))
    made.reported_model = "m"
    return made


def _watched(engine: Engine, is_over: Callable[[HealthMonitor[EngineEndpoint], list[str]], bool]) -> list[str]:
    """What is told of one replica of two that had been up, until it is enough."""

    async def run() -> list[str]:
        told: list[str] = []

        def tell(what: str) -> Any:
            return lambda *_: told.append(what)

        both = [_replica(0, engine), _replica(1, Engine())]
        watch = HealthMonitor(
            both, Settings(scrape_period_s=PERIOD_S), tell("up"), tell("down"), tell("abandoned"), tell("load")
        )
        for breaker in watch.breakers.values():
            breaker.is_open = False
        watch.start()
        async with asyncio.timeout(30):
            while not is_over(watch, told):
                await asyncio.sleep(0.01)
        await watch.stop()
        return told

    return asyncio.run(run())


def test_a_failure_during_a_probe_has_it_looked_at_again() -> None:
    """The probe may have been answered before the engine died. Nothing is sent there meanwhile."""
    watches: list[HealthMonitor[EngineEndpoint]] = []
    died = BrokenOffError("killed")
    answers = (
        lambda: watches[0].failed(watches[0].replicas[0], died),
        lambda: None,
        *99 * [UnreachableError("refused")],
    )
    engine = Engine(*answers)

    def is_over(watch: HealthMonitor[EngineEndpoint], told: list[str]) -> bool:
        watches[:] = [watch]
        return engine.num_asked > 2

    assert _watched(engine, is_over) == ["down"]


def test_a_probe_that_is_broken_off_is_soon_repeated() -> None:
    """As when the engine's process is being ended: it may have taken the connection still."""
    engine = Engine(BrokenOffError("closed"), UnreachableError("refused"))
    assert _watched(engine, lambda watch, told: "abandoned" in told) == ["down", "abandoned"]


def test_one_probe_that_fails_is_no_reason_to_give_a_replica_up() -> None:
    engine = Engine(BrokenOffError("closed"))
    assert _watched(engine, lambda watch, told: engine.num_asked > 1) == []


def test_a_replica_that_breaks_off_is_used_again_when_it_has_been_looked_at() -> None:
    """Not so where it breaks off again and again, though its health is fine: then it has to say a token first."""

    def is_over(watch: HealthMonitor[EngineEndpoint], told: list[str]) -> bool:
        if watch.is_up(watch.replicas[0]):
            watch.failed(watch.replicas[0], BrokenOffError("closed"))
        return watch.breakers[0].needs_canary

    assert _watched(Engine(), is_over) == ["down", "up", "down", "up", "down"]
