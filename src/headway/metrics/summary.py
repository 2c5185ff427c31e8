"""The summary of a run: all numbers for tables, reports and scripts.

The window runs from `warmup_s` to the end of the run. Requests that arrived in it count, with any outcome. A metric
without data is None, not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial, reduce
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from headway.core.pacer import Pacer
from headway.core.record import FALLBACK, FALLBACK_REASONS, REFUSAL_REASONS, MoveOutcome, Outcome, Records
from headway.metrics.cascade import answer_metrics
from headway.metrics.columns import Ints, Mask, Rows, floats, rows_by_code
from headway.metrics.itl import itl_by_replica, itl_distributions
from headway.metrics.latency import (
    BLOCK_ROWS,
    SLO_KINDS,
    ComputedSample,
    DefaultSlo,
    Distribution,
    Sample,
    distribution,
    sample,
)
from headway.metrics.programs import ProgramMetrics, program_metrics
from headway.metrics.usage import MeanPeak, ReplicaUsage, StartingGpuHours, fullest, provisioning_metrics, usage


class Refusals(Struct, frozen=True):
    """Requests that a limit of their tenant denied, by the limit."""

    refused_by_requests_per_minute: int
    refused_by_tokens_per_minute: int
    refused_by_budget: int


class RequestMetrics(Struct, frozen=True, kw_only=True):
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
    refusals: Refusals | None = None
    """Refusals by limits; None unless tenants have limits."""


class ReplicaMetrics(RequestMetrics, frozen=True, kw_only=True):
    """Metrics of a set of replicas and of their requests."""

    kv_use: MeanPeak | None
    batch_size: MeanPeak | None
    busy_share: float | None
    gpu_hours: float
    usd: float
    usd_per_million_output_tokens: float | None
    energy_kwh: float | None
    joules_per_output_token: float | None


class Summary(ReplicaMetrics, frozen=True, kw_only=True):
    """Metrics of a run. A breakdown by tier, model, region or tenant is empty if there is only one tier, model, region
    or tenant."""

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
    """The lower bound for a scaling run (`planning.gpu_hours_bound`)."""
    gpu_hours_clairvoyant: float | None = None
    programs: ProgramMetrics | None = None
    """Times of programs, if there is an SLO for programs."""
    tiers: dict[str, RequestMetrics]
    models: dict[str, ReplicaMetrics]
    """Metrics by the model that served a request, or the requested model if none did."""
    regions: dict[str, RequestMetrics]
    """Keyed by region of origin."""
    tenants: dict[str, RequestMetrics]
    fallbacks: dict[str, RequestMetrics]
    """Requests that a fallback model answered, by the reason."""
    replicas: Mapping[str, ReplicaMetrics]
    """Keyed by the last replica of a request. Requests that were never placed are left out."""


class MetricsByReplica(Mapping[str, ReplicaMetrics]):
    """`Summary.replicas`, computed on first access, because few readers need the metrics of thousands of replicas."""

    def __init__(self, names: Sequence[str], compute: Callable[[], dict[str, ReplicaMetrics]], fullness: float) -> None:
        self._names, self._compute = names, compute
        self.fullness = fullness
        """Fullness as in `usage.fullest`."""

    @cached_property
    def _found(self) -> dict[str, ReplicaMetrics]:
        return self._compute()

    def __getitem__(self, name: str) -> ReplicaMetrics:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def summarize(
    records: Records, *, warmup_s: float = 0.0, slo: DefaultSlo | None = None, pacer: Pacer | None = None
) -> Summary:
    """Summarise a run. `slo` applies to requests without an SLO of their own; `pacer` defines the reading pace.

    Raises HeadwayError for a negative or infinite warm-up.
    """
    chosen = sample(records, warmup_s, slo, pacer or Pacer())
    used = usage(records, warmup_s)
    window_s = max(records.end_s - warmup_s, 0.0)
    breakdowns = [
        _tiers(records, chosen),
        _models(records, chosen),
        _named(records, chosen, "region", records.regions),
        _named(records, chosen, "tenant", records.tenants),
        _fallbacks(chosen),
    ]
    itl = _itl(records, chosen, breakdowns)
    overall = _request_metrics(chosen, itl.get((ALL_REQUESTS, 0)), window_s)
    tiers, models, regions, tenants, fallbacks = (
        {
            name: _request_metrics(chosen.subset(rows), itl.get((which, position)), window_s)
            for position, (name, rows) in enumerate(groups.items())
        }
        for which, groups in enumerate(breakdowns)
    )
    answers, scaling = answer_metrics(records, chosen), provisioning_metrics(records, warmup_s)
    return Summary(
        **_replica_metrics(overall, used, list(range(len(records.replicas)))),
        warmup_s=warmup_s,
        window_s=window_s,
        transfer_s=_transfer_s(records, chosen),
        quality=answers.quality,
        judged=answers.judged,
        judge_usd=answers.judge_usd,
        starts=scaling.starts if scaling else None,
        starting_gpu_hours=scaling.starting_gpu_hours if scaling else None,
        spot_gpu_hours=scaling.spot_gpu_hours if scaling else None,
        tiers=tiers,
        models={name: _model_metrics(records, name, found, used) for name, found in models.items()},
        regions=regions,
        tenants=tenants,
        fallbacks=fallbacks,
        replicas=MetricsByReplica(
            [str(each.id) for each in records.replicas],
            partial(_replicas, records, chosen, used, window_s),
            fullest(used, records.replicas),
        ),
        programs=program_metrics(records, warmup_s, None if slo is None else slo.program_s),
    )


def _model_metrics(records: Records, name: str, found: RequestMetrics, used: ReplicaUsage) -> ReplicaMetrics:
    """The metrics of a model's requests, with the usage of the replicas that serve it."""
    own = [i for i, each in enumerate(records.replicas) if each.model == name]
    return ReplicaMetrics(**_replica_metrics(found, used, own))


Groups = dict[str, Rows]
"""Rows of a sample by group name; empty if there are fewer than two groups."""
ALL_REQUESTS = -1
"""Key of the grouping in `_itl` with all requests in one set."""


class _Counts(Struct, frozen=True):
    """Sums over requests. All are integers, so that parts of a sample add up to the same sums as the whole sample."""

    outcomes: Ints
    """Requests by `Outcome`."""
    has_slo: Ints
    """Requests with an SLO of each kind of `_SLOS`."""
    met_slo: Ints
    refused: Ints
    """Requests by the code of the limit that denied them."""
    output_tokens: int
    answered_prompt_tokens: int
    """Prompt tokens of requests with a first token."""
    admitted_prompt_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    moves: int
    retries: int


_SLOS = ("all", *SLO_KINDS)


def _counts(chosen: Sample | ComputedSample) -> _Counts:
    attained, refused = chosen.attained, chosen.refused
    prompt_tokens, admitted = chosen.prompt_tokens, ~np.isnan(chosen.queueing_s)
    return _Counts(
        outcomes=np.bincount(chosen.column("outcome"), minlength=len(Outcome)),
        has_slo=np.array([np.count_nonzero(attained[kind][0]) for kind in _SLOS]),
        met_slo=np.array([np.count_nonzero(attained[kind][1]) for kind in _SLOS]),
        refused=np.bincount(_NO_ROWS if refused is None else refused, minlength=1 + len(REFUSAL_REASONS)),
        output_tokens=int(chosen.column("generated_tokens").sum()),
        answered_prompt_tokens=int(prompt_tokens.sum(where=~np.isnan(chosen.ttft_s))),
        admitted_prompt_tokens=int(prompt_tokens.sum(where=admitted)),
        cached_prompt_tokens=int(chosen.column("cached_prompt_tokens").sum(where=admitted)),
        preemptions=int(chosen.column("preemptions").sum()),
        moves=int(chosen.column("moves").sum()),
        retries=int(np.maximum(chosen.column("attempts") - 1, 0).sum()),
    )


def _added(one: _Counts, other: _Counts) -> _Counts:
    return _Counts(*(a + b for a, b in zip(structs.astuple(one), structs.astuple(other), strict=True)))


def _request_metrics(chosen: Sample | ComputedSample, itl_s: Distribution | None, window_s: float) -> RequestMetrics:
    counts = reduce(_added, map(_counts, chosen.blocks()))
    outcomes = counts.outcomes.tolist()
    slos = dict(zip(_SLOS, zip(counts.met_slo.tolist(), counts.has_slo.tolist(), strict=True), strict=True))
    num_good, num_with_slo = slos["all"]
    phases = chosen.phases
    return RequestMetrics(
        num_requests=len(chosen),
        num_completed=outcomes[Outcome.FINISHED],
        num_cancelled=outcomes[Outcome.CANCELLED],
        num_rejected=outcomes[Outcome.REJECTED],
        num_unfinished=outcomes[Outcome.UNFINISHED],
        ttft_s=chosen.distribution("ttft_s"),
        answer_s=chosen.distribution("answer_s"),
        tpot_s=chosen.distribution("tpot_s"),
        itl_s=itl_s,
        e2e_s=chosen.distribution("e2e_s"),
        queueing_s=chosen.distribution("queueing_s"),
        reasoning_s=chosen.distribution("reasoning_s") if phases else None,
        ttfat_s=chosen.distribution("ttfat_s") if phases else None,
        blocking_s=chosen.distribution("blocking_s") if phases else None,
        qoe_violations=phases.violations if phases else None,
        slo_attainment=_ratio(num_good, num_with_slo),
        slo_ttft_attainment=_ratio(*slos["ttft"]),
        slo_tpot_attainment=_ratio(*slos["tpot"]),
        slo_e2e_attainment=_ratio(*slos["e2e"]),
        goodput_rps=_ratio(num_good, window_s) if num_with_slo else None,
        throughput_rps=_ratio(outcomes[Outcome.FINISHED], window_s),
        output_tokens_per_s=_ratio(counts.output_tokens, window_s),
        total_tokens_per_s=_ratio(counts.output_tokens + counts.answered_prompt_tokens, window_s),
        output_tokens=counts.output_tokens,
        preemptions=counts.preemptions,
        moves=counts.moves,
        retries=counts.retries,
        cached_prompt_share=_ratio(counts.cached_prompt_tokens, counts.admitted_prompt_tokens),
        refusals=None if chosen.refused is None else Refusals(*counts.refused.tolist()[1:]),
    )


def _replica_metrics(requests: RequestMetrics, used: ReplicaUsage, rows: list[int] | slice) -> dict[str, Any]:
    usd, joules = float(used.usd[rows].sum()), float(used.joules[rows].sum())
    return structs.asdict(requests) | {
        "kv_use": used.kv_use(rows),
        "batch_size": used.batch_size(rows),
        "busy_share": used.busy_share(rows),
        "gpu_hours": float(used.gpu_hours[rows].sum()),
        "usd": usd,
        "usd_per_million_output_tokens": _ratio(usd * 1e6, requests.output_tokens),
        "energy_kwh": used.energy_kwh(rows),
        "joules_per_output_token": None if isnan(joules) else _ratio(joules, requests.output_tokens),
    }


def _transfer_s(records: Records, chosen: Sample) -> Distribution | None:
    table = records.moves
    if not table:
        return None
    done = (
        (table["outcome"] == MoveOutcome.DONE) & (floats(table, "num_bytes") > 0) & np.isin(table["request"], chosen.id)
    )
    return distribution(floats(table, "end_s", done) - floats(table, "start_s", done))


def _itl(records: Records, chosen: Sample, breakdowns: Sequence[Groups]) -> dict[tuple[int, int], Distribution]:
    """Inter-token latencies by (number of the breakdown, position in it), and of all requests."""
    wanted = _wanted(records, chosen)
    codes = [_codes(chosen, groups, len(wanted)) for groups in breakdowns]
    found = itl_distributions(records, wanted, [*codes, np.broadcast_to(np.int8(0), len(wanted))])
    return {(w if w < len(codes) else ALL_REQUESTS, c): each for (w, c), each in found.items()}


def _wanted(records: Records, chosen: Sample) -> Mask:
    """Holds, for each request id, whether the request is in the sample."""
    wanted = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    for each in chosen.blocks():
        wanted[each.id] = True
    return wanted


def _codes(chosen: Sample, groups: Groups, num_requests: int) -> npt.NDArray[np.int16]:
    """Position of each request's group; -1 if it is in no group."""
    if not groups:
        return np.broadcast_to(np.int16(-1), num_requests)
    code = np.full(num_requests, -1, dtype=np.int16)
    ids = chosen.id
    for position, rows in enumerate(groups.values()):
        code[ids[rows]] = position
    return code


def _tiers(records: Records, chosen: Sample) -> Groups:
    tier = records.workload.get("tier")
    return {} if tier is None else _several({str(c): rows for c, rows in rows_by_code(tier[chosen.id]).items()})


def _models(records: Records, chosen: Sample) -> Groups:
    """Groups by the model that served a request, or by the requested model if none did."""
    names = sorted({replica.model for replica in records.replicas} | set(records.models))
    code_of = {name: code for code, name in enumerate(names)}
    requested = records.workload.get("model")
    if requested is not None and records.models:
        code = np.array([code_of[name] for name in records.models], dtype=np.int16)[requested[chosen.id]]
    else:
        code = np.full(len(chosen), -1, dtype=np.int16)
    by_id = np.full(max((each.id for each in records.replicas), default=0) + 1, -1, dtype=np.int16)
    for each in records.replicas:
        by_id[each.id] = code_of[each.model]
    replica = chosen.column("replica")
    code = np.where(replica >= 0, by_id[replica], code)
    return _several({names[c]: rows for c, rows in rows_by_code(code).items() if c >= 0 and names[c]})


def _named(records: Records, chosen: Sample, column: str, names: tuple[str, ...]) -> Groups:
    code = records.workload.get(column)
    if code is None or len(names) < 2:
        return {}
    rows = rows_by_code(code[chosen.id])
    return _several({names[c] or "none": found for c, found in rows.items() if c >= 0})


def _fallbacks(chosen: Sample) -> Groups:
    """Groups by the reason for which a fallback answered; empty if none did."""
    if FALLBACK not in chosen.records.requests:
        return {}
    rows = rows_by_code(chosen.column(FALLBACK))
    return {FALLBACK_REASONS[code - 1]: found for code, found in rows.items() if code}


def _several(groups: Groups) -> Groups:
    return groups if len(groups) > 1 else {}


def _replicas(records: Records, chosen: Sample, used: ReplicaUsage, window_s: float) -> dict[str, ReplicaMetrics]:
    itl, rows = itl_by_replica(records, _wanted(records, chosen)), rows_by_code(chosen.column("replica"))
    ids = [replica.id for replica in records.replicas]
    result = {}
    for position, (id, own) in enumerate(zip(ids, _parts(chosen, [rows.get(id, _NO_ROWS) for id in ids]), strict=True)):
        found = _request_metrics(own, itl.get(id), window_s)
        result[str(id)] = ReplicaMetrics(**_replica_metrics(found, used, slice(position, position + 1)))
    return result


_NO_ROWS: Rows = np.empty(0, dtype=np.int32)
_JOINT_ROWS = 1 << 16
"""Rows of several groups whose latencies are computed at once."""


def _parts(chosen: Sample, groups: Sequence[Rows]) -> Iterator[Sample | ComputedSample]:
    """The part of the sample in each group of rows."""
    at = 0
    while at < len(groups):
        if len(groups[at]) > BLOCK_ROWS:
            yield chosen.subset(groups[at])
            at += 1
            continue
        ends = np.cumsum([len(rows) for rows in groups[at:]])
        num = max(int(np.searchsorted(ends, _JOINT_ROWS, side="right")), 1)
        computed = ComputedSample.of(chosen.subset(np.concatenate(groups[at : at + num])))
        yield from computed.parts(ends[:num].tolist())
        at += num


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


BREAKDOWNS = {
    "tiers": "tier",
    "models": "model",
    "regions": "region",
    "tenants": "tenant",
    "fallbacks": "fallback",
    "replicas": "replica",
}
"""Fields of a summary, and the first word of their flat keys."""


def flatten(summary: RequestMetrics, replicas: bool = True) -> dict[str, float | int | None]:
    """The metrics under flat keys such as `ttft_s.p99` or `tier.0.ttft_s.p99`; None without data.

    `report.describe` defines each key. `replicas`: include the metrics of each replica, which is slow for thousands of
    them.
    """
    return dict(_flat(summary, () if replicas else ("replicas",)))


def flat_replicas(replicas: Mapping[str, ReplicaMetrics]) -> Iterator[tuple[str, Sequence[str], list[Any]]]:
    """Yield (name, keys, values) for each replica. The flat key of a value begins with `replica.NAME.`."""
    keys: dict[bool, list[str]] = {}
    for name, metrics in replicas.items():
        has_refusals = metrics.refusals is not None
        if has_refusals not in keys:
            keys[has_refusals] = [key for key, _ in _flat(metrics)]
        yield name, keys[has_refusals], _flat_values(metrics)


def _flat_values(metrics: ReplicaMetrics) -> list[float | int | None]:
    """The values of `_flat`, in half the time."""
    found: list[float | int | None] = []
    for name, value in zip(metrics.__struct_fields__, structs.astuple(metrics), strict=True):
        if name in PARTS:
            found += [None] * len(PARTS[name].__struct_fields__) if value is None else structs.astuple(value)
        elif name == "refusals":
            found += () if value is None else structs.astuple(value)
        else:
            found.append(value)
    return found


def _flat(
    summary: RequestMetrics | ProgramMetrics | Refusals, omitted: Collection[str] = ()
) -> Iterator[tuple[str, float | int | None]]:
    for name in summary.__struct_fields__:
        if name in omitted:
            continue
        value = getattr(summary, name)
        if name in BREAKDOWNS:
            for key, metrics in value.items():
                for inner, number in _flat(metrics):
                    yield f"{BREAKDOWNS[name]}.{key}.{inner}", number
        elif name in ("programs", "refusals"):
            if value is not None:
                yield from _flat(value)
        elif name in PARTS:
            for inner in PARTS[name].__struct_fields__:
                yield f"{name}.{inner}", None if value is None else getattr(value, inner)
        else:
            yield name, value


_LATENCIES = (
    "ttft_s",
    "answer_s",
    "tpot_s",
    "itl_s",
    "e2e_s",
    "queueing_s",
    "reasoning_s",
    "ttfat_s",
    "blocking_s",
    "transfer_s",
    "program_s",
)

PARTS: dict[str, type[Distribution] | type[MeanPeak] | type[StartingGpuHours]] = {
    **dict.fromkeys(_LATENCIES, Distribution),
    **dict.fromkeys(("kv_use", "batch_size"), MeanPeak),
    "starting_gpu_hours": StartingGpuHours,
}
"""Fields with several numbers."""
