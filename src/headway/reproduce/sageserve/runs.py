"""What SageServe's evaluation runs: fleets, workloads, strategies, and what is kept of a run.

The model is Llama-2-70B, the one that the paper's figures 11 to 13, 15 and 16 show, in three regions. All is smaller:
an instance has 4 A100s and 14,000 tokens of KV cache, and half of the published load comes, which makes for about as
many instances as the paper's figure 11. Of an instance as large as the paper's, two or three would do for that load.
The cache is small for another reason, too: the paper scales by memory in use, and its simulator gives each token all
heads' keys and values, eight times what grouped-query attention keeps, so that its memory fills up as these do.

A day is 11:00 to 19:00 of the second Thursday, the busiest, with the peak in it; forecasters know three days before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.record import Records
from headway.metrics.columns import floats, ints
from headway.report.run import Run
from headway.reproduce.tasks import Measurement

Document = dict[str, Any]

MODEL, GPU, GPUS = "llama-2-70b", "a100-80gb", 4
REGIONS = ("us-east", "us-central", "us-west")
SCALE = 0.5
"""Of the published load."""
THURSDAY = 168 + 72
"""Hour at which it begins."""
PAST_HOURS = 72
WARMUP_S = 3600.0
"""In which the initial fleet shrinks to what is needed."""
FAST, BATCH = 0, 2
SILOED, REACTIVE, CHIRON = "siloed", "reactive", "chiron"
LT_I, LT_U, LT_UA, LEAK = "lt-i", "lt-u", "lt-ua", "lt-ua (leaked forecast)"
STRATEGIES = (SILOED, REACTIVE, LT_I, LT_U, LT_UA, LEAK, CHIRON)
ORDERINGS: Mapping[str, Any] = {
    "fcfs": {"name": "priority-first", "classes": [2]},
    "edf": "edf",
    "pf": "priority-first",
    "dpa": "deadline-priority",
}
"""6.5. FCFS keeps batch work behind both interactive tiers (6.1)."""
SILOS = {"interactive_suffix": "-interactive", "batch_suffix": "-batch"}
POOLS: Mapping[str, Mapping[str, int]] = {
    SILOED: {"-interactive": 6, "-batch": 2},
    CHIRON: {"-interactive": 4, "": 2, "-batch": 2},
}
"""Instances at the start; 16 + 4 and 10 + 5 + 5 of 20 in the paper, of 8 here."""
START, LEAST, MOST = 8, 2, 20
BIN_S = 900.0


def day(strategy: str, tps: float, hours: float, from_hour: float = 11.0) -> Document:
    """A scenario, with theta as measured."""
    pools = POOLS.get(strategy, {"": START})
    fleet = [_pool(region, suffix, num) for region in REGIONS for suffix, num in pools.items()]
    return _document(fleet, _policies(strategy, tps), hours, THURSDAY + from_hour)


def burst(strategy: str, tps: float) -> Document:
    """Eight times the load in the last 25 minutes of an hour of the night (7.2.7)."""
    document = day(strategy, tps, 3.0, 3.0)
    document["workload"]["surges"] = [{"from_s": 5700.0, "to_s": 7200.0, "factor": 8}]
    return document


def ordered(ordering: str) -> Document:
    """A fleet that stays as it is, overloaded for 20 minutes: under FCFS, 45% and 25% are late, as in 7.2.6.

    That holds with a seed that no claim uses: 47% and 25%.
    """
    fleet = [_pool(region, "", num) for region, num in zip(REGIONS, (4, 3, 3), strict=True)]
    policies = {"routing": "sageserve", "admission": "queue-manager", "ordering": ORDERINGS[ordering]}
    document = _document(fleet, policies, 1.5, THURSDAY + 13.0)
    document["simulation"]["warmup_s"] = 0.0
    document["workload"]["surges"] = [{"from_s": 1800.0, "to_s": 3000.0, "factor": 2}]
    return document


def _pool(region: str, suffix: str, num: int) -> Document:
    return {
        "name": f"{region}{suffix}", "model": MODEL, "gpu": GPU, "tp": GPUS, "region": region, "replicas": num,
        "min_replicas": min(LEAST, num), "max_replicas": MOST, "kv_capacity_tokens": 14_000,
    }  # fmt: skip


def _policies(strategy: str, tps: float) -> Document:
    """The paper's baselines share routers and orderings with SageServe (7.1)."""
    silos = SILOS if strategy in POOLS else {}
    policies: Document = {"routing": {"name": "sageserve", **silos}, "ordering": ORDERINGS["fcfs"]}
    if strategy != SILOED:  # whose batch requests have instances of their own
        kept = {key: silos[key] for key in silos if key.startswith("interactive")}
        policies["admission"] = {"name": "queue-manager", **kept}
    if strategy in (SILOED, REACTIVE):
        return policies | {"scaling": REACTIVE}
    if strategy == CHIRON:
        return policies | {"scaling": {"name": CHIRON, **SILOS}}
    name, method = (LT_UA, "arima-leak") if strategy == LEAK else (strategy, "arima")
    forecaster = {"name": method, "past_hours": PAST_HOURS}
    plan = {"step_s": 1800.0, "tps": {MODEL: tps}}
    return policies | {"scaling": {"name": name, "plan": plan, "forecaster": forecaster, "planner": "ilp"}}


def _document(fleet: list[Document], policies: Document, hours: float, start_hour: float) -> Document:
    workload = {
        "builtin": "sageserve-july-2025", "models": {MODEL: 1}, "scale": SCALE, "start_hour": start_hour,
        "duration_s": hours * 3600,
    }  # fmt: skip
    return {
        "workload": workload, "fleet": fleet, "policies": policies,
        "provisioning": {"reclaim_s": 60, "redeploy_s": 600, "acquire_s": 600},
        "simulation": {"until_s": hours * 3600, "warmup_s": WARMUP_S},
    }  # fmt: skip


def theta(document: Document) -> Measurement:
    """Input tokens per second that an instance serves in time."""
    from headway import longterm, scenario
    from headway.userfile import Places

    chosen = scenario.assemble(document, Places(), Path())
    setting = longterm.Setting(chosen.spec.workload, 0, Path(), chosen.fleet, scenario.line_of(chosen))
    return {"tps": longterm.Demanded(setting).tps(chosen.fleet.pools[0])}


def measure(run: Run) -> Measurement:
    """All that is asked of a run."""
    summary, records = run.summary, run.records
    tiers = {name: each for name, each in summary.tiers.items() if int(name) < BATCH}
    wait_s = _waits_s(records, WARMUP_S, records.end_s)
    wasted = summary.starting_gpu_hours
    found: Measurement = {
        "instance_hours": summary.gpu_hours / GPUS,
        "spot_hours": (summary.spot_gpu_hours or 0.0) / GPUS,
        "wasted_hours": 0.0 if wasted is None else (wasted.new + wasted.reclaimed + wasted.redeployed) / GPUS,
        "starts": summary.starts or 0,
        "kv_use": summary.kv_use.mean if summary.kv_use else None,
        "usd": summary.usd,
        "num_requests": summary.num_requests,
        "simulate_s": run.simulate_s,
        "violations": {name: 1 - (each.slo_ttft_attainment or 0.0) for name, each in tiers.items()},
        "instances": _instances(records),
    }
    return found | {f"ttft_p{q}_s": float(np.percentile(wait_s, q)) for q in (75, 90, 95, 99)}


def measure_order(run: Run) -> Measurement:
    """The violations of each interactive tier."""
    return {"violations": measure(run)["violations"]}


def measure_burst(run: Run) -> Measurement:
    """The waits of those who come from the burst's begin to half an hour after its end."""
    return {
        "ttft_p95_s": float(np.percentile(_waits_s(run.records, 5700.0, 9000.0), 95)),
        "instances": _instances(run.records),
    }


def _waits_s(records: Records, from_s: float, to_s: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """TTFT of interactive requests that arrive in between; of those that still wait, what they have waited so far."""
    ended = records.requests
    request = ints(ended, "request")
    arrival_s = floats(records.workload, "arrival_s", request)
    chosen = (ints(records.workload, "tier", request) < BATCH) & (arrival_s >= from_s) & (arrival_s < to_s)
    first_s = floats(ended, "first_token_s")
    waits = np.where(np.isnan(first_s), records.end_s, first_s) - arrival_s
    return np.asarray(waits[chosen])


def _instances(records: Records) -> list[list[float]]:
    """(hour, mean instances up) in whole bins."""
    edges = np.arange(records.end_s // BIN_S) * BIN_S
    sums = np.zeros(len(edges))
    for replica in records.replicas:
        for since, to in replica.up:
            sums += np.clip(np.minimum(to, edges + BIN_S) - np.maximum(since, edges), 0.0, None)
    return [[float(edge / 3600), float(total / BIN_S)] for edge, total in zip(edges, sums, strict=True)]
