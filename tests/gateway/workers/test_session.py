"""Two workers and their scheduler in one event loop: the scheduler counts every open stream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

from asgi import Inside
from headway.gateway.scheduling.in_flight import ReleaseReason
from headway.gateway.server.completions import CompletionsApp
from headway.gateway.workers.protocol import WorkerConfig, frame, receive_config
from headway.gateway.workers.session import WorkerSession
from headway.gateway.workers.worker import Worker
from held import check_idle, gateway_before_held, run_steps

NUM_ENGINES = 2


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """Whose requests come in by workers, one after the other."""
    with gateway_before_held(tmp_path_factory.mktemp("fleet"), NUM_ENGINES) as made:
        workers = [made.run(_hired(made)) for _ in range(2)]
        apps = [CompletionsApp(lambda worker=worker: worker) for worker in workers]  # type: ignore[misc]
        turns = iter(range(1 << 30))

        async def app(*message: Any) -> None:
            await apps[next(turns) % 2](*message)

        made.app = app  # type: ignore[assignment]
        made.workers = workers  # type: ignore[attr-defined]
        yield made
        for worker in workers:
            made.run(worker.stop())


async def _hired(inside: Inside) -> Worker:
    ours, theirs = socket.socketpair()
    gateway = inside.gateway
    ours.sendall(frame(WorkerConfig(gateway.settings, None, False, gateway.clock.start_s, "", None, None)))
    worker = Worker(receive_config(theirs), lambda: None)
    loop = asyncio.get_running_loop()
    session = WorkerSession(gateway, lambda: None, lambda: None)
    for link, end in ((session.link, ours), (worker.scheduler.link, theirs)):
        end.setblocking(False)
        await loop.create_unix_connection(lambda link=link: link, sock=end)  # type: ignore[misc]
    return worker


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
    max_examples=60, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
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
