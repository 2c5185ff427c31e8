"""The planner's parts: replica sets, allocation, lower bounds against simulations, deployment, baselines."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade_queues import ENGINE, GPU, LARGE, MIDDLE, SMALL, HonestBounds, Queue, problem
from headway import catalog
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Fleet, Model, Parallel, Pool
from headway.core.record import Outcome
from headway.perf import memory
from headway.perf.step import StepModel
from headway.planning.cascade.allocation import least_max, least_max_milp
from headway.planning.cascade.baselines import (
    cascade_serve,
    equal_shares,
    route_llm,
    stand_alone,
    uniform_allocation,
    uniform_parallelism,
)
from headway.planning.cascade.bounds import NoBounds, StepTimeBounds
from headway.planning.cascade.cascadia import plan
from headway.planning.cascade.deployment import GuessCorrection, LatencyTable, StageLatencies, deploy, with_spare_gpus
from headway.planning.cascade.problem import CascadeProblem, LatencyBudget, Lengths, QualityFloor, Replicas, ReplicaSet
from headway.planning.cascade.replica_sets import feasible_shapes, replica_sets, uniform_sets, with_shapes
from headway.planning.cascade.search import Effort
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.least_loaded import LeastLoadedRouter
from headway.reproduce.cascadia.exhaustive import exhaustive
from headway.sim.cluster import simulate
from headway.workload.quality_traces import generate_scores
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

ALL = Effort(stable_rounds=None, gap=0.0)


# Shapes and sets of replicas.


def test_shapes_hold_the_model_within_servers() -> None:
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    for name in ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b", "deepseek-r1-awq"):
        model = catalog.model(name)
        found, reason = feasible_shapes(model, gpu, engine, 32, 8, 4)
        assert found and not reason
        for tp, pp in product(range(1, 10), range(1, 5)):
            try:
                memory.plan(model, gpu, engine, Parallel(tp, pp))
                fits = tp in (1, 2, 4, 8)
            except HeadwayError:
                fits = False
            assert (Parallel(tp, pp) in found) == fits
    assert {(8, 1), (4, 3)} <= {(shape.tp, shape.pp) for shape in found}, "Table 3 places the 671B model so"
    assert feasible_shapes(model, gpu, engine, 5, 8, 4)[0] == ()
    six, _ = feasible_shapes(catalog.model("llama-3-8b"), gpu, engine, 12, 6, 1)
    assert [shape.tp for shape in six] == [1, 2], "groups of four would leave two of six GPUs over"


@pytest.mark.parametrize(("num_gpus", "kinds"), [(6, None), (8, 2), (9, 1)])
def test_sets_are_all_there_are(num_gpus: int, kinds: int | None) -> None:
    of = (Parallel(1, 1), Parallel(2, 1), Parallel(1, 3), Parallel(4, 1))
    sizes = [shape.num_gpus for shape in of]
    every = {
        row
        for row in product(*(range(num_gpus // size + 1) for size in sizes))
        if 1 <= sum(n * size for n, size in zip(row, sizes, strict=True)) <= num_gpus
        and (kinds is None or sum(map(bool, row)) <= kinds)
    }
    found = replica_sets(of, num_gpus, kinds)
    assert sorted(map(tuple, found.counts.tolist())) == sorted(every)
    assert [found[i].num_gpus for i in range(len(found))] == found.cells.tolist()


def test_the_papers_table_3_is_among_the_sets() -> None:
    """All of it has two shapes at most, and GPUs add up to Table 2's."""
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    rows = [
        (0, 4, {(1, 1): 4}), (1, 8, {(4, 1): 2}), (2, 20, {(4, 3): 1, (8, 1): 1}),
        (0, 4, {(2, 1): 2}), (1, 12, {(2, 1): 6}), (2, 16, {(8, 1): 2}),
        (0, 6, {(1, 1): 6}), (1, 14, {(2, 1): 5, (4, 1): 1}), (2, 12, {(4, 3): 1}),
        (0, 8, {(1, 1): 6, (2, 1): 1}), (1, 16, {(2, 1): 8}), (2, 8, {(8, 1): 1}),
        (0, 18, {(1, 1): 10, (2, 1): 4}), (1, 14, {(4, 1): 2, (2, 1): 3}),
        (0, 24, {(1, 1): 16, (2, 1): 4}), (1, 8, {(2, 1): 4}),
    ]  # fmt: skip
    models = [catalog.model(name) for name in generate_scores(1, 1).models]
    sets = [replica_sets(feasible_shapes(model, gpu, engine, 32, 8, 4)[0], 32, 2) for model in models]
    known = [{found[i] for i in range(len(found))} for found in sets]
    for stage, gpus, counts in rows:
        order = {shape: i for i, shape in enumerate((s.tp, s.pp) for s in sets[stage].shapes)}
        parts = sorted((Replicas(tp, pp, n) for (tp, pp), n in counts.items()), key=lambda p: order[p.tp, p.pp])
        wanted = ReplicaSet(tuple(parts))
        assert wanted.num_gpus == gpus and wanted in known[stage]


def test_uniform_parallelism_fills_servers() -> None:
    of = tuple(Parallel(tp) for tp in (1, 2, 4, 8))
    found = uniform_sets(of, 32, 8)
    by_gpus = {found[i].num_gpus: found[i].label for i in range(len(found))}
    assert by_gpus[4] == "1 x tp 4" and by_gpus[32] == "4 x tp 8" and by_gpus[20] == "1 x tp 4, 2 x tp 8"
    only = with_shapes(replica_sets(of, 8, 2), [Parallel(2)])
    assert [only[i].label for i in range(len(only))] == ["1 x tp 2", "2 x tp 2", "3 x tp 2", "4 x tp 2"]
    spread_over = uniform_sets((Parallel(2, 3), Parallel(4, 2)), 14, 4)
    assert spread_over[len(spread_over) - 1].label == "1 x tp 2 pp 3, 1 x tp 4 pp 2"


# Allocation.


def brute_force(tables: list[np.ndarray], num_gpus: int, use_all: bool) -> float:
    return min(
        (
            max(table[f] for table, f in zip(tables, gpus, strict=True))
            for gpus in product(range(num_gpus + 1), repeat=len(tables))
            if (sum(gpus) == num_gpus if use_all else sum(gpus) <= num_gpus)
        ),
        default=inf,
    )


TABLES = st.integers(1, 7).flatmap(
    lambda n: st.lists(
        st.lists(st.one_of(st.just(inf), st.floats(0, 50)), min_size=n + 1, max_size=n + 1), min_size=1, max_size=3
    )
)


@settings(max_examples=60, deadline=None)
@given(TABLES, st.booleans())
def test_the_allocation_is_what_brute_force_finds(rows: list[list[float]], use_all: bool) -> None:
    tables = [np.array(row) for row in rows]
    num_gpus = len(rows[0]) - 1
    best = brute_force(tables, num_gpus, use_all)
    for solver in (least_max, least_max_milp):
        found = solver(tables, num_gpus, use_all)
        if best == inf:
            assert found is None
            continue
        assert found is not None and found.latency_s == pytest.approx(best, rel=1e-5, abs=1e-5)
        assert sum(found.gpus) <= num_gpus and (not use_all or sum(found.gpus) == num_gpus)
        assert found.latency_s == max(table[f] for table, f in zip(tables, found.gpus, strict=True))


def test_a_stage_without_requests_gets_no_gpus() -> None:
    """Table 2, (70, 3): the largest model has none."""
    busy = np.array([inf, 8.0, 6.0, 4.0, 2.0])
    idle = np.array([0.0, inf, inf, inf, inf])
    for solver in (least_max, least_max_milp):
        for use_all in (False, True):
            found = solver([busy, idle], 4, use_all)
            assert found is not None and found.gpus == (4, 0) and found.latency_s == pytest.approx(2.0)


# Deployment: a table known only in part.


def tables_of(seed: int, num_gpus: int, stages: int, honest: bool) -> tuple[list[LatencyTable], Queue]:
    random = np.random.default_rng(seed)
    queue, found = Queue(), []
    for i, model in enumerate((SMALL, MIDDLE, LARGE)[:stages]):
        sets = replica_sets(feasible_shapes(model, GPU, ENGINE, num_gpus, 4, 2)[0], num_gpus, 2)
        lengths = Lengths(*(random.integers(10, 300, 20).astype("f8") for _ in range(3)))
        rate_rps = float(random.uniform(0.5, 4.0)) / (i + 1)
        bounds = HonestBounds(Queue(), seed) if honest else NoBounds()
        lower, guess = bounds.estimate(model, sets, rate_rps, lengths)
        table = LatencyTable(
            sets, lower, guess, num_gpus,
            lambda replicas, m=model, r=rate_rps, x=lengths: queue.p95_latency_s(m, replicas, r, x),
            GuessCorrection(), 0.1 * i,
        )  # fmt: skip
        found.append(table)
    return found, queue


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(5, 9), st.integers(1, 3), st.booleans(), st.floats(0, 0.2))
def test_a_deployment_is_proved_without_asking_for_everything(
    seed: int, num_gpus: int, stages: int, use_all: bool, gap: float
) -> None:
    full, _ = tables_of(seed, num_gpus, stages, honest=False)
    for table in full:
        for f in range(num_gpus + 1):
            while table.can_improve(f):
                table.evaluate(f)
    truth = least_max([table.best for table in full], num_gpus, use_all)
    lazy, queue = tables_of(seed, num_gpus, stages, honest=True)
    found, bound_s = deploy(lazy, num_gpus, use_all, gap=gap)
    assert (found is None) == (truth is None)
    if found is None or truth is None:
        return
    assert bound_s <= truth.latency_s * (1 + 1e-9) and found.latency_s * (1 - gap) <= truth.latency_s * (1 + 1e-9)
    assert len(queue.asked) < sum(table.num_sets for table in full)
    for gpus, replicas in zip(found.gpus, found.sets, strict=True):
        assert replicas is not None and replicas.num_gpus <= gpus
    helped = with_spare_gpus(lazy, num_gpus, found, use_all)
    assert helped.latency_s == pytest.approx(found.latency_s) and sum(helped.gpus) <= num_gpus
    slowest_first = [sorted(np.round(each.latencies_s, 9).tolist(), reverse=True) for each in (helped, found)]
    assert slowest_first[0] <= slowest_first[1]
    again, _ = tables_of(seed, num_gpus, stages, honest=True)
    none, at_least = deploy(again, num_gpus, use_all, limit_s=truth.latency_s * 0.9)
    assert none is None and at_least >= truth.latency_s * 0.9


def test_spare_gpus_go_where_they_help() -> None:
    helped = []
    for seed in range(8):
        tables, _ = tables_of(seed, 12, 2, honest=False)
        found, _ = deploy(tables, 12)
        assert found is not None
        after = with_spare_gpus(tables, 12, found)
        assert sum(after.gpus) <= 12 and after.latency_s == found.latency_s
        if min(after.latencies_s) < min(found.latencies_s):
            assert sum(after.gpus) > sum(found.gpus)
            helped.append(seed)
    assert helped


# Lower bounds.


def simulated_p95_s(model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths, rounds: int) -> float:
    """Requests at random within the time they take at their rate, in a simulation."""
    num = rounds * len(lengths)
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    at = np.sort(np.random.default_rng(1).uniform(0, num / rate_rps, num))
    columns = {"prompt_tokens": lengths.computed_tokens, "output_tokens": lengths.output_tokens}
    workload = Workload({"arrival_s": at - at[0], **{n: np.tile(c, rounds) for n, c in columns.items()}})
    pools = tuple(Pool(part.label, model, gpu, engine, part.parallel, part.count) for part in replicas.parts)
    policies = Policies(LeastLoadedRouter, FcfsOrdering)
    line = lambda pool: StepModel(pool.model, pool.gpu, pool.engine, pool.parallel).line  # noqa: E731
    done = simulate(Fleet(pools), TraceSource(workload), policies, seed=0, line=line).requests
    assert (done["outcome"] == Outcome.FINISHED).all()
    return float(np.quantile(done["end_s"] - workload.arrival_s[done["request"].astype("i8")], 0.95))


@pytest.mark.parametrize(
    ("stage", "rate_rps", "prompt_tokens", "rounds"),
    [(0, 5, 160, 1), (0, 150, 160, 2), (1, 2, 160, 1), (1, 20, 160, 1), (2, 3, 160, 1), (1, 6, 3000, 1)],
)
def test_no_simulation_is_faster_than_its_bound(stage: int, rate_rps: float, prompt_tokens: int, rounds: int) -> None:
    table = generate_scores(1, 80, seed=stage)
    model = catalog.model(table.models[stage])
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    prompts = table.prompt_tokens * (prompt_tokens / 160)
    lengths = Lengths(prompts, prompts, table.output_tokens[:, stage].astype("f8"))
    sets = replica_sets(feasible_shapes(model, gpu, engine, 16, 8, 3)[0], 16, 2)
    lower, guess = StepTimeBounds(gpu, engine, rounds).estimate(model, sets, rate_rps, lengths)
    picked = np.random.default_rng(stage).choice(len(sets), 6, replace=False).tolist()
    one_kind = [i for i in range(len(sets)) if (sets.counts[i] > 0).sum() == 1]
    picked += one_kind[:: max(1, len(one_kind) // 4)]
    truth = np.array([simulated_p95_s(model, sets[i], rate_rps, lengths, rounds) for i in picked])
    share = lower[picked] / truth
    assert share.max() <= 1.0, "a bound above the truth"
    assert np.median(share[6:]) > (0.35 if stage == 2 else 0.6), "a bound that says nothing"
    assert (guess >= lower - 1e-9).all()


class StageSimulator:
    """The simulator as evaluator; counts what it is asked."""

    num_evaluated = 0

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        self.num_evaluated += 1
        return simulated_p95_s(model, replicas, rate_rps, lengths, rounds=1)


@pytest.mark.parametrize(("trace", "rate_rps", "q_min"), [(1, 4.0, 78.0), (3, 30.0, 80.0)])
def test_with_simulations_the_plan_is_the_exhaustive_one(trace: int, rate_rps: float, q_min: float) -> None:
    table = generate_scores(trace, 40, cascade="llama")
    coarse = replace(table, scores=np.round(table.scores / 10) * 10)
    models = tuple(catalog.model(name) for name in table.models)
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    asked = CascadeProblem(models, gpu, engine, 5, rate_rps, coarse, QualityFloor(q_min), max_pp=2)
    everything, usual = StageSimulator(), StageSimulator()
    oracle = exhaustive(asked, StageLatencies(everything))
    found = plan(asked, StageLatencies(usual), effort=ALL)
    assert found.status == oracle.status == "optimal"
    assert (found.latency_s, found.quality) == pytest.approx((oracle.latency_s, oracle.quality))
    assert usual.num_evaluated < everything.num_evaluated / 3
    assert plan(asked, StageLatencies(StageSimulator())).latency_s <= oracle.latency_s * 1.01


def test_bounds_fall_with_replicas_and_rise_with_load() -> None:
    table = generate_scores(1, 60)
    model = catalog.model(table.models[1])
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    tokens = table.prompt_tokens.astype("f8")
    lengths = Lengths(tokens, tokens, table.output_tokens[:, 1].astype("f8"))
    sets = with_shapes(replica_sets(feasible_shapes(model, gpu, engine, 16, 8, 1)[0], 16, 1), [Parallel(2)])
    bounds = StepTimeBounds(gpu, engine, 10)
    by_rate = [bounds.estimate(model, sets, rate, lengths)[0] for rate in (0.5, 5.0, 50.0)]
    for lower in by_rate:
        assert (np.diff(lower) <= 1e-9).all()
    assert (by_rate[0] <= by_rate[1] + 1e-9).all() and by_rate[1].sum() < by_rate[2].sum()


# Baselines.


def latencies() -> StageLatencies:
    return StageLatencies(Queue())


def test_a_model_alone_is_a_cascade_of_one() -> None:
    asked = problem(3, 8, 2.0, QualityFloor(0.0), 1)
    found = stand_alone(asked, "middle", latencies(), NoBounds(), ALL)
    assert [stage.model for stage in found.stages] == ["middle"] and found.stages[0].processing_ratio == 1.0
    assert found.quality == pytest.approx(np.nanmean(asked.scores.scores[:, 1]))
    every = np.ones(len(asked.scores), np.bool_)
    sets = replica_sets(feasible_shapes(MIDDLE, GPU, ENGINE, 8, 4, 4)[0], 8, 2)
    told = [Queue().p95_latency_s(MIDDLE, sets[i], 2.0, asked.lengths(1, every)) for i in range(len(sets))]
    assert found.latency_s == pytest.approx(min(told)), "no judge, and the best of all sets"
    with pytest.raises(HeadwayError, match="did you mean 'middle'"):
        stand_alone(asked, "midle", latencies())


def test_ablations_are_never_better() -> None:
    worse = []
    for seed in range(4):
        asked = problem(3, 12, 4.0, QualityFloor(70.0), seed, num_requests=20)
        best = plan(asked, latencies(), HonestBounds(Queue(), seed), ALL)
        for planner in (uniform_parallelism, uniform_allocation):
            found = planner(asked, latencies(), HonestBounds(Queue(), seed), ALL)
            assert found.objective >= best.objective - 1e-9
            assert sum(stage.num_gpus for stage in found.stages) <= 12
            worse.append(found.objective / best.objective)
            if planner is uniform_allocation:
                shares = equal_shares(12, tuple(stage.num_gpus > 0 for stage in found.stages))
                assert all(stage.num_gpus <= share for stage, share in zip(found.stages, shares, strict=True))
    assert max(worse) > 1.05


def test_equal_shares() -> None:
    assert equal_shares(32, (True, True, True)) == (10, 10, 12), "as in 4.3"
    assert equal_shares(32, (True, True, False)) == (16, 16, 0)
    assert equal_shares(7, (True, False, True)) == (2, 0, 5)
    for num, used in product(range(1, 20), ((True,), (True, True), (True, True, True, True))):
        assert sum(equal_shares(num, used)) == num


def test_planning_by_load_alone_misjudges_lengths() -> None:
    gaps = []
    for seed in range(5):
        asked = problem(3, 12, 4.0, QualityFloor(70.0), seed, num_requests=20)
        best = plan(asked, latencies(), HonestBounds(Queue(), seed), ALL)
        found = cascade_serve(asked, latencies(), HonestBounds(Queue(), seed), ALL)
        if best.status != "infeasible":
            gaps.append(found.latency_s / best.latency_s)
            assert found.quality >= 70 - 1e-9
        assert found.objective >= best.objective - 1e-9 and found.bound_s is None and found.gap is None
        assert all(len(stage.replicas) <= 1 for stage in found.stages)
    assert len(gaps) > 1 and max(gaps) > 1.05
    with pytest.raises(HeadwayError, match="cascade-serve: plans without latencies"):
        cascade_serve(asked.with_target(LatencyBudget(1.0)), latencies())


def test_a_router_in_front_sends_each_request_to_one_model() -> None:
    asked = problem(3, 12, 4.0, QualityFloor(65.0), 2, num_requests=30)
    found = route_llm(asked, asked.scores, latencies(), HonestBounds(Queue(), 0), ALL)
    assert found.pre_routed and found.planner == "route-llm"
    assert sum(stage.processing_ratio for stage in found.stages) == pytest.approx(1.0)
    thresholds = {stage.threshold for stage in found.stages[:-1]}
    assert len(thresholds) == 1
    level = thresholds.pop()
    assert level is not None
    final = asked.scores.final_stage([level, level])
    assert found.quality == pytest.approx(asked.scores.quality_of(final)) and found.quality >= 65
    assert [stage.processing_ratio for stage in found.stages] == pytest.approx([(final == i).mean() for i in range(3)])
    shuffled = asked.scores.take(np.random.default_rng(0).permutation(30))
    misled = route_llm(asked, shuffled, latencies(), HonestBounds(Queue(), 0), ALL)
    assert misled.stages[0].processing_ratio <= found.stages[0].processing_ratio
    with pytest.raises(HeadwayError, match="29 predictions for 30 requests"):
        route_llm(asked, asked.scores.take(np.arange(29)), latencies())


def test_one_known_table_serves_all_planners() -> None:
    asked, known = problem(3, 10, 4.0, QualityFloor(70.0), 3, num_requests=20), latencies()
    first = plan(asked, known, HonestBounds(Queue(), 0))
    num = len(known.known)
    uniform_parallelism(asked, known, HonestBounds(Queue(), 0))
    again = plan(replace(asked), StageLatencies(Queue(), known.known), HonestBounds(Queue(), 0))
    assert again.num_evaluations == 0 and again.stages == first.stages and len(known.known) >= num
