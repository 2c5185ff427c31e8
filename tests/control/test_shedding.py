"""Requests that are expected to miss their TTFT SLO are refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control_fakes import Fleet
from fakes import FakeReplica
from headway import scenario
from headway.config.strict_yaml import Places
from headway.control.decisions import Decision, DecisionObserver
from headway.control.live import HELD, Live
from headway.core.fleet import Fallbacks
from headway.core.record import Outcome
from headway.policies.ordering.fair import FairOrdering
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.tiers import PriorityOrdering


class Times:
    """An engine that computes 1,000 prompt tokens a second, and gives each sequence 10 tokens a second."""

    def prefill_s(self, tokens: int, /) -> float:
        return 0.001 * tokens

    def step_s(self, num_decoding: int, context_tokens: int, /) -> float:
        return 0.1


def busy(prefill_tokens: int = 0, log: list[Decision] | None = None, num_others: int = 1, **policies: Any) -> Fleet:
    """One replica that has so many prompt tokens to compute."""
    replica = FakeReplica(times=Times(), prefill_tokens_left=prefill_tokens, max_num_seqs=4, num_in_flight=num_others)
    observer = DecisionObserver()
    if log is not None:
        observer.listeners.append(log.append)
    return Fleet([replica], observer=observer, **{"slo_ttft_s": 2.0, "shed_ttft_share": 1.0, **policies})


def arrive(run: Fleet, id: int, at_s: float = 0.0, **fields: Any) -> Live:
    live = Live(id, at_s, 100, 10, **fields)
    run.control.on_arrival(live, at_s)
    return live


def test_a_request_behind_too_many_prompt_tokens_is_rejected_with_the_reason() -> None:
    log: list[Decision] = []
    run = busy(prefill_tokens=3000, log=log)
    live = arrive(run, 0)
    assert run.effects.ended == [(0, Outcome.REJECTED)] and not run.effects.started
    assert log[-1].what == "refused" and log[-1].why.startswith("its first token is expected after 3.")
    assert live.shed_s == pytest.approx(1.1, abs=0.2)  # 3,100 tokens and an iteration, less the SLO of 2 s


@pytest.mark.parametrize(
    ("fields", "policies"),
    [
        ({"slo_ttft_s": 60.0}, {}),
        ({"deadline_s": 600.0}, {}),
        ({}, {"shed_ttft_share": 2.0}),
        ({}, {"shed_ttft_share": None}),
        ({}, {"slo_ttft_s": None}),
    ],
    ids=["an SLO of its own", "a deadline", "a larger share", "off", "no SLO"],
)
def test_a_request_that_may_wait_is_served(fields: dict[str, Any], policies: dict[str, Any]) -> None:
    run = busy(3000, **policies)
    arrive(run, 0, **fields)
    assert run.effects.started == [(0, 0)]


def test_the_replica_that_is_soonest_counts() -> None:
    replicas = [
        FakeReplica(id=i, times=Times(), prefill_tokens_left=tokens, num_in_flight=1)
        for i, tokens in enumerate((9000, 0))
    ]
    run = Fleet(replicas, slo_ttft_s=2.0, shed_ttft_share=1.0)
    arrive(run, 0)
    assert not run.effects.ended


def test_held_requests_that_go_first_count_and_others_do_not() -> None:
    """A seat is free every 6 s or so: 256 tokens an answer, 10 a second, 4 seats."""
    run = busy(num_others=0, ordering=PriorityOrdering, ordering_at="gateway", window=4)
    running = [arrive(run, i) for i in range(4)]
    waiting = arrive(run, 4, slo_ttft_s=1000.0, tier=1)
    assert waiting.stage is HELD
    arrive(run, 5, slo_ttft_s=10.0, tier=1)  # behind the one that waits
    assert run.effects.ended == [(5, Outcome.REJECTED)]
    first = arrive(run, 6, slo_ttft_s=10.0)  # before it
    assert first.stage is HELD
    run.finish(running[0], 1.0)
    assert run.effects.started[-1] == (6, 0)


def test_no_request_is_shed_while_no_replica_is_up() -> None:
    run = busy(prefill_tokens=3000)
    run.control.on_crashed(0, [], 0.0)
    assert arrive(run, 0).stage is HELD


def test_a_fallback_answers_in_place_of_a_rejection() -> None:
    replicas = [
        FakeReplica(id=0, model="large", times=Times(), prefill_tokens_left=9000, num_in_flight=1),
        FakeReplica(id=1, model="small", times=Times()),
    ]
    fallbacks = Fallbacks({"large": ("small",)})
    run = Fleet(replicas, fallbacks=fallbacks, slo_ttft_s=2.0, shed_ttft_share=1.0)
    arrive(run, 0, model="large")
    assert run.effects.started == [(0, 1)] and not run.effects.ended


def test_engines_that_are_slower_than_their_model_shed_sooner_and_are_tried_again() -> None:
    """The model expects 1.4 s of 2 s."""
    run = busy(prefill_tokens=1000)
    live = arrive(run, 0)
    live.first_token_s = 5.0
    run.finish(live, 6.0)
    assert arrive(run, 1, at_s=6.0).shed_s > 0
    assert not arrive(run, 2, at_s=120.0).shed_s, "what was seen long ago counts no more"
    run.effects.replicas[0].num_in_flight = 0
    assert not arrive(run, 3, at_s=6.0).shed_s, "nothing would ever be seen of an idle replica that gets nothing"


def test_engines_that_are_as_fast_as_their_model_go_on() -> None:
    run = busy(prefill_tokens=1000)
    for i in range(20):
        live = arrive(run, i)
        live.first_token_s = 1.4
        run.finish(live, 2.0)
    assert {outcome for _, outcome in run.effects.ended} == {Outcome.FINISHED}


def test_the_number_of_requests_before_one_is_that_of_its_order() -> None:
    run = busy(num_others=0, ordering=FcfsOrdering, ordering_at="gateway", window=1, shed_ttft_share=None)
    for i in range(4):
        arrive(run, i)
    queue = run.control.services[0].hold_queue
    assert queue.num_before(Live(9, 1.0, 100, 10), 1.0) == 3 and queue.oldest_s(Live(9, 1.0, 100, 10), 5.0) == 5.0

    run = busy(num_others=0, ordering=FairOrdering, ordering_at="gateway", window=1, shed_ttft_share=None)
    for i, tenant in enumerate(("a", "a", "a", "a", "b")):
        arrive(run, i, tenant=tenant)
    queue = run.control.services[0].hold_queue
    assert queue.num == 4
    new = {tenant: Live(9, 1.0, 100, 10, tenant=tenant, tier=tier) for tenant, tier in (("a", 0), ("c", 0), ("d", 1))}
    assert [queue.num_before(live, 1.0) for live in new.values()] == [4, 1, 4]
    assert [queue.oldest_s(live, 5.0) for live in new.values()] == [5.0, 0.0, 0.0]


def overloaded(**policies: Any) -> tuple[int, int]:
    """The requests with a first token in time, and those that were answered."""
    document = {
        "workload": {
            "arrivals": 30.0,
            "num_requests": 300,
            "prompt_tokens": {"kind": "lognormal", "mean": 600, "cv": 0.8},
            "output_tokens": {"kind": "lognormal", "mean": 100, "cv": 0.5},
        },
        "fleet": [{"model": "qwen3-32b", "gpu": "h100", "replicas": 2, "kv_capacity_tokens": 16_000}],
        "slo": {"ttft_s": 1.0},
        "policies": policies,
    }
    ran = scenario.run(scenario.assemble(document, Places(), Path())).records
    waits = ran.requests["first_token_s"] - ran.workload["arrival_s"][ran.requests["request"]]
    return int((waits <= 1.0).sum()), int((ran.requests["outcome"] == Outcome.FINISHED).sum())


def test_more_requests_keep_their_slo_in_an_overload_if_others_are_shed() -> None:
    """Without shedding, requests wait for longer and longer."""
    in_time, answered = overloaded()
    shed_in_time, shed_answered = overloaded(shed_ttft_share=0.8)
    assert answered == 300 and shed_answered < 300
    assert shed_in_time > 1.5 * in_time and shed_in_time > 0.7 * shed_answered
