"""Metrics of a run in the arena. The functions run in other processes, and their module is part of the cache keys."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.record import Columns, Records
from headway.metrics.columns import Floats, floats, ints
from headway.metrics.latency import DefaultSlo, distribution, sample, slo_masks
from headway.metrics.programs import program_metrics
from headway.metrics.usage import usage
from headway.scenario import Simulator, assemble

Measurement = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """The name of a metric in tables, and its better direction."""

    title: str
    better: Literal["high", "low"]
    unit: str = ""


METRICS: Mapping[str, Metric] = {
    "goodput_rps": Metric("goodput", "high", "/s"),
    "slo_attainment": Metric("SLO met", "high", "%"),
    "ttft_s.mean": Metric("TTFT mean", "low", "s"),
    "ttft_s.p99": Metric("TTFT p99", "low", "s"),
    "tpot_s.p99": Metric("TPOT p99", "low", "s"),
    "e2e_s.mean": Metric("E2E mean", "low", "s"),
    "e2e_s.p99": Metric("E2E p99", "low", "s"),
    "program_s.mean": Metric("program mean", "low", "s"),
    "cached_prompt_share": Metric("cached", "high", "%"),
    "gpu_hours": Metric("GPU hours", "low", "h"),
    "goodput_per_gpu_hour": Metric("goodput/GPU h", "high"),
}


def measure(document: dict[str, Any], base_dir: str, warmup_s: float) -> Measurement:
    """The metrics of a scenario's run; or `error`, if its policies do not fit its fleet."""
    try:
        chosen = assemble(copy.deepcopy(document), Places(), Path(base_dir))
        records = Simulator().records(chosen)
    except HeadwayError as error:
        return {"error": str(error)}
    return metrics(records, warmup_s, chosen.spec.slo)


def metrics(records: Records, warmup_s: float, slo: DefaultSlo) -> Measurement:
    """`METRICS` of the requests that arrive in the window of a run.

    The window begins at `warmup_s` and ends when the last request, session or program begins: after that, sessions and
    programs end one by one, and the load falls. Goodput is the rate of the window's requests that met all of their
    SLOs. Without SLOs, all finished requests count.
    """
    last_s = float(begin_s(records.workload).max(initial=0.0))
    chosen = sample(records, warmup_s, slo, until_s=last_s)
    has, met = slo_masks(chosen)["all"]
    num_good = int((met if has.any() else chosen.finished).sum())
    ttft_s, tpot_s, e2e_s = (distribution(each) for each in (chosen.ttft_s, chosen.tpot_s, chosen.e2e_s))
    admitted = ~np.isnan(chosen.queueing_s)
    prompt_tokens = int(chosen.prompt_tokens.sum(where=admitted))
    hours = float(usage(records, warmup_s).gpu_hours.sum())
    programs = program_metrics(records, warmup_s, slo.program_s)
    return {
        "num_requests": len(chosen),
        "goodput_rps": _ratio(num_good, last_s - warmup_s),
        "slo_attainment": _ratio(int((met & has).sum()), int(has.sum())),
        "ttft_s.mean": ttft_s and ttft_s.mean,
        "ttft_s.p99": ttft_s and ttft_s.p99,
        "tpot_s.p99": tpot_s and tpot_s.p99,
        "e2e_s.mean": e2e_s and e2e_s.mean,
        "e2e_s.p99": e2e_s and e2e_s.p99,
        "program_s.mean": programs.program_s.mean if programs and programs.program_s else None,
        "cached_prompt_share": _ratio(int(chosen.column("cached_prompt_tokens").sum(where=admitted)), prompt_tokens),
        "gpu_hours": hours,
        "goodput_per_gpu_hour": _ratio(num_good, hours),
    }


def begin_s(workload: Columns) -> Floats:
    """Arrival times; turns and calls have the arrival of the first one of their session or program."""
    arrival_s = floats(workload, "arrival_s")
    if "session_id" not in workload:
        return arrival_s
    session = ints(workload, "session_id")
    _, row, member = np.unique(
        np.where(session < 0, -1 - np.arange(len(session)), session), return_index=True, return_inverse=True
    )
    first_s = arrival_s[row]
    np.minimum.at(first_s, member, arrival_s)
    return first_s[member]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
