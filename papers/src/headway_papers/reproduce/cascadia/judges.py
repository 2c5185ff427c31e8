"""Measurements of judges (H, K, N), of a router in front of the models (I), and of prefix caches (M)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headway import catalog
from headway.control.policies import Policies
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.record import Cause, Outcome, Records
from headway.metrics.columns import floats, ints
from headway.perf.speculation import step_model
from headway.planning.cascade import planners
from headway.planning.cascade.candidates import best_plan_of, plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of, evaluator_of
from headway.planning.cascade.planners import EFFORT
from headway.planning.cascade.problem import CascadePlan, JudgeError, LatencyBudget, QualityFloor
from headway.planning.cascade.regret import informed_routings, regrets
from headway.planning.cascade.rehearsal import rehearse, simulated, tighten_until_met
from headway.planning.cascade.request import PlanningRequest
from headway.planning.cascade.search import Search
from headway.sim.cluster import simulate
from headway.sim.replica_resources import Line
from headway.workload.quality import Scores
from headway.workload.quality_judges import GPT_4O_MINI, LLAMA_70B, JudgeNoise, LinearJudge, misjudged, trained
from headway.workload.sources import TraceSource
from headway.workload.table import LENGTH, Workload
from headway_papers.reproduce.cascadia.runs import run
from headway_papers.reproduce.cascadia.setup import NUM_GPUS, changed, planning_case, with_fresh_requests
from headway_papers.reproduce.tasks import Measurement

NOISE = 15.0
"""Error of a router's predictions in points: the default of the policy `pre-routed`."""
NOISES = (5.0, 10.0, NOISE, 20.0, 30.0)
HIT_RATE = 0.5
"""Share of prompt tokens in the prefix cache, if it is on."""
ERRORS = (5.0, 10.0, 20.0)
"""Additional errors of a trained judge's scores, in points."""
ROUNDS = 6
OFF = (JudgeError(-9.0, 8.0), JudgeError(9.0, 8.0))
"""Judges with scores that are too low, as those of Table 6's weaker judges at a score of 96, or equally too high."""
PLANNED = BY_JUDGE, _, INFORMED = "planned by its scores", "planned by true scores", "planned knowing it"
JUDGE_GPUS = 4
JUDGES = {"llama-3.1-8b": 1, "llama-3.1-70b": 4}
"""Models that judge on these GPUs, with their tensor parallelism."""
INSTRUCTIONS = 150
"""Tokens of a judge's instructions. The judge reads them, the question and the answer, and writes two tokens."""


def weaker(rate_rps: float, seed: int) -> Measurement:
    """The Llama cascade on trace 1 at quality 80, planned with each judge (appendix K).

    A plan reaches the quality by the judge's own scores; with "known", by the reference's scores while the judge's
    scores decide; with "less", a quality that is lower by the judge's bias, by the judge's own scores. "bias alone" is
    GPT-4o-mini without a spread.
    """
    case = planning_case("llama", 1, 80.0, rate_rps, seed)
    latencies, reference = StageLatencies(evaluator_of(case)), case.problem.scores
    judges = {
        "gpt-4o": None,
        "gpt-4o-mini": GPT_4O_MINI,
        "llama-3.1-70b": LLAMA_70B,
        "bias alone": JudgeNoise(bias=GPT_4O_MINI.bias),
    }
    plans, most = Measurement(), Measurement()
    for name, error in judges.items():
        scores = reference if error is None else misjudged(reference, error, seed)
        plans[name] = _planned(_plan(case, scores, latencies), reference, scores)
        most[name] = max(scores.quality([level]) or 0.0 for level in range(101))
        if error is not None:
            search = Search(
                case.problem, latencies, bounds_of(case), EFFORT, informed_routings(reference, scores, case)
            )
            known = best_plan_of(search, search.run(case.problem.target), "cascadia")
            plans[f"{name}, known"] = _planned(known, reference, scores)
            less = replace(case, problem=case.problem.with_target(QualityFloor(80.0 * (1 + error.bias))))
            plans[f"{name}, less"] = _planned(_plan(less, scores, latencies), reference, scores)
    return {"plans": plans, "most": most}


def _planned(chosen: CascadePlan, reference: Scores, scores: Scores) -> Measurement:
    return {
        "share": chosen.stages[-1].processing_ratio,
        "latency_s": chosen.latency_s,
        "quality": reference.quality_of(scores.final_stage(chosen.thresholds)),
    }


def wrong(rate_rps: float, seed: int) -> Measurement:
    """The loss of plans with a judge that scores too low or too high: Llama cascade, trace 1, quality 80.

    `kept`: for plans that know the judge, the lowest quality on unseen requests, minus 80.
    """
    case = planning_case("llama", 1, 80.0, rate_rps, seed)
    low, high = regrets(case, StageLatencies(evaluator_of(case)), OFF)
    kept = []
    for regret in (low, high):
        judge = changed(case, judge_bias=regret.judge_error.bias, judge_noise=regret.judge_error.noise)
        fresh = rehearse(with_fresh_requests(judge, seed), regret.informed.plan, seed)
        kept.append((fresh.quality or 0.0) - 80.0)
    plans = {
        f"{regret.judge_error.bias:+g}": {
            name: {
                "quality": each.rehearsed.quality,
                "p95_s": each.rehearsed.p95_s,
                "short_points": each.short_points,
                "slower_s": each.slower_s,
            }
            for name, each in zip(PLANNED, (regret.by_judge, regret.by_truth, regret.informed), strict=True)
        }
        for regret in (low, high)
    }
    return {"plans": plans, "kept": min(kept)}


def _plan(case: PlanningRequest, scores: Scores, latencies: StageLatencies) -> CascadePlan:
    return plan(replace(case.problem, scores=scores), latencies, bounds_of(case), EFFORT)


def trained_judge(rate_rps: float, seed: int) -> Measurement:
    """A judge trained on 70% of the answers: the reference's quality on the other 30%, which this judge routes (N)."""
    case = planning_case("llama", 1, 80.0, rate_rps, seed)
    unseen, judged = trained(case.problem.scores, LinearJudge(), seed=seed)
    latencies, qualities = StageLatencies(evaluator_of(case)), list[float | None]()
    for spread in (0.0, *ERRORS):
        scores = misjudged(judged, JudgeNoise(spread=spread), seed)
        qualities.append(unseen.quality_of(scores.final_stage(_plan(case, scores, latencies).thresholds)))
    return {"quality": qualities[0], "with error": qualities[1:], "asked": 80.0}


def route_llm(trace: int, rate_rps: float, q_min: float, noise: float, seeds: list[int]) -> Measurement:
    """A router in front of the Llama models, whose target rises until a rehearsal keeps the quality (appendix I).

    `noise`: standard deviation of the error of its predictions, in points; the paper gives none.
    """
    case = planning_case("llama", trace, q_min, rate_rps)
    latencies, target, last = StageLatencies(evaluator_of(case)), q_min, None
    predicted = misjudged(case.problem.scores, JudgeNoise(spread=noise))
    for _ in range(ROUNDS):
        problem = case.problem.with_target(QualityFloor(min(target, 100.0)))
        last = planners.route_llm(problem, predicted, latencies, bounds_of(case), EFFORT)
        policy = {"name": "pre-routed", "threshold": last.stages[0].threshold, "noise": noise}
        rehearsed = rehearse(case, last, policy=policy)
        if rehearsed.quality is None or rehearsed.quality >= q_min:
            break
        target += q_min - rehearsed.quality + 0.05
    assert last is not None
    return {"runs": [run(case, last, seed, policy) for seed in seeds]}


def prefixes(rate_rps: float, seed: int) -> Measurement:
    """Plans with and without half of each prompt in a cache (appendix M)."""
    case = planning_case("llama", 1, 80.0, rate_rps, seed)
    latencies = StageLatencies(evaluator_of(case))
    without, with_ = (
        plan(replace(case.problem, prefix_hit_rate=rate), latencies, bounds_of(case), EFFORT)
        for rate in (0.0, HIT_RATE)
    )
    same = [stage.num_gpus for stage in without.stages] == [stage.num_gpus for stage in with_.stages]
    plans = {"without": {"latency_s": without.latency_s}, "with": {"latency_s": with_.latency_s}}
    return {"plans": plans, "same_gpus": same}


def budget(q_min: float, p95_s: float, rate_rps: float) -> Measurement:
    """The best quality within the latency of a plan made for a quality (appendix C)."""
    case = planning_case("deepseek", 1, q_min, rate_rps)
    case = replace(case, problem=case.problem.with_target(LatencyBudget(p95_s)))
    rehearsed = tighten_until_met(case, StageLatencies(evaluator_of(case))).rehearsed
    return {"quality": rehearsed.quality, "p95_s": rehearsed.p95_s}


# A judge that occupies GPUs.


def judge_on_gpus(q_min: float, rate_rps: float, seeds: list[int]) -> Measurement:
    """The p95 of runs by seed, if a judge has `JUDGE_GPUS` of the GPUs and answers queue for it, by the judge's model.

    "elsewhere": the models have the same GPUs less, and the judge is as fast as in all other rows.

    The plan is made for the other GPUs and for the duration of a judgement without a queue. The answers reach the judge
    as in a run of the plan. Their wait delays the request, but not the load of later stages.
    """
    case = planning_case("deepseek", 1, q_min, rate_rps, num_gpus=NUM_GPUS - JUDGE_GPUS)
    runs: dict[str, list[Measurement]] = {}
    waits_s = {"elsewhere": case.problem.judge_s}
    for name, tp in JUDGES.items():
        pool = Pool("judge", catalog.model(name), case.problem.gpu, case.problem.engine, Parallel(tp), JUDGE_GPUS // tp)
        alone_s = float(_judging_s(pool, np.array([0.0, 60.0]), np.array([800.0, 800.0]), case.policies).mean())
        own = changed(replace(case, problem=replace(case.problem, judge_s=alone_s)), judge_s=alone_s)
        chosen = tighten_until_met(own, StageLatencies(evaluator_of(own))).plan
        for seed in seeds:
            _, records = simulated(with_fresh_requests(own, seed), chosen, seed)
            latency_s, wait_s = _with_judging(records, pool, alone_s, own.policies)
            runs.setdefault(name, []).append({"p95_s": float(np.quantile(latency_s, 0.95))})
            waits_s[name] = wait_s
    chosen = tighten_until_met(case, StageLatencies(evaluator_of(case))).plan
    runs["elsewhere"] = [{"p95_s": run(case, chosen, seed)["p95_s"]} for seed in seeds]
    return {"runs": runs, "judging_s": waits_s}


def _with_judging(records: Records, pool: Pool, judge_s: float, policies: Policies) -> tuple[np.ndarray, float]:
    """The latency of every finished request with the judge's queue in place of `judge_s`, and the mean judging time."""
    segments, requests = records.segments, records.requests
    last = np.full(len(records.workload["arrival_s"]), -1, "i8")
    last[requests["request"]] = ints(requests, "stage")
    of, stage = segments["request"].astype("i8"), ints(segments, "stage")
    judged = (segments["cause"] == Cause.FINISHED) & (stage >= 0) & (stage < max(last.max(), 1))
    models = np.array([replica.model for replica in records.replicas])[segments["replica"].astype("i8")]
    tokens = floats(records.workload, "prompt_tokens")[of]
    for name in set(models.tolist()):
        tokens = tokens + np.where(models == name, floats(records.workload, LENGTH + name)[of], 0.0)
    order = np.argsort(segments["end_s"][judged], kind="stable")
    at_s, rows = floats(segments, "end_s")[judged][order], of[judged][order]
    judging_s = _judging_s(pool, at_s, tokens[judged][order] + INSTRUCTIONS, policies)
    finished = requests["outcome"] == Outcome.FINISHED
    latency_s = np.full(len(last), np.nan)
    ids = requests["request"][finished]
    latency_s[ids] = floats(requests, "end_s")[finished] - floats(records.workload, "arrival_s")[ids]
    np.add.at(latency_s, rows, judging_s - judge_s)
    return latency_s[ids], float(judging_s.mean())


def _judging_s(pool: Pool, at_s: np.ndarray, tokens: np.ndarray, policies: Policies) -> np.ndarray:
    """The duration of each judgement, including waiting."""
    rows = Workload(
        {"arrival_s": at_s, "prompt_tokens": tokens.astype("i8"), "output_tokens": np.full(len(at_s), 2, "i8")}
    )

    def line(each: Pool) -> Line:
        return step_model(each.model, each.gpu, each.engine, each.parallel).line

    records = simulate(Fleet((pool,)), TraceSource(rows), policies, seed=0, line=line)
    seconds = np.full(len(at_s), np.nan)
    seconds[records.requests["request"]] = floats(records.requests, "end_s")
    return np.asarray(seconds - at_s)
