"""Planning anew: what counts as a shift, what changes, and a run in which requests get harder."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from headway import catalog
from headway.control.policies import CascadeOf, Policies
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.record import Ended, Outcome
from headway.metrics.summary import summarize
from headway.planner.cascade.plan import CascadePlan, StagePlan
from headway.planner.cascade.problem import QualityFloor, Replicas
from headway.planner.cascade.replanning import Period, Replanner, changes, pool_of, replicas_of, shift
from headway.policies.cascade.replanned import Replanned as Following
from headway.policies.ordering.fcfs import Fcfs
from headway.policies.resolve import Choice
from headway.policies.routing.least_loaded import LeastLoaded
from headway.policies.scaling.replanned import Replanned as Rollout
from headway.sim.cluster import simulate
from headway.workload.quality import Scores
from headway.workload.table import Workload
from headway.workload.trace import TraceSource

MODELS = ("llama-3-8b", "llama-3-70b")


def scores(num: int = 200, harder: float = 0.0, seed: int = 0) -> Scores:
    random = np.random.default_rng(seed)
    first = np.clip(random.uniform(40, 100, num) - harder, 0, 100)
    table = np.stack([first, np.full(num, 95.0)], axis=1)
    return Scores(MODELS, table, random.integers(50, 150, (num, 2)), random.integers(50, 150, num))


def period(of: Scores, rate_rps: float = 5.0) -> Period:
    return Period(rate_rps, tuple(of.prompt_tokens[:50].astype(float)), of)


def plan(threshold: float, small: tuple[Replicas, ...], large: tuple[Replicas, ...]) -> CascadePlan:
    stages = tuple(
        StagePlan(name, sum(part.num_gpus for part in parts), parts, level, 1.0, 5.0, 1.0)
        for name, parts, level in zip(MODELS, (small, large), (threshold, None), strict=True)
    )
    return CascadePlan(
        "converged", "test", QualityFloor(80), stages, 8, 8, 1.0, None, 80.0, 1.0, 95.0, 70.0, (), 0, 0, 0, ""
    )


LIGHT = plan(60.0, (Replicas(1, 1, 4),), (Replicas(4, 1, 1),))
HEAVY = plan(75.0, (Replicas(1, 1, 2),), (Replicas(4, 1, 1), Replicas(2, 1, 1)))


def test_what_has_shifted_is_named_and_chance_is_not() -> None:
    before = period(scores())
    assert [shift(before, period(scores(seed=i))) for i in range(1, 40)] == [None] * 39
    assert shift(before, period(scores(seed=1), 6.5)) == "rate: +30%"
    assert shift(before, period(scores(seed=1, harder=15.0))) == "scores of llama-3-8b"
    longer = structs.replace(period(scores(seed=1)), prompt_tokens=(400.0,) * 50)
    assert shift(before, longer) == "prompt lengths"


def test_replicas_that_both_plans_have_are_no_change() -> None:
    assert changes(LIGHT, LIGHT) == {}
    assert changes(LIGHT, HEAVY) == {pool_of(MODELS[0], 1, 1): -2, pool_of(MODELS[1], 2, 1): 1}


def test_a_plan_is_made_from_the_audited_requests_once_the_planning_time_is_over() -> None:
    asked: list[tuple[Scores, float]] = []

    def make(found: Scores, rate_rps: float) -> CascadePlan:
        asked.append((found, rate_rps))
        return HEAVY

    planner = Replanner(LIGHT, period(scores()), make, period_s=300.0, planning_s=20.0)
    hard = scores(3000, harder=20.0, seed=3)
    for i in range(3000):
        planner.arrived(SimpleNamespace(id=i, prompt_tokens=int(hard.prompt_tokens[i])), i / 10)  # type: ignore[arg-type]
        for stage, name in enumerate(MODELS):
            tokens = int(hard.output_tokens[i, stage])
            planner.ended(Ended(i, Outcome.FINISHED, name, 0, 0, i / 10, None, i / 10 + 1, 9, tokens))
            planner.scored(i, stage, float(hard.scores[i, stage]))
    assert planner.replicas(299.0) == replicas_of(LIGHT) and not asked
    assert planner.replicas(300.0) == replicas_of(LIGHT) and not asked
    assert planner.replicas(320.0) == replicas_of(HEAVY)
    (found, rate_rps), (made,) = asked[0], planner.made
    assert rate_rps == pytest.approx(10.0) and 90 < len(found) < 210  # 5% of 3,000
    rows = {tuple(row) for row in hard.scores.tolist()}
    assert all(tuple(row) in rows for row in found.scores.tolist())
    assert made.changes == changes(LIGHT, HEAVY) and made.why.startswith("rate")
    assert planner.thresholds() == (60.0,)
    planner.adopt()
    assert planner.thresholds() == (75.0,)


def test_too_few_answers_make_no_plan() -> None:
    planner = Replanner(LIGHT, period(scores()), lambda found, rate_rps: HEAVY)
    planner.arrived(SimpleNamespace(id=0, prompt_tokens=9), 0.0)  # type: ignore[arg-type]
    for now in (300.0, 320.0, 600.0, 620.0):
        assert planner.replicas(now) == replicas_of(LIGHT)


class Watched(Rollout):
    """Notes how many GPUs are in use."""

    most = 0
    last: Mapping[str, int] = {}

    def scale(self, view: Any) -> Mapping[str, int]:
        used = sum(
            sum(pool.gpus.values()) * (len(pool.replicas) + pool.num_starting) for pool in view.pools
        )  # each replica stands alone here
        Watched.most = max(Watched.most, used)
        Watched.last = {pool.name: pool.num_serving for pool in view.pools if pool.num_serving}
        serving = {pool.model for pool in view.pools if pool.num_serving}
        assert serving == set(MODELS)
        return super().scale(view)


@pytest.mark.parametrize("after", [HEAVY, plan(50.0, (Replicas(2, 1, 2),), (Replicas(2, 1, 2),))])
def test_a_run_takes_a_new_plan_up_while_it_serves(after: CascadePlan) -> None:
    gpu, engine = catalog.gpu("h100-80gb-sxm"), catalog.engine("vllm")
    shapes = sorted({(s.model, p.tp) for each in (LIGHT, HEAVY, after) for s in each.stages for p in s.replicas})
    there = replicas_of(LIGHT)
    pools = tuple(
        Pool(pool_of(name, tp, 1), catalog.model(name), gpu, engine, Parallel(tp), there.get(pool_of(name, tp, 1), 0),
             min_replicas=0, start_s=5.0)
        for name, tp in shapes
    )  # fmt: skip
    hard, num = scores(2000, harder=20.0, seed=4), 2000
    rows = Workload(
        {
            "arrival_s": np.arange(num) / 10,
            "prompt_tokens": hard.prompt_tokens,
            "output_tokens": hard.output_tokens[:, 0],
            **{f"quality:{name}": hard.scores[:, i] for i, name in enumerate(MODELS)},
            **{f"output_tokens:{name}": hard.output_tokens[:, i] for i, name in enumerate(MODELS)},
        }
    )
    planner = Replanner(LIGHT, period(scores(), 10.0), lambda found, rate_rps: after, period_s=100.0)
    cascade = CascadeOf("cascade", MODELS, Choice("following", Following, {"planner": planner}))
    scaler = Choice("rollout", Watched, {"planner": planner, "num_gpus": 8})
    Watched.most = 0
    done = summarize(
        simulate(Fleet(pools), TraceSource(rows), Policies(LeastLoaded, Fcfs, cascade=cascade, scaler=scaler), seed=0)
    )
    assert done.num_completed == num
    assert [each.why for each in planner.made][:1] == ["scores of llama-3-8b"]
    assert Watched.most <= 8 and dict(Watched.last) == replicas_of(after)
    assert planner.thresholds() == after.thresholds
