"""The runs of PASCAL's sections III and V: workloads, fleets, policies, and measurements.

The engine is vLLM's V0 scheduler, as in the paper's vLLM 0.6.1: prefills before decodes, at most 256 sequences, 1% of
the KV blocks left free at admission. Unlike vLLM's default, preempted requests are swapped to host memory and not
recomputed: the paper's FCFS and RR both offload (II-C), and its server has 256 GB (III-A). Prefills are whole: vLLM
0.6.1 chunks them only for contexts beyond 32K. The model's own context, 128K, exceeds the GPU's KV cache, so the engine
must be configured with a smaller one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway.core.pacer import Pacer
from headway.core.record import Columns
from headway.metrics.arriving import while_arriving
from headway.metrics.columns import floats, ints
from headway.metrics.latency import sample
from headway.metrics.qoe import VIOLATED, Phases, computed_phases, phases
from headway.report.run import Run
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec
from headway_papers.reproduce.tasks import Measurement

Floats = npt.NDArray[np.float64]
Document = dict[str, Any]

FCFS, RR, PASCAL = "FCFS", "RR", "PASCAL"
NO_MIGRATION, NON_ADAPTIVE = "PASCAL (no migration)", "PASCAL (non-adaptive)"
BY_PACE = "PASCAL (schedulers that go by the pace alone)"
SHORTEST, SOONEST = "shortest-remaining (oracle)", "shortest-to-answer (oracle)"

_TURNS = {"name": "pascal", "by_quanta": True}
_MOVES = {"name": "pascal", "host_counts": True}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    FCFS: {"routing": "least-footprint", "ordering": "fcfs"},
    RR: {"routing": "least-footprint", "ordering": "fewest-quanta"},
    PASCAL: {"routing": "pascal", "ordering": _TURNS, "migration": _MOVES},
    NO_MIGRATION: {"routing": "pascal", "ordering": _TURNS},
    NON_ADAPTIVE: {"routing": "pascal", "ordering": _TURNS, "migration": {**_MOVES, "adaptive": False}},
    BY_PACE: {"routing": "pascal", "ordering": _TURNS, "migration": _MOVES},
    SHORTEST: {"routing": "least-footprint", "ordering": "shortest-remaining"},
    SOONEST: {"routing": "least-footprint", "ordering": "shortest-to-answer"},
}
"""Both baselines place by the smallest footprint and never migrate (V-A), and so do the oracles.

Two things have two readings. Turns: in the paper, round-robin lowers a request's priority with each used quantum, so
that a short request keeps a higher priority than a long one that has used many (V-B); answers within their first
quantum are next in line (IV-B); and no request waits to begin (III-B). The request with fewer used quanta therefore
goes first. Among equals, the one that has had this number for longest goes first, because no request loses its memory
within a quantum (II-C). Memory: Algorithms 1 and 2 only know the footprint on GPU and host, so a replica that has
swapped requests out is short of memory. `READINGS` has the other reading of each.
"""

READINGS: Mapping[str, Mapping[str, Any]] = {
    "first quantum first, then a circle: RR": {
        "routing": "least-footprint",
        "ordering": {"name": "fewest-quanta", "levels": 2},
    },
    "first quantum first, then a circle: PASCAL": {
        "routing": "pascal",
        "ordering": {"name": "pascal", "by_quanta": True, "levels": 2},
        "migration": _MOVES,
    },
    "turns in a circle: RR": {"routing": "least-footprint", "ordering": "round-robin"},
    "turns in a circle: PASCAL": {"routing": "pascal", "ordering": "pascal", "migration": _MOVES},
    "host memory does not count: PASCAL": {"routing": "pascal", "ordering": _TURNS, "migration": "pascal"},
    "both: PASCAL": {"routing": "pascal", "ordering": "pascal", "migration": "pascal"},
}
"""Other readings of the paper's text."""

BIN_TOKENS = 256
TPOT_ONLY = Pacer(ttfat_s=None, tpot_s=0.1)
"""V-A: QoE by the pace alone, from the first answering token on."""
WITH_TTFAT = Pacer(ttfat_s=0.25, tpot_s=0.1)
"""III-A. The scheduler's own pacer uses it, too: readers wait for an answer once its reasoning is over. The pacers of
`BY_PACE` do not: there t_i, the answers behind their pace, counts only answers that have begun."""
LENGTHS = (128, 256, 512, 1024, 2048)
"""Lengths in Figures 4 and 5."""


def served(workload: Document, system: str, *, replicas: int = 8, kv_capacity_tokens: int | None = None) -> Document:
    """The scenario document: the paper's model and GPUs (III-A, V-A), 100 Gbit/s between replicas."""
    pool: Document = {
        "model": "deepseek-r1-distill-qwen-32b",
        "gpu": "h100-96gb",
        "replicas": replicas,
        "network_bytes_per_s": 12.5e9,
        "engine": {"name": "vllm-v0", "preemption": "swap", "host_memory_bytes": 256e9, "orderings": None},
    }
    if kv_capacity_tokens is not None:
        pool["kv_capacity_tokens"] = kv_capacity_tokens
    policies = POLICIES[system] if system in POLICIES else READINGS[system]
    pacer = TPOT_ONLY if system == BY_PACE else WITH_TTFAT
    return {"workload": workload, "fleet": [pool], "policies": policies, "pacer": structs.asdict(pacer)}


def measure(run: Run) -> Measurement:
    """The measurements of section V."""
    records, summary = run.records, run.summary
    ended = records.requests
    request = ints(ended, "request")
    arrival_s = floats(records.workload, "arrival_s", request)
    reasoning = ints(records.workload, "reasoning_tokens", request)
    ttft_s, e2e_s = floats(ended, "answer_s") - arrival_s, floats(ended, "end_s") - arrival_s
    by_pace = phases(records, ended, TPOT_ONLY)
    answered = ~np.isnan(ttft_s)
    chosen = sample(records, 0.0, None)
    arriving = while_arriving(chosen, np.ones(len(chosen), dtype=bool))
    measured: Measurement = {
        "tails": list(tails(reasoning[answered], ttft_s[answered])),
        "reasoning": list(_means(reasoning[answered], (floats(ended, "reasoning_end_s") - arrival_s)[answered])),
        "ttft_quantiles_s": quantiles(ttft_s[answered]),
        "points": _points(reasoning[answered], ttft_s[answered]),
        "reasoning_quantiles": quantiles(reasoning.astype(np.float64)),
        "answer_quantiles": quantiles(ints(records.workload, "output_tokens", request) - reasoning),
        "ttft_mean_s": float(ttft_s[answered].mean()),
        "ttft_p50_s": float(np.percentile(ttft_s[answered], 50)),
        "tokens_per_s": summary.output_tokens_per_s,
        "arriving_tokens_per_s": arriving.tokens / arriving.seconds,
        "violations": by_pace.violations if by_pace else None,
        "violations_with_ttfat": summary.qoe_violations,
        "blocking_p99_s": summary.blocking_s.p99 if summary.blocking_s else None,
        "transfer_p99_s": summary.transfer_s.p99 if summary.transfer_s else None,
        "reasoning_mean_s": summary.reasoning_s.mean if summary.reasoning_s else None,
        "preemptions": summary.preemptions,
        "moves": summary.moves,
        "end_s": records.end_s,
    }
    for name, q in (("p50", 50), ("p90", 90), ("p99", 99)):
        measured[f"e2e_{name}_s"] = float(np.nanpercentile(e2e_s, q))
    return measured


def tails(reasoning: npt.NDArray[np.int64], ttft_s: Floats) -> Iterator[tuple[int, int, float]]:
    """(first token of the bin, requests in it, tail TTFT), by the rule of Figure 10's caption."""
    bins = reasoning // BIN_TOKENS
    for each in np.unique(bins).tolist():
        values = ttft_s[bins == each]
        if len(values) >= 5:
            yield each * BIN_TOKENS, len(values), tail(values)


def _means(reasoning: npt.NDArray[np.int64], reasoning_s: Floats) -> Iterator[tuple[int, int, float]]:
    """(first token of the bin, requests in it, mean reasoning latency)."""
    has_value = ~np.isnan(reasoning_s)
    bins, reasoning_s = reasoning[has_value] // BIN_TOKENS, reasoning_s[has_value]
    for each in np.unique(bins).tolist():
        values = reasoning_s[bins == each]
        if len(values) >= 5:
            yield each * BIN_TOKENS, len(values), float(values.mean())


def tail(values: Floats) -> float:
    """The maximum of fewer than 10 samples, P90 of fewer than 20, P95 of fewer than 100, otherwise P99."""
    for less_than, q in ((10, 100), (20, 90), (100, 95)):
        if len(values) < less_than:
            return float(np.percentile(values, q))
    return float(np.percentile(values, 99))


def quantiles(values: npt.NDArray[Any]) -> list[float]:
    """Quantiles from 0 to 100% in steps of 1%."""
    return [float(f"{value:.5g}") for value in np.percentile(values, np.arange(101))]


def _points(x: npt.NDArray[np.int64], y: Floats, most: int = 300) -> list[list[float]]:
    step = max(1, len(x) // most)
    return [[int(a), float(f"{b:.4g}")] for a, b in zip(x[::step], y[::step], strict=True)]


def lengths(builtin: str, num_requests: int) -> Measurement:
    """Quantiles of a built-in workload's tokens."""
    drawn = generate(WorkloadSpec(builtin=builtin, num_requests=num_requests), seed=0).columns
    reasoning, output = ints(drawn, "reasoning_tokens"), ints(drawn, "output_tokens")
    return {"reasoning": quantiles(reasoning), "answers": quantiles(output - reasoning)}


# Section III: one phase at a time.


def measure_phase(run: Run) -> Measurement:
    """Maps each length to the phase's mean latency, and the shares of it in which requests ran, were blocked, or were
    preempted."""
    records = run.records
    ended = records.requests
    request = ints(ended, "request")
    scores = computed_phases(records, ended, WITH_TTFAT)
    arrival_s = floats(records.workload, "arrival_s", request)
    reasons = bool(np.any(records.workload.get("reasoning_tokens", 0)))
    length = ints(records.workload, "reasoning_tokens" if reasons else "output_tokens", request)
    latency_s = floats(ended, "reasoning_end_s" if reasons else "end_s") - arrival_s
    blocked_s = floats(ended, "admitted_s") - arrival_s
    preempted_s = _between_stays_s(records.segments, len(request))[request]
    use, capacity = run.summary.kv_use, records.replicas[0].kv_capacity_tokens
    measured: Measurement = {
        "preemptions": run.summary.preemptions,
        "kv_peak_tokens": use.peak * capacity if use else None,
        "kv_capacity_tokens": capacity,
        "lengths": [],
    }
    for each in LENGTHS:
        rows = length == each
        if rows.any():
            latency, blocked, preempted = (float(s[rows].mean()) for s in (latency_s, blocked_s, preempted_s))
            measured["lengths"].append([each, latency, blocked, preempted, _attained(scores, rows)])
    return measured


def _between_stays_s(segments: Columns, num_requests: int) -> Floats:
    """Maps each request to the time from the end of each stay in the batch to the start of the next."""
    request = ints(segments, "request")
    order = np.lexsort((segments["admitted_s"], request))
    begun, ended, request = floats(segments, "admitted_s", order), floats(segments, "end_s", order), request[order]
    again = request[1:] == request[:-1]
    waited = np.where(again, begun[1:] - ended[:-1], 0.0)
    return np.bincount(request[1:], weights=waited, minlength=num_requests).astype(np.float64)


def _attained(scores: Phases, rows: npt.NDArray[np.bool_]) -> float | None:
    """The share of answers that meet the SLO."""
    qoe = scores.qoe[rows]
    qoe = qoe[~np.isnan(qoe)]
    return float((qoe >= VIOLATED).mean()) if len(qoe) else None
