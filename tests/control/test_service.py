"""One model's replicas: which may be chosen, who decodes, and the hold queue."""

from __future__ import annotations

from typing import Any

import pytest

from control_fakes import fleet
from fakes import FakeReplica
from headway.control.live import ENDED, HELD, Live
from headway.core.decision import Placement
from headway.core.errors import HeadwayError
from headway.core.view import FleetView, RequestView
from headway.policies.ordering.deadlines import EdfOrdering


def offered(run: Any, live: Live | None = None) -> list[int]:
    """The replicas that the router may choose from, one after the other, by excluding each."""
    live = live or Live(99, 0.0, 10, 5)
    seen: list[int] = []

    class Recording:
        def route(self, request: RequestView, view: FleetView) -> Placement:
            seen[:] = [replica.id for replica in view.replicas]
            return Placement(view.replicas[0].id)

    run.service.router = Recording()
    run.service.choose(live, 0.0)
    return seen


def test_draining_replicas_are_chosen_only_if_all_drain() -> None:
    run = fleet("mixed", "mixed")
    members = run.service.members
    members[0].is_draining = True
    run.service.refresh()
    assert offered(run) == [1]
    members[1].is_draining = True
    run.service.refresh()
    assert offered(run) == [0, 1]


def test_a_window_limits_requests_in_flight() -> None:
    run = fleet("mixed", "mixed", window=1)
    lives = [run.arrive(i) for i in range(3)]
    assert run.effects.started == [(0, 0), (1, 1)] and lives[2].stage is HELD
    run.finish(lives[1], 1.0)
    assert run.effects.started[-1] == (2, 1)


def test_a_replica_can_be_excluded() -> None:
    run = fleet("mixed", "mixed")
    live = Live(0, 0.0, 10, 5)
    assert run.service.choose(live, 0.0, exclude=0) == 1
    assert run.service.is_served_without(0)
    run.service.members[1].is_up = False
    run.service.refresh()
    assert run.service.choose(live, 0.0, exclude=0) is None
    assert not run.service.is_served_without(0) and run.service.any_up


def test_long_requests_go_only_where_they_fit() -> None:
    run = fleet("mixed", "mixed")
    run.service.members[0].max_tokens = 10
    run.service.refresh()
    assert offered(run) == [1] and run.service.longest_tokens == 1000


def test_an_announced_replica_limits_lengths_until_there_is_a_member() -> None:
    run = fleet("mixed")
    service = run.service
    service.announce(5)  # has no effect while there are members
    assert service.longest_tokens == 1000
    service.members.clear()
    service.announce(2000)
    assert service.longest_tokens == 2000


def test_a_router_must_choose_an_offered_replica() -> None:
    class Stubborn:
        def route(self, request: RequestView, view: FleetView) -> Placement:
            return Placement(7)

    run = fleet("mixed", router=Stubborn)
    with pytest.raises(HeadwayError, match=r"router Stubborn chose replica 7; it was offered \[0\]"):
        run.arrive(0)


# Roles.


def test_requests_start_at_prefill_replicas_and_the_least_loaded_one_decodes() -> None:
    run = fleet("prefill", "decode", "decode", combo=1)
    run.effects.replicas[1].num_in_flight = 3
    live = run.arrive(0)
    assert (run.effects.started, live.decode_replica) == ([(0, 0)], 2)
    run.control.on_prefilled(live, 1.0)
    assert run.effects.handed_over == [(0, 2)]


def test_a_decode_replica_is_chosen_again_if_it_went_down_meanwhile() -> None:
    run = fleet("prefill", "decode", "decode", combo=1)
    live = run.arrive(0)
    assert live.decode_replica == 1
    run.control.on_crashed(1, [], 0.5)
    run.control.on_prefilled(live, 1.0)
    assert run.effects.handed_over == [(0, 2)]


def test_single_phase_replicas_need_a_partner_in_their_combo() -> None:
    run = fleet("prefill", "decode", combo=1)
    for member in run.service.members:
        member.is_single_phase = True
    run.service.refresh()
    assert run.service.any_up
    run.service.members[1].is_up = False
    run.service.refresh()
    assert not run.service.any_up
    assert run.arrive(0).stage is HELD


# The hold queue.


def test_held_requests_are_placed_in_the_order_of_their_ranks() -> None:
    run = fleet("mixed", window=1, ordering=EdfOrdering, ordering_at="gateway")
    lives = [run.arrive(0)]
    lives += [run.arrive(id, deadline_s=deadline_s) for id, deadline_s in ((1, 30.0), (2, 10.0), (3, 20.0))]
    for now, ending in enumerate((0, 2, 3)):
        run.finish(lives[ending], float(now))
    assert run.effects.started == [(0, 0), (2, 0), (3, 0), (1, 0)]


def test_an_ended_request_leaves_the_hold_queue_when_it_is_its_turn() -> None:
    run = fleet("mixed", window=1)
    running, gone, waiting = (run.arrive(i) for i in range(3))
    gone.stage = ENDED
    assert run.service.hold_queue.first(0.0) is waiting and len(run.service.hold_queue) == 1
    run.finish(running, 1.0)
    assert run.effects.started == [(0, 0), (2, 0)] and not run.service.hold_queue


def test_a_released_region_is_preferred() -> None:
    run = fleet("mixed", "mixed")
    replica: FakeReplica = run.effects.replicas[1]
    replica.region = "west"
    live = Live(0, 0.0, 10, 5)
    live.release_region = "west"
    assert offered(run, live) == [1]
    live.release_region = "north"
    assert offered(run, live) == [0, 1]
