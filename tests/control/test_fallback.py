"""Fallbacks: when another model answers, which one, and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from control_fakes import Fleet
from fakes import FakeReplica
from headway.control.decisions import Decision, DecisionObserver
from headway.control.live import ENDED, HELD, Live
from headway.control.policies import FallbackConfig
from headway.core.fleet import Fallbacks
from headway.core.record import Outcome

HOME, FIRST, SECOND = 0, 1, 2
MODELS = ("llama", "gpt", "llama@spare")
FALLBACKS = Fallbacks({"llama": ("gpt", "llama@spare")}, {"llama@spare": "llama"})
SLOW = FallbackConfig(when=("slow",), ttft_s=1.0, window_s=10.0, min_requests=4, miss_share=0.5, return_s=10.0)


def three(config: FallbackConfig | None = None, **given: Any) -> Fleet:
    """A replica of each model: the one that is asked for, another one, and a spare of the first."""
    replicas = [FakeReplica(i, model=model) for i, model in enumerate(MODELS)]
    return Fleet(replicas, fallbacks=FALLBACKS, fallback=config or FallbackConfig(), **given)


def crash(run: Fleet, replica: int, now: float, *lost: Live) -> None:
    run.effects.replicas[replica].num_in_flight -= len(lost)
    run.control.on_crashed(replica, lost, now)


def test_the_first_fallback_that_is_up_answers_while_the_model_is_down() -> None:
    run = three()
    crash(run, HOME, 0.0)
    live = run.arrive(0, model="llama")
    assert run.effects.started == [(0, FIRST)] and (live.model, live.fallback.why) == ("gpt", "down")
    crash(run, FIRST, 1.0, live)  # it has no token yet
    assert run.effects.started[1:] == [(0, SECOND)] and live.model == "llama@spare"
    run.finish(live, 2.0)
    run.control.on_recovered(HOME, 3.0)
    run.arrive(1, 3.0, model="llama")
    assert run.effects.started[2:] == [(1, HOME)]
    assert run.records()["fallback"].tolist() == [1]


def test_held_requests_go_to_a_fallback_when_the_last_replica_is_down() -> None:
    run = three(window=1)
    first, second = run.arrive(0, model="llama"), run.arrive(1, model="llama")
    assert second.stage is HELD
    crash(run, HOME, 1.0, first)
    # Those that were held before may go first.
    assert sorted(run.effects.started[1:]) == [(0, SECOND), (1, FIRST)]
    assert {first.fallback.why, second.fallback.why} == {"down"}


def test_a_request_is_held_until_its_own_model_or_a_fallback_is_back() -> None:
    run = three()
    for replica in (HOME, FIRST, SECOND):
        crash(run, replica, 0.0)
    live = run.arrive(0, model="llama")
    assert live.stage is HELD and run.effects.started == []
    run.control.on_recovered(FIRST, 1.0)
    assert run.effects.started == [(0, FIRST)]


def test_an_answer_that_has_begun_stays_with_its_model() -> None:
    run = three()
    live = run.arrive(0, model="llama")
    live.generated_tokens = 3
    crash(run, HOME, 1.0, live)
    assert run.effects.started[1:] == [(0, SECOND)] and live.model == "llama@spare"  # not at `gpt`
    crash(run, SECOND, 2.0, live)
    assert live.stage is HELD
    run.control.on_recovered(HOME, 3.0)
    assert live.generated_tokens == 3


def test_another_models_answer_is_of_no_use_to_an_embedding() -> None:
    run = three()
    crash(run, HOME, 0.0)
    live = Live(0, 0.0, 10, 1, "llama")
    live.keeps_model = True
    run.control.on_arrival(live, 0.0)
    assert run.effects.started == [(0, SECOND)]


def test_a_fallback_takes_what_the_model_would_reject() -> None:
    run = three(max_num_waiting=3)
    run.effects.replicas[HOME].num_waiting = 3
    assert run.arrive(0, model="llama").fallback.why == "rejects" and run.effects.started == [(0, FIRST)]
    run.effects.replicas[FIRST].num_waiting = 3
    run.arrive(1, model="llama")
    assert run.effects.started[1:] == [(1, SECOND)]
    run.effects.replicas[SECOND].num_waiting = 3
    assert run.arrive(2, model="llama").stage is ENDED and run.effects.ended == [(2, Outcome.REJECTED)]


def test_a_fallback_whose_context_is_too_short_is_skipped() -> None:
    run = three(tokens_of={"llama": 100, "gpt": 50, "llama@spare": 1000})
    run.arrive(0, prompt=96, output=5, model="llama")
    assert run.effects.started == [(0, SECOND)]
    run.arrive(1, prompt=996, output=5, model="llama")
    assert run.effects.ended == [(1, Outcome.REJECTED)]


@pytest.mark.parametrize("when", [(), ("slow",)])
def test_only_the_reasons_that_are_configured_count(when: Any) -> None:
    run = three(FallbackConfig(when=when), max_num_waiting=3)
    run.effects.replicas[HOME].num_waiting = 3
    assert run.arrive(0, model="llama").stage is ENDED
    crash(run, HOME, 0.0)
    assert run.arrive(1, model="llama").stage is HELD


def test_the_answer_is_as_long_as_the_model_makes_it() -> None:
    run = three()
    crash(run, HOME, 0.0)
    live = run.arrive(0, output=40, reasoning_tokens=20, model="llama", lengths=(("gpt", 10), ("llama", 40)))
    assert (live.output_tokens, live.reasoning_tokens) == (10, 5)
    crash(run, FIRST, 1.0)
    run.control.on_recovered(HOME, 1.0)
    crash(run, FIRST, 1.0, live)
    assert (live.model, live.output_tokens, live.reasoning_tokens, live.fallback) == ("llama", 40, 20, None)


def arrive_at_rate(run: Fleet, start_s: float, end_s: float, ttft_s: float, rate: float = 2.0) -> list[int]:
    """Requests whose first tokens come so late at the model itself. Returns the replica of each."""
    chosen, id = [], len(run.effects.started)
    for i in range(round((end_s - start_s) * rate)):
        now = start_s + i / rate
        live = run.arrive(id + i, now, model="llama")
        replica = run.effects.started[-1][1]
        live.first_token_s = now + (ttft_s if replica == HOME else 0.1)
        chosen.append(replica)
    return chosen


def test_a_model_that_misses_its_slo_keeps_a_tenth_of_its_requests_until_it_does_no_longer() -> None:
    run = three(SLOW)
    assert set(arrive_at_rate(run, 0, 10, ttft_s=0.5)) == {HOME}
    late = arrive_at_rate(run, 10, 40, ttft_s=3.0)
    first = late.index(FIRST)
    assert 2 < first < 20 and set(late[:first]) == {HOME}
    kept = late[first:].count(HOME)
    assert 0 < kept <= len(late[first:]) / 10 + 1
    back = arrive_at_rate(run, 40, 75, ttft_s=0.5)
    assert back[0] == FIRST and set(back[-10:]) == {HOME}
    # It comes back in steps, none of which is taken back.
    shares = [back[i : i + 10].count(HOME) for i in range(0, 70, 10)]
    assert shares == sorted(shares)


def test_a_model_at_its_limit_does_not_flap() -> None:
    """Whatever it gets above a half of the load makes it slow."""
    run, changes, was_slow = three(SLOW), 0, False
    for start_s in range(0, 400, 5):
        chosen = arrive_at_rate(run, start_s, start_s + 5, ttft_s=3.0 if not was_slow else 0.5)
        is_slow = chosen.count(FIRST) > 5
        changes, was_slow = changes + (is_slow != was_slow), is_slow
    assert changes <= 400 / SLOW.window_s


def test_answers_that_are_not_streamed_say_nothing() -> None:
    """Their TTFT is not known: they may run for longer than its SLO allows."""
    run = three(SLOW)
    for i in range(60):
        run.arrive(i, i / 2, model="llama", is_streamed=False)
    assert {replica for _, replica in run.effects.started} == {HOME}


def test_requests_without_an_slo_say_nothing() -> None:
    run = three(FallbackConfig(when=("slow",), min_requests=2))
    assert set(arrive_at_rate(run, 0, 30, ttft_s=60.0)) == {HOME}


def test_decisions_tell_why_a_fallback_answers() -> None:
    decisions: list[Decision] = []
    observer = DecisionObserver()
    observer.listeners.append(decisions.append)
    run = three(observer=observer)
    crash(run, HOME, 0.0)
    run.arrive(0, model="llama")
    assert [(each.what, each.model, each.why) for each in decisions] == [
        ("fallback", "gpt", "llama: down"),
        ("placed", "gpt", ""),
    ]


def test_requests_without_a_model_are_for_the_one_that_is_nobodys_fallback() -> None:
    run = three(FallbackConfig(when=()))
    run.arrive(0)
    assert run.effects.started == [(0, HOME)]
