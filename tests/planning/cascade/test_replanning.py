"""Planning anew: what counts as a shift, what changes, and a run in which requests get harder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from headway import catalog
from headway.config.spec import Replan
from headway.control.policies import CascadeConfig, Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.record import Ended, Outcome
from headway.core.task import InlineTask
from headway.metrics.summary import summarize
from headway.planning.cascade import replanning
from headway.planning.cascade.problem import CascadePlan, QualityFloor, Replicas, StagePlan
from headway.planning.cascade.replanning import (
    CascadeSetup,
    Period,
    Replanner,
    detect_shift,
    replica_changes,
    setup_of,
    unit,
)
from headway.policies.cascade.replanned import ReplannedCascade
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.resolve import PolicyChoice
from headway.policies.routing.least_loaded import LeastLoadedRouter
from headway.policies.scaling.replanned import ReplannedScaler
from headway.sim.cluster import simulate
from headway.testing import check_cascade, check_scaler
from headway.workload.quality import Scores
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

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


def pool_of(model: str, tp: int, pp: int = 1) -> str:
    return f"{model} tp {tp}"


GPU = "h100-80gb-sxm"
POOLS = {(name, unit(tp)): pool_of(name, tp) for name in MODELS for tp in (1, 2, 4)}
CONFIG = Replan(quality=80)


def replicas_of(found: CascadePlan) -> Mapping[str, int]:
    return setup_of(found, POOLS).replicas


def replanner(make: Callable[[Scores, float], CascadePlan], expected: Period | None, **changes: Any) -> Replanner:
    config = structs.replace(CONFIG, **changes)
    return Replanner(MODELS, POOLS, setup_of(LIGHT, POOLS), expected, InlineTask(make), config, planning_s=20.0)


LIGHT = plan(60.0, (Replicas(1, 1, 4),), (Replicas(4, 1, 1),))
HEAVY = plan(75.0, (Replicas(1, 1, 2),), (Replicas(4, 1, 1), Replicas(2, 1, 1)))


def feed(planner: Replanner, of: Scores, from_s: float, every_s: float = 0.1) -> None:
    """Requests that both models answer, whether they are audited or not."""
    for i in range(len(of)):
        id, at_s = round(from_s * 1000) + i, from_s + i * every_s
        planner.arrived(SimpleNamespace(id=id, prompt_tokens=int(of.prompt_tokens[i])), at_s)  # type: ignore[arg-type]
        for stage, name in enumerate(MODELS):
            tokens = int(of.output_tokens[i, stage])
            planner.ended(Ended(id, Outcome.FINISHED, name, 0, 0, at_s, None, at_s + 1, 9, tokens))
            planner.scored(id, stage, float(of.scores[i, stage]))


def test_what_has_shifted_is_named_and_chance_is_not() -> None:
    before = period(scores())
    assert [detect_shift(before, period(scores(seed=i))) for i in range(1, 40)] == [None] * 39
    assert detect_shift(before, period(scores(seed=1), 6.5)) == "rate: +30%"
    assert detect_shift(before, period(scores(seed=1, harder=15.0))) == "scores of llama-3-8b"
    longer = structs.replace(period(scores(seed=1)), prompt_tokens=(400.0,) * 50)
    assert detect_shift(before, longer) == "prompt lengths"


def test_replicas_that_both_plans_have_are_no_change() -> None:
    light, heavy = setup_of(LIGHT, POOLS), setup_of(HEAVY, POOLS)
    assert replica_changes(light, light) == {}
    assert replica_changes(light, heavy) == {pool_of(MODELS[0], 1): -2, pool_of(MODELS[1], 2): 1}


def test_a_plan_is_made_from_the_audited_requests_once_the_planning_time_is_over() -> None:
    asked: list[tuple[Scores, float]] = []

    def make(found: Scores, rate_rps: float) -> CascadePlan:
        asked.append((found, rate_rps))
        return HEAVY

    planner = replanner(make, period(scores()))
    hard = scores(3000, harder=20.0, seed=3)
    feed(planner, hard, 0.0)
    assert planner.replicas(299.0) == replicas_of(LIGHT) and not asked
    assert planner.replicas(300.0) == replicas_of(LIGHT) and not asked
    assert planner.replicas(320.0) == replicas_of(HEAVY)
    (found, rate_rps), (made,) = asked[0], planner.new_plans
    assert rate_rps == pytest.approx(10.0) and 90 < len(found) < 210  # 5% of 3,000
    rows = {tuple(row) for row in hard.scores.tolist()}
    assert all(tuple(row) in rows for row in found.scores.tolist())
    assert made.changes == replica_changes(setup_of(LIGHT, POOLS), setup_of(HEAVY, POOLS)) and made.why.startswith(
        "rate"
    )
    assert planner.thresholds() == (60.0,)
    planner.adopt()
    assert planner.thresholds() == (75.0,)


def test_too_few_answers_make_no_plan() -> None:
    planner = replanner(lambda found, rate_rps: HEAVY, period(scores()))
    planner.arrived(SimpleNamespace(id=0, prompt_tokens=9), 0.0)  # type: ignore[arg-type]
    for now in (300.0, 320.0, 600.0, 620.0):
        assert planner.replicas(now) == replicas_of(LIGHT)


def test_what_is_too_little_for_one_period_counts_in_the_next() -> None:
    planner = replanner(lambda found, rate_rps: HEAVY, None, every_s=60.0, audit_share=1.0, least_audited=40)
    for minute, harder in enumerate((0.0, 0.0, 30.0, 30.0)):
        feed(planner, scores(25, harder=harder, seed=minute), 60.0 * minute, every_s=2.0)
        planner.replicas(60.0 * (minute + 1))
        known = 0 if planner.expected is None else len(planner.expected.scores)
        assert known == (0, 50, 50, 50)[minute] and not planner.new_plans
    planner.replicas(260.0)
    assert [each.why for each in planner.new_plans] == ["scores of llama-3-8b"]


def test_a_period_that_does_not_end_takes_no_more_and_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of it is even over all that came, and its rate is that of all."""
    monkeypatch.setattr(replanning, "MOST_KEPT", 64)
    made: list[float] = []

    def make(found: Scores, rate_rps: float) -> CascadePlan:
        made.append(rate_rps)
        return LIGHT

    planner = replanner(make, period(scores(), 1.0), audit_share=1.0)
    for i in range(5000):
        planner.arrived(SimpleNamespace(id=i, prompt_tokens=i), i * 0.05)  # type: ignore[arg-type]
        assert len(planner._prompts) <= 64
    kept = planner._prompts.between(0.0)
    assert kept == list(range(0, 5000, int(kept[1]))) and len(kept) >= 32
    feed(planner, scores(), 250.0)
    planner.replicas(300.0)
    planner.replicas(330.0)
    assert made and made[0] == pytest.approx((5000 + 200) / 300.0)


def test_who_never_gets_through_is_not_waited_for_for_ever() -> None:
    """A request that no judge could score, say."""
    planner = replanner(lambda found, rate_rps: HEAVY, period(scores()), every_s=10.0, audit_share=1.0)
    planner.arrived(SimpleNamespace(id=7, prompt_tokens=9), 0.0)  # type: ignore[arg-type]
    planner.replicas(100.0)
    assert planner.audits(7)
    planner.replicas(200.0)
    assert not planner.audits(7)


def test_a_plan_that_cannot_be_made_leaves_everything_as_it_is() -> None:
    def make(found: Scores, rate_rps: float) -> CascadePlan:
        raise HeadwayError("too much for 8 GPUs")

    planner = replanner(make, period(scores()))
    feed(planner, scores(3000, harder=20.0, seed=3), 0.0)
    planner.replicas(300.0)
    assert planner.replicas(320.0) == replicas_of(LIGHT) and planner.thresholds() == (60.0,)
    assert planner.messages == ["no plan at 320 s (rate: +100%): too much for 8 GPUs"] and not planner.new_plans
    feed(planner, scores(3000, harder=20.0, seed=4), 300.0)
    planner.replicas(600.0)
    planner.replicas(620.0)
    assert len(planner.messages) == 2, "the next period is another chance"


class Slow:
    """A task that ends when the test says so."""

    def __init__(self) -> None:
        self.is_busy, self.num_evaluated = False, 0

    def start(self, *arguments: Any) -> None:
        assert not self.is_busy
        self.is_busy, self.num_evaluated = True, self.num_evaluated + 1

    def result(self) -> Any:
        return HEAVY


def test_a_plan_that_comes_late_is_taken_when_it_is_there_and_no_other_is_begun_before() -> None:
    task = Slow()
    planner = Replanner(MODELS, POOLS, setup_of(LIGHT, POOLS), period(scores()), task, CONFIG)
    for i in range(3):
        feed(planner, scores(3000, harder=20.0, seed=i), 300.0 * i)
        assert planner.replicas(300.0 * (i + 1)) == replicas_of(LIGHT)
    assert task.num_evaluated == 1 and not planner.new_plans
    task.is_busy = False
    assert planner.replicas(902.0) == replicas_of(HEAVY) and planner.new_plans[0].at_s == 902.0


@pytest.mark.ci
def test_the_pair_keeps_to_what_every_policy_must() -> None:
    """Within bounds, the same again, picklable, nothing kept, nothing reached for."""
    wanted = CascadeSetup((50.0, 60.0, 70.0, 80.0), {"a": 2, "b": 1})

    def planner() -> Replanner:
        config = Replan(quality=80, every_s=5.0, audit_share=0.5)
        return Replanner(tuple("mnopq"), {}, wanted, None, InlineTask(_no_plan), config)

    check_cascade(lambda: ReplannedCascade(planner()))
    check_scaler(lambda: ReplannedScaler(planner(), gpus={"h100": 1000}))


def _no_plan(found: Scores, rate_rps: float) -> CascadePlan:
    raise HeadwayError("none")


class Watched(ReplannedScaler):
    """Notes how many GPUs are in use."""

    most = 0
    last: Mapping[str, int] = {}

    def scale(self, view: Any) -> Mapping[str, int]:
        used = sum(
            sum(pool.gpus.values()) * (len(pool.replicas) + pool.num_starting) for pool in view.pools
        )  # each replica stands alone here
        Watched.most = max(Watched.most, used)
        Watched.last = {pool.name: pool.num_serving for pool in view.pools}
        serving = {pool.model for pool in view.pools if pool.num_serving}
        assert serving == set(MODELS)
        return super().scale(view)


@pytest.mark.ci
@pytest.mark.parametrize("after", [HEAVY, plan(50.0, (Replicas(2, 1, 2),), (Replicas(2, 1, 2),))])
def test_a_run_takes_a_new_plan_up_while_it_serves(after: CascadePlan) -> None:
    gpu, engine = catalog.gpu("h100-80gb-sxm"), catalog.engine("vllm")
    there = replicas_of(LIGHT)
    pools = tuple(
        Pool(pool, catalog.model(name), gpu, engine, Parallel(part.tp), there[pool], min_replicas=0, start_s=5.0)
        for (name, (part,)), pool in POOLS.items()
        if (name, part.tp) != ("llama-3-70b", 1)
    )
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
    planner = replanner(lambda found, rate_rps: after, period(scores(), 10.0), every_s=100.0)
    cascade = CascadeConfig("cascade", MODELS, PolicyChoice("following", ReplannedCascade, {"planner": planner}))
    scaler = PolicyChoice("rollout", Watched, {"planner": planner, "gpus": {GPU: 8}})
    Watched.most = 0
    done = summarize(
        simulate(
            Fleet(pools),
            TraceSource(rows),
            Policies(LeastLoadedRouter, FcfsOrdering, cascade=cascade, scaler=scaler),
            seed=0,
        )
    )
    assert done.num_completed == num
    assert [each.why for each in planner.new_plans][:1] == ["scores of llama-3-8b"]
    assert Watched.most <= 8 and {**replicas_of(after), **Watched.last} == replicas_of(after)
    assert planner.thresholds() == after.thresholds


def test_what_came_since_the_last_change_is_planned_for() -> None:
    """Requests get harder 200 s into a period of 300 s: the mixture is no plan's business."""
    asked: list[Scores] = []

    def make(found: Scores, rate_rps: float) -> CascadePlan:
        asked.append(found)
        return HEAVY

    planner = replanner(make, period(scores(), 10.0), audit_share=0.2)
    feed(planner, scores(3000, seed=1), 0.0)
    planner.replicas(300.0)
    assert planner.expected is not None and len(planner.expected.first_scores) == 3000 and not asked
    feed(planner, scores(2000, seed=2), 300.0)
    feed(planner, scores(1000, harder=30.0, seed=3), 500.0)
    planner.replicas(600.0)
    assert planner.replicas(620.0) == replicas_of(HEAVY)
    hard = {tuple(row) for row in scores(1000, harder=30.0, seed=3).scores.tolist()}
    assert all(tuple(row) in hard for row in asked[0].scores.tolist()) and 100 < len(asked[0]) < 200


def test_plans_are_made_with_the_observed_corrections() -> None:
    asked: list[tuple[object, ...]] = []

    def make(found: Scores, rate_rps: float, *more: object) -> CascadePlan:
        asked.append(more)
        return HEAVY

    corrections: dict[str, tuple[float, float]] = {}
    planner = replanner(make, period(scores(), 10.0), audit_share=0.2)
    planner.use_corrections(lambda: corrections)
    for start_s, harder in ((0.0, 30.0), (620.0, 0.0)):
        feed(planner, scores(3000, harder=harder, seed=int(start_s)), start_s)
        planner.replicas(start_s + 320.0)
        planner.replicas(start_s + 340.0)
        corrections["small"] = (1.1, 1.0)
    assert asked == [(), ({"small": (1.1, 1.0)},)]


def test_audited_requests_stand_for_all_first_scores() -> None:
    """A sample that happens to be easy is planned for as what all requests are."""
    audited, every = scores(100, seed=5), scores(4000, harder=10.0, seed=6)
    seen = structs.replace(period(audited), first_scores=tuple(every.scores[:, 0].tolist()))
    before = abs(float(audited.scores[:, 0].mean() - every.scores[:, 0].mean()))
    after = abs(float(seen.reweighted_scores.scores[:, 0].mean() - every.scores[:, 0].mean()))
    assert len(seen.reweighted_scores) == 100 and after < before / 3
    assert period(audited).reweighted_scores is audited


# Scaling between plans.


class Wishes:
    """A scaler that says what the test says."""

    interval_s = 1.0

    def __init__(self, wishes: dict[str, int]) -> None:
        self.wishes = wishes

    def scale(self, view: Any) -> Mapping[str, int]:
        return self.wishes


class FixedPlans:
    """A planner whose newest plan has these replicas."""

    def __init__(self, **replicas: int) -> None:
        self.planned = replicas

    def replicas(self, now: float) -> Mapping[str, int]:
        return self.planned

    def adopt(self) -> None: ...


def pools_view(now: float, models: Mapping[str, str], **serving: int) -> Any:
    """Pools of replicas with one GPU each."""
    pools = [
        SimpleNamespace(
            name=name,
            model=models[name],
            gpus={GPU: 1},
            num_serving=num,
            num_starting=0,
            num_down=0,
            min_replicas=0,
            max_replicas=100,
            replicas=[SimpleNamespace(combo=i) for i in range(num)],
        )
        for name, num in serving.items()
    ]
    return SimpleNamespace(now=now, pools=pools)


def test_between_plans_the_scaler_has_the_plans_pools_within_their_gpus() -> None:
    wished: dict[str, int] = {}
    models = {"a": "small", "b": "large", "b-tp2": "large", "other": "chat"}
    plans = FixedPlans(a=2, b=3, **{"b-tp2": 0})
    scaler = ReplannedScaler(plans, gpus={GPU: 6}, scaler=lambda: Wishes(wished))  # type: ignore[arg-type]

    def asked(at_s: float, a: int, b: int, /, **wishes: int) -> Mapping[str, int]:
        wished.clear()
        wished.update(wishes)
        return scaler.scale(pools_view(at_s, models, a=a, b=b, other=1, **{"b-tp2": 0}))

    assert asked(0, 2, 2, a=1) == {"a": 2, "b": 3, "b-tp2": 0}, "the plan is rolled out first"
    assert asked(1, 2, 3) == {"a": 2, "b": 3, "b-tp2": 0}
    assert asked(2, 2, 3, a=5, other=3) == {"a": 3, "b": 3, "b-tp2": 0, "other": 3}, "one GPU is free"
    assert asked(3, 3, 3) == {"a": 3, "b": 3, "b-tp2": 0}, "and stays"
    assert asked(4, 3, 3, b=0, **{"b-tp2": 2}) == {"a": 3, "b": 1, "b-tp2": 0}, "one of each stays, no shape is added"
    plans.planned = {"a": 1, "b": 4, "b-tp2": 0}
    assert asked(5, 3, 1, a=3) == {"a": 2, "b": 3, "b-tp2": 0}, "a new plan sets them anew"
    assert asked(6, 2, 3, a=3) == {"a": 1, "b": 4, "b-tp2": 0}
