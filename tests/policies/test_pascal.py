"""PASCAL's algorithms, line by line, on views made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeFleet, FakePlaced, FakeReplica, FakeRequest
from headway.core.decision import Move
from headway.core.errors import HeadwayError
from headway.core.policy import QueuedOrdering, SteppedOrdering
from headway.core.request import Phase
from headway.policies.migration.pascal import PascalMigration
from headway.policies.ordering.phases import PascalOrdering
from headway.policies.ordering.time_sharing import FewestQuantaOrdering
from headway.policies.routing.kv import LeastFootprintRouter, PascalRouter

replicas = st.lists(
    st.builds(
        FakeReplica,
        kv_blocks_used=st.integers(0, 6),
        kv_blocks_total=st.just(6),
        kv_blocks_host=st.integers(0, 3),
        answers_on_pace=st.booleans(),
        queue_lengths=st.tuples(st.integers(0, 3), st.integers(0, 3)),
        num_arriving=st.integers(0, 2),
        requests=st.lists(
            st.builds(
                FakePlaced,
                id=st.integers(1, 99),
                phase=st.sampled_from(Phase),
                answer_tokens=st.sampled_from([0, 1, 499, 500, 501]),
            ),
            max_size=4,
        ),
    ),
    min_size=1,
    max_size=5,
).map(lambda found: [numbered(replica, i) for i, replica in enumerate(found)])


def numbered(replica: FakeReplica, id: int) -> FakeReplica:
    replica.id = id
    return replica


def footprints(*of: tuple[int, int, bool]) -> FakeFleet:
    """Replicas with (GPU blocks, host blocks, whether answers are on pace)."""
    return FakeFleet(
        [FakeReplica(i, kv_blocks_used=m, kv_blocks_host=h, answers_on_pace=t) for i, (m, h, t) in enumerate(of)]
    )


# Algorithm 1.


@pytest.mark.parametrize(
    ("fleet", "selected"),
    [
        (footprints((5, 0, True), (3, 0, True), (4, 0, True)), 1),  # line 7
        (footprints((5, 0, True), (3, 3, True), (1, 5, True)), 0),  # GPU and host together
        (footprints((5, 0, True), (3, 0, False), (4, 0, True)), 2),  # line 3
        (footprints((5, 0, False), (3, 0, False), (4, 0, False)), 1),  # lines 4 and 5
        (footprints((9, 0, True), (3, 0, False), (4, 0, False)), 0),  # one is enough
        (footprints((4, 0, True), (0, 4, True), (4, 0, True)), 0),  # equals: the lowest id
    ],
)
def test_algorithm_1(fleet: FakeFleet, selected: int) -> None:
    assert PascalRouter().route(FakeRequest(), fleet).replica == selected
    backwards = FakeFleet(list(reversed(fleet.replicas)))
    assert PascalRouter().route(FakeRequest(), backwards).replica == selected


@given(replicas)
def test_algorithm_1_as_written(found: list[FakeReplica]) -> None:
    e = [i for i in found if i.answers_on_pace]
    if not e:
        e = found
    selected = e[0]
    for i in e:
        if i.kv_blocks_used + i.kv_blocks_host < selected.kv_blocks_used + selected.kv_blocks_host:
            selected = i
    assert PascalRouter().route(FakeRequest(), FakeFleet(found)).replica == selected.id


def test_the_baselines_do_not_look_at_the_pace() -> None:
    fleet = footprints((5, 0, True), (1, 2, False), (4, 0, True))
    assert LeastFootprintRouter().route(FakeRequest(), fleet).replica == 1
    assert PascalRouter().route(FakeRequest(), fleet).replica == 2


# Algorithm 2.


def transition(own: int, prompt: int = 60, generated: int = 36) -> FakeRequest:
    """A request whose reasoning ends at a replica."""
    return FakeRequest(id=1000, replica=own, prompt_tokens=prompt, generated_tokens=generated, phase=Phase.ANSWERING)


def at(id: int, r: int, *, on_pace: bool = True, fresh: int = 0, stale: int = 0, **more: Any) -> FakeReplica:
    """A replica where so many reason in the first queue, and so many answer, within their first quantum or not."""
    answering = [FakePlaced(10 * id + k, answer_tokens=499) for k in range(fresh)]
    answering += [FakePlaced(10 * id + 5 + k, answer_tokens=500) for k in range(stale)]
    reasoning = [FakePlaced(100 * id + 10 + k, phase=Phase.REASONING) for k in range(r)]
    queues = (r, fresh + stale)
    return FakeReplica(id, queue_lengths=queues, answers_on_pace=on_pace, requests=answering + reasoning, **more)


def target(request: FakeRequest, *fleet: FakeReplica, **arguments: Any) -> int:
    """Where it answers."""
    move = PascalMigration(**arguments).at_phase(request, FakeFleet(fleet))
    if move is None:
        return request.replica
    assert move.request == request.id and move.stage_blocks is None and move.target != request.replica
    return move.target


def test_line_10_the_fewest_that_reason() -> None:
    assert target(transition(0), at(0, 3), at(1, 2), at(2, 1)) == 2
    assert target(transition(2), at(0, 3), at(1, 2), at(2, 1)) == 2
    assert target(transition(0), at(0, 3), at(1, 1, fresh=5), at(2, 2)) == 1  # answers do not count


def test_line_3_only_where_answers_keep_pace() -> None:
    assert target(transition(0), at(0, 3), at(1, 2), at(2, 1, on_pace=False)) == 1
    assert target(transition(0), at(0, 0, on_pace=False), at(1, 2)) == 1


def test_lines_4_to_9_fresh_answers_count_where_nobody_keeps_pace() -> None:
    fleet = [at(0, 3, on_pace=False), at(1, 1, on_pace=False, fresh=3), at(2, 2, on_pace=False, stale=5)]
    assert target(transition(0), *fleet) == 2
    assert target(transition(0), *fleet, quantum_tokens=501) == 0  # 3, 4 and 7 now
    assert target(transition(0), *fleet, quantum_tokens=400) == 1  # 3, 1 and 2


def test_who_is_on_the_way_counts_where_it_goes_and_the_request_itself_nowhere() -> None:
    leaving = at(1, 0, on_pace=False, fresh=2)
    fleet = [at(0, 1, on_pace=False), leaving, at(2, 0, on_pace=False, num_arriving=2)]
    assert target(transition(0), *fleet) == 0
    for request in leaving.requests:
        request.is_moving = True
    assert target(transition(0), *fleet) == 1
    own = at(0, 0, on_pace=False)
    own.requests = [FakePlaced(1000, answer_tokens=0)]
    assert target(transition(0), own, at(1, 0, on_pace=False, num_arriving=0)) == 0


def test_of_equals_its_own_replica_then_the_lowest_id() -> None:
    assert target(transition(2), at(0, 1), at(1, 1), at(2, 1)) == 2
    assert target(transition(2), at(1, 1), at(0, 1), at(2, 2)) == 0


@given(replicas, st.data())
def test_algorithm_2_as_written(found: list[FakeReplica], data: st.DataObject) -> None:
    request = transition(data.draw(st.integers(0, len(found) - 1)))
    e = [i for i in found if i.answers_on_pace]
    r = {i.id: i.queue_lengths[0] for i in found}
    if not e:
        e = found
        for i in e:
            for one in i.requests:
                r[i.id] += one.phase is Phase.ANSWERING and one.answer_tokens < 500
            r[i.id] += i.num_arriving
    selected = target(request, *found, adaptive=False)
    assert selected in {i.id for i in e}
    assert r[selected] == min(r[i.id] for i in e)


def test_it_moves_nothing_at_other_times() -> None:
    assert PascalMigration().interval_s is None
    assert list(PascalMigration().moves(FakeFleet([at(0, 9), at(1, 0)]))) == []


# Adaptive migration.


def fig_7() -> list[FakeReplica]:
    """Reasoning spread over instances 0 and 1, four answers filling instance 2; two slots free in instance 0."""
    return [
        at(0, 2, kv_blocks_used=2, kv_blocks_total=4),
        at(1, 2, kv_blocks_used=4, kv_blocks_total=4),
        at(2, 0, stale=4, kv_blocks_used=4, kv_blocks_total=4),
    ]


def test_fig_7() -> None:
    request = transition(0, prompt=10, generated=6)
    assert target(request, *fig_7(), adaptive=False) == 2
    assert target(request, *fig_7()) == 0


def test_where_its_own_replica_is_full_too_it_goes() -> None:
    fleet = fig_7()
    fleet[0].kv_blocks_used = 4
    assert target(transition(0, prompt=10, generated=6), *fleet) == 2


@pytest.mark.parametrize(("free", "to"), [(6, 0), (7, 1)])
def test_room_is_for_the_whole_kv_cache_and_a_block_to_grow(free: int, to: int) -> None:
    request = transition(0, prompt=60, generated=36)  # 96 tokens: 6 blocks of 16
    fleet = [at(0, 2), at(1, 0, kv_blocks_used=100 - free, kv_blocks_total=100)]
    assert target(request, *fleet) == to


def test_a_move_says_what_it_weighed() -> None:
    move = PascalMigration().at_phase(transition(0), FakeFleet([at(0, 2), at(1, 1), at(2, 0, on_pace=False)]))
    assert move == Move(1000, 1, scores=((0, 2), (1, 1)))


# The queues.


def reasoning(prompt: int, generated: int, **more: Any) -> FakeRequest:
    return FakeRequest(prompt_tokens=prompt, generated_tokens=generated, phase=Phase.REASONING, **more)


def test_reasoning_goes_before_answering_and_each_queue_by_turns() -> None:
    requests = [
        FakeRequest(0, turn=1, arrival_s=0.0),
        FakeRequest(1, turn=4, arrival_s=9.0, phase=Phase.REASONING),
        FakeRequest(2, turn=3, arrival_s=8.0, phase=Phase.REASONING),
        FakeRequest(3, turn=3, arrival_s=7.0, phase=Phase.REASONING),
        FakeRequest(4, turn=0, arrival_s=5.0),
    ]
    ordering = PascalOrdering()
    assert [r.id for r in sorted(requests, key=lambda r: ordering.rank(r, 10.0))] == [3, 2, 1, 4, 0]
    assert (ordering.quantum, ordering.preemptive, ordering.num_queues) == (500, True, 2)
    assert isinstance(ordering, QueuedOrdering) and isinstance(ordering, SteppedOrdering)


@pytest.mark.parametrize(
    ("request_", "queue", "change"),
    [
        (reasoning(128, 0), 0, 4873),
        (reasoning(128, 4872), 0, 1),
        (reasoning(128, 4873), 1, None),
        (reasoning(5000, 0), 0, 1),
        (reasoning(5001, 0), 1, None),  # a prompt as long is demoted from the start
        (FakeRequest(prompt_tokens=1), 1, None),
        (FakeRequest(prompt_tokens=9000), 1, None),
    ],
)
def test_demotion(request_: FakeRequest, queue: int, change: int | None) -> None:
    ordering = PascalOrdering()
    assert (ordering.queue(request_), ordering.next_change_tokens(request_)) == (queue, change)


@given(st.integers(1, 400), st.integers(0, 400), st.integers(1, 400), st.integers(1, 300))
def test_a_change_comes_when_it_was_said(prompt: int, generated: int, demotion: int, gained: int) -> None:
    ordering = PascalOrdering(demotion_tokens=demotion)
    before, after = reasoning(prompt, generated), reasoning(prompt, generated + gained)
    announced = ordering.next_change_tokens(before)
    assert (ordering.queue(before) != ordering.queue(after)) == (announced is not None and gained >= announced)


# The other reading of turns and of memory.


def life(prompt: int, reasoning_tokens: int, output: int) -> list[FakeRequest]:
    """A request after each of its tokens."""
    return [
        FakeRequest(
            prompt_tokens=prompt,
            generated_tokens=n,
            answer_tokens=max(n - reasoning_tokens, 0),
            phase=Phase.REASONING if n < reasoning_tokens else Phase.ANSWERING,
        )
        for n in range(output)
    ]


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 60), st.integers(1, 20), st.integers(0, 80))
def test_by_quanta_each_quantum_in_a_queue_lowers_the_rank(
    prompt: int, thought: int, answer: int, quantum: int, demotion: int
) -> None:
    ordering = PascalOrdering(quantum, demotion, by_quanta=True)
    assert ordering.quantum is None and isinstance(ordering, SteppedOrdering)
    served: dict[tuple[int, Phase], int] = {}
    states = life(prompt, thought, thought + answer)
    for state, after in zip(states, [*states[1:], None], strict=True):
        queue, used, _, _ = ordering.rank(state, 0.0)
        assert queue == ordering.queue(state)
        assert used == served.get((queue, state.phase), 0) // quantum
        served[queue, state.phase] = served.get((queue, state.phase), 0) + 1
        if after is not None and after.phase is state.phase:
            assert (ordering.rank(after, 0.0) > ordering.rank(state, 0.0)) == (ordering.next_change_tokens(state) == 1)


def test_by_quanta_an_answer_that_begins_goes_before_those_past_their_first_quantum() -> None:
    begun, past = FakeRequest(0, arrival_s=9.0), FakeRequest(1, arrival_s=1.0, answer_tokens=500, generated_tokens=900)
    within = FakeRequest(2, arrival_s=5.0, answer_tokens=499, generated_tokens=5000)
    ordering = PascalOrdering(by_quanta=True)
    assert [r.id for r in sorted([begun, past, within], key=lambda r: ordering.rank(r, 10.0))] == [2, 0, 1]


@pytest.mark.parametrize("ordering", [PascalOrdering(by_quanta=True), FewestQuantaOrdering()])
def test_among_equals_who_has_had_so_many_quanta_for_longest_goes_first(ordering: Any) -> None:
    first = FakeRequest(0, arrival_s=9.0, turn=3, answer_tokens=999, generated_tokens=999)
    earlier_arrival = FakeRequest(1, arrival_s=1.0, turn=8, answer_tokens=500, generated_tokens=500)
    assert ordering.rank(first, 10.0) < ordering.rank(earlier_arrival, 10.0)


@pytest.mark.parametrize(
    ("levels", "order"), [(None, [3, 0, 2, 1]), (3, [3, 0, 1, 2]), (2, [3, 1, 2, 0]), (1, [1, 2, 0, 3])]
)
def test_levels_limit_the_quanta_that_are_told_apart(levels: int | None, order: list[int]) -> None:
    answers = [(600, 7), (1700, 2), (1200, 5), (0, 9)]
    requests = [FakeRequest(i, turn=turn, answer_tokens=n, generated_tokens=n) for i, (n, turn) in enumerate(answers)]
    for ordering in (PascalOrdering(by_quanta=True, levels=levels), FewestQuantaOrdering(levels=levels)):
        assert [r.id for r in sorted(requests, key=lambda r: ordering.rank(r, 0.0))] == order


def test_a_circle_has_no_levels() -> None:
    with pytest.raises(HeadwayError, match="levels: expected by_quanta: true"):
        PascalOrdering(levels=2)
    with pytest.raises(HeadwayError, match="levels"):
        FewestQuantaOrdering(levels=0)


@given(st.integers(0, 3000), st.integers(1, 700), st.integers(1, 700))
def test_fewest_quanta_says_when_its_rank_falls(generated: int, quantum: int, gained: int) -> None:
    ordering = FewestQuantaOrdering(quantum)
    before, after = FakeRequest(generated_tokens=generated), FakeRequest(generated_tokens=generated + gained)
    announced = ordering.next_change_tokens(before)
    assert announced is not None
    assert (ordering.rank(after, 0.0) > ordering.rank(before, 0.0)) == (gained >= announced)


def test_fig_2c_with_fewest_quanta() -> None:
    """Requests A, B and C come at 0, 1 and 2; two run at a time; quanta of four tokens."""
    ordering = FewestQuantaOrdering(4)
    requests = [FakeRequest(i, arrival_s=float(i)) for i in range(3)]
    ran = []
    for now in range(11):
        here = [r for r in requests if r.arrival_s <= now]
        batch = sorted(here, key=lambda r: ordering.rank(r, now))[:2]
        ran.append("".join(sorted("ABC"[r.id] for r in batch)))
        for request in batch:
            request.generated_tokens += 1
    assert ran == ["A", "AB", "AB", "AB", "BC", "AC", "AC", "AC", "AB", "BC", "BC"]


@pytest.mark.parametrize(("host", "to"), [(0, 1), (3, 1), (4, 0)])
def test_what_waits_in_host_memory_may_count_as_taken(host: int, to: int) -> None:
    request = transition(0, prompt=60, generated=36)  # 6 blocks, and one to grow
    fleet = [at(0, 2), at(1, 0, kv_blocks_used=90, kv_blocks_host=host, kv_blocks_total=100)]
    assert target(request, *fleet, host_counts=True) == to
    assert target(request, *fleet) == 1
