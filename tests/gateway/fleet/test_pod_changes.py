"""Pods that are not ready, are being deleted, or lose their label, and what becomes of their replicas."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("kubernetes")

from headway.gateway.fleet import kubernetes, pod_changes
from headway.gateway.fleet.kubernetes import Pod, Pods, _parse_pod
from headway.gateway.fleet.pod_changes import Departures, Readiness
from headway.gateway.fleet.specs import Kubernetes


def _replica(number: int) -> Any:
    return SimpleNamespace(
        id=number, name=f"chat/{number}", is_unready=False, is_removed=False, is_starting=False, num_in_flight=1
    )


class _Host:
    """What actuators tell scaling."""

    leads = True

    def __init__(self) -> None:
        self.replicas: list[Any] = []
        self.lost: list[tuple[int, bool]] = []

    def replica_created(self, pool: str, url: str) -> Any:
        self.replicas.append(_replica(len(self.replicas)))
        return self.replicas[-1]

    def replica_lost(self, replica: Any, at_once: bool = True) -> bool:
        self.lost.append((replica.id, at_once))
        replica.is_removed |= at_once
        return True

    def set_unready(self, replica: Any, on: bool) -> None:
        replica.is_unready = on

    def pods_requested(self, *_: object) -> None:
        """Nothing is scaled."""

    def start_failed(self, *_: object) -> None:
        raise AssertionError("no pod fails to start")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6))
def test_readiness_is_followed_while_half_of_the_pods_are_ready(days: list[list[bool]]) -> None:
    """However probes fail, at least half of the pods that were ready take requests, and those that are ready do."""
    host = _Host()
    readiness, replicas, were_ready = Readiness("chat", host), [_replica(i) for i in range(4)], set[int]()
    for day in days:
        ready = [each for each, is_ready in zip(replicas, day, strict=True) if is_ready]
        others = [each for each in replicas if each not in ready]
        readiness.follow(ready, others)
        were_ready |= {each.id for each in ready}
        used = [each for each in replicas if not each.is_unready]
        assert all(each in used for each in ready)
        known = [each for each in replicas if each.id in were_ready]
        assert len([each for each in known if each in used]) >= len(known) / 2
        if len(ready) >= len(known) / 2:
            assert used == ready, "readiness says which pods take requests"


def _pods(monkeypatch: pytest.MonkeyPatch, host: _Host, *days: list[Pod], answering: bool = True) -> None:
    """What `Pods` tells its host of pods that change from day to day."""
    listed = iter([(2, day) for day in days])
    monkeypatch.setattr(kubernetes, "WorkloadApi", lambda spec: SimpleNamespace(read=lambda: next(listed)))

    async def answers(replica: Any) -> bool:
        return answering

    monkeypatch.setattr(kubernetes, "answers", answers)
    monkeypatch.setattr(pod_changes, "answers", answers)
    monkeypatch.setattr(pod_changes, "_PERIOD_S", 0.0)

    async def story() -> None:
        served = SimpleNamespace(pool=SimpleNamespace(name="chat"), num_initial=2)
        pods = Pods(served, Kubernetes(name="chat"), host)  # type: ignore[arg-type]
        for number, _ in enumerate(days):
            await pods._synchronize()
            for _ in range(5):
                await asyncio.sleep(0)
            seen.append([each.is_unready for each in host.replicas])
            assert number or len(host.replicas) == 2
        await pods.close()

    seen: list[list[bool]] = []
    asyncio.run(story())
    host.seen = seen  # type: ignore[attr-defined]


A, B = Pod("a", "chat-a", "10.0.0.1"), Pod("b", "chat-b", "10.0.0.2")
UNREADY, LEAVING = Pod("a", "chat-a", "10.0.0.1", is_ready=False), Pod("a", "chat-a", "10.0.0.1", is_leaving=True)


def test_a_pod_that_is_not_ready_for_a_moment_keeps_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _Host()
    _pods(monkeypatch, host, [A, B], [UNREADY, B], [A, B])
    assert host.seen == [[False, False], [True, False], [False, False]] and not host.lost  # type: ignore[attr-defined]


@pytest.mark.parametrize("then", [[LEAVING, B], [B]], ids=["being deleted", "without its label"])
def test_a_pod_that_leaves_keeps_its_requests_while_it_answers(
    monkeypatch: pytest.MonkeyPatch, then: list[Pod]
) -> None:
    host = _Host()
    _pods(monkeypatch, host, [A, B], then, then)
    assert host.lost == [(0, False)] and not host.replicas[0].is_removed


def test_a_pod_that_is_gone_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _Host()
    _pods(monkeypatch, host, [A, B], [B], answering=False)
    assert host.lost[0] == (0, True)


def test_requests_at_a_pod_that_left_go_elsewhere_once_its_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single health check that fails says nothing: an engine may be busy."""
    answered = iter([True, False, True, False, False, False])
    monkeypatch.setattr(pod_changes, "_PERIOD_S", 0.0)

    async def answers(replica: Any) -> bool:
        return next(answered)

    monkeypatch.setattr(pod_changes, "answers", answers)

    async def story() -> None:
        host, replica = _Host(), _replica(0)
        departures = Departures(host)
        departures.watch(replica)
        async with asyncio.timeout(20):
            while not host.lost:
                await asyncio.sleep(0)
        assert host.lost == [(0, True)] and next(answered, None) is None
        idle = _replica(1)
        idle.num_in_flight = 0
        departures.watch(idle)
        await asyncio.sleep(0)
        assert len(host.lost) == 1
        departures.close()

    asyncio.run(story())


READY, SCHEDULED = ("Ready", "True"), ("PodScheduled", "True")
CONDITIONS: list[tuple[list[tuple[str, str]] | None, bool]] = [
    ([], True),
    (None, True),
    ([READY], True),
    ([("Ready", "False")], False),
    ([("Ready", "Unknown")], False),
    ([SCHEDULED, ("Ready", "False")], False),
]


@pytest.mark.parametrize(("conditions", "is_ready"), CONDITIONS)
def test_a_pod_without_a_condition_counts_as_ready(conditions: Any, is_ready: bool) -> None:
    listed = None if conditions is None else [SimpleNamespace(type=t, status=s, reason=None) for t, s in conditions]
    status = SimpleNamespace(pod_ip="10.0.0.1", phase="Running", conditions=listed, container_statuses=[])
    meta = SimpleNamespace(uid="u", name="chat-0", deletion_timestamp=None)
    assert _parse_pod(SimpleNamespace(metadata=meta, status=status)).is_ready is is_ready
