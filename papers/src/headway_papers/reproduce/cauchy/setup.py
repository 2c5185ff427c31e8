"""Cauchy's cluster and services (section 4.1): profiles, demand, and fleets as scenarios.

The paper's rates (54, 50 and 6 requests/s) cannot be used here, because one combo of H800 and H20 serves ten times its
figure in our step-time model. They also contradict the paper's own goodputs: at 2.14 requests/s per combo, 50
requests/s need 23 combos, but the cluster has room for 8. One rule therefore sets the rate of all workloads: a third of
the whole cluster's capacity, because the plan of 3.3.3 takes 8 of 24 GPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway import catalog, scenario
from headway.config.strict_yaml import Places
from headway.metrics.arriving import while_arriving
from headway.metrics.latency import DefaultSlo as Limits
from headway.metrics.latency import sample, slo_masks
from headway.planning.combos.candidates import Efficiencies, better_directions, select
from headway.planning.combos.plan import ComboOptions, service_scenario
from headway.planning.combos.problem import (
    ComboCandidate,
    ComboPlan,
    ComboProblem,
    ComboService,
    Counts,
    GpuCombo,
    Objective,
    Offer,
    ServiceDemand,
)
from headway.planning.combos.rehearsal import LIVES, MOST_REQUESTS, GoodputProfiler, ServiceScenario, span_s, strains
from headway.planning.combos.search import deploy
from headway.planning.highest_rate import Strains, highest
from headway.planning.rehearsals import Rehearsals, Resources, Source

MODEL = "llama-3.1-8b"
GPUS = {"h800": "h800-80gb-sxm", "a800": "a800-80gb-pcie", "h20": "h20-96gb"}
NUM_GPUS = 8
"""GPUs of each type, two per server. The catalog's prices are those of Table 1."""
LIMITS = dict.fromkeys(GPUS.values(), NUM_GPUS)
ENGINE = "vllm-v0"
"""Engine; the paper uses vLLM 0.6.5."""
SLOS = {"cnn-dailymail": (10.0, 0.05), "sharegpt": (5.0, 0.03), "longwriter": (1.0, 0.03)}
"""Seconds to the first token and between tokens (3.3.3), in the order of the workloads."""
STREAM_BYTES_PER_S = 0.4295e9
"""Rate of one transfer stream: 2,048 tokens in bulk take the 625 ms of section 4.7."""
STREAM_OVERHEAD_S = 0.0067
"""Overhead of each stream: eight streams then take the 85 ms of section 4.7."""
HANDOVER = {
    "mode": "layerwise",
    "degree": 8,
    "stream_bytes_per_s": STREAM_BYTES_PER_S,
    "stream_overhead_s": STREAM_OVERHEAD_S,
}
NETWORK_BYTES_PER_S = 12.5e9
"""Bandwidth of each instance: Eq. 18 requires 7.9e9 for an H800 that prefills at its peak."""
BASE_DIR = Path()
SHARE = 3
"""The demand is the cluster's capacity divided by this."""


def offers() -> tuple[Offer, ...]:
    return tuple(Offer(catalog.gpu(gpu), NUM_GPUS, None, 2) for gpu in GPUS.values())


def pool(gpu: str, replicas: int = 1, tp: int = 1) -> dict[str, Any]:
    size = {"replicas": replicas, "tp": tp, "network_bytes_per_s": NETWORK_BYTES_PER_S}
    return {"model": MODEL, "gpu": gpu, "engine": ENGINE, **size}


def document(workload: str, rate: float, num_requests: int, **sections: Any) -> dict[str, Any]:
    ttft_s, tpot_s = SLOS[workload]
    return {
        "name": workload,
        "workload": {"builtin": workload, "arrivals": rate, "num_requests": num_requests},
        "slo": {"ttft_s": ttft_s, "tpot_s": tpot_s},
        **sections,
    }


def profiled_service(workload: str) -> ServiceScenario:
    """The service, for profiles; 4,000 of its requests give its mean lengths."""
    contents = document(workload, 5.0, 4000, fleet=[pool(GPUS["h800"])], handover=HANDOVER)
    return service_scenario(Source(contents, Places(), BASE_DIR), scenario.Simulator())


def combo_options(quick: bool) -> ComboOptions:
    """Sizes as in 3.3.2. Quick: fewer sizes and shorter profiles."""
    sizes = Counts(prefill=(1, 2), decode=(1, 2, 3, 4, 5, 6), aggregated=(1, 2))
    if quick:
        sizes = Counts(prefill=(1,), decode=(1, 2), aggregated=(1,))
    most = 3000 if quick else MOST_REQUESTS
    return ComboOptions(offers=offers(), counts=sizes, num_requests=most, per_pair=1 if quick else 2, directions="both")


def profiled(workload: str, quick: bool) -> dict[str, Any]:
    """All candidates of a workload, and the whole cluster's capacity for it (3.3.1)."""
    ours, options = profiled_service(workload), combo_options(quick)
    rehearsals = Rehearsals(Resources(scenario.Simulator()), remembers=True)
    profiles = GoodputProfiler({workload: ours}, rehearsals, num_requests=options.num_requests)
    service, counts = ours.service, options.counts
    selection = select([service], options.offers, profiles, counts, None, options.per_pair, options.directions)
    capacity = planned(selection.candidates, service, 1e6)
    return {
        "candidates": msgspec.to_builtins(selection.candidates),
        "capacity_rps": capacity.services[0].goodput_rps,
        "gpus": capacity.gpus,
    }


Ranking = Literal["closed-form", "ranking", "filter", "estimate"]
"""What determines directions and candidates: Eq. 15, as in 3.3.1 and 3.3.3; Eq. 15 without the limit of four; only its
directions, so that all pairs and sizes stay; or the step-time estimate in its place."""
TOP = 4
"""Candidates that Eq. 15 passes on to Eq. 16 (3.3.3)."""


def kept_by_eq_15(profiled: Sequence[ComboCandidate]) -> frozenset[GpuCombo]:
    """3.3.1: the combos in the better direction of each pair of types."""
    efficiencies = {each.combo: each.closed_form_tokens_per_usd for each in profiled}
    return frozenset(better_directions([each.combo for each in profiled], efficiencies.__getitem__)[0])


def ranked_by_eq_15(profiled: Sequence[ComboCandidate]) -> tuple[ComboCandidate, ...]:
    """3.3.1: for each pair of types the better direction and one configuration, in descending order of Eq. 15's CE.

    Eq. 15 ignores numbers of GPUs, so the measured CE decides between the sizes of a pair, and between a pair of one
    type and the same GPUs aggregated.
    """
    kept = kept_by_eq_15(profiled)
    best: dict[tuple[str, ...], ComboCandidate] = {}
    for each in sorted(profiled, key=lambda each: -(each.tokens_per_usd or 0.0)):
        if each.combo in kept:
            best.setdefault(tuple(group.gpu for group in each.combo.groups), each)
    order = [(-(each.closed_form_tokens_per_usd or 0.0), -(each.tokens_per_usd or 0.0)) for each in best.values()]
    return tuple(each for _, each in sorted(zip(order, best.values(), strict=True), key=lambda pair: pair[0]))


class Market:
    """The candidates for one workload, and the demand."""

    def __init__(self, workload: str, profile: Mapping[str, Any], ranking: Ranking = "closed-form") -> None:
        self.workload, self.ranking = workload, ranking
        self.profiled = msgspec.convert(profile["candidates"], tuple[ComboCandidate, ...])
        self.capacity_rps = float(profile["capacity_rps"])
        self.demand_rps = self.capacity_rps / SHARE
        self.service = profiled_service(workload).service
        self.candidates = self._chosen(self.profiled)
        """Candidates for plans, best first."""
        self.aggregated = self._chosen([each for each in self.profiled if each.combo.aggregated is not None])
        """Candidates of combos that do not split prefill and decode."""

    def _chosen(self, some: Sequence[ComboCandidate]) -> tuple[ComboCandidate, ...]:
        if self.ranking in ("closed-form", "ranking"):
            return ranked_by_eq_15(some)[: TOP if self.ranking == "closed-form" else None]
        if self.ranking == "filter":
            kept_combos = kept_by_eq_15(some)
            return tuple(each for each in some if each.combo in kept_combos)
        estimated = Efficiencies(self.service, offers()).estimated
        kept, _ = better_directions([each.combo for each in some], estimated)
        return tuple(each for each in some if each.combo in kept)

    @property
    def demand(self) -> ServiceDemand:
        return ServiceDemand(self.workload, self.demand_rps, self.tokens)

    @property
    def tokens(self) -> float:
        """Mean prompt and output tokens of a request."""
        return self.service.pattern.prompt_tokens + self.service.pattern.output_tokens

    def plan(self, objective: Objective = "co", aggregated: bool = False, rps: float | None = None) -> ComboPlan:
        """The plan for `rps`; None: the mean demand."""
        candidates = self.aggregated if aggregated else self.candidates
        return planned(candidates, self.service, self.demand_rps if rps is None else rps, objective)

    def whole_mix_plan(self, rps: float) -> ComboPlan:
        """The cheapest aggregated instances whose goodputs for the whole mix of requests cover `rps`."""
        aggregated = ((each, each.combo.aggregated) for each in self.profiled)
        single = [each for each, group in aggregated if group is not None and group.instances == 1]
        return planned(single, self.service, rps, "mc")

    @property
    def reachable_rps(self) -> float:
        """The highest rate of the cluster with these candidates."""
        return planned(self.candidates, self.service, 1e6).services[0].goodput_rps


def planned(
    candidates: Sequence[ComboCandidate], service: ComboService, rps: float, objective: Objective = "co"
) -> ComboPlan:
    """Eq. 16 for one service, within the cluster."""
    pattern = service.pattern
    demand = ServiceDemand(service.name, rps, pattern.prompt_tokens + pattern.output_tokens)
    return deploy(ComboProblem((demand,), tuple(candidates), LIMITS, objective), explain=False)


def combo(name: str, gpu_combo: GpuCombo, count: int, goodput_rps: float | None, **sections: Any) -> dict[str, Any]:
    """An entry of a scenario's `combos`."""
    roles = ("aggregated",) if gpu_combo.aggregated is not None else ("prefill", "decode")
    parts = {role: pool(g.gpu, g.instances, g.tp) for role, g in zip(roles, gpu_combo.groups, strict=True)}
    fields: dict[str, Any] = {} if goodput_rps is None else {"goodput_rps": goodput_rps}
    fields |= {} if gpu_combo.aggregated is not None else {"handover": HANDOVER}
    return {"name": name, "replicas": count, **parts, **fields, **sections}


def split(name: str, pair: str, num_decode: int = 1, **fields: Any) -> dict[str, Any]:
    """A combo of one GPU for prefill and several for decode. `pair`: types such as "h800-h20"."""
    prefill, decode = pair.split("-")
    parts = {"prefill": pool(GPUS[prefill]), "decode": pool(GPUS[decode], num_decode)}
    return {"name": name, **parts, "handover": HANDOVER, **fields}


PRECISION = 1.005
"""Final ratio of a rate that misses the goal to one that meets it."""
ATTAINED = 0.9


def goodput(
    workload: str, combos: list[dict[str, Any]], routing: dict[str, Any], seed: int, start_rps: float, quick: bool
) -> dict[str, Any]:
    """The highest rate at which nine of ten requests are in time and waits do not grow, always with the same
    requests."""
    rate_rps = highest(
        lambda rate: strains_at(workload, combos, routing, seed, rate, quick),
        start_rps,
        start_rps / 100,
        start_rps * 20,
        1.02 if quick else PRECISION,
    )
    return {"rps": rate_rps}


def strains_at(
    workload: str, combos: list[dict[str, Any]], routing: dict[str, Any], seed: int, rate: float, quick: bool
) -> Strains:
    """How close the fleet is to its limits at this rate."""
    num = max(round(rate * span_s(profiled_service(workload).service)), 600 if quick else 1500)
    policies = {"routing": {"name": "cauchy", **routing}}
    contents = document(workload, rate, num, fleet=[], combos=combos, policies=policies, seed=seed)
    records = scenario.run(scenario.assemble(contents, Places(), BASE_DIR)).records
    end_s = float(records.workload["arrival_s"][-1])
    return strains(sample(records, end_s / LIVES, Limits(*SLOS[workload])), end_s, ATTAINED)


def measured(document: dict[str, Any], seed: int) -> dict[str, Any]:
    """Latencies of a scenario's run; tokens and cost until its last arrival."""
    run = scenario.run(scenario.assemble({**copy.deepcopy(document), "seed": seed}, Places(), BASE_DIR))
    summary, chosen = run.summary, sample(run.records, 0.0, Limits(**document["slo"]))
    served = while_arriving(chosen, slo_masks(chosen)["all"][1])
    assert summary.ttft_s and summary.e2e_s and summary.tpot_s
    return {
        "tokens_per_usd": served.tokens_per_usd,
        "in_time_per_usd": served.tokens_in_time / served.usd,
        "joules_per_token": served.joules / served.tokens,
        "usd_per_hour": served.usd_per_hour,
        "attainment": summary.slo_attainment,
        "e2e_s": summary.e2e_s.mean,
        "p90_s": summary.e2e_s.p90,
        "ttft_s": summary.ttft_s.mean,
        "tbt_s": summary.tpot_s.mean,
        "moved": summary.moves / summary.num_requests,
        "finished": bool(chosen.finished.all()),
    }
