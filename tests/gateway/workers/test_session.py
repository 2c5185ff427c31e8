"""Two workers and their scheduler in one event loop: the scheduler counts every open stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

pytest.importorskip("httptools")

from counted_gateway import check_idle, gateway_before_held, run_steps
from gateway_in_process import Inside
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.gateway import Gateway
from headway.gateway.reload import Reloader
from headway.gateway.scheduling.in_flight import ReleaseReason
from headway.gateway.workers.session import WorkerSession
from serving import MODEL
from workers_in_process import hire

NUM_ENGINES = 2


@contextmanager
def before_workers(folder: Path) -> Iterator[Inside]:
    """A gateway whose requests come in by workers, one after the other."""
    with gateway_before_held(folder, NUM_ENGINES) as made:
        workers = hire(made, 2)
        made.workers = workers  # type: ignore[attr-defined]
        yield made
        for worker in workers:
            made.run(worker.stop())


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with before_workers(tmp_path_factory.mktemp("fleet")) as made:
        yield made


@pytest.fixture
def inside_of_its_own(tmp_path: Path) -> Iterator[Inside]:
    """For a test that leaves it changed."""
    with before_workers(tmp_path) as made:
        yield made


_STEP = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.sampled_from(["leave", "expire"]), st.integers(0, 30)),
    st.tuples(st.sampled_from(["abandon", "drain"]), st.integers(0, NUM_ENGINES - 1)),
    st.tuples(st.sampled_from(["word", "word", "end", "refuse", "reset"]), st.integers(0, NUM_ENGINES - 1)),
    st.tuples(st.just("settle"), st.just(0)),
)


def _scheduler_does(inside: Inside, what: str, which: int) -> bool:
    """What requests hear of by their workers only. Whether it is such a step."""
    gateway, driver = inside.gateway, inside.gateway.driver
    replica = gateway.replicas[which % NUM_ENGINES]
    if what == "expire" and driver.requests:
        request = list(driver.requests.values())[which % len(driver.requests)]
        driver.release(request, ReleaseReason.CANCELLED)
    elif what == "abandon":
        driver.fail_over(replica)
    elif what == "drain":
        driver.drain(replica, True)
        driver.drain(replica, False)
    return what in ("expire", "abandon", "drain")


@given(st.lists(_STEP, max_size=40))
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_open_connection_of_a_worker_is_counted_at_every_step(
    inside: Inside, steps: list[tuple[str, Any]]
) -> None:
    replies = run_steps(
        inside,
        steps,
        lambda replica, here: "too few" if replica.num_in_flight < len(here) else "",
        lambda what, which: _scheduler_does(inside, what, which),
    )
    for reply in inside.run(replies):
        if reply is not None:
            assert reply.is_whole and reply.status in (200, 502, 503, 504)
    assert not any(worker.scheduler.requests for worker in inside.workers)  # type: ignore[attr-defined]
    check_idle(inside)


def test_a_request_that_is_cancelled_while_its_stream_is_looked_for_is_not_served(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other gateways may have sent a part of it, for which their store is asked first."""
    asked, answered = asyncio.Event(), asyncio.Event()

    async def restore(_: Any) -> None:
        asked.set()
        await answered.wait()

    async def leave() -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
        task = asyncio.create_task(inside.post(body, headers=[("x-request-id", "mine")]))
        await asked.wait()
        task.cancel()
        await inside.until(lambda: not any(session._arriving for session in sessions))
        answered.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    owners = [getattr(each, "__self__", None) for each in inside.gateway.fleet.on_removed]
    sessions = [each for each in owners if isinstance(each, WorkerSession)]
    assert len(sessions) == 2
    monkeypatch.setattr(inside.gateway, "peers", SimpleNamespace(restore=restore))
    inside.run(leave())
    assert not inside.gateway.driver.requests
    check_idle(inside)


def test_workers_know_how_prompts_are_named_before_a_first_request(inside_of_its_own: Inside) -> None:
    inside = inside_of_its_own
    replica = inside.gateway.replicas[0]
    worker = inside.workers[0]  # type: ignore[attr-defined]

    async def heard() -> None:
        async with asyncio.timeout(60.0):
            while worker.scheduler._replicas.get(0) is None or not worker.scheduler._replicas[0].event_block_tokens:
                await asyncio.sleep(0)

    replica.event_block_tokens, replica.tokenizer = 16, "/models/none"
    for callback in inside.gateway.on_replica_up:
        callback(replica)
    inside.run(heard())
    assert worker.scheduler._replicas[0].event_block_tokens == 16
    assert "/models/none" in worker.scheduler._prompt_blocks._tokenizers, "it is read before the first request, too"


def test_a_reload_ends_once_all_workers_serve_what_it_says(inside_of_its_own: Inside) -> None:
    inside = inside_of_its_own
    workers = inside.workers  # type: ignore[attr-defined]
    gateway = inside.gateway

    def changed(plan: ServingPlan) -> ServingPlan:
        return structs.replace(plan, settings=structs.replace(plan.settings, timeout_s=plan.settings.timeout_s + 1))

    async def story() -> None:
        before, late = gateway.settings.timeout_s, workers[1].scheduler.link._transport
        late.pause_reading()
        reloading = asyncio.create_task(Reloader(gateway, changed, None).reload("request"))
        await inside.until(lambda: workers[0].settings.timeout_s == before + 1 and len(gateway.unapplied) == 1)
        assert not reloading.done()
        late.resume_reading()
        assert (await reloading).outcome == "applied"
        assert {worker.settings.timeout_s for worker in workers} == {before + 1} and not gateway.unapplied

    inside.run(story())
    plan = gateway.plan
    inside.run(_reconfigure(gateway, structs.replace(plan, settings=structs.replace(plan.settings, hang_s=0.05))))
    inside.run(_reload_with_a_worker_that_hangs(inside, changed))


async def _reconfigure(gateway: Gateway, plan: ServingPlan) -> None:
    gateway.reconfigure(plan)


async def _reload_with_a_worker_that_hangs(inside: Inside, changed: Callable[[ServingPlan], ServingPlan]) -> None:
    """It is killed after `hang_s`, and the next one starts with what the file says."""
    link = inside.workers[1].scheduler.link._transport  # type: ignore[attr-defined]
    link.pause_reading()
    assert (await Reloader(inside.gateway, changed, None).reload("request")).outcome == "applied"
    link.resume_reading()
    await inside.until(lambda: not inside.gateway.unapplied)


def test_the_client_of_a_request_for_which_a_policy_raises_is_told(
    inside_of_its_own: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without workers: else it would wait for ever."""
    inside = inside_of_its_own

    class Broken:
        def route(self, request: Any, view: Any) -> Any:
            raise ValueError("planted")

    async def ask() -> Any:
        async with asyncio.timeout(60.0):
            return await inside.post({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})

    (service,) = inside.gateway.driver.control.services
    monkeypatch.setattr(service, "router", Broken())
    reply = inside.run(ask())
    assert reply.status == 500 and reply.error()["code"] == "internal_error"
    assert not any(worker.scheduler.requests for worker in inside.workers)  # type: ignore[attr-defined]
    assert not inside.gateway.driver.requests
