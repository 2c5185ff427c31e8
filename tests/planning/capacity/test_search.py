"""The capacity search against brute force, and what must hold of its answers. No simulator: made-up evaluators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.planning.capacity.problem import (
    CandidateBounds,
    CapacityCandidate,
    CapacityPlan,
    CapacityProblem,
    RehearsalMetrics,
    Situation,
    Targets,
    misses,
    stopped,
)
from headway.planning.capacity.search import cheapest_fleet
from headway.planning.capacity.text import sentences

MOST = 12


class Queue:
    """Latency falls with replicas: `base + work * load / replicas`, a pair for each candidate. Records the calls."""

    def __init__(self, pairs: list[tuple[float, float]]) -> None:
        self.pairs = pairs
        self.asked: list[tuple[int, int, Situation]] = []

    def __call__(self, candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics:
        number = int(candidate.routing)
        self.asked.append((number, replicas, situation))
        base, work = self.pairs[number]
        left = replicas - situation.lost_replicas
        ttft_s = base + work * situation.load / left if left > 0 else None
        share = 0.0 if ttft_s is None else 1 / (1 + ttft_s)
        return RehearsalMetrics(ttft_s, 0.01, ttft_s, share, 1.0, 0.5, 100, 100, True)


def candidates(prices: list[int]) -> tuple[CapacityCandidate, ...]:
    return tuple(CapacityCandidate(f"gpu-{i % 2}", Parallel(), str(i), float(usd)) for i, usd in enumerate(prices))


def brute_force(problem: CapacityProblem, evaluate: Queue) -> float:
    """The least cost over all candidates and numbers of replicas; infinite if none meets the targets."""
    return min(
        (
            n * each.usd_per_replica_hour
            for each in problem.candidates
            for n in range(problem.least_replicas, problem.max_replicas + 1)
            if not misses(evaluate(each, n, Situation()), problem.targets)
        ),
        default=inf,
    )


def cost(found: CapacityPlan) -> float:
    return inf if found.objective_usd_per_hour is None else found.objective_usd_per_hour


KINDS = st.lists(st.tuples(st.integers(1, 9), st.floats(0, 2), st.floats(0.1, 20)), min_size=1, max_size=5)
LIMITS = st.floats(0.2, 5)


def made(kinds: list[tuple[int, float, float]], ttft_s: float, load: float = 1.0) -> tuple[CapacityProblem, Queue]:
    problem = CapacityProblem(candidates([usd for usd, _, _ in kinds]), Targets(ttft_p99_s=ttft_s), max_replicas=MOST)
    return problem, Queue([(base, work * load) for _, base, work in kinds])


@given(KINDS, LIMITS)
def test_the_plan_costs_what_brute_force_finds(kinds: list[tuple[int, float, float]], ttft_s: float) -> None:
    problem, evaluate = made(kinds, ttft_s)
    least_usd = brute_force(problem, made(kinds, ttft_s)[1])
    found = cheapest_fleet(problem, [CandidateBounds()] * len(kinds), evaluate)
    assert cost(found) == pytest.approx(least_usd)
    if found.status == "optimal":
        assert found.choice is not None and found.choice.replicas is not None and found.measured is not None
        _check_bound(problem, evaluate, found)
        assert not misses(found.measured, problem.targets)
        assert found.monotone is not False
        assert bool(found.binds) == (found.choice.replicas > 1)
        for option in (found.choice, *found.runners_up):
            if option.replicas is not None and option.replicas > 1:
                fewer = evaluate(option.candidate, option.replicas - 1, Situation())
                assert misses(fewer, problem.targets)


@given(KINDS, LIMITS, st.sampled_from([lambda *_: 7, lambda _, replicas, *__: 100 * replicas]))
def test_rehearsals_that_stop_at_a_miss_give_the_same_plan(
    kinds: list[tuple[int, float, float]], ttft_s: float, arrivals: Callable[..., int]
) -> None:
    """Whether or not more replicas delay the end."""
    problem, evaluate = made(kinds, ttft_s)

    def until_missed(*asked: Any) -> RehearsalMetrics:
        measured = evaluate(*asked)
        return stopped(arrivals(*asked)) if misses(measured, problem.targets) else measured

    bounds = [CandidateBounds()] * len(kinds)
    whole, found = (cheapest_fleet(problem, bounds, each) for each in (evaluate, until_missed))
    assert cost(found) == pytest.approx(cost(whole)) and found.measured == whole.measured
    chosen = [each.choice and (each.choice.candidate, each.choice.replicas) for each in (found, whole)]
    assert chosen[0] == chosen[1]


def test_early_ends_that_more_replicas_do_not_delay_lead_to_the_most_replicas() -> None:
    problem, evaluate = made([(1, 3.0, 0.0)], ttft_s=1.0)

    def until_missed(*asked: Any) -> RehearsalMetrics:
        evaluate(*asked)
        return stopped(7)

    assert cheapest_fleet(problem, [CandidateBounds()], until_missed).status == "infeasible"
    assert [replicas for _, replicas, _ in evaluate.asked] == [1, 2, MOST]


def _check_bound(problem: CapacityProblem, evaluate: Queue, found: CapacityPlan) -> None:
    """Each fleet below the bound was rehearsed; those that were not are counted."""
    usd, bound = found.objective_usd_per_hour, found.bound_usd_per_hour
    assert usd is not None and bound is not None
    rehearsed = {(number, replicas) for number, replicas, situation in evaluate.asked if situation == Situation()}
    cheaper = [
        (n * each.usd_per_replica_hour, (int(each.routing), n))
        for each in problem.candidates
        for n in range(1, MOST + 1)
        if n * each.usd_per_replica_hour < usd * (1 - 1e-9)
    ]
    assumed = [cost for cost, size in cheaper if size not in rehearsed]
    assert (found.num_assumed, bound) == (len(assumed), min(assumed, default=usd))
    assert ("No candidate can cost less" in next(sentences(found))) == (not assumed)


@given(KINDS, LIMITS, st.integers(1, 4))
def test_valid_bounds_change_only_the_number_of_rehearsals(
    kinds: list[tuple[int, float, float]], ttft_s: float, slack: int
) -> None:
    """With bounds at or below the true values: the same cost, and no more rehearsals than candidates have sizes."""
    problem, evaluate = made(kinds, ttft_s)
    floors = []
    for each in problem.candidates:
        good = [n for n in range(1, MOST + 1) if not misses(evaluate(each, n, Situation()), problem.targets)]
        floors.append(CandidateBounds(max(1, good[0] - slack)) if good else CandidateBounds(reason="too slow"))
    evaluate.asked.clear()
    found = cheapest_fleet(problem, floors, evaluate)
    assert cost(found) == pytest.approx(brute_force(problem, made(kinds, ttft_s)[1]))
    assert len(evaluate.asked) == len(set(evaluate.asked)) == found.num_rehearsals <= MOST * len(kinds)
    ruled_out = {int(each.routing) for each, floor in zip(problem.candidates, floors, strict=True) if floor.reason}
    assert not ruled_out & {number for number, _, _ in evaluate.asked}


@given(KINDS, LIMITS, st.floats(1, 4))
def test_a_looser_slo_never_costs_more(kinds: list[tuple[int, float, float]], ttft_s: float, more: float) -> None:
    floors = [CandidateBounds()] * len(kinds)
    tight, loose = (cheapest_fleet(*_args(made(kinds, limit), floors)) for limit in (ttft_s, ttft_s * more))
    assert cost(loose) <= cost(tight)


@given(KINDS, LIMITS, st.floats(1, 4))
def test_more_load_never_costs_less(kinds: list[tuple[int, float, float]], ttft_s: float, more: float) -> None:
    floors = [CandidateBounds()] * len(kinds)
    little, much = (cheapest_fleet(*_args(made(kinds, ttft_s, load), floors)) for load in (1.0, more))
    assert cost(little) <= cost(much)


def _args(
    pair: tuple[CapacityProblem, Queue], floors: list[CandidateBounds]
) -> tuple[CapacityProblem, list[CandidateBounds], Queue]:
    return pair[0], floors, pair[1]


@settings(max_examples=50)
@given(KINDS, LIMITS)
def test_what_ifs_rehearse_the_plan(kinds: list[tuple[int, float, float]], ttft_s: float) -> None:
    problem, evaluate = made(kinds, ttft_s)
    situations = (Situation(load=3.0), Situation(lost_replicas=1))
    found = cheapest_fleet(replace(problem, situations=situations), [CandidateBounds()] * len(kinds), evaluate)
    if found.choice is None:
        return
    assert found.choice.replicas is not None
    loaded, lost = found.what_ifs
    assert loaded.measured == evaluate(found.choice.candidate, found.choice.replicas, situations[0])
    assert lost.replicas_needed == found.choice.replicas + 1
    if loaded.replicas_needed is not None and loaded.replicas_needed > found.choice.replicas:
        assert misses(evaluate(found.choice.candidate, loaded.replicas_needed - 1, situations[0]), problem.targets)


def test_runners_up_are_the_cheapest_of_each_other_gpu() -> None:
    problem, evaluate = made([(2, 0.0, 4.0), (1, 0.0, 9.0), (4, 0.0, 1.0), (1, 99.0, 1.0)], 1.0)
    found = cheapest_fleet(problem, [CandidateBounds()] * 4, evaluate)
    assert found.choice is not None and found.choice.candidate.gpu == "gpu-0"
    assert found.objective_usd_per_hour == 4.0  # one replica of the third
    (other,) = found.runners_up
    assert (other.candidate.gpu, other.replicas, other.usd_per_hour) == ("gpu-1", 9, 9.0)


def test_progress_never_goes_beyond_what_is_expected() -> None:
    problem, evaluate = made([(2, 0.0, 4.0), (1, 0.0, 9.0), (4, 0.0, 1.0)], 1.0)
    progress: list[tuple[int, int]] = []
    found = cheapest_fleet(
        problem, [CandidateBounds()] * 3, evaluate, lambda done, expected: progress.append((done, expected))
    )
    assert [done for done, _ in progress] == list(range(found.num_rehearsals))
    assert all(done < expected for done, expected in progress)


def test_infeasible_plans_name_the_best_values() -> None:
    problem, evaluate = made([(1, 2.0, 1.0), (1, 3.0, 1.0)], 1.0)
    found = cheapest_fleet(problem, [CandidateBounds(), CandidateBounds(reason="too slow", ttft_p99_s=1.5)], evaluate)
    assert found.status == "infeasible" and found.choice is None
    (reach,) = found.reach
    assert reach.best == 1.5 and "unloaded" in reach.where and reach.target == 1.0
    assert [option.status for option in found.options] == ["infeasible", "pruned"]
    assert found.options[0].reason == "misses TTFT p99 with 12 replicas"


def test_work_beyond_the_most_replicas_needs_no_rehearsal() -> None:
    problem, evaluate = made([(1, 0.0, 1.0)], 1.0)
    found = cheapest_fleet(problem, [CandidateBounds(least_replicas=MOST + 1)], evaluate)
    assert found.status == "infeasible" and not evaluate.asked
    assert "13 replicas or more" in found.options[0].reason


def test_a_violated_assumption_is_reported() -> None:
    """Two and four replicas meet the target and three do not: the neighbours' rehearsals show it."""

    def evaluate(candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics:
        ttft_s = {1: 9.0, 2: 0.5, 3: 9.0, 4: 0.5, 5: 0.5}.get(replicas, 0.5)
        return RehearsalMetrics(ttft_s, 0.0, ttft_s, 1.0, 1.0, 0.5, 100, 100, True)

    problem = CapacityProblem(candidates([1]), Targets(ttft_p99_s=1.0), max_replicas=8)
    found = cheapest_fleet(problem, [CandidateBounds(least_replicas=3)], evaluate)
    assert found.monotone is False
    assert found.choice is not None and found.choice.replicas == 2
    said = "rehearsed (replicas that meet all targets: 2, 4, 5, 6; that do not: 1, 3)"
    assert said in " ".join(sentences(found))


@given(st.lists(st.sampled_from([0.5, 1.5, 3.0]), min_size=MOST, max_size=MOST), st.integers(1, 3))
def test_a_fleet_that_does_worse_with_more_replicas_is_looked_at_again(by_size: list[float], least: int) -> None:
    """Whatever the latencies by number of replicas: no smaller number is ruled out that was not rehearsed to miss."""
    asked: dict[int, float] = {}

    def evaluate(candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics:
        asked[replicas] = ttft_s = by_size[replicas - 1]
        return RehearsalMetrics(ttft_s, 0.0, ttft_s, 1.0, 1.0, 0.5, 100, 100, True)

    problem = CapacityProblem(candidates([1]), Targets(ttft_p99_s=1.0), max_replicas=MOST)
    found = cheapest_fleet(problem, [CandidateBounds(least_replicas=least)], evaluate)
    seen = [asked[n] for n in sorted(asked)]
    rises = any(after > max(before, 1.0) for before, after in itertools.pairwise(seen))
    if found.choice is None or found.choice.replicas is None:
        assert min(asked.values()) > 1.0 and (not rises or set(asked) >= set(range(least, MOST + 1)))
        return
    replicas = found.choice.replicas
    unseen = [n for n in range(least, replicas) if n not in asked]
    assert asked[replicas] <= 1.0 and all(asked[n] > 1.0 for n in asked if n < replicas)
    assert found.monotone in (not rises, None) and found.num_assumed == len(unseen)
    assert not (rises and unseen)
    claim = f"No candidate can cost less than ${replicas}" in " ".join(sentences(found))
    assert claim == (not unseen)


def test_where_doubling_gains_nothing_and_the_most_replicas_meet_all_smaller_numbers_are_rehearsed() -> None:
    def evaluate(candidate: CapacityCandidate, replicas: int, situation: Situation) -> RehearsalMetrics:
        ttft_s = 0.4 if replicas in (7, *range(47, 65)) else 0.6
        return RehearsalMetrics(ttft_s, 0.0, ttft_s, 1.0, 1.0, 0.5, 100, 100, True)

    problem = CapacityProblem(candidates([1]), Targets(ttft_p99_s=0.5), max_replicas=64)
    found = cheapest_fleet(problem, [CandidateBounds(least_replicas=3)], evaluate)
    assert found.choice is not None and found.choice.replicas == 7 and found.num_assumed == 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"candidates": ()}, "no candidates"),
        ({"targets": Targets()}, "no target"),
        ({"targets": Targets(ttft_p99_s=0.0)}, "ttft_p99_s: 0.0; expected more than 0"),
        ({"targets": Targets(attainment=1.5)}, "attainment: 1.5; expected more than 0, 1 at most"),
        ({"max_replicas": 0}, "max_replicas: 0; expected 1 or more"),
    ],
)
def test_problems_without_a_question_are_refused(change: dict[str, object], what: str) -> None:
    problem, evaluate = made([(1, 0.0, 1.0)], 1.0)
    problem = replace(problem, **change)
    with pytest.raises(HeadwayError, match=what):
        cheapest_fleet(problem, [CandidateBounds()] * len(problem.candidates), evaluate)
