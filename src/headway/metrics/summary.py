"""A run's summary: every number that a table, a report or a script asks for.

The window runs from `warmup_s` to the end of the run. Requests count if they arrived in it, whatever became
of them. What a run has no data for is None, not 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from headway.core.errors import HeadwayError
from headway.core.pacer import Pacer
from headway.core.record import MoveOutcome, Outcome, Records
from headway.metrics.cascade import answer_metrics
from headway.metrics.columns import Rows, floats, rows_by_code
from headway.metrics.itl import Latencies, itl_distributions
from headway.metrics.latency import DefaultSlo, Distribution, Sample, distribution, sample, slo_masks
from headway.metrics.usage import Level, StartingGpuHours, Usage, provisioning, usage


class RequestMetrics(Struct, frozen=True, kw_only=True):
    """Of a set of requests."""

    num_requests: int
    num_completed: int
    num_cancelled: int
    num_rejected: int
    num_unfinished: int
    ttft_s: Distribution | None
    answer_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    queueing_s: Distribution | None
    reasoning_s: Distribution | None
    ttfat_s: Distribution | None
    blocking_s: Distribution | None
    qoe_violations: float | None
    slo_attainment: float | None
    slo_ttft_attainment: float | None
    slo_tpot_attainment: float | None
    slo_e2e_attainment: float | None
    goodput_rps: float | None
    throughput_rps: float | None
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    output_tokens: int
    preemptions: int
    moves: int
    retries: int
    cached_prompt_share: float | None


class ReplicaMetrics(RequestMetrics, frozen=True, kw_only=True):
    """Of a set of replicas, and of the requests that were served there."""

    kv_use: Level | None
    batch_size: Level | None
    busy_share: float | None
    gpu_hours: float
    usd: float
    usd_per_million_output_tokens: float | None


class Summary(ReplicaMetrics, frozen=True, kw_only=True):
    """Of a run. Breakdowns by tier, model and region are empty where there is only one of them."""

    warmup_s: float
    window_s: float
    transfer_s: Distribution | None
    quality: float | None
    judged: int
    judge_usd: float
    starts: int | None
    starting_gpu_hours: StartingGpuHours | None
    spot_gpu_hours: float | None
    gpu_hours_bound: float | None = None
    """Of a run that scales: what `yardsticks` says."""
    gpu_hours_clairvoyant: float | None = None
    tiers: dict[str, RequestMetrics]
    models: dict[str, ReplicaMetrics]
    """By the model that served a request, or that it asked for if none did."""
    regions: dict[str, RequestMetrics]
    """By the region that a request came from."""
    replicas: dict[str, ReplicaMetrics]
    """By the replica that a request was last placed on. Requests never placed are in none."""


def summarize(
    records: Records, *, warmup_s: float = 0.0, slo: DefaultSlo | None = None, pacer: Pacer | None = None
) -> Summary:
    """The summary of a run. `slo` holds for what a request has no SLO of its own for, `pacer` for who reads answers.

    Raises `HeadwayError` for a warm-up that is negative or not a number.
    """
    if not 0.0 <= warmup_s < float("inf"):
        raise HeadwayError(f"warm-up is {warmup_s}; expected seconds, 0 or more")
    chosen = sample(records, warmup_s, slo, pacer or Pacer())
    used = usage(records, warmup_s)
    window_s = max(records.end_s - warmup_s, 0.0)
    breakdowns = [_tiers(records, chosen), _models(records, chosen), _regions(records, chosen)]
    itl = _itl(records, chosen, breakdowns)
    whole = _request_metrics(chosen, itl.groups.get((WHOLE, 0)), window_s)
    tiers, models, regions = (
        {
            name: _request_metrics(chosen.of(rows), itl.groups.get((which, position)), window_s)
            for position, (name, rows) in enumerate(groups.items())
        }
        for which, groups in enumerate(breakdowns)
    )
    given, scaled = answer_metrics(records, chosen), provisioning(records, warmup_s)
    return Summary(
        **_replica_metrics(whole, used, list(range(len(records.replicas)))),
        warmup_s=warmup_s,
        window_s=window_s,
        transfer_s=_transfer_s(records, chosen),
        quality=given.quality,
        judged=given.judged,
        judge_usd=given.judge_usd,
        starts=scaled.starts if scaled else None,
        starting_gpu_hours=scaled.starting_gpu_hours if scaled else None,
        spot_gpu_hours=scaled.spot_gpu_hours if scaled else None,
        tiers=tiers,
        models={
            name: ReplicaMetrics(
                **_replica_metrics(found, used, [i for i, each in enumerate(records.replicas) if each.model == name])
            )
            for name, found in models.items()
        },
        regions=regions,
        replicas=_replicas(records, chosen, itl, used, window_s),
    )


Groups = dict[str, Rows]
"""Rows of a sample by name; none where there are fewer than two."""
WHOLE = -1
"""The grouping, of those that `_itl` asks for, that is everybody."""


def _request_metrics(chosen: Sample, itl_s: Distribution | None, window_s: float) -> RequestMetrics:
    attained = slo_masks(chosen)
    has_slo, good = attained["all"]
    outcomes = np.bincount(chosen.outcome, minlength=len(Outcome)).tolist()
    output_tokens = int(chosen.generated_tokens.sum())
    prompt_tokens, ttft_s, queueing_s = chosen.prompt_tokens, chosen.ttft_s, chosen.queueing_s
    total_tokens = output_tokens + int(prompt_tokens.sum(where=~np.isnan(ttft_s)))
    admitted = ~np.isnan(queueing_s)
    cached = _ratio(int(chosen.cached_prompt_tokens.sum(where=admitted)), int(prompt_tokens.sum(where=admitted)))
    phases = chosen.phases
    return RequestMetrics(
        num_requests=len(chosen),
        num_completed=outcomes[Outcome.FINISHED],
        num_cancelled=outcomes[Outcome.CANCELLED],
        num_rejected=outcomes[Outcome.REJECTED],
        num_unfinished=outcomes[Outcome.UNFINISHED],
        ttft_s=distribution(ttft_s),
        answer_s=distribution(chosen.answer_s),
        tpot_s=distribution(chosen.tpot_s),
        itl_s=itl_s,
        e2e_s=distribution(chosen.e2e_s),
        queueing_s=distribution(queueing_s),
        reasoning_s=distribution(phases.reasoning_s) if phases else None,
        ttfat_s=distribution(phases.ttfat_s) if phases else None,
        blocking_s=distribution(phases.blocking_s) if phases else None,
        qoe_violations=phases.violations if phases else None,
        slo_attainment=_ratio(int(good.sum()), int(has_slo.sum())),
        slo_ttft_attainment=_ratio(int(attained["ttft"][1].sum()), int(attained["ttft"][0].sum())),
        slo_tpot_attainment=_ratio(int(attained["tpot"][1].sum()), int(attained["tpot"][0].sum())),
        slo_e2e_attainment=_ratio(int(attained["e2e"][1].sum()), int(attained["e2e"][0].sum())),
        goodput_rps=_ratio(int(good.sum()), window_s) if has_slo.any() else None,
        throughput_rps=_ratio(outcomes[Outcome.FINISHED], window_s),
        output_tokens_per_s=_ratio(output_tokens, window_s),
        total_tokens_per_s=_ratio(total_tokens, window_s),
        output_tokens=output_tokens,
        preemptions=int(chosen.preemptions.sum()),
        moves=int(chosen.moves.sum()),
        retries=int(np.maximum(chosen.attempts - 1, 0).sum()),
        cached_prompt_share=cached,
    )


def _replica_metrics(requests: RequestMetrics, used: Usage, rows: list[int]) -> dict[str, Any]:
    usd = float(used.usd[rows].sum())
    return structs.asdict(requests) | {
        "kv_use": used.kv_use(rows),
        "batch_size": used.batch_size(rows),
        "busy_share": used.busy_share(rows),
        "gpu_hours": float(used.gpu_hours[rows].sum()),
        "usd": usd,
        "usd_per_million_output_tokens": _ratio(usd * 1e6, requests.output_tokens),
    }


def _transfer_s(records: Records, chosen: Sample) -> Distribution | None:
    """How long KV caches were on their way to other replicas."""
    table = records.moves
    if not table:
        return None
    made = (
        (table["outcome"] == MoveOutcome.DONE) & (floats(table, "num_bytes") > 0) & np.isin(table["request"], chosen.id)
    )
    return distribution(floats(table, "end_s", made) - floats(table, "start_s", made))


def _itl(records: Records, chosen: Sample, breakdowns: Sequence[Groups]) -> Latencies:
    """Inter-token latencies by replica, by (number of the breakdown, position in it), and of everybody."""
    wanted = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    wanted[chosen.id] = True
    codes = [_codes(chosen, groups, len(wanted)) for groups in breakdowns]
    found = itl_distributions(records, wanted, [*codes, np.zeros(len(wanted), dtype=np.int8)])
    return Latencies(
        {(w if w < len(codes) else WHOLE, c): each for (w, c), each in found.groups.items()}, found.replicas
    )


def _codes(chosen: Sample, groups: Groups, num_requests: int) -> npt.NDArray[np.int16]:
    """Of each request the position of its group, -1 where it is in none."""
    code = np.full(num_requests, -1, dtype=np.int16)
    ids = chosen.id
    for position, rows in enumerate(groups.values()):
        code[ids[rows]] = position
    return code


def _tiers(records: Records, chosen: Sample) -> Groups:
    tier = records.workload.get("tier")
    return {} if tier is None else _several({str(c): rows for c, rows in rows_by_code(tier[chosen.id]).items()})


def _models(records: Records, chosen: Sample) -> Groups:
    """By the model that served a request, or that it asked for if none did."""
    names = sorted({replica.model for replica in records.replicas} | set(records.models))
    code_of = {name: code for code, name in enumerate(names)}
    asked = records.workload.get("model")
    if asked is not None and records.models:
        code = np.array([code_of[name] for name in records.models], dtype=np.int16)[asked[chosen.id]]
    else:
        code = np.full(len(chosen), -1, dtype=np.int16)
    by_id = np.full(max((each.id for each in records.replicas), default=0) + 1, -1, dtype=np.int16)
    for each in records.replicas:
        by_id[each.id] = code_of[each.model]
    replica = chosen.replica
    code = np.where(replica >= 0, by_id[replica], code)
    return _several({names[c]: rows for c, rows in rows_by_code(code).items() if c >= 0 and names[c]})


def _regions(records: Records, chosen: Sample) -> Groups:
    code = records.workload.get("region")
    if code is None or len(records.regions) < 2:
        return {}
    rows = rows_by_code(code[chosen.id])
    return _several({records.regions[c] or "none": found for c, found in rows.items() if c >= 0})


def _several(groups: Groups) -> Groups:
    return groups if len(groups) > 1 else {}


def _replicas(
    records: Records, chosen: Sample, itl: Latencies, used: Usage, window_s: float
) -> dict[str, ReplicaMetrics]:
    rows = rows_by_code(chosen.replica)
    nobody = np.empty(0, dtype=np.intp)
    result = {}
    for position, replica in enumerate(records.replicas):
        found = _request_metrics(chosen.of(rows.get(replica.id, nobody)), itl.replicas.get(replica.id), window_s)
        result[str(replica.id)] = ReplicaMetrics(**_replica_metrics(found, used, [position]))
    return result


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


BREAKDOWNS = {"tiers": "tier", "models": "model", "regions": "region", "replicas": "replica"}
"""A summary's field -> the first word of its flat keys."""


def flatten(summary: RequestMetrics) -> dict[str, float | int | None]:
    """Flat keys, as in `ttft_s.p99` or `tier.0.ttft_s.p99`; None where there is no data.

    `report.describe` says what each of them means.
    """
    return dict(_flat(summary))


def _flat(summary: RequestMetrics) -> Iterator[tuple[str, float | int | None]]:
    for name in summary.__struct_fields__:
        value = getattr(summary, name)
        if name in BREAKDOWNS:
            for key, metrics in value.items():
                for inner, number in _flat(metrics):
                    yield f"{BREAKDOWNS[name]}.{key}.{inner}", number
        elif name in PARTS:
            for inner in PARTS[name].__struct_fields__:
                yield f"{name}.{inner}", None if value is None else getattr(value, inner)
        else:
            yield name, value


_LATENCIES = (
    "ttft_s", "answer_s", "tpot_s", "itl_s", "e2e_s", "queueing_s", "reasoning_s", "ttfat_s", "blocking_s",
    "transfer_s",
)  # fmt: skip

PARTS: dict[str, type[Distribution] | type[Level] | type[StartingGpuHours]] = {
    **dict.fromkeys(_LATENCIES, Distribution), "kv_use": Level, "batch_size": Level, "starting_gpu_hours": StartingGpuHours,
}  # fmt: skip
"""Fields that are several numbers."""
