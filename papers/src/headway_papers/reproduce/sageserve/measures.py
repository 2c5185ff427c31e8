"""Measurements of SageServe's runs, and the throughput of an instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway import scenario
from headway.config.scenario import with_seed
from headway.config.strict_yaml import Places
from headway.control.policies import Policies
from headway.core.fleet import Fleet
from headway.core.record import Records, ReplicaRecord
from headway.metrics.columns import floats, ints
from headway.metrics.usage import ReplicaUsage, usage
from headway.planning.regions import long_term
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.jsq_tokens import JsqTokensRouter
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload
from headway_papers.reproduce.sageserve.scenes import BURST_S, LLAMA_2
from headway_papers.reproduce.tasks import Measurement

Floats = npt.NDArray[np.float64]
BATCH = 2
BIN_S, LONG_BIN_S = 900.0, 10_800.0
TRIAL_REQUESTS = 800
"""Requests served at once to measure an instance's highest rate."""
CAUSES = ("new", "reclaimed", "redeployed")
IN_TIME_WEIGHT, BATCH_WEIGHT, SPOT_WEIGHT = 3.0, 1.0, 1.5
"""Utility in the artifact: of an interactive request in time, of a batch request, and of a spot instance for a quarter
of an hour."""
OLD_S = 12 * 3600.0
"""Batch work that is older when the run ends should be done, because it is held for at most ten hours (6.2)."""
RECOVERED_S = 1.0
"""A minute whose median TTFT is at most this is not part of a burst: the fast tier's SLA."""


def theta(document: Mapping[str, Any]) -> Measurement:
    """Maps each model to the input tokens per second that an instance serves within the SLOs (`tps`), and at full load
    (`most`)."""
    chosen = with_seed(scenario.assemble(document, Places(), Path()), 0)
    line = scenario.StepTimes(chosen)
    demand = long_term.ScenarioDemand(chosen, line)
    measured: Measurement = {"tps": {}, "most": {}}
    for pool in {pool.model.name: pool for pool in chosen.fleet.pools}.values():
        measured["tps"][pool.model.name] = demand.served_tps(pool)
        rows = _interactive_at_once(demand.table, pool.model.name)
        source = TraceSource(rows)
        alone = Fleet((structs.replace(pool, replicas=1),))
        records = simulate(alone, source, Policies(JsqTokensRouter, FcfsOrdering), seed=0, line=line)
        first_s = floats(records.requests, "first_token_s")
        order = np.argsort(first_s)
        middle = order[len(order) // 5 : 4 * len(order) // 5]  # without the filling and draining of batches
        tokens = rows.prompt_tokens[ints(records.requests, "request")[middle[1:]]]
        measured["most"][pool.model.name] = float(tokens.sum() / (first_s[middle[-1]] - first_s[middle[0]]))
    return measured


def _interactive_at_once(table: Workload, model: str) -> Workload:
    """Interactive requests for a model, all arriving at once."""
    mine = (table.column("tier") < BATCH) & (table.column("model") == table.models.index(model))
    rows = np.flatnonzero(mine)[:TRIAL_REQUESTS]
    columns = {name: table.columns[name][rows] for name in ("prompt_tokens", "output_tokens")}
    return Workload({"arrival_s": np.zeros(len(rows)), **columns})


def measure(records: Records, from_s: float) -> Measurement:
    """The measurements of a day, from `from_s` on."""
    used, models = usage(records, from_s), {name: _of_model(records, name, from_s) for name in records.models}
    for name, measured in models.items():
        measured["kv_use"] = _kv_use(used, [i for i, each in enumerate(records.replicas) if each.model == name])
    return {
        "models": models,
        "instance_hours": sum(measured["instance_hours"] for measured in models.values()),
        "spot_hours": sum(measured["spot_hours"] for measured in models.values()),
        "utility": sum(measured["utility"] for measured in models.values()),
        "kv_use": _kv_use(used, list(range(len(records.replicas)))),
    }


def _kv_use(used: ReplicaUsage, rows: list[int]) -> float | None:
    use = used.kv_use(rows)
    return None if use is None else use.mean


def measure_burst(records: Records, warmup_s: float) -> Measurement:
    """TTFT of arrivals from the start of the burst to half an hour after its end, and the time of recovery."""
    from_s, to_s = BURST_S
    wait_s, _ = waits(records, LLAMA_2, from_s, to_s + 1800.0)
    minutes = np.arange(from_s, records.end_s - 60.0, 60.0)
    medians = [_median(waits(records, LLAMA_2, at, at + 60.0)[0]) for at in minutes]
    late = [at for at, median in zip(minutes, medians, strict=True) if median > RECOVERED_S]
    return {
        "ttft_p95_s": float(np.percentile(wait_s, 95)),
        "recovered_s": float(late[-1] + 60.0 - from_s) if late else 0.0,
        "minutes": [[float(at / 60), median] for at, median in zip(minutes, medians, strict=True)],
        "instances": _instances(records, LLAMA_2),
    }


def measure_week(records: Records, from_s: float) -> Measurement:
    """P95 of TTFT, in total and by three hours."""
    edges = np.arange(0.0, records.end_s, LONG_BIN_S).tolist()
    binned = [waits(records, LLAMA_2, max(at, from_s), at + LONG_BIN_S)[0] for at in edges]
    return {
        "ttft_p95_s": float(np.percentile(waits(records, LLAMA_2, from_s, records.end_s)[0], 95)),
        "bins": [[float(at / 3600), float(np.percentile(w, 95))] for at, w in zip(edges, binned, strict=True)],
        "instance_hours": _of_model(records, LLAMA_2, from_s)["instance_hours"],
    }


def _of_model(records: Records, model: str, from_s: float) -> Measurement:
    replicas = [each for each in records.replicas if each.model == model]
    wait_s, limit_s = waits(records, model, from_s, records.end_s)
    e2e_s = _e2e_s(records, model, from_s)
    wasted = {cause: sum(_starting_hours(r, from_s) for r in replicas if r.origin == cause) for cause in CAUSES}
    regions = dict.fromkeys(sorted({each.region for each in replicas}), 0.0)
    for each in replicas:
        regions[each.region] += _up_hours(each, from_s)
    measured: Measurement = {
        "instance_hours": sum(regions.values()),
        "regions": regions,
        "spot_hours": _spot_hours(replicas, records, from_s),
        "wasted": wasted,
        "wasted_hours": sum(wasted.values()),
        "starts": sum(each.origin != "initial" and each.up[0][0] >= from_s for each in replicas),
        "late": float((wait_s > limit_s).mean()) if len(wait_s) else None,
        "num_requests": len(wait_s),
        "instances": _instances(records, model),
        "e2e_p95_s": float(np.percentile(e2e_s, 95)) if len(e2e_s) else None,
    }
    measured |= _of_batch(records, model, from_s)
    in_time, spots = int((wait_s <= limit_s).sum()), measured["spot_hours"] * 3600 / BIN_S
    measured["utility"] = IN_TIME_WEIGHT * in_time + BATCH_WEIGHT * measured["batch_in_time"] + SPOT_WEIGHT * spots
    tails = {q: float(np.percentile(wait_s, q)) if len(wait_s) else None for q in (75, 90, 95, 99)}
    return measured | {f"ttft_p{q}_s": wait for q, wait in tails.items()}


def _of_batch(records: Records, model: str, from_s: float) -> Measurement:
    """Batch requests that are done before their deadlines; of requests that are old at the run's end, the number and
    the times.

    For unfinished requests, the time so far.
    """
    request, chosen = _arrived(records, model, from_s, records.end_s)
    chosen &= ints(records.workload, "tier", request) >= BATCH
    arrival_s = floats(records.workload, "arrival_s", request[chosen])
    is_done = ints(records.requests, "outcome")[chosen] == 0
    took_s = np.where(is_done, floats(records.requests, "end_s")[chosen], records.end_s) - arrival_s
    in_time = is_done
    if "deadline_s" in records.workload:
        in_time = is_done & (took_s <= floats(records.workload, "deadline_s", request[chosen]) - arrival_s)
    old = arrival_s <= records.end_s - OLD_S
    return {
        "num_batch": int(chosen.sum()),
        "batch_in_time": int(in_time.sum()),
        "batch_done": float(is_done[old].mean()) if old.any() else None,
        "batch_p95_s": float(np.percentile(took_s[old], 95)) if old.any() else None,
    }


def waits(records: Records, model: str, from_s: float, to_s: float, tier: int | None = None) -> tuple[Floats, Floats]:
    """TTFT of interactive requests for a model that arrive in an interval, and their promised TTFT.

    For requests that still wait, the wait so far.
    """
    request, chosen = _interactive(records, model, from_s, to_s, tier)
    first_s = floats(records.requests, "first_token_s")[chosen]
    arrival_s = floats(records.workload, "arrival_s", request[chosen])
    limit_s = floats(records.workload, "slo_ttft_s", request[chosen])
    return np.where(np.isnan(first_s), records.end_s, first_s) - arrival_s, limit_s


def _e2e_s(records: Records, model: str, from_s: float) -> Floats:
    """E2E latency of interactive requests with complete answers."""
    request, chosen = _interactive(records, model, from_s, records.end_s, None)
    chosen &= ints(records.requests, "outcome") == 0
    return floats(records.requests, "end_s")[chosen] - floats(records.workload, "arrival_s", request[chosen])


def _interactive(
    records: Records, model: str, from_s: float, to_s: float, tier: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Request ids, and a mask of interactive requests for a model that arrive in an interval."""
    request, chosen = _arrived(records, model, from_s, to_s)
    tiers = ints(records.workload, "tier", request)
    return request, chosen & (tiers < BATCH if tier is None else tiers == tier)


def _arrived(
    records: Records, model: str, from_s: float, to_s: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Request ids, and a mask of requests for a model that arrive in an interval."""
    request = ints(records.requests, "request")
    arrival_s = floats(records.workload, "arrival_s", request)
    is_of_model = ints(records.workload, "model", request) == records.models.index(model)
    return request, np.asarray(is_of_model & (arrival_s >= from_s) & (arrival_s < to_s))


def _instances(records: Records, model: str) -> list[list[float]]:
    """(hour, mean instances up) in complete bins."""
    edges = np.arange(records.end_s // BIN_S) * BIN_S
    sums = np.zeros(len(edges))
    for replica in records.replicas:
        for since, to in replica.up if replica.model == model else ():
            sums += np.clip(np.minimum(to, edges + BIN_S) - np.maximum(since, edges), 0.0, None)
    return [[float(edge / 3600), float(total / BIN_S)] for edge, total in zip(edges, sums, strict=True)]


def _up_hours(replica: ReplicaRecord, from_s: float) -> float:
    return sum(max(to - max(since, from_s), 0.0) for since, to in replica.up) / 3600


def _starting_hours(replica: ReplicaRecord, from_s: float) -> float:
    """The first down time, if it begins with the replica; later ones are crashes."""
    first = replica.down[:1] if replica.down and replica.down[0][0] == replica.up[0][0] else ()
    return sum(max(to - max(since, from_s), 0.0) for since, to in first) / 3600


def _spot_hours(replicas: Sequence[ReplicaRecord], records: Records, from_s: float) -> float:
    """Time from releasing instances to reusing them, by any model, or to the end."""
    taken_s = {each.replaces: each.up[0][0] for each in records.replicas if each.replaces >= 0}
    total_s = 0.0
    for each in replicas:
        gone_s = each.up[-1][1]
        if gone_s < records.end_s:
            total_s += max(taken_s.get(each.id, records.end_s) - max(gone_s, from_s), 0.0)
    return total_s / 3600


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else 0.0
