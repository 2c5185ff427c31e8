"""The life of a request: placed or held, finished, cancelled or rejected."""

from __future__ import annotations

import pytest

from control_fakes import FirstRouter, Fleet, fleet
from fakes import FakeReplica
from headway.control.live import ENDED, HELD, WAITING
from headway.core.errors import HeadwayError
from headway.core.record import Ended, Outcome
from headway.core.request import Phase


def test_a_request_is_placed_and_finishes() -> None:
    run = fleet("mixed")
    live = run.arrive(0, 1.0, model="llama")
    assert (live.stage, live.placed_s, run.effects.started) == (WAITING, 1.0, [(0, 0)])
    live.response_s = 0.5
    run.finish(live, 3.0)
    assert (live.stage, run.effects.ended, run.control.last_s) == (ENDED, [(0, Outcome.FINISHED)], 3.5)
    records = run.records()
    row = {name: records[name][0] for name in ("outcome", "attempts", "replica", "placed_s", "end_s")}
    assert row == {"outcome": Outcome.FINISHED, "attempts": 1, "replica": 0, "placed_s": 1.0, "end_s": 3.5}


def test_a_request_that_reasons_begins_with_its_reasoning() -> None:
    assert fleet("mixed").arrive(0, reasoning_tokens=3).phase is Phase.REASONING


def test_any_name_of_a_model_finds_its_service() -> None:
    run = fleet("mixed")
    run.arrive(0, model="LLAMA")
    run.arrive(1)  # without a name: the only model
    assert run.effects.started == [(0, 0), (1, 0)]


def test_an_unknown_model_is_an_error() -> None:
    run = Fleet([FakeReplica(0, model="llama"), FakeReplica(1, model="qwen")])
    with pytest.raises(HeadwayError, match="for model 'gemma'; the fleet serves: llama, qwen"):
        run.arrive(0, model="gemma")
    with pytest.raises(HeadwayError, match="names no model"):
        run.arrive(1)


def test_a_request_that_fits_no_replica_is_rejected() -> None:
    run = fleet("mixed", max_tokens=100)
    assert run.arrive(0, prompt=96, output=5).stage is ENDED
    assert run.effects.ended == [(0, Outcome.REJECTED)]


def test_full_queues_reject_unless_requests_are_held_in_front() -> None:
    full = FakeReplica(0, num_waiting=3)
    rejecting = Fleet([full], max_num_waiting=3)
    rejecting.arrive(0)
    assert rejecting.effects.ended == [(0, Outcome.REJECTED)]
    holding = Fleet([full], max_num_waiting=3, window=10)
    assert holding.arrive(0).stage is HELD


def test_a_request_is_held_while_no_replica_is_up() -> None:
    run = fleet("mixed")
    run.control.on_crashed(0, [], 0.0)
    live = run.arrive(0, 1.0)
    assert live.stage is HELD and run.control.parts.has_held() and not run.control.parts.has_placeable_waiter(1.0)
    run.control.on_recovered(0, 2.0)
    assert (live.stage, live.placed_s) == (WAITING, 2.0)


def test_lost_requests_are_placed_again_with_their_tokens() -> None:
    run = fleet("mixed", "mixed")
    live = run.arrive(0)
    live.generated_tokens = 2
    live.stage = HELD
    run.control.on_crashed(0, [live], 1.0)
    assert run.effects.started == [(0, 0), (0, 1)]
    assert (live.attempt, live.generated_tokens, live.placed_s) == (1, 2, 0.0)


def test_a_timeout_ends_a_held_request_and_aborts_a_running_one() -> None:
    run = fleet("mixed", window=1)
    running, held = run.arrive(0, timeout_s=5.0), run.arrive(1, timeout_s=5.0)
    for time_s, action, live in run.effects.timers:
        action(time_s, live)
    assert run.effects.cancelled == [0] and run.effects.ended == [(1, Outcome.CANCELLED)]
    running.first_token_s = 5.5  # was on its way when the client gave up
    run.control.on_cancelled(running, 6.0)
    records = run.records()
    assert records["end_s"].tolist() == [5.0, 5.0] and held.stage is ENDED
    assert records["first_token_s"][1] != records["first_token_s"][1]


def test_a_timeout_after_the_end_changes_nothing() -> None:
    run = fleet("mixed")
    live = run.arrive(0, timeout_s=5.0)
    run.finish(live, 1.0)
    time_s, action, _ = run.effects.timers[0]
    action(time_s, live)
    assert run.effects.ended == [(0, Outcome.FINISHED)]


def test_requests_in_the_system_are_recorded_as_unfinished() -> None:
    run = fleet("mixed", window=1)
    running = run.arrive(0)
    run.arrive(1)
    run.control.write_unfinished([running], 9.0)
    records = run.records()
    assert records["request"].tolist() == [0, 1]
    assert set(records["outcome"].tolist()) == {int(Outcome.UNFINISHED)}


class LearningRouter(FirstRouter):
    """A router that keeps what it learns."""

    def __init__(self) -> None:
        self.learned: list[Ended] = []

    def learn(self, record: Ended) -> None:
        self.learned.append(record)


def test_policies_learn_from_every_end() -> None:
    router = LearningRouter()
    run = fleet("mixed", router=lambda: router, max_tokens=100)
    live = run.arrive(0, tier=2)
    live.first_token_s = 1.0
    run.finish(live, 2.0)
    run.arrive(1, 3.0, prompt=1000)
    ends = [(each.id, each.outcome, each.tier, each.first_token_s, each.end_s) for each in router.learned]
    assert ends == [(0, Outcome.FINISHED, 2, 1.0, 2.0), (1, Outcome.REJECTED, 0, None, 3.0)]
