"""Preemption in front of the replicas, in simulation: who gives way, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_fakes import fleet
from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.record import Cause, Outcome, Records

pytestmark = pytest.mark.slow
QUANTA = {"name": "fewest-quanta", "quantum_tokens": 40}


def ran(ordering: Any = QUANTA, every_s: float | None = 0.1, step: str = "stretch", **policies: Any) -> Records:
    """Chats for two replicas that get three at a time."""
    policies = {"ordering": ordering, "ordering_at": "gateway", "window": 3, **policies}
    if every_s is not None:
        policies["preempt_every_s"] = every_s
    document = {
        "workload": {"builtin": "chat", "num_requests": 80, "arrivals": 6.0},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "replicas": 2}],
        "policies": policies,
        "simulation": {"step": step},
    }
    return scenario.run(scenario.assemble(document, Places(), Path())).records


def waits_s(records: Records) -> Any:
    return records.requests["first_token_s"] - records.workload["arrival_s"][records.requests["request"]]


@pytest.mark.parametrize("ordering", [QUANTA, {"name": "round-robin", "quantum_tokens": 40}, "pascal"])
def test_every_answer_is_complete_and_both_ways_to_step_agree(ordering: Any) -> None:
    records, exact = (ran(ordering, step=step) for step in ("stretch", "exact"))
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    order = records.requests["request"]
    assert (records.requests["generated_tokens"] == records.workload["output_tokens"][order]).all()
    for name, column in records.requests.items():
        assert np.allclose(column, exact.requests[name], rtol=0, atol=1e-9, equal_nan=True), name


def test_new_requests_do_not_wait_for_old_ones() -> None:
    plain, shared = ran(every_s=None), ran()
    assert not plain.requests["preemptions"].any()
    assert shared.requests["preemptions"].sum() == (shared.segments["cause"] == Cause.PREEMPTED).sum() > 10
    assert np.percentile(waits_s(shared), 99) < 0.5 * np.percentile(waits_s(plain), 99)


def test_nobody_gives_way_within_a_quantum() -> None:
    """Among equals the one goes first that has had its number of quanta for longest."""
    assert not ran({"name": "fewest-quanta", "quantum_tokens": 100_000}).requests["preemptions"].any()


def test_no_more_give_way_than_there_is_need_for() -> None:
    """A replica never has more than its window, and no request is paused while there is room."""
    records = ran({"name": "priority"}, window=200)
    assert not records.requests["preemptions"].any()


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            {"ordering": "pascal", "ordering_at": "both"},
            "policies.preempt_every_s: requests wait in the replicas' queues",
        ),
        ({"ordering": "fcfs"}, "FcfsOrdering never preempts a request that runs"),
    ],
)
def test_what_would_pause_nothing_is_refused(policies: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        ran(**policies)


def test_a_pause_that_other_policies_overtake_ends_as_others_do() -> None:
    """When the replica has ended it, the service has no pauses any more."""
    run = fleet("mixed", window=1, ordering_at="gateway")
    live = run.arrive(0)
    run.effects.replicas[0].num_in_flight -= 1
    run.control.on_paused(live, 1.0)
    assert live.preemptions == 1 and run.effects.started == [(0, 0), (0, 0)]
