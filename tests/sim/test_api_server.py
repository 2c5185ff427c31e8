"""Tokens that leave a replica one after the other: in closed form, and in simulations."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog
from headway.control.policies import Policies
from headway.core.fleet import Fleet, Pool
from headway.policies.resolve import ordering, router
from headway.sim.api_server import ApiServer
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

TOKEN_S = 1e-3
Stretch = tuple[int, int, float, float, float]
STRETCHES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.floats(1e-4, 0.05), st.floats(0, 1e-3), st.floats(0, 0.2)),
    max_size=8,
)
"""(tokens of an iteration, iterations, seconds of the first, further seconds of each next, rest before)."""


@given(STRETCHES)
def test_many_iterations_at_once_are_as_late_as_one_by_one(
    stretches: list[Stretch],
) -> None:
    at_once, by_one, now = ApiServer(TOKEN_S), ApiServer(TOKEN_S), 0.0
    late_s, at_s = 0.0, 0.0
    for tokens, num, first_s, more_s, rest_s in stretches:
        ends_s = [now + rest_s + s for s in accumulate(first_s + i * more_s for i in range(num))]
        at_once.take(tokens, now + rest_s, first_s, more_s, 0, num)
        for i, end_s in enumerate(ends_s):
            by_one.take(tokens, now + rest_s, first_s, more_s, i, i + 1)
            late_s, at_s = max(0.0, late_s - (end_s - at_s)) + tokens * TOKEN_S, end_s
        now = ends_s[-1]
        assert at_once.late_s == pytest.approx(late_s, abs=1e-9) and by_one.late_s == pytest.approx(late_s, abs=1e-9)


def ends_s(token_overhead_s: float, step: str = "stretch", num: int = 64) -> np.ndarray:
    """When clients have their last tokens, of as many equal requests at once."""
    engine = replace(catalog.engine("vllm-0.25"), token_overhead_s=token_overhead_s)
    pool = Pool("p", catalog.model("llama-3.1-8b"), catalog.gpu("h100"), engine)
    table = Workload(
        {
            "arrival_s": np.arange(num) * 1e-3,
            "prompt_tokens": np.full(num, 50),
            "output_tokens": np.full(num, 60),
        }
    )
    policies = Policies(router("least-loaded"), ordering("fcfs"))
    records = simulate(Fleet((pool,)), TraceSource(table), policies, seed=0, step=step)
    return np.sort(records.requests["end_s"])


def test_a_server_that_keeps_up_delays_by_its_time_for_an_iteration_and_one_that_does_not_by_more() -> None:
    without, kept_up, behind = ends_s(0.0), ends_s(2e-5), ends_s(1e-3)
    assert kept_up[0] - without[0] == pytest.approx(64 * 2e-5, rel=0.1)
    tokens = 64 * 60
    assert behind[-1] == pytest.approx(tokens * 1e-3, rel=0.05)  # all of them, one after the other


@pytest.mark.parametrize("token_overhead_s", [2e-5, 1.2e-4, 1e-3])
def test_stretches_and_exact_steps_are_as_late(token_overhead_s: float) -> None:
    assert ends_s(token_overhead_s) == pytest.approx(ends_s(token_overhead_s, "exact"), abs=1e-9)
