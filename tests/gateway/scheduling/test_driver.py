"""The driver: where requests are placed, and what each reason for leaving a replica does."""

from __future__ import annotations

import pytest

pytest.importorskip("httptools")

from driver_alone import Driven
from headway.control.live import DECODING, HELD
from headway.control.policies import Policies
from headway.core.decision import Placement
from headway.core.record import Ended, Outcome
from headway.core.view import FleetView, RequestView
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason, State
from headway.gateway.scheduling.request_state import Assignment
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.round_robin import RoundRobinRouter

ENDS = {
    ReleaseReason.FINISHED: Outcome.FINISHED,
    ReleaseReason.REFUSED: Outcome.REJECTED,
    ReleaseReason.CANCELLED: Outcome.CANCELLED,
}


def _decode(request: InFlightRequest, tokens: int) -> None:
    """The replica has sent the first tokens of an answer that another replica could continue."""
    assert request.reservation is not None
    if request.state is State.PLACED:
        request.send()
    request.reservation.count_tokens(tokens)
    request.live.generated_tokens += tokens
    request.live.stage = DECODING
    request.begin_answer()


@pytest.mark.parametrize(("reason", "outcome"), ENDS.items(), ids=lambda value: value.name)
def test_a_reason_that_ends_a_request_frees_its_replica(reason: ReleaseReason, outcome: Outcome) -> None:
    driven = Driven(1)
    request = driven.arrive(0)
    assert driven.num_in_flight == [1] and request.replica is driven.replicas[0]
    driven.driver.release(request, reason)
    assert driven.outcomes == {0: outcome} and request.outcome is outcome
    assert driven.num_in_flight == [0] and not driven.driver.requests
    for again in ENDS:
        driven.driver.release(request, again)
    assert driven.outcomes == {0: outcome}


def test_a_failed_request_is_placed_at_another_replica_with_its_tokens() -> None:
    driven = Driven(2)
    request = driven.arrive(0)
    _decode(request, 3)
    driven.driver.release(request, ReleaseReason.FAILED)
    assert request.replica is driven.replicas[1] and driven.num_in_flight == [0, 1]
    assert (request.live.attempt, request.live.generated_tokens) == (1, 3)


def test_a_llama_cpp_server_gets_as_many_requests_as_it_has_slots() -> None:
    """The others are held, where a server that is killed does not take them along."""
    driven = Driven(2)
    for replica, num in zip(driven.replicas, (2, None), strict=True):
        replica.num_slots = num
        driven.driver.roster.limit_to_slots(replica)
    driven.driver.roster.replica_down(driven.replicas[1])
    requests = [driven.arrive(id) for id in range(5)]
    assert driven.num_in_flight == [2, 0] and [request.live.stage is HELD for request in requests].count(True) == 3
    driven.driver.release(requests[0], ReleaseReason.FINISHED)
    assert driven.num_in_flight == [2, 0]
    driven.driver.roster.replica_up(driven.replicas[1])
    assert driven.num_in_flight == [2, 2] and not driven.outcomes.get(4)


def test_a_failed_request_without_another_replica_is_rejected() -> None:
    driven = Driven(1)
    driven.driver.release(driven.arrive(0), ReleaseReason.FAILED)
    assert driven.outcomes == {0: Outcome.REJECTED} and driven.num_in_flight == [0]


def test_a_request_is_held_while_no_replica_is_up_and_rejected_at_the_hold_timeout() -> None:
    driven = Driven(1, hold_s=5.0, is_up=False)
    first, second = driven.arrive(0), driven.arrive(1)
    assert first.live.stage is HELD and not driven.outcomes
    driven.driver.release(second, ReleaseReason.CANCELLED)
    driven.clock.advance(4.0)
    assert driven.outcomes == {1: Outcome.CANCELLED}
    driven.clock.advance(5.0)
    assert driven.outcomes == {0: Outcome.REJECTED, 1: Outcome.CANCELLED}


def test_what_is_held_for_room_is_rejected_at_the_hold_timeout_once_no_replica_is_up() -> None:
    driven = Driven(2, hold_s=5.0, window=1)
    held = [driven.arrive(id) for id in range(3)][2]
    assert held.live.stage is HELD
    driven.driver.roster.replica_down(driven.replicas[0])
    driven.clock.advance(10.0)
    assert not driven.outcomes, "the other replica may have room soon"
    driven.driver.roster.replica_down(driven.replicas[1])
    driven.clock.advance(14.9)
    assert not driven.outcomes
    driven.clock.advance(15.0)
    assert driven.outcomes == {2: Outcome.REJECTED}


def test_a_request_is_rejected_before_its_client_gives_up_waiting_for_a_replica() -> None:
    """So that the client is told that no replica is up, and when to come again."""
    driven = Driven(1, hold_s=30.0, is_up=False)
    driven.arrive(0, timeout_s=4.0)
    driven.clock.advance(4.0)
    assert driven.outcomes == {0: Outcome.REJECTED}


def test_the_hold_timeout_does_nothing_once_a_replica_is_up() -> None:
    driven = Driven(1, hold_s=5.0, is_up=False)
    request = driven.arrive(0)
    driven.clock.advance(4.0)
    driven.driver.roster.replica_up(driven.replicas[0])
    assert request.replica is driven.replicas[0]
    driven.clock.advance(6.0)
    assert not driven.outcomes


def test_a_window_holds_requests_until_one_leaves() -> None:
    driven = Driven(1, window=1)
    first, second = driven.arrive(0), driven.arrive(1)
    assert (first.live.stage is HELD, second.live.stage is HELD) == (False, True)
    driven.driver.release(first, ReleaseReason.FINISHED)
    assert second.replica is driven.replicas[0] and driven.num_in_flight == [1]


class _Connection:
    """A connection that notes why it was aborted."""

    why = ""

    def abort(self, why: str) -> None:
        self.why = why


class _Client:
    def release(self, connection: object) -> None:
        """Take the connection back."""


def _send(request: InFlightRequest) -> _Connection:
    """Give the request a connection to its replica."""
    assert request.replica is not None
    request.replica.client = _Client()  # type: ignore[assignment]
    connection = _Connection()
    request.connection = connection  # type: ignore[assignment]
    request.send()
    return connection


def test_a_moved_request_continues_at_the_target_once_its_connection_is_closed() -> None:
    driven = Driven(2)
    request = driven.arrive(0)
    connection = _send(request)
    _decode(request, 3)
    driven.driver.move(request.live, 1, None, 0.0)
    assert connection.why and driven.num_in_flight == [1, 0] and driven.replicas[1].num_arriving == 1
    driven.driver.release(request, ReleaseReason.MOVED)
    assert request.replica is driven.replicas[1] and driven.num_in_flight == [0, 1]
    assert (driven.replicas[1].num_arriving, request.live.moves, request.live.attempt) == (0, 1, 0)


def test_a_request_can_move_once_its_present_replica_has_sent_tokens() -> None:
    driven = Driven(3)
    request = driven.arrive(0)
    _send(request)
    _decode(request, 3)
    driven.driver.release(request, ReleaseReason.FAILED)
    _send(request)
    assert request.replica is driven.replicas[1]
    for state in (State.SENT, State.MOVING):
        driven.driver.move(request.live, 2, None, 0.0)
        assert request.state is state and (request.move_target is None) == (state is State.SENT)
        _decode(request, 1)


def test_a_pair_hands_over_until_the_decode_replica_sends_tokens() -> None:
    driven = Driven(2, roles=("prefill", "decode"))
    for each in (*driven.replicas, *driven.driver.control.services[0].members):
        each.is_single_phase = True
    early, late = driven.arrive(0), driven.arrive(1)
    for request in (early, late):
        _send(request)
        assert request.state is State.HANDING_OVER and request.prefill_leg is not None
    _decode(early, 1)
    driven.driver.prefill_leg_done(early)
    driven.driver.prefill_leg_done(late)
    assert (early.state, late.state) == (State.STREAMING, State.SENT)


def test_draining_a_replica_moves_out_what_can_move() -> None:
    driven = Driven(2)
    movable, fixed = driven.arrive(0), driven.arrive(2)
    assert (movable.replica, fixed.replica) == (driven.replicas[0], driven.replicas[1])
    _send(movable)
    _decode(movable, 1)
    driven.driver.drain(driven.replicas[0], True)
    assert movable.move_target is driven.replicas[1] and fixed.move_target is None
    assert driven.arrive(3).replica is driven.replicas[1]
    driven.driver.drain(driven.replicas[0], False)
    assert {driven.arrive(id).replica for id in (4, 5)} == set(driven.replicas)


def test_a_replica_that_does_not_answer_has_its_connections_aborted() -> None:
    driven = Driven(2)
    first, second = driven.arrive(0), driven.arrive(1)
    connections = _send(first), _send(second)
    driven.driver.fail_over(driven.replicas[0])
    assert [bool(connection.why) for connection in connections] == [True, False]


@pytest.mark.parametrize(
    ("reason", "outcome", "is_stored"),
    [
        (ReleaseReason.PREFILLED, "handed over", True),
        (ReleaseReason.PREFILL_NOT_STORED, "not kept", False),
        (ReleaseReason.PREFILL_FAILED, "failed", False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_prefill_is_handed_over_to_the_decode_replica(reason: ReleaseReason, outcome: str, is_stored: bool) -> None:
    driven = Driven(2, roles=("prefill", "decode"))
    request = driven.arrive(0)
    assert request.assignment.is_prefill_only and driven.num_in_flight == [1, 0]
    if reason is not ReleaseReason.PREFILL_FAILED:
        request.send()
    driven.driver.release(request, reason)
    assert request.replica is driven.replicas[1] and driven.num_in_flight == [0, 1]
    assert request.assignment == Assignment(has_stored_kv=is_stored, has_alternative=True)
    assert driven.replicas[1].prefill_tokens_left == (0 if is_stored else 100)
    assert request.live.attempt == (reason is ReleaseReason.PREFILL_FAILED)
    assert f'outcome="{outcome}"}} 1' in driven.metrics.page()


@pytest.mark.parametrize(
    "reason", [ReleaseReason.PREFILLED, ReleaseReason.PREFILL_NOT_STORED], ids=lambda each: each.name
)
def test_a_replica_that_decodes_its_own_prefill_keeps_alternative_and_fallback(reason: ReleaseReason) -> None:
    """No other replica can decode."""
    driven = Driven(2, roles=("prefill", "decode"))
    request = driven.arrive(0)
    request.assignment = Assignment(is_prefill_only=True, has_alternative=True, has_fallback=True)
    request.send()
    driven.driver.roster.replica_down(driven.replicas[1])
    driven.driver.release(request, reason)
    assert request.replica is driven.replicas[0] and request.state is State.PLACED
    assert request.assignment == Assignment(has_alternative=True, has_fallback=True)


def test_a_prefill_replica_that_has_sent_the_cache_has_answered() -> None:
    driven = Driven(2, roles=("prefill", "decode"))
    driven.driver.roster.place_pairs_at_once()
    answered: list[object] = []
    driven.driver.on_prefill_sent = answered.append
    well, failed = driven.arrive(0), driven.arrive(1)
    driven.driver.prefill_leg_done(well)
    driven.driver.prefill_leg_done(well)
    driven.driver.release(failed, ReleaseReason.PREFILL_LEG_FAILED)
    assert answered == [driven.replicas[0]]


def test_a_stored_cache_is_offered_to_another_decode_replica_only_if_it_was_not_fetched() -> None:
    for reason, replica in ((ReleaseReason.FAILED_BEFORE_FETCH, 2), (ReleaseReason.FAILED, 0)):
        driven = Driven(3, roles=("prefill", "decode", "decode"))
        request = driven.arrive(0)
        driven.driver.release(request, ReleaseReason.PREFILLED)
        assert request.replica is driven.replicas[1]
        driven.driver.release(request, reason)
        assert request.replica is driven.replicas[replica]
        assert request.assignment.has_stored_kv == (reason is ReleaseReason.FAILED_BEFORE_FETCH)


def test_dropping_a_request_cancels_it_and_frees_all_that_it_holds() -> None:
    driven = Driven(1)
    request = driven.arrive(0)
    driven.driver.drop(request)
    driven.driver.drop(request)
    assert driven.outcomes == {0: Outcome.CANCELLED} and driven.num_in_flight == [0]


def test_a_dropped_request_is_forgotten_though_control_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*arguments: object) -> None:
        raise ValueError("a policy's defect")

    driven = Driven(1)
    request = driven.arrive(0)
    monkeypatch.setattr(driven.driver.control, "client_left", raises)
    with pytest.raises(ValueError, match="defect"):
        driven.driver.drop(request)
    assert not driven.driver.requests and driven.num_in_flight == [0]


def test_policies_that_take_turns_know_what_they_knew_and_learn_meanwhile() -> None:
    made: list[_Counting] = []

    def counting() -> _Counting:
        made.append(_Counting())
        return made[-1]

    driven = Driven(2, router=counting)
    first, other = Policies(counting, FcfsOrdering), Policies(RoundRobinRouter, FcfsOrdering)
    driven.driver.take_turns(True)
    for before, after in ((first, other), (other, first), (first, other)):
        driven.driver.release(driven.arrive(len(driven.outcomes)), ReleaseReason.FINISHED)
        driven.driver.change_policies(before, after)
    driven.driver.release(driven.arrive(3), ReleaseReason.FINISHED)
    assert len(made) == 1 and (made[0].num_routed, made[0].num_learnt) == (2, 4)
    driven.driver.take_turns(False)
    driven.driver.release(driven.arrive(4), ReleaseReason.FINISHED)
    assert made[0].num_learnt == 4  # who is not to come back learns no more
    driven.driver.change_policies(other, first)
    assert len(made) == 2


class _Counting:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.num_routed = self.num_learnt = 0

    def route(self, request: RequestView, view: FleetView) -> Placement:
        self.num_routed += 1
        return Placement(view.replicas[0].id)

    def learn(self, record: Ended) -> None:
        self.num_learnt += 1
