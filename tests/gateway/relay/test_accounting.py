"""What is counted as in flight is what is open towards engines: at every step of the loop, whatever fails or leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

from asgi import Inside
from combo_fleets import pair_file
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.upstream.client import Connection
from held import check_all_is_nought, gateway_before_held, live

NUM_ENGINES = 3


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with gateway_before_held(tmp_path_factory.mktemp("fleet"), NUM_ENGINES) as made:
        yield made


SETTINGS = settings(
    max_examples=60, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


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
def test_at_every_step_what_is_open_is_counted(inside: Inside, steps: list[tuple[str, Any]]) -> None:
    """Nothing is sent before it is counted, and nothing is forgotten before it is closed; in the end, all is nought."""
    driver = inside.gateway.driver

    def wrong(replica: LiveReplica, here: Sequence[Connection]) -> str:
        tickets = [
            each for each in driver.requests.values() if each.replica is replica and each.reservation is not None
        ]
        is_known = set(here) <= {ticket.connection for ticket in tickets}
        is_right = is_known and replica.num_in_flight >= max(len(here), len(tickets))
        return "" if is_right else f"{len(tickets)} seated"

    for reply in inside.run(live(inside, steps, wrong)):
        if reply is not None:
            assert reply.is_whole and reply.status in (200, 502, 503)
    check_all_is_nought(inside)


# Pairs of engines that are both asked at once.


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    def write(folder: Path, urls: list[str], **sections: Any) -> Path:
        return pair_file(folder, urls[::2], urls[1::2], 2, **sections)

    with gateway_before_held(tmp_path_factory.mktemp("halves"), 4, write) as made:
        yield made


@given(st.lists(_step(4), max_size=40))
@SETTINGS
def test_at_every_step_both_halves_of_what_is_open_are_counted(halves: Inside, steps: list[tuple[str, Any]]) -> None:
    """Each until its own connection is closed, whichever of the two fails or ends first."""
    driver = halves.gateway.driver

    def wrong(replica: LiveReplica, here: Sequence[Connection]) -> str:
        tickets = driver.requests.values()
        answers = [each for each in tickets if each.replica is replica and each.reservation is not None]
        helps = [
            each.prefill_leg for each in tickets if each.prefill_leg is not None and each.prefill_leg.replica is replica
        ]
        known = {ticket.connection for ticket in answers} | {half.connection for half in helps}
        num = len(answers) + len(helps)
        is_right = set(here) <= known and replica.num_in_flight >= max(len(here), num)
        return "" if is_right else f"{num} seated"

    for reply in halves.run(live(halves, steps, wrong)):
        if reply is not None:
            assert reply.is_whole and reply.status in (200, 502, 503)
    check_all_is_nought(halves)
