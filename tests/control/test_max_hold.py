"""The longest time for which a request is held."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from control_fakes import Fleet, fleet
from headway import scenario
from headway.config.strict_yaml import Places
from headway.control.live import HELD
from headway.core.record import Outcome
from headway.policies.ordering.fair import FairOrdering


def behind() -> Fleet:
    return fleet("mixed", window=1, ordering=lambda: FairOrdering(headroom=0), ordering_at="gateway", max_hold_s=5.0)


def test_a_request_that_is_held_for_too_long_is_rejected() -> None:
    run = behind()
    first, second, third = (run.arrive(i, float(i)) for i in range(3))
    assert [when for when, _, _ in run.effects.timers] == [6.0, 7.0]
    run.finish(first, 4.0)
    assert second.stage is not HELD and third.stage is HELD
    for when, action, live in run.effects.timers:
        action(when, live)
    assert run.effects.ended == [(0, Outcome.FINISHED), (2, Outcome.REJECTED)]
    assert not run.control.parts.has_held()


def test_a_request_that_has_been_placed_is_held_for_any_time() -> None:
    """As after a crash: its client has tokens, or soon would have had."""
    run = behind()
    live = run.arrive(0)
    run.control.on_crashed(0, [live], 1.0)
    assert live.stage is HELD and not run.effects.timers


def test_no_request_waits_longer_in_a_simulation() -> None:
    document = {
        "workload": {"arrivals": 20.0, "num_requests": 200, "prompt_tokens": 200, "output_tokens": 100},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100"}],
        "policies": {"ordering_at": "gateway", "window": 4, "max_hold_s": 2.0},
    }
    records = scenario.run(scenario.assemble(document, Places(), Path())).records
    rows, arrival_s = records.requests, records.workload["arrival_s"][records.requests["request"]]
    rejected = rows["outcome"] == Outcome.REJECTED
    assert 10 < rejected.sum() < 190 and (rows["outcome"][~rejected] == Outcome.FINISHED).all()
    assert np.allclose(rows["end_s"][rejected] - arrival_s[rejected], 2.0, atol=0.05)
    assert (rows["placed_s"] - arrival_s)[~rejected].max() <= 2.0
