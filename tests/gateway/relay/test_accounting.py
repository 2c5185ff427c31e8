"""The in-flight counts match the open connections to engines at every step of the event loop, whatever fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

from combo_fleets import pair_file
from counted_gateway import check_idle, gateway_before_held, run_steps
from gateway_in_process import Inside
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream.client import Connection

NUM_ENGINES = 3


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with gateway_before_held(tmp_path_factory.mktemp("fleet"), NUM_ENGINES) as made:
        yield made


SETTINGS = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _step(num_engines: int) -> st.SearchStrategy[tuple[str, Any]]:
    return st.one_of(
        st.tuples(st.just("ask"), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(
            st.sampled_from(["word", "word", "end", "refuse", "reset", "close"]), st.integers(0, num_engines - 1)
        ),
        st.tuples(st.just("settle"), st.just(0)),
    )


_STEP = _step(NUM_ENGINES)


@given(st.lists(_STEP, max_size=40))
@SETTINGS
def test_open_connections_are_counted_at_every_step(inside: Inside, steps: list[tuple[str, Any]]) -> None:
    """A request is counted before it is sent, and until its connection is closed. In the end, all counts are zero."""
    driver = inside.gateway.driver

    def count_error(replica: LiveReplica, here: Sequence[Connection]) -> str:
        requests = [
            each for each in driver.requests.values() if each.replica is replica and each.reservation is not None
        ]
        is_known = set(here) <= {request.connection for request in requests}
        is_correct = is_known and replica.num_in_flight >= max(len(here), len(requests))
        return "" if is_correct else f"{len(requests)} counted by control"

    for reply in inside.run(run_steps(inside, steps, count_error)):
        if reply is not None:
            assert reply.is_whole and reply.status in (200, 502, 503)
    check_idle(inside)


# Pairs of engines that are both asked at once.


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    def write(folder: Path, urls: list[str], **sections: Any) -> Path:
        return pair_file(folder, urls[::2], urls[1::2], 2, **sections)

    with gateway_before_held(tmp_path_factory.mktemp("halves"), 4, write) as made:
        yield made


@given(st.lists(_step(4), max_size=40))
@SETTINGS
def test_both_connections_of_a_dual_dispatch_are_counted_at_every_step(
    halves: Inside, steps: list[tuple[str, Any]]
) -> None:
    """Each replica counts the request until its own connection is closed, whichever fails or ends first."""
    driver = halves.gateway.driver

    def count_error(replica: LiveReplica, here: Sequence[Connection]) -> str:
        requests = driver.requests.values()
        answers = [each for each in requests if each.replica is replica and each.reservation is not None]
        legs = [
            each.prefill_leg
            for each in requests
            if each.prefill_leg is not None and each.prefill_leg.replica is replica
        ]
        known = {request.connection for request in answers} | {leg.connection for leg in legs}
        num = len(answers) + len(legs)
        is_correct = set(here) <= known and replica.num_in_flight >= max(len(here), num)
        return "" if is_correct else f"{num} counted by control"

    for reply in halves.run(run_steps(halves, steps, count_error)):
        if reply is not None:
            assert reply.is_whole and reply.status in (200, 502, 503)
    check_idle(halves)
