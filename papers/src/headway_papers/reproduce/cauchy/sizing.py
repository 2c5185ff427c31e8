"""Fleets for varying demand: every system is sized until nine of ten requests are in time.

A plan for the mean demand is late in every peak, and a fleet that may be later costs less. Systems are therefore
compared at equal lateness. The size k divides all goodputs: a plan covers k times the mean demand, and Algorithm 1
compares k times the observed rate with the profiled goodputs. k is chosen on requests that are not used for judging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import msgspec
from msgspec import structs

from headway.catalog import gpu
from headway.planning.combos.estimate import FluidEstimate
from headway.planning.combos.problem import (
    ComboCandidate,
    ComboPlan,
    Counts,
    GpuCombo,
    ServiceSlo,
    WorkloadPattern,
)
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec
from headway_papers.reproduce.cauchy.demand import Demand
from headway_papers.reproduce.cauchy.melange import MelangeProblem, Sized
from headway_papers.reproduce.cauchy.melange import buckets as filled_buckets
from headway_papers.reproduce.cauchy.melange import plan as mix_of
from headway_papers.reproduce.cauchy.melange import sized as instances_of
from headway_papers.reproduce.cauchy.setup import ATTAINED, BASE_DIR, LIMITS, Market, combo, document, measured, offers
from headway_papers.reproduce.tasks import Measurement

System = Literal["melange", "mix", "star", "static", "cauchy"]
COARSE = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.4)
FINE = 4
"""Steps between two coarse sizes."""
SIZES = (
    *(low * (high / low) ** (step / FINE) for low, high in pairwise(COARSE) for step in range(FINE)),
    COARSE[-1],
)
"""Values of k: every fourth is tried from the smallest on, and then those before the first that is in time."""
CHOOSING_SEED = 1000
MOST_KINDS = 6
"""Combos from which the autoscaler chooses: the best candidates, and those of the plan."""
START_S = 90.0
Kinds = list[tuple[GpuCombo, int, float]]
"""(combo, initial number, goodput of one over k)."""


def sized(market: Market, demand: Demand, system: System, k: float, pace: float) -> dict[str, Any]:
    """The scenario of a system of size k. `pace`: seconds of a run per second in the paper."""
    base = document(market.workload, 1.0, 1)
    base["workload"] = {
        "builtin": market.workload,
        "arrivals": demand.arrivals(market.demand_rps, pace),
        "duration_s": demand.duration_s(pace),
    }
    kinds = kinds_of(market, system, k)
    if system in ("melange", "mix", "static"):
        kinds = [each for each in kinds if each[1]]
    policies: dict[str, Any] = {"routing": {"name": "cauchy"}}
    if system in ("star", "cauchy"):
        policies["scaling"] = algorithm_1(kinds, pace)
    return base | _fleet(kinds, START_S * pace) | {"policies": policies}


def kinds_of(market: Market, system: System, k: float) -> Kinds:
    """The combos of the plan for k times the mean demand, and the best others with 0 replicas."""
    rps = k * market.demand_rps
    if system == "melange":
        # The router does not know output lengths, so the goodput for the whole mix is used, not the one for the plan's
        # buckets.
        goodputs = ScaledEstimate(market).goodput_by_label
        return [(each.combo, each.count, goodputs[each.combo.label] / k) for each in melange_plan(market, rps).combos]
    if system == "mix":
        return _with_spares(market.whole_mix_plan(rps), [], k)
    candidates = market.aggregated if system == "star" else market.candidates
    return _with_spares(market.plan(aggregated=system == "star", rps=rps), candidates, k)


def _with_spares(plan: ComboPlan, candidates: Sequence[ComboCandidate], k: float) -> Kinds:
    chosen: Kinds = [(each.combo, each.count, each.goodput_rps / k) for each in plan.combos]
    planned = {each.label for each, _, _ in chosen}
    spares = [(each.combo, 0, each.goodput_rps / k) for each in candidates if each.combo.label not in planned]
    return chosen + spares[: max(MOST_KINDS - len(chosen), 0)]


def _fleet(kinds: Kinds, start_s: float) -> dict[str, Any]:
    combos = []
    for i, (what, count, goodput_rps) in enumerate(kinds):
        fields = combo(f"combo-{i}", what, count, goodput_rps, min_replicas=0)
        for role in ("prefill", "decode", "aggregated"):
            if role in fields:
                fields[role]["start_s"] = start_s
        combos.append(fields)
    return {"fleet": [], "combos": combos}


def algorithm_1(kinds: Kinds, pace: float) -> dict[str, Any]:
    """The paper's autoscaler, with its parameters."""
    tokens = {f"combo-{i}": goodput_rps / what.usd_per_hour for i, (what, _, goodput_rps) in enumerate(kinds)}
    gpus_in_use = {name for what, _, _ in kinds for name in what.gpus}
    return {
        "name": "combos",
        "local_window_s": 120 * pace,
        "global_window_s": 1800 * pace,
        "grace_s": 30 * pace,
        "interval_s": 5 * pace,
        "gpu_limits": {name: limit for name, limit in LIMITS.items() if name in gpus_in_use},
        "cost_efficiency": tokens,
    }


def first_in_time(documents: Mapping[str, Any], seed: int) -> Measurement:
    """The smallest size at which nine of ten requests are in time; if there is none, the one with the most in time.

    Rehearses every fourth size from the smallest until one is in time, and then bisects the sizes before it.
    """
    tried: dict[str, Measurement] = {}
    names = list(documents)

    def is_in_time(i: int) -> bool:
        k = names[i]
        equal = next((each for each in tried if documents[each] == documents[k]), None)
        tried[k] = measured(documents[k], seed) if equal is None else tried[equal]
        return bool(tried[k]["attainment"] >= ATTAINED)

    high = next((i for i in range(0, len(names), FINE) if is_in_time(i)), None)
    if high is None:
        return {"k": max(tried, key=lambda k: tried[k]["attainment"]), "tried": tried}
    low = max(high - FINE, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_in_time(middle) else (middle, high)
    return {"k": names[high], "tried": tried}


def largest_for(documents: Mapping[str, Any], usd_per_hour: float, seed: int) -> Measurement:
    """The largest scenario whose cost stays below a limit, rehearsed by size from the smallest."""
    last: Measurement = {"k": None}
    for k, contents in documents.items():
        found = measured(contents, seed)
        if found["usd_per_hour"] > usd_per_hour:
            break
        last = {"k": k, **found}
    return last


class ScaledEstimate:
    """Melange's profiles: the estimate for a bucket, scaled by a simulation of the instance on the whole mix."""

    def __init__(self, market: Market) -> None:
        self.service = market.service
        gpus = {name: gpu(name) for name in LIMITS}
        self.estimate = FluidEstimate({self.service.model.name: self.service.model}, gpus, self.service.engine)
        alone = [each for each in market.profiled if each.combo.aggregated is not None]
        self.goodput_by_label = {each.combo.label: each.goodput_rps for each in alone}

    def goodput_rps(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> float:
        """See `Profiler`; 0 if the instance has no simulated goodput."""
        whole = self.estimate.goodput_rps(combo, self.service.pattern, slo)
        factor = self.goodput_by_label.get(combo.label, 0.0) / whole if whole else 0.0
        return factor * self.estimate.goodput_rps(combo, workload, slo)


@cache
def melange_profiles(market: Market) -> Sized:
    """Rates of instances for each bucket of sizes, at one request per second in all."""
    spec = msgspec.convert({"builtin": market.workload, "arrivals": 5.0, "num_requests": 4000}, WorkloadSpec)
    rows = generate(spec, 0, BASE_DIR)
    buckets = filled_buckets(rows.prompt_tokens, rows.output_tokens, 1.0)
    return instances_of(market.service, buckets, offers(), ScaledEstimate(market), Counts(aggregated=(1, 2)))


@cache
def melange_plan(market: Market, rps: float) -> ComboPlan:
    """The cheapest mix of aggregated instances."""
    profiles = melange_profiles(market)
    buckets = tuple(structs.replace(each, rps=each.rps * rps) for each in profiles.buckets)
    return mix_of(MelangeProblem((structs.replace(profiles, buckets=buckets),), LIMITS))
