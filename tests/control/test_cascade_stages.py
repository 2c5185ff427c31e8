"""Model cascades: the first stage, judged answers, escalation."""

from __future__ import annotations

from typing import Any

import pytest

from control_fakes import Fleet
from fakes import FakeReplica
from headway.control.live import HELD, WAITING
from headway.control.policies import CascadeConfig
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.view import CascadeView, RequestView


class Threshold:
    """Accepts scores of 50 or more."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def enter(self, request: RequestView, view: CascadeView) -> int:
        return self.first

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        return score >= 50


class Auditing(Threshold):
    """Has every last answer judged."""

    def judges_last(self, request: RequestView) -> bool:
        return True


def cascade(policy: Any) -> Fleet:
    """A small and a large model, each with one replica."""
    config = CascadeConfig("cascade", ("small", "large"), lambda: policy)
    return Fleet([FakeReplica(0, model="small"), FakeReplica(1, model="large")], cascade=config)


def test_a_good_answer_of_the_first_stage_is_final() -> None:
    run = cascade(Threshold())
    live = run.arrive(0, model="cascade")
    assert (live.model, live.stage_index, run.effects.started) == ("small", 0, [(0, 0)])
    run.finish(live, 1.0)
    assert live.stage is HELD and run.effects.judged == [0] and run.control.parts.has_held()
    run.control.on_judged(live, 80.0, 1.5)
    assert run.effects.ended == [(0, Outcome.FINISHED)]
    assert (run.records()["stage"][0], run.records()["score"][0]) == (0, 80.0)


def test_a_bad_answer_escalates_and_the_last_stage_is_not_judged() -> None:
    run = cascade(Threshold())
    live = run.arrive(0, lengths=(("large", 9),), reasoning_tokens=2)
    run.finish(live, 1.0)
    run.control.on_judged(live, 20.0, 1.5)
    assert (live.model, live.stage_index, live.stage) == ("large", 1, WAITING)
    assert (live.generated_tokens, live.output_tokens, live.reasoning_tokens) == (0, 9, 4)
    run.finish(live, 3.0)
    assert run.effects.judged == [0] and run.effects.ended == [(0, Outcome.FINISHED)]


def test_an_auditor_has_the_last_answer_judged_and_accepts_it() -> None:
    run = cascade(Auditing(first=1))
    live = run.arrive(0)
    run.finish(live, 1.0)
    run.control.on_judged(live, 1.0, 2.0)
    assert run.effects.judged == [0] and run.effects.ended == [(0, Outcome.FINISHED)]


def test_a_request_for_one_model_stays_out_of_the_cascade() -> None:
    run = cascade(Threshold())
    live = run.arrive(0, model="large")
    run.finish(live, 1.0)
    assert live.stage_index == -1 and run.effects.judged == []


def test_a_score_after_a_timeout_changes_nothing() -> None:
    run = cascade(Threshold())
    live = run.arrive(0, timeout_s=5.0)
    run.finish(live, 1.0)
    run.control.on_timeout(5.0, live)
    run.control.on_judged(live, 80.0, 6.0)
    assert run.effects.ended == [(0, Outcome.CANCELLED)]


def test_a_policy_must_choose_a_stage_and_the_fleet_must_have_the_models() -> None:
    with pytest.raises(HeadwayError, match="cascade Threshold chose stage 2; expected 0 to 1"):
        cascade(Threshold(first=2)).arrive(0)
    config = CascadeConfig("cascade", ("smal",), Threshold)
    with pytest.raises(HeadwayError, match="cascade: unknown model 'smal'; did you mean 'small'"):
        Fleet([FakeReplica(0, model="small")], cascade=config)
