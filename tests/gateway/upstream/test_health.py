"""Probes and breakers of the health monitor, with engines whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
import logging
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
"""No test waits so long."""


class Engine:
    """Answers probes as scripted: each item is an error to raise, or a function to call before the answer."""

    def __init__(self, *answers: EngineError | Callable[[], None]) -> None:
        self._answers = list(answers)
        self.num_probes = 0

    async def fetch(self, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        """The answer to a probe. The canary fails."""
        if body is not None:
            raise EngineError("no tokens")
        self.num_probes += 1
        if self._answers:
            answer = self._answers.pop(0)
            if isinstance(answer, EngineError):
                raise answer
            answer()
        return 200, b""

    async def fetch_status(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        return await self.fetch(path, timeout_s)


def _replica(id: int, engine: Engine, model: str = "m", served: str = "m") -> EngineEndpoint:
    made = EngineEndpoint(id, "pool", model, "http://engine", ADAPTERS["openai"], 9, cast(Client, engine))
    made.reported_model = served
    return made


def _calls(
    engine: Engine,
    is_over: Callable[[HealthMonitor[EngineEndpoint], list[str]], bool],
    is_new: bool = False,
    model: str = "m",
    served: str = "m",
) -> list[str]:
    """The callbacks of a monitor of two replicas that had been up, or of a new one, until `is_over`."""

    async def run() -> list[str]:
        calls: list[str] = []

        def record(callback: str) -> Any:
            return lambda *_: calls.append(callback)

        replicas = [_replica(0, engine, model, served), *([] if is_new else [_replica(1, Engine())])]
        monitor = HealthMonitor(
            replicas,
            Settings(scrape_period_s=PERIOD_S),
            record("up"),
            record("down"),
            record("unresponsive"),
            record("load"),
        )
        for breaker in monitor.breakers.values():
            breaker.is_open = is_new
        monitor.start()
        async with asyncio.timeout(30):
            while not is_over(monitor, calls):
                await asyncio.sleep(0.01)
        await monitor.stop()
        return calls

    return asyncio.run(run())


def test_a_failure_during_a_probe_causes_another_probe() -> None:
    """The engine may have answered the probe before it died, so the replica stays down."""
    monitors: list[HealthMonitor[EngineEndpoint]] = []
    died = BrokenOffError("killed")
    answers = (
        lambda: monitors[0].failed(monitors[0].replicas[0], died),
        lambda: None,
        *99 * [UnreachableError("refused")],
    )
    engine = Engine(*answers)

    def is_over(monitor: HealthMonitor[EngineEndpoint], calls: list[str]) -> bool:
        monitors[:] = [monitor]
        return engine.num_probes > 2

    assert _calls(engine, is_over) == ["down"]


def test_a_probe_that_is_broken_off_is_repeated_soon() -> None:
    """An engine that shuts down may still accept the connection of a probe."""
    engine = Engine(BrokenOffError("closed"), UnreachableError("refused"))
    assert _calls(engine, lambda monitor, calls: "unresponsive" in calls) == ["down", "unresponsive"]


def test_one_failed_probe_does_not_take_a_replica_down() -> None:
    engine = Engine(BrokenOffError("closed"))
    assert _calls(engine, lambda monitor, calls: engine.num_probes > 1) == []


def test_a_replica_that_broke_off_a_connection_is_up_again_after_a_probe() -> None:
    """A replica that breaks off repeatedly needs a canary, though its health checks succeed."""

    def is_over(monitor: HealthMonitor[EngineEndpoint], calls: list[str]) -> bool:
        if monitor.is_up(monitor.replicas[0]):
            monitor.failed(monitor.replicas[0], BrokenOffError("closed"))
        return monitor.breakers[0].needs_canary

    assert _calls(Engine(), is_over) == ["down", "up", "down", "up", "down"]


def test_a_replica_that_is_not_up_from_the_start_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """An operator with a wrong port would see nothing else."""
    engine = Engine(*99 * [UnreachableError("connection refused")])
    _calls(engine, lambda monitor, calls: engine.num_probes > 5, is_new=True)
    told = [each.getMessage() for each in caplog.records if each.name == "headway.gateway"]
    assert told == ["pool/0 at http://engine is not up yet: connection refused"]


@pytest.mark.parametrize(
    ("pool_model", "served", "is_told"),
    [
        ("llama-3.1-8b", "Qwen/Qwen3-8B", True),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", False),
        ("llama-3.1-8b", "our-chat", False),
        ("house-model", "qwen3-8b", False),
    ],
)
def test_an_engine_that_serves_another_model_than_its_pool_says_is_named(
    caplog: pytest.LogCaptureFixture, pool_model: str, served: str, is_told: bool
) -> None:
    def is_over(monitor: HealthMonitor[EngineEndpoint], calls: list[str]) -> bool:
        return "up" in calls

    _calls(Engine(), is_over, is_new=True, model=pool_model, served=served)
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert told == (["pool/0 serves qwen3-8b, but pool pool has `model: llama-3.1-8b`"] if is_told else [])


class BreakingEngine(Engine):
    """Passes health checks and completes one token; its streams break after five."""

    def __init__(self) -> None:
        super().__init__()
        self.most_tokens = 5
        self.asked: list[int] = []

    async def fetch(self, path: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        if body is not None:
            self.asked.append(1)
        return 200, b""

    async def request(self, method: str, path: str, headers: str, body: bytes) -> Any:
        num = json.loads(body)["max_tokens"]
        self.asked.append(num)
        engine = self

        class Answer:
            status = 200
            left = num

            async def read_part(self) -> bytes:
                self.left -= 1
                if num - self.left > engine.most_tokens:
                    raise BrokenOffError("broke off the connection")
                reason = b'"length"' if not self.left else b"null"
                return b'data: {"choices":[{"text":"a","finish_reason":%b}]}\n\n' % reason + (
                    b"" if self.left else b"data: [DONE]\n\n"
                )

        return Answer()

    def release(self, connection: Any) -> None:
        """Keep nothing."""

    async def fetch_status(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        return await self.fetch(path, timeout_s)


def test_a_replica_whose_streams_break_is_down_until_a_longer_stream_succeeds() -> None:
    """Neither its health checks nor one token bring it back."""
    engine, died = BreakingEngine(), BrokenOffError("broke off the connection")
    died.after_tokens = 5

    def is_over(monitor: HealthMonitor[EngineEndpoint], calls: list[str]) -> bool:
        if monitor.is_up(monitor.replicas[0]) and len(engine.asked) < 2:
            monitor.failed(monitor.replicas[0], died)
        if len(engine.asked) == 2:
            engine.most_tokens = 99
        return len(engine.asked) > 2 and monitor.is_up(monitor.replicas[0])

    calls = _calls(engine, is_over)
    assert calls == ["down", "up", "down", "up", "down", "up"] and engine.asked == [13, 13, 13]


def test_breaks_in_mid_stream_eject_as_other_failures_do() -> None:
    """Those of all streams of an engine that ends are one."""
    monitor = HealthMonitor(
        [_replica(0, Engine()), _replica(1, Engine())], Settings(), *[lambda *_: None] * 4, lambda *_: None, lambda: 0.0
    )
    for breaker in monitor.breakers.values():
        breaker.is_open = False
    broken = monitor.replicas[0]
    for _ in range(9):
        monitor.failed(broken, BrokenOffError("killed"))
    assert not monitor.outliers.is_ejected(0)
    for _ in range(4):
        monitor.breakers[0].is_open = False
        monitor.failed(broken, BrokenOffError("broke off"))
    monitor.breakers[0].is_open = False
    monitor.check_outliers()
    assert monitor.outliers.is_ejected(0)


def test_another_replica_of_the_model_may_be_up() -> None:
    replicas = [_replica(i, Engine(), model="n" if i == 3 else "m") for i in range(4)]
    monitor = HealthMonitor(replicas, Settings(), *[lambda *_: None] * 4)
    assert not any(monitor.has_other(each) for each in replicas)
    for up in ([0], [0, 1], [1, 3], [3]):
        for replica in replicas:
            monitor.breakers[replica.id].is_open = replica.id not in up
        for replica in replicas:
            others = [i for i in up if i != replica.id and replicas[i].model == replica.model]
            assert monitor.has_other(replica) == bool(others)
