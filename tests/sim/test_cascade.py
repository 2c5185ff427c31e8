"""Cascades in simulation: who answers, what the judge costs in time, and what answers are worth."""

from __future__ import annotations

import numpy as np
import pytest

from headway.control.policies import CascadeConfig
from headway.core.errors import HeadwayError
from headway.core.record import Outcome, Records
from headway.core.request import Request
from headway.metrics.summary import summarize
from headway.policies.cascade.deadline_aware import DeadlineAwareCascade
from headway.policies.cascade.load_based import LoadBasedCascade
from headway.policies.cascade.pre_routed import PreRoutedCascade
from headway.policies.cascade.thresholds import ThresholdsCascade
from simulation import MODEL, Made, Patient, Scenario, by_request, pool, request, seconds

SMALL, LARGE = MODEL.name, "large"
POOLS = (
    pool("small"),
    pool("large", model=type(MODEL)(LARGE, *(getattr(MODEL, f) for f in MODEL.__struct_fields__[1:]))),
)


def cascade(policy: object = ThresholdsCascade, *arguments: object, **given: float) -> CascadeConfig:
    return CascadeConfig("cascade", (SMALL, LARGE), Made(policy, arguments), **{"judge_s": 0.5, **given})  # type: ignore[arg-type]


def scored(id: int, small: float, large: float = 90.0, output: int = 4, **given: object) -> Request:
    """A request that each model answers in so many tokens, the large one in twice as many."""
    quality, lengths = ((SMALL, small), (LARGE, large)), ((LARGE, 2 * output),)
    return request(id, 10.0 * id, 1, output, quality=quality, lengths=lengths, **given)


def play(requests: list[Request], config: CascadeConfig, **given: object) -> Records:
    return Scenario(tuple(requests), POOLS, line=seconds(1.0), cascade=config, **given).play()  # type: ignore[arg-type]


def test_an_answer_that_will_do_takes_its_judge_s_time() -> None:
    done = by_request(play([scored(0, 80.0)], cascade(ThresholdsCascade, 70.0)).requests)
    assert (done["stage"][0], done["score"][0], done["generated_tokens"][0]) == (0, 80.0, 4)
    assert (done["first_token_s"][0], done["end_s"][0]) == (1.0, 4.5)


def test_an_answer_that_will_not_do_is_given_anew_by_the_next_model() -> None:
    records = play([scored(0, 60.0)], cascade(ThresholdsCascade, 70.0))
    done = by_request(records.requests)
    assert (done["stage"][0], done["generated_tokens"][0], done["replica"][0]) == (1, 8, 1)
    assert np.isnan(done["score"][0])  # nobody judges the last model
    # Four tokens, the judge, and eight more; the first token that counts is the large model's.
    assert (done["first_token_s"][0], done["end_s"][0]) == (5.5, 12.5)
    assert records.segments["stage"].tolist() == [0, 1]


def test_summaries_count_what_answers_are_worth_and_who_gave_them() -> None:
    records = play([scored(i, 10.0 * i) for i in range(10)], cascade(ThresholdsCascade, 50.0, judge_usd=0.01))
    summary = summarize(records)
    assert [summary.models[name].num_completed for name in (SMALL, LARGE)] == [5, 5]
    assert summary.quality == pytest.approx((50 + 60 + 70 + 80 + 90 + 5 * 90) / 10)
    assert (summary.judged, summary.judge_usd) == (10, pytest.approx(0.1))


def test_a_biased_judge_accepts_more_and_a_noisy_one_errs_alike_under_any_policy() -> None:
    requests = [scored(i, 45.0) for i in range(40)]
    accepted = {}
    for name, given in {"fair": {}, "kind": {"judge_bias": 10.0}, "noisy": {"judge_noise": 10.0}}.items():
        done = by_request(play(requests, cascade(ThresholdsCascade, 50.0, **given)).requests)
        accepted[name] = int((done["stage"] == 0).sum())
    assert accepted["fair"] == 0 and accepted["kind"] == 40 and 5 < accepted["noisy"] < 25
    scores = [
        by_request(play(requests, cascade(ThresholdsCascade, threshold, judge_noise=10.0)).requests)["score"]
        for threshold in (0.0, 40.0)
    ]
    both = ~np.isnan(scores[0]) & ~np.isnan(scores[1])
    assert both.any() and (scores[0][both] == scores[1][both]).all()


def test_a_client_may_give_up_while_its_answer_is_judged() -> None:
    done = by_request(
        play([scored(0, 80.0, timeout_s=4.2), scored(1, 80.0)], cascade(ThresholdsCascade, 70.0)).requests
    )
    assert done["outcome"].tolist() == [Outcome.CANCELLED, Outcome.FINISHED]
    assert done["end_s"][0] == 4.2


def test_what_is_being_judged_when_the_run_stops_is_unfinished() -> None:
    done = play([scored(0, 80.0)], cascade(ThresholdsCascade, 70.0), until_s=4.25).requests
    assert done["outcome"].tolist() == [Outcome.UNFINISHED]


def test_requests_that_ask_for_a_model_get_that_model() -> None:
    done = by_request(play([scored(0, 0.0, model=SMALL), scored(1, 0.0, model="cascade")], cascade()).requests)
    assert done["stage"].tolist() == [-1, 1]


def test_a_busy_next_model_makes_answers_good_enough() -> None:
    crowd = [request(i, 0.0, 1, 400, model=LARGE) for i in range(300)]
    late = [request(300, 5.0, 1, 4, quality=((SMALL, 40.0),)), request(301, 5.0, 1, 4, quality=((SMALL, 90.0),))]
    for requests, stage in (([*crowd, *late], 0), ([request(0, 0.0, 1, 4, quality=((SMALL, 40.0),))], 1)):
        done = by_request(play(requests, cascade(LoadBasedCascade)).requests)
        assert done["stage"][-len(late) if stage == 0 else 0] == stage


def test_routing_beforehand_asks_no_judge_and_one_model() -> None:
    records = play([scored(i, 10.0 * i) for i in range(10)], cascade(PreRoutedCascade, 50.0, 0.0))
    done = by_request(records.requests)
    assert done["stage"].tolist() == [1] * 5 + [0] * 5
    assert len(records.segments["request"]) == 10


def test_too_few_thresholds_are_an_error() -> None:
    config = CascadeConfig("three", (SMALL, LARGE, SMALL), Made(ThresholdsCascade, ([50.0],)), 0.5)
    with pytest.raises(HeadwayError, match="1; expected 2"):
        play([scored(0, 80.0)], config)


def test_ticks_go_on_while_an_answer_is_judged() -> None:
    """Admission is asked again after a judge was all that there was to wait for."""
    late = [scored(0, 80.0), request(1, 4.4, 1, 4, tier=3, quality=((SMALL, 80.0),))]
    records = play(late, cascade(ThresholdsCascade, 70.0, judge_s=5.0), admission=Patient, concurrency=1)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()


def test_an_answer_will_do_where_the_next_model_would_be_late() -> None:
    """Four tokens and the judge take 4.5 s, the large model's eight another 8: in time by 13 s, not by 12."""
    first = [scored(0, 60.0, slo_e2e_s=100.0)]  # from which it learns what the large model takes
    for promise_s, stage in ((13.0, 1), (12.0, 0), (None, 1)):
        records = play([*first, scored(2, 60.0, slo_e2e_s=promise_s)], cascade(DeadlineAwareCascade, 70.0))
        done = by_request(records.requests)
        assert (done["stage"][0], done["stage"][1]) == (1, stage)
    due = by_request(play([*first, scored(2, 60.0, deadline_s=31.0)], cascade(DeadlineAwareCascade, 70.0)).requests)
    assert due["stage"][1] == 0
