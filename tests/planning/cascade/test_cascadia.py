"""Cascadia's planner against exhaustive search, and what must hold of every plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade_queues import ENGINE, GPU, LARGE, MIDDLE, SMALL, HonestBounds, Queue, problem, scores
from headway.core.errors import HeadwayError
from headway.perf import memory
from headway.planning.cascade.candidates import plan, plans, with_held_out
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency_bounds import NoBounds
from headway.planning.cascade.problem import CascadePlan, CascadeProblem, LatencyBudget, QualityFloor, ReplicaSet
from headway.planning.cascade.routing import Objective, cascades, penalised_latency, penalised_quality, proportional
from headway.planning.cascade.search import Effort
from headway.workload.quality import Scores
from headway_papers.reproduce.cascadia.exhaustive import exhaustive

ALL = Effort(stable_rounds=None, gap=0.0)
NAN = float("nan")


def check(found: CascadePlan, asked: CascadeProblem) -> None:
    """What is wrong in no plan, told without the planner's own arithmetic."""
    assert sum(stage.num_gpus for stage in found.stages) <= asked.num_gpus
    sample, reached = asked.scores, np.ones(len(asked.scores), np.bool_)
    final = np.zeros(len(sample), "i8")
    for i, stage in enumerate(found.stages):
        assert stage.processing_ratio == pytest.approx(reached.mean())
        assert stage.rate_rps == pytest.approx(asked.rate_rps * reached.mean())
        assert sum(part.num_gpus for part in stage.replicas) <= stage.num_gpus
        assert bool(stage.replicas) == bool(reached.any()) == (stage.p95_latency_s is not None)
        for part in stage.replicas:
            memory.plan(asked.models[i], asked.gpu, asked.engine, part.parallel)
            assert part.tp <= asked.server and part.count >= 1
        if reached.any():
            lengths = asked.lengths(i, reached)
            latency_s = Queue().p95_latency_s(asked.models[i], ReplicaSet(stage.replicas), stage.rate_rps, lengths)
            judged = asked.judge_s if i < len(found.stages) - 1 else 0.0
            assert stage.p95_latency_s == pytest.approx(latency_s + judged)
        final[reached] = i
        if stage.threshold is not None:
            with np.errstate(invalid="ignore"):
                reached = reached & ~(sample.scores[:, i] >= stage.threshold)
    latencies = [stage.p95_latency_s for stage in found.stages if stage.p95_latency_s is not None]
    assert found.latency_s == pytest.approx(max(latencies))
    assert found.quality == pytest.approx(sample.quality_of(final))
    assert found.bound_s is not None and found.bound_s <= found.latency_s * (1 + 1e-9)
    assert msgspec.json.decode(msgspec.json.encode(found), type=CascadePlan) == found


CASES = dict(
    seed=st.integers(0, 10_000),
    stages=st.integers(1, 3),
    num_gpus=st.integers(5, 8),
    rate_rps=st.floats(0.5, 12.0),
    q_min=st.floats(20.0, 100.0),
)


@pytest.mark.ci
@settings(max_examples=25, deadline=None)
@given(**CASES, use_all=st.booleans())
def test_a_full_look_finds_what_exhaustive_search_finds(
    seed: int, stages: int, num_gpus: int, rate_rps: float, q_min: float, use_all: bool
) -> None:
    asked = problem(stages, num_gpus, rate_rps, QualityFloor(q_min), seed, use_all=use_all, max_pp=2)
    try:
        oracle = exhaustive(asked, StageLatencies(Queue()))
    except HeadwayError:
        with pytest.raises(HeadwayError, match="no set of replicas serves"):
            plan(asked, StageLatencies(Queue()), HonestBounds(Queue(), seed), ALL)
        return
    for bounds in (HonestBounds(Queue(), seed), NoBounds()):
        found = plan(asked, StageLatencies(Queue()), bounds, ALL)
        assert found.objective == pytest.approx(oracle.objective)
        assert found.latency_s == pytest.approx(oracle.latency_s)
        assert found.status == ("optimal" if oracle.quality >= q_min - 1e-9 else "infeasible")
        check(found, asked)
        if use_all:
            assert sum(stage.num_gpus for stage in found.stages) == num_gpus


@settings(max_examples=15, deadline=None)
@given(**CASES, budget_s=st.floats(0.1, 8.0))
def test_a_latency_budget_gets_the_best_quality(
    seed: int, stages: int, num_gpus: int, rate_rps: float, q_min: float, budget_s: float
) -> None:
    asked = problem(stages, num_gpus, rate_rps, LatencyBudget(budget_s), seed, max_pp=2)
    try:
        oracle = exhaustive(asked, StageLatencies(Queue()))
    except HeadwayError:
        return
    found = plan(asked, StageLatencies(Queue()), HonestBounds(Queue(), seed), ALL)
    assert found.objective == pytest.approx(oracle.objective)
    assert found.quality == pytest.approx(oracle.quality)
    assert (found.status == "infeasible") == (oracle.latency_s > budget_s)
    check(found, asked)


@pytest.mark.ci
def test_the_usual_look_is_within_one_percent_and_far_cheaper() -> None:
    worse = []
    for seed in range(12):
        asked = problem(3, 10, 6.0, QualityFloor(70.0), seed, num_requests=40)
        everything, queue = Queue(), Queue()
        oracle = exhaustive(asked, StageLatencies(everything))
        found = plan(asked, StageLatencies(queue), HonestBounds(Queue(), seed, 0.8))
        check(found, asked)
        assert found.quality == pytest.approx(oracle.quality) or min(found.quality, oracle.quality) >= 70 - 1e-9
        worse.append(found.latency_s / oracle.latency_s - 1)
        assert found.num_evaluations == len(queue.asked) < len(everything.asked) / 10
    assert max(worse) <= 0.01


def test_bounds_save_questions_and_change_nothing_else() -> None:
    for seed in range(6):
        asked = problem(2, 8, 5.0, QualityFloor(65.0), seed)
        without, with_ = Queue(), Queue()
        plain = plan(asked, StageLatencies(without), NoBounds(), ALL)
        pruned = plan(asked, StageLatencies(with_), HonestBounds(Queue(), seed, 0.9), ALL)
        assert pruned.objective == pytest.approx(plain.objective)
        assert len(with_.asked) < len(without.asked) / 2
        assert len(set(with_.asked)) <= len(with_.asked) and pruned.num_evaluations == len(with_.asked)


def test_nothing_is_asked_twice_and_a_warm_table_asks_nothing() -> None:
    asked, queue = problem(3, 10, 6.0, QualityFloor(70.0), 1, num_requests=30), Queue()
    first = plan(asked, StageLatencies(queue), HonestBounds(Queue(), 0))
    assert len(queue.asked) == first.num_evaluations
    known = StageLatencies(queue)
    cold = plan(asked, known, HonestBounds(Queue(), 0))
    num = len(queue.asked)
    warm = plan(asked, StageLatencies(queue, known.known), HonestBounds(Queue(), 0))
    assert len(queue.asked) == num and warm.num_evaluations == 0 < warm.num_remembered
    assert warm.stages == cold.stages == first.stages and warm.rounds == cold.rounds


@pytest.mark.ci
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), rate_rps=st.floats(1.0, 10.0))
def test_a_looser_target_never_has_a_worse_plan(seed: int, rate_rps: float) -> None:
    asked = problem(3, 9, rate_rps, seed=seed, num_requests=25)
    levels = [90.0, 60.0, 75.0, 45.0]
    found = plans(asked, [QualityFloor(q) for q in levels], StageLatencies(Queue()), HonestBounds(Queue(), seed))
    by_level = {each.target.q_min: each for each in found}  # type: ignore[union-attr]
    feasible = [by_level[q] for q in sorted(levels) if by_level[q].status != "infeasible"]
    assert [each.latency_s for each in feasible] == sorted(each.latency_s for each in feasible)
    for each in found:
        check(each, asked)


def test_more_gpus_are_never_worse() -> None:
    latencies = StageLatencies(Queue())
    found = [
        plan(problem(3, n, 4.0, QualityFloor(70.0), 3), latencies, HonestBounds(Queue(), n), ALL).objective
        for n in (4, 6, 8, 10)
    ]
    assert found == sorted(found, reverse=True)


def test_what_is_out_of_reach_is_said_with_the_best_there_is() -> None:
    asked = problem(2, 6, 3.0, QualityFloor(100.0), 4)
    found = plan(asked, StageLatencies(Queue()), NoBounds(), ALL)
    best = max(cascades(asked.scores, [1, 1]).quality)
    assert best < 100 and found.status == "infeasible"
    assert found.quality == pytest.approx(best) and f"{best:.4g} at most" in found.why
    slow = plan(asked.with_target(LatencyBudget(1e-3)), StageLatencies(Queue()), NoBounds(), ALL)
    assert slow.status == "infeasible" and "out of reach on these GPUs" in slow.why
    assert slow.latency_s == exhaustive(asked.with_target(QualityFloor(0.0)), StageLatencies(Queue())).latency_s
    with pytest.raises(HeadwayError, match=r"no set of replicas serves 1e\+06 requests/s of small"):
        plan(replace(asked, rate_rps=1e6), StageLatencies(Queue()), NoBounds(), ALL)


def test_a_model_that_fits_nowhere_is_not_used() -> None:
    asked = replace(problem(3, 2, 1.0, QualityFloor(0.0), 5), target=QualityFloor(100.0))
    found = plan(asked, StageLatencies(Queue()), NoBounds(), ALL)
    assert found.status == "infeasible" and found.stages[2].num_gpus == 0
    alone = CascadeProblem((LARGE,), GPU, ENGINE, 2, 1.0, scores(5, 3, 0), QualityFloor(0.0))
    with pytest.raises(HeadwayError, match=r"2 x gpu: large .* needs"):
        plan(alone, StageLatencies(Queue()), NoBounds())


def test_one_model_needs_no_threshold() -> None:
    asked = problem(1, 5, 3.0, QualityFloor(0.0))
    found = plan(asked, StageLatencies(Queue()), NoBounds())
    assert found.thresholds == () and found.stages[0].processing_ratio == 1.0
    check(found, asked)


def test_missing_scores_are_no_zeroes() -> None:
    asked = problem(2, 6, 3.0, QualityFloor(50.0), 6)
    values = asked.scores.scores.copy()
    values[::3, 0] = NAN
    values[1::5, 1] = NAN
    gaps = replace(asked, scores=replace(asked.scores, scores=values))
    found = plan(gaps, StageLatencies(Queue()), NoBounds(), ALL)
    check(found, gaps)
    assert found.objective == pytest.approx(exhaustive(gaps, StageLatencies(Queue())).objective)
    none = replace(asked, scores=replace(asked.scores, scores=np.full_like(values, NAN)))
    with pytest.raises(HeadwayError, match="no answer that would be given has one"):
        plan(none, StageLatencies(Queue()), NoBounds())


def test_the_papers_example() -> None:
    """3.3: J = 21.0, 11.4 and 12.2 for a requirement of 0.90 between nadir 0.75 and utopia 0.95."""
    found = [
        penalised_latency(latency_s, quality, 0.90, 0.95, 0.75, 100.0)
        for latency_s, quality in ((11.0, 0.88), (11.4, 0.91), (12.2, 0.93))
    ]
    assert found == pytest.approx([21.0, 11.4, 12.2])
    objective = Objective(QualityFloor(0.90, mu=100.0), 0.95, 0.75)
    assert objective(11.0, 0.88) == pytest.approx(21.0) and objective(inf, 1.0) == inf
    assert penalised_quality(0.9, 12.0, 10.0, 5.0, 15.0, 3.0) == pytest.approx(-0.9 + 3.0 * 0.2)


@given(
    st.one_of(
        st.builds(QualityFloor, st.floats(0, 100), st.floats(0.1, 1e4)),
        st.builds(LatencyBudget, st.floats(0.1, 50), st.floats(0.1, 1e4)),
    ),
    st.floats(0, 100),
    st.floats(0, 100),
    st.floats(-200, 1e5),
)
def test_a_limit_is_where_a_routing_stops_being_better(
    target: QualityFloor | LatencyBudget, quality: float, latency_s: float, score: float
) -> None:
    objective = Objective(target, 90.0, 60.0, 1.0, 30.0)
    limit = objective.limit_s(score, quality)
    if latency_s >= limit * (1 + 1e-9) + 1e-9:
        assert objective(latency_s, quality) >= score - 1e-6 * max(1.0, abs(score))
    if latency_s < limit * (1 - 1e-9) - 1e-9:
        assert objective(latency_s, quality) <= score + 1e-6 * max(1.0, abs(score))


def test_a_small_penalty_may_be_worth_paying() -> None:
    asked = problem(2, 6, 3.0, QualityFloor(70.0, mu=0.01), 7)
    found, oracle = plan(asked, StageLatencies(Queue()), NoBounds(), ALL), exhaustive(asked, StageLatencies(Queue()))
    assert found.objective == pytest.approx(oracle.objective)
    assert found.quality < 70 and "at this price" in found.why


@given(st.integers(0, 500), st.integers(1, 3))
def test_routings_are_all_that_thresholds_make(seed: int, stages: int) -> None:
    table = scores(9, stages, seed)
    found = cascades(table, [1.0] * stages)
    every = {table.final_stage(levels).tobytes() for levels in _grid(table)}
    made = {table.final_stage(row.tolist()).tobytes() for row in found.thresholds}
    assert made == every and len(found) == len(every)
    for i in range(len(found)):
        levels = found.thresholds[i].tolist()
        assert found.quality[i] == pytest.approx(table.quality(levels))
        assert found.ratios[i] == pytest.approx(table.ratios(levels))


def _grid(table: Scores) -> list[list[float]]:
    levels: list[list[float]] = [[]]
    for i in range(len(table.models) - 1):
        own = sorted({0.0, 100.0, *table.scores[:, i].tolist()})
        levels = [[*before, level] for before in levels for level in own]
    return levels


def test_the_first_routing_is_proportional() -> None:
    random = np.random.default_rng(0)
    table = Scores(("a", "b", "c"), random.uniform(0, 100, (300, 3)), np.ones((300, 3), "i8"), np.ones(300, "i8"))
    found = cascades(table, [1, 2, 3])
    assert found.ratios[proportional(found)] == pytest.approx([1, 1 / 2, 1 / 3], abs=0.02)


def test_prefix_hits_shorten_prefill_alone() -> None:
    asked = problem(2, 6, 3.0)
    half = replace(asked, prefix_hit_rate=0.5)
    every = np.ones(len(asked.scores), np.bool_)
    before, after = asked.lengths(0, every), half.lengths(0, every)
    assert (after.prompt_tokens == before.prompt_tokens).all() and (after.output_tokens == before.output_tokens).all()
    assert after.computed_tokens == pytest.approx(np.maximum(np.round(before.prompt_tokens / 2), 1))
    assert before.key != after.key == half.lengths(0, every).key
    full = plan(asked, StageLatencies(Queue()), NoBounds(), ALL)
    assert plan(half, StageLatencies(Queue()), NoBounds(), ALL).latency_s < full.latency_s
    with pytest.raises(HeadwayError, match="prefix_hit_rate: 1"):
        replace(asked, prefix_hit_rate=1.0)


def test_thresholds_are_applied_to_requests_that_they_were_not_chosen_on() -> None:
    asked = problem(2, 6, 3.0, QualityFloor(60.0), 8, num_requests=60)
    first, second = asked.scores.split(0.5, 3)
    found = with_held_out(plan(replace(asked, scores=first), StageLatencies(Queue()), NoBounds()), second)
    check(found, replace(asked, scores=first))
    assert found.held_out is not None and found.held_out.num_requests == 30
    assert found.held_out.quality == second.quality(found.thresholds)
    assert found.held_out.processing_ratios == second.ratios(found.thresholds)
    assert with_held_out(found, first).held_out.quality == pytest.approx(found.quality)  # type: ignore[union-attr]


def test_questions_that_make_no_sense() -> None:
    asked = problem()
    for change, message in (
        ({"num_gpus": 0}, "num_gpus: 0"),
        ({"rate_rps": 0.0}, "rate_rps: 0.0"),
        ({"judge_s": -1.0}, "judge_s: -1.0"),
        ({"gpus_per_server": 0}, "gpus_per_server: 0"),
        ({"models": (SMALL, LARGE)}, "unknown model 'large'"),
    ):
        with pytest.raises(HeadwayError, match=message):
            replace(asked, **change)  # type: ignore[arg-type]
    with pytest.raises(HeadwayError, match="no requests"):
        replace(asked, scores=asked.scores.take(np.zeros(0, "i8")))
    assert replace(asked, models=(MIDDLE,)).scores.models == ("middle",)


@pytest.mark.parametrize(
    "make",
    [
        lambda: QualityFloor(101.0),
        lambda: QualityFloor(NAN),
        lambda: QualityFloor(50.0, mu=0.0),
        lambda: LatencyBudget(0.0),
        lambda: LatencyBudget(1.0, nu=inf),
        lambda: Effort(gap=1.0),
        lambda: Effort(stable_rounds=0),
        lambda: Effort(min_distance=0.0),
    ],
)
def test_targets_and_efforts_that_make_no_sense(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_an_evaluator_that_answers_nonsense_is_named() -> None:
    class Broken(Queue):
        def p95_latency_s(self, *given: object) -> float:  # type: ignore[override]
            return NAN

    with pytest.raises(HeadwayError, match="evaluator: nan s for small on"):
        plan(problem(), StageLatencies(Broken()), NoBounds())
