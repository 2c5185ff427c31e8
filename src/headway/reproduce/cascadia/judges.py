"""Measurements of weaker judges (K), a trained judge (N), a router in front (I) and prefix caches (M)."""

from __future__ import annotations

from dataclasses import replace

from headway.planning.cascade import planners
from headway.planning.cascade.cascadia import plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.planners import EFFORT
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import LatencyBudget, QualityFloor
from headway.planning.cascade.regret import JudgeError, regrets
from headway.planning.cascade.rehearsal import rehearse, tighten_until_met
from headway.planning.cascade.stage_simulator import bounds_of, evaluator_of
from headway.reproduce.cascadia.runs import throughput_rps
from headway.reproduce.cascadia.setup import planning_case
from headway.reproduce.tasks import Measurement
from headway.workload.quality import Scores
from headway.workload.quality_judges import GPT_4O_MINI, LLAMA_70B, JudgeNoise, LinearJudge, misjudged, trained

NOISE = 15.0
"""Points by which the predictions of a router are off: the default of the policy `pre-routed`."""
HIT_RATE = 0.5
"""Of prompt tokens, where prefix caching is on."""
ROUNDS = 8
OFF = (JudgeError(-9.0, 8.0), JudgeError(9.0, 8.0))
"""Judges whose scores are too low, as those of Table 6's weaker judges at a score of 96, or as much too high."""


def weaker(rate_rps: float, seed: int, quick: bool) -> Measurement:
    """The Llama cascade on trace 1 at quality 80, planned by the scores of each judge (appendix K)."""
    case = planning_case("llama", 1, 80.0, quick, rate_rps, seed)
    latencies = StageLatencies(evaluator_of(case))
    reference = case.problem.scores
    results: Measurement = {}
    for name, error in (("gpt-4o", None), ("gpt-4o-mini", GPT_4O_MINI), ("llama-3.1-70b", LLAMA_70B)):
        scores = reference if error is None else misjudged(reference, error, seed)
        chosen = _plan(case, scores, latencies)
        results[name] = {
            "share": chosen.stages[-1].processing_ratio,
            "latency_s": chosen.latency_s,
            "gpus": chosen.stages[-1].num_gpus,
            "quality": reference.quality_of(scores.final_stage(chosen.thresholds)),
        }
    return results


def wrong(rate_rps: float, seed: int, quick: bool) -> Measurement:
    """The loss of plans with a judge that scores too low or too high: Llama cascade, trace 1, quality 80."""
    case = planning_case("llama", 1, 80.0, quick, rate_rps, seed)
    low, high = regrets(case, StageLatencies(evaluator_of(case)), OFF)
    informed = [each.informed.rehearsed for each in (low, high)]
    return {
        "slower_s": low.by_judge.slower_s,
        "short_points": high.by_judge.short_points,
        "kept": all(rehearsed.meets(case.problem.target) for rehearsed in informed),
        "runs": [[each.rehearsed.quality, each.rehearsed.p95_s, each.short_points, each.slower_s]
                 for regret in (low, high) for each in (regret.by_judge, regret.by_truth, regret.informed)],
    }  # fmt: skip


def _plan(case: PlanningRequest, scores: Scores, latencies: StageLatencies) -> CascadePlan:
    return plan(replace(case.problem, scores=scores), latencies, bounds_of(case), EFFORT)


def trained_judge(rate_rps: float, seed: int, quick: bool) -> Measurement:
    """A judge trained on 70% of the answers: the reference's quality on the other 30%, routed by it (N)."""
    case = planning_case("llama", 1, 80.0, quick, rate_rps, seed)
    unseen, judged = trained(case.problem.scores, LinearJudge(), seed=seed)
    chosen = _plan(case, judged, StageLatencies(evaluator_of(case)))
    return {"quality": unseen.quality_of(judged.final_stage(chosen.thresholds)), "asked": 80.0}


def route_llm(trace: int, rate_rps: float, q_min: float, seeds: list[int], quick: bool) -> Measurement:
    """A router in front of the Llama models, whose target rises until a rehearsal keeps the quality (appendix I)."""
    case = planning_case("llama", trace, q_min, quick, rate_rps)
    latencies, target, last = StageLatencies(evaluator_of(case)), q_min, None
    predicted = misjudged(case.problem.scores, JudgeNoise(spread=NOISE))
    for _ in range(ROUNDS):
        problem = case.problem.with_target(QualityFloor(min(target, 100.0)))
        last = planners.route_llm(problem, predicted, latencies, bounds_of(case), EFFORT)
        rehearsed = rehearse(case, last)
        if rehearsed.quality is None or rehearsed.quality >= q_min:
            break
        target += q_min - rehearsed.quality + 0.05
    assert last is not None
    runs = [rehearse(case, last, seed) for seed in seeds]
    return {
        "p95_s": [rehearsed.p95_s for rehearsed in runs],
        "quality": [rehearsed.quality for rehearsed in runs],
        "throughput_rps": [throughput_rps(case, last, seed) for seed in seeds],
    }


def prefixes(rate_rps: float, seed: int, quick: bool) -> Measurement:
    """Plans with and without half of each prompt in a cache (appendix M)."""
    case = planning_case("llama", 1, 80.0, quick, rate_rps, seed)
    latencies = StageLatencies(evaluator_of(case))
    without, with_ = (
        plan(replace(case.problem, prefix_hit_rate=rate), latencies, bounds_of(case), EFFORT)
        for rate in (0.0, HIT_RATE)
    )
    same = [stage.num_gpus for stage in without.stages] == [stage.num_gpus for stage in with_.stages]
    return {"saved": 1 - with_.latency_s / without.latency_s, "same_gpus": same}


def budget(q_min: float, p95_s: float, rate_rps: float, quick: bool) -> Measurement:
    """The best quality within the latency of a plan that was made for a quality (appendix C)."""
    case = planning_case("deepseek", 1, q_min, quick, rate_rps)
    case = replace(case, problem=case.problem.with_target(LatencyBudget(p95_s)))
    rehearsed = tighten_until_met(case, StageLatencies(evaluator_of(case))).rehearsed
    return {"quality": rehearsed.quality, "p95_s": rehearsed.p95_s}
