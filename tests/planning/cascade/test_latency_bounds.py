"""Lower bounds of latencies, against simulations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway import catalog
from headway.control.policies import Policies
from headway.core.fleet import Fleet, Model, Pool
from headway.core.record import Outcome
from headway.perf.step import StepModel
from headway.planning.cascade.candidates import plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency_bounds import StepTimeBounds
from headway.planning.cascade.problem import CascadeProblem, Lengths, QualityFloor, Replicas, ReplicaSet
from headway.planning.cascade.replica_sets import feasible_shapes, replica_sets, with_units
from headway.planning.cascade.search import Effort
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.least_loaded import LeastLoadedRouter
from headway.sim.cluster import simulate
from headway.workload.quality_traces import generate_scores
from headway.workload.sources import TraceSource
from headway.workload.table import Workload
from headway_papers.reproduce.cascadia.exhaustive import exhaustive

ALL = Effort(stable_rounds=None, gap=0.0)


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
    lower, estimate = StepTimeBounds(gpu, engine, rounds).estimate(model, sets, rate_rps, lengths)
    picked = np.random.default_rng(stage).choice(len(sets), 6, replace=False).tolist()
    one_kind = [i for i in range(len(sets)) if (sets.counts[i] > 0).sum() == 1]
    picked += one_kind[:: max(1, len(one_kind) // 4)]
    truth = np.array([simulated_p95_s(model, sets[i], rate_rps, lengths, rounds) for i in picked])
    share = lower[picked] / truth
    assert share.max() <= 1.0, "a bound above the truth"
    assert np.median(share[6:]) > (0.35 if stage == 2 else 0.6), "a bound that says nothing"
    assert (estimate >= lower - 1e-9).all()


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
    sets = with_units(
        replica_sets(feasible_shapes(model, gpu, engine, 16, 8, 1)[0], 16, 1), {(Replicas(2, 1, 1),): None}
    )
    bounds = StepTimeBounds(gpu, engine, 10)
    by_rate = [bounds.estimate(model, sets, rate, lengths)[0] for rate in (0.5, 5.0, 50.0)]
    for lower in by_rate:
        assert (np.diff(lower) <= 1e-9).all()
    assert (by_rate[0] <= by_rate[1] + 1e-9).all() and by_rate[1].sum() < by_rate[2].sum()


@pytest.mark.parametrize("rate_rps", [1.0, 20.0, 200.0])
def test_counts_that_searches_share_do_not_depend_on_who_asks_first(rate_rps: float) -> None:
    """Searches with few and with many replicas of a shape, and loads in turns, find what each would find alone."""
    table = generate_scores(1, 60)
    model = catalog.model(table.models[1])
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    tokens = table.prompt_tokens.astype("f8")
    loads = [Lengths(tokens[:num], tokens[:num], table.output_tokens[:num, 1].astype("f8")) for num in (60, 40)]
    every = replica_sets(feasible_shapes(model, gpu, engine, 16, 8, 1)[0], 16, 2)
    few = every.select((every.counts <= 1).all(axis=1))
    shared = StepTimeBounds(gpu, engine, 10)
    for sets, lengths in ((few, loads[0]), (every, loads[1]), (every, loads[0]), (few, loads[1]), (few, loads[0])):
        found = shared.estimate(model, sets, rate_rps, lengths)
        alone = StepTimeBounds(gpu, engine, 10).estimate(model, sets, rate_rps, lengths)
        for values, expected in zip(found, alone, strict=True):
            assert values.tolist() == pytest.approx(expected.tolist(), rel=1e-9)
