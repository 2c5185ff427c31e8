"""The decision observer: placements, moves, refusals, and the reasons for holds."""

from __future__ import annotations

from typing import Any

from control_fakes import Fleet, fleet
from headway.control.decisions import Decision, DecisionObserver


def observed(*roles: Any, **given: Any) -> tuple[Fleet, list[Decision]]:
    """A fleet and its decision log."""
    log: list[Decision] = []
    observer = DecisionObserver(start_s=100.0)
    observer.listeners.append(log.append)
    return fleet(*roles, observer=observer, **given), log


def test_a_placement_has_its_scores_and_the_offered_replicas() -> None:
    run, log = observed("mixed", "mixed")
    run.effects.replicas[1].kv_blocks_used = 500
    run.arrive(0, 1.0, tier=2)
    decision = log[0]
    assert (decision.time_s, decision.what, decision.request, decision.tier) == (101.0, "placed", "0", 2)
    assert (decision.choice, decision.decode, decision.scores) == (0, None, ((0, 1.0),))
    assert [(each.replica, each.kv_share, each.age_s) for each in decision.replicas] == [(0, 0.0, 0.0), (1, 0.5, 0.0)]


def test_a_decode_replica_is_part_of_a_placement() -> None:
    run, log = observed("prefill", "decode", combo=1)
    run.arrive(0)
    assert (log[0].choice, log[0].decode) == (0, 1)


def test_a_held_request_tells_how_long_and_why() -> None:
    run, log = observed("mixed", window=1)
    first = run.arrive(0, 0.0)
    for id in (1, 2):
        run.arrive(id, 1.0)
    run.finish(first, 4.0)
    assert [(each.request, each.why, each.held_s) for each in log] == [
        ("0", "", 0.0),
        ("1", "no replica has room", 3.0),
    ]
    run.control.on_crashed(0, [], 5.0)
    assert [each.what for each in log] == ["placed", "placed"]


def test_a_refusal_has_a_reason() -> None:
    run, log = observed("mixed", max_tokens=100)
    run.arrive(0, prompt=1000)
    assert (log[0].what, log[0].why) == ("refused", "it is longer than any replica can hold")
    run, log = observed("mixed", max_num_waiting=0)
    run.arrive(0)
    assert (log[0].what, log[0].why) == ("refused", "all queues are full")


def test_a_driver_reports_the_refusal_of_a_held_request() -> None:
    run, log = observed("mixed", window=1)
    run.arrive(0)
    live = run.arrive(1)
    observer = DecisionObserver()
    observer.listeners.append(log.append)
    observer.record_hold_refusal(live, 1.0, "mine")  # not held by this observer
    observer.note_hold(live, 0.0, "no replica is up")
    observer.record_hold_refusal(live, 2.0, "mine")
    assert [(each.what, each.request, each.why, each.held_s) for each in log[1:]] == [
        ("refused", "mine", "no replica is up", 2.0)
    ]


def test_without_listeners_nothing_is_built() -> None:
    observer = DecisionObserver(name=lambda live: 1 / 0)  # type: ignore[arg-type, return-value]
    run = fleet("mixed", window=1, observer=observer)
    first = run.arrive(0)
    run.arrive(1)
    run.finish(first, 1.0)
    assert run.effects.started == [(0, 0), (1, 0)]
