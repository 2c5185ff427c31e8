"""Candidates of a search for rehearsals, and the weighted sum of the stages' latencies."""

from __future__ import annotations

import pytest
from msgspec import structs

from headway import catalog
from headway.core.fleet import Model
from headway.planning.cascade.candidates import candidates, total_latency_s
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency_bounds import NoBounds
from headway.planning.cascade.problem import CascadeProblem, LatencyBudget, Lengths, QualityFloor, ReplicaSet, Target
from headway.planning.cascade.search import Effort, Search
from headway.workload.quality_traces import generate_scores


class Formula:
    """Work over GPUs: the larger the model, the slower."""

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        size = {"llama-3-8b": 1.0, "llama-3-70b": 4.0}[model.name]
        return size * rate_rps * float(lengths.output_tokens.mean()) / 1000 / replicas.num_gpus**0.9


def problem(target: Target) -> CascadeProblem:
    models = tuple(catalog.model(name) for name in ("llama-3-8b", "llama-3-70b"))
    scores = generate_scores(1, 80, cascade="llama")
    return CascadeProblem(
        models, catalog.gpu("h100-80gb-sxm"), catalog.engine("vllm"), 8, 10.0, scores, target, max_kinds=1
    )


@pytest.mark.parametrize("target", [QualityFloor(75.0), LatencyBudget(6.0)])
def test_candidates_are_plans_of_their_own_that_begin_with_the_answer(target: Target) -> None:
    asked = problem(target)
    search = Search(asked, StageLatencies(Formula()), NoBounds(), Effort(stable_rounds=4))
    result = search.run(target)
    found = candidates(search, result, "test", 6)
    assert len(found) > 1 and len({(each.thresholds, each.stages) for each in found}) == len(found)
    assert found[0].objective == min(each.objective for each in found)
    for each in found:
        assert sum(stage.num_gpus for stage in each.stages) <= 8
        final = asked.scores.final_stage(each.thresholds)
        assert each.quality == pytest.approx(asked.scores.quality_of(final))
        assert each.latency_s == max(stage.p95_latency_s or 0.0 for stage in each.stages)
    if isinstance(target, QualityFloor):
        good = search.routings.quality >= target.q_min
        least = search.routings.ratios[good, 1].min()
        # One model's answers are about as long as another's, so the least work is the least share that is sent on.
        assert min(each.stages[1].processing_ratio for each in found if each.quality >= 75.0) <= least + 0.02


def test_the_sum_along_the_way_counts_rare_stages_less() -> None:
    """Where 1% of the requests reach a stage, it is a fifth of what it were if the slowest 5% went through it."""
    asked = problem(QualityFloor(80.0))
    search = Search(asked, StageLatencies(Formula()), NoBounds(), Effort(stable_rounds=4))
    found = candidates(search, search.run(asked.target), "test", 6)[0]
    first = structs.replace(found.stages[0], processing_ratio=1.0, p95_latency_s=10.0)
    some, few, none = (
        structs.replace(found.stages[1], processing_ratio=ratio, p95_latency_s=p95_s)
        for ratio, p95_s in ((0.2, 40.0), (0.01, 8.0), (0.0, None))
    )
    assert total_latency_s(structs.replace(found, stages=(first, some))) == pytest.approx(50.0)
    assert total_latency_s(structs.replace(found, stages=(first, few))) == pytest.approx(11.6)
    assert total_latency_s(structs.replace(found, stages=(first, none))) == pytest.approx(10.0)


def test_the_least_work_by_mean_answers_is_a_candidate() -> None:
    """The lengths of a small sample may favour a routing by chance; with mean lengths, shares alone decide."""
    asked = problem(QualityFloor(75.0))
    search = Search(asked, StageLatencies(Formula()), NoBounds(), Effort(stable_rounds=1))
    found = candidates(search, search.run(asked.target), "test", 2)
    good = search.routings.quality >= 75.0
    least = search.routings.ratios[good, 1].min()
    assert min(each.stages[1].processing_ratio for each in found if each.quality >= 75.0) == pytest.approx(least)


def test_refined_routings_may_have_two_shapes_and_are_never_worse() -> None:
    asked = problem(QualityFloor(75.0))
    effort = Effort(stable_rounds=2, gap=0.05, max_evaluations=5)
    plain, refined = (
        Search(asked, StageLatencies(TwoShapes()), NoBounds(), structs.replace(effort, num_refined=num))
        for num in (0, 2)
    )
    before, after = (candidates(search, search.run(asked.target), "test", 2)[0] for search in (plain, refined))
    assert after.latency_s < before.latency_s
    assert any(len(stage.replicas) == 2 for stage in after.stages)


class TwoShapes(Formula):
    """Replicas of two shapes do more together."""

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        return super().p95_latency_s(model, replicas, rate_rps, lengths) / len(replicas.parts)
