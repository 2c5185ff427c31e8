"""What several schedulers of one fleet know of each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from fakes import FakeReplica, FakeRequest
from headway.control.peers import Load, PeerLoads, SharedReplica, load_of
from headway.control.sent_prompts import SentPrompts
from headway.core.view import REPLICA_FIELDS

PASSED_ON = set(
    """
    block_size_tokens is_draining is_single_phase kv_blocks_total kv_transfer_s latency_s max_num_seqs region role times
    head_demand_blocks kv_blocks_host kv_blocks_used loras loras_waiting max_loras num_running num_waiting
    answers_on_pace cached_tokens loadable_tokens num_arriving output_tokens_left paused
    """.split()
)
"""Fields that are the replica's or its engine's, whoever sent the requests; then those that no scheduler reports."""


@dataclass
class Own:
    num_in_flight: int = 0
    prefill_tokens_left: int = 0
    tokens_generated: int = 0
    expected_cached_tokens: int = 0
    num_by_tier: dict[int, int] = field(default_factory=dict)
    queue_lengths: list[int] = field(default_factory=lambda: [0])
    requests: list[object] = field(default_factory=list)


def test_the_last_state_of_each_scheduler_counts_and_none_once_its_lease_has_lapsed() -> None:
    changes: list[tuple[int, int]] = []
    loads = PeerLoads(lambda replica, load: changes.append((replica, load.num_in_flight)))
    at_zero = loads.at(0)
    loads.update("a", {0: Load(2, 100, 7, 3, 50, {0: 1, 2: 1}, [2]), 1: Load(1)}, 0.0)
    loads.update("b", {0: Load(3, 10, num_by_tier={0: 3}, queue_lengths=[1, 2])}, 1.0)
    assert loads.at(0) is at_zero
    assert at_zero == Load(5, 110, 7, 3, 50, {0: 4, 2: 1}, [3, 2])
    loads.update("a", {1: Load(4)}, 1.5)
    assert (loads.at(0).num_in_flight, loads.at(1).num_in_flight) == (3, 4)
    assert changes == [(0, 2), (1, 1), (0, 5), (0, 3), (1, 4)]
    assert loads.forget_silent(2.9, 2.0) == [] and sorted(map(str, loads.peers)) == ["a", "b"]
    assert loads.forget_silent(3.1, 2.0) == ["b"] and loads.at(0).num_in_flight == 0
    loads.mark_alive("a", 4.0)
    assert loads.forget_silent(5.9, 2.0) == []
    loads.forget("a")
    assert not loads.peers and loads.at(1) == Load(num_by_tier={}, queue_lengths=[])


def test_a_view_has_a_schedulers_own_counts_and_the_others_and_the_engines_metrics() -> None:
    own, loads = Own(1, 20, 5, 2, {0: 1}, [1, 0]), PeerLoads()
    view = SharedReplica(FakeReplica(3, num_waiting=4), own, loads.at(3))
    assert (view.id, view.num_in_flight, view.num_waiting) == (3, 1, 4)
    loads.update("a", {3: Load(2, 30, 50, 8, 70, {0: 1, 1: 1}, [1, 1])}, 0.0)
    assert (view.num_in_flight, view.prefill_tokens_left, view.tokens_generated) == (3, 50, 55)
    assert (view.expected_cached_tokens, view.num_by_tier, view.queue_lengths) == (10, {0: 2, 1: 1}, [2, 1])
    own.num_in_flight = 0
    assert view.num_in_flight == 2
    assert load_of(own) == Load(0, 20, 5, 2, 0, {0: 1}, [1, 0])


def test_a_view_passes_on_no_count_of_requests_that_schedulers_could_report() -> None:
    passed = {name for name in REPLICA_FIELDS if isinstance(getattr(SharedReplica, name, None), property)}
    passed = {name for name in passed if isinstance(getattr(SharedReplica, name).fget, attrgetter)}
    assert passed == PASSED_ON, (
        "a count of placed requests belongs in Load, OwnCounts and SharedReplica; else list it here"
    )


def test_prompts_that_others_have_sent_take_room() -> None:
    sent = SentPrompts(1000, 0.0)
    replica = FakeReplica(0, kv_blocks_total=1000, block_size_tokens=16)
    request = FakeRequest(prompt_tokens=600)
    sent.set_elsewhere(0, 500, 500)
    assert not sent.has_room(replica, request)  # type: ignore[arg-type]
    sent.set_elsewhere(0, 300, 300)
    assert sent.has_room(replica, request)  # type: ignore[arg-type]
