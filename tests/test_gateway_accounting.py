"""What is counted as in flight is what is open towards engines: at every step of the loop, whatever fails or leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

from asgi import Inside
from headway.gateway.client import Connection
from headway.gateway.replica import LiveReplica
from held import check_all_is_nought, gateway_before_held, live

NUM_ENGINES = 3


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with gateway_before_held(tmp_path_factory.mktemp("fleet"), NUM_ENGINES) as made:
        yield made


_STEP = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["word", "word", "end", "refuse", "reset", "close"]), st.integers(0, NUM_ENGINES - 1)),
    st.tuples(st.just("settle"), st.just(0)),
)


@given(st.lists(_STEP, max_size=40))
@settings(
    max_examples=60, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_at_every_step_what_is_open_is_counted(inside: Inside, steps: list[tuple[str, Any]]) -> None:
    """Nothing is sent before it is counted, and nothing is forgotten before it is closed; in the end, all is nought."""
    driver = inside.gateway.driver

    def wrong(replica: LiveReplica, here: Sequence[Connection]) -> str:
        tickets = [each for each in driver.tickets.values() if each.replica is replica and each.seat is not None]
        is_known = set(here) <= {ticket.connection for ticket in tickets}
        is_right = is_known and replica.num_in_flight >= max(len(here), len(tickets))
        return "" if is_right else f"{len(tickets)} seated"

    for reply in inside.run(live(inside, steps, wrong)):
        if reply is not None:
            assert reply.is_whole and reply.status in (200, 502, 503)
    check_all_is_nought(inside)
