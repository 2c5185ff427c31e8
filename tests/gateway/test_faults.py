"""Policies and listeners that raise: the request that causes it is refused, and all others continue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway_in_process import Inside, Reply
from headway.control.observe import MutablePoolsView
from serving import MODEL

pytest.importorskip("httptools")
from headway.gateway.fleet.scaling import ScalingWithFailures
from headway.gateway.relay.request import CHAT
from headway.gateway.relay.request_reader import read_request
from headway.gateway.scheduling.in_flight import ReleaseReason
from headway.gateway.upstream.errors import BrokenOffError
from headway.gateway.workers.protocol import RequestArrived
from headway.gateway.workers.session import WorkerSession
from scripted import Exchange, ScriptedEngine
from workers_in_process import hire

BODY = b'{"model":"%s","messages":[{"role":"user","content":"hello"}]}' % MODEL.encode()
BRITTLE = """
from headway.core.decision import Placement


class Brittle:
    def route(self, request, view):
        if request.tier == 7:
            raise ValueError("nobody told me of sevens")
        return Placement(min(view.replicas, key=lambda replica: (replica.num_in_flight, replica.id)).id)
"""


class Engine(ScriptedEngine):
    """An engine that answers once `may` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.may.set()

    async def complete(self, exchange: Exchange) -> None:
        await self.may.wait()
        await super().complete(exchange)


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    (tmp_path / "brittle.py").write_text(BRITTLE)
    policies = {"routing": "brittle:Brittle", "ordering_at": "gateway", "window": 1}
    made = Inside(tmp_path, 2, engine=Engine, policies=policies, gateway={"scrape_period_s": 0.05, "hold_s": 5.0})
    yield made
    made.close()


def _post(inside: Inside, tier: int) -> asyncio.Task[Reply]:
    messages = [{"role": "user", "content": "hello there"}]
    return asyncio.create_task(inside.post({"model": MODEL, "messages": messages, "priority": tier}))


def _num_held(inside: Inside) -> int:
    return len(inside.gateway.driver.control.parts.held_requests())


def test_a_request_that_ends_is_not_failed_by_the_placement_of_the_next(inside: Inside) -> None:
    async def story() -> None:
        for engine in inside.engines:
            engine.may.clear()  # type: ignore[attr-defined]
        before = [_post(inside, 1) for _ in range(2)]
        await inside.until(lambda: inside.num_in_flight == 2)
        after = [_post(inside, tier) for tier in (7, 1, 7, 1)]
        await inside.until(lambda: _num_held(inside) == 4)
        for engine in inside.engines:
            engine.may.set()  # type: ignore[attr-defined]
        assert [(await task).status for task in before] == [200, 200]
        assert [(await task).status for task in after] == [503, 200, 503, 200]
        assert inside.num_in_flight == 0 and not inside.gateway.driver.requests

    inside.run(story())
    assert sum("nobody told me of sevens" in fault for fault in inside.faults) == 2


def test_health_checks_continue_when_a_placement_fails(inside: Inside) -> None:
    """Requests are held while all engines are down; when the engines are back, the policy raises for one request."""

    async def story() -> None:
        for engine in inside.engines:
            await engine.stop()
        await inside.until(lambda: inside.gateway.num_up == 0)
        waiting = [_post(inside, tier) for tier in (7, 1)]
        await inside.until(lambda: _num_held(inside) == 2)
        for engine in inside.engines:
            await engine.listen(port=engine.port)
        assert [(await task).status for task in waiting] == [503, 200]
        await inside.until(lambda: inside.gateway.num_up == 2)
        await inside.engines[0].stop()
        await inside.until(lambda: inside.gateway.num_up == 1)

    inside.run(story())


def test_health_checks_continue_when_a_listener_raises(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise ValueError("I do not want to know")

    async def story() -> None:
        watch = inside.gateway.health
        for heard in ("_on_down", "_on_up", "_on_load", "_on_unresponsive"):
            with monkeypatch.context() as patch:
                patch.setattr(watch, heard, fails)
                await inside.engines[0].stop()
                await inside.until(lambda: not watch.is_up(inside.gateway.replicas[0]))
                await inside.engines[0].listen(port=inside.engines[0].port)
                await inside.until(lambda: heard == "_on_load" or watch.is_up(inside.gateway.replicas[0]))  # noqa: B023
            await inside.until(lambda: inside.gateway.num_up == 2)

    inside.run(story())
    assert sum("I do not want to know" in fault for fault in inside.faults) >= 3


def test_a_replica_that_drops_a_connection_is_used_again_after_a_probe(inside: Inside) -> None:
    """With and without another replica, for a replica of the start and for an added one."""

    async def story() -> None:
        gateway = inside.gateway
        gateway.fleet.remove(gateway.replicas[0], at_once=True)
        later = gateway.fleet.add("pool", inside.urls[0])
        await inside.until(lambda: gateway.health.is_up(later))
        for replica, other in ((gateway.replicas[1], later), (later, gateway.replicas[1])):
            for is_alone in (False, True):
                gateway.health.breakers[other.id].is_open = is_alone
                gateway.health.failed(replica, BrokenOffError("broke off"))
                assert not gateway.health.is_up(replica)
                await inside.until(lambda: gateway.num_up == 2)

    inside.run(story())


def test_a_failed_release_does_not_keep_the_other_requests_of_a_dead_worker(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, gone = inside.gateway, []
    release = gateway.driver.release

    def fails(request: Any, reason: ReleaseReason) -> None:
        release(request, reason)
        raise ValueError("I do not want to know")

    async def story() -> None:
        session = WorkerSession(gateway, lambda: None, lambda: gone.append(True), lambda: None)
        for number in range(3):
            features = read_request(CHAT, BODY, {}).features(gateway.clock.now)
            session._receive([RequestArrived(number, f"{number}", "", False, features)])
        assert len(gateway.driver.requests) == 3
        monkeypatch.setattr(gateway.driver, "release", fails)
        session._link_lost()
        assert not gateway.driver.requests and inside.num_in_flight == 0 and gone

    inside.run(story())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_poison_prompt_is_recognised_though_the_engines_end_is_known_before_the_break(
    tmp_path: Path, num_workers: int
) -> None:
    """A health check finds that an engine is gone before the event loop has read the end of the connection."""
    ended: list[int] = []

    class Dying(ScriptedEngine):
        async def complete(self, exchange: Exchange) -> None:
            loop, id = asyncio.get_running_loop(), inside.engines.index(self)
            ended.append(id)
            exchange.abort()  # the socket is closed in the loop's next iteration, and read in the one after it
            loop.call_soon(inside.gateway.driver.fail_over, inside.gateway.replicas[id])

    inside = Inside(tmp_path, 4, engine=Dying, gateway={"max_attempts": 4, "scrape_period_s": 3600.0})
    workers = hire(inside, num_workers) if num_workers else []
    reply = inside.chat(stream=True)
    assert (reply.status, reply.error()["code"], len(set(ended))) == (422, "request_quarantined", 2)
    assert inside.num_in_flight == 0 and not inside.faults
    for worker in workers:
        inside.run(worker.stop())
    inside.close()


def test_an_invalid_scaling_target_is_logged_once_until_a_valid_one(caplog: pytest.LogCaptureFixture) -> None:
    placements = [{"nowhere": 1}, {"nowhere": 1}, {}, {"nowhere": 1}]
    scaler = type("Wrong", (), {"interval_s": 1.0, "scale": lambda self, view: placements.pop()})()
    scaling = ScalingWithFailures(
        scaler, MutablePoolsView(Random(0)), [], None, (), lambda pool: None, frozenset(), list
    )
    for now in range(4):
        scaling.tick(float(now))
    assert not placements and caplog.text.count("unknown pool 'nowhere'") == 2, "once, and again after a valid target"
