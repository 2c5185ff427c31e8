"""Metrics of whole programs: the calls of an agent, or the turns of a session, from the first arrival to the last
token."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from headway.core.record import Outcome, Records
from headway.metrics.columns import floats, ints
from headway.metrics.latency import Distribution, distribution


class ProgramMetrics(Struct, frozen=True):
    num_programs: int
    """Programs whose first call arrived in the window."""
    program_s: Distribution | None
    """Time from the first arrival to the end of the last call, over programs whose calls all finished."""
    program_slo_attainment: float
    """Share of the programs that finished within the SLO."""


def program_metrics(records: Records, warmup_s: float, slo_s: float | None) -> ProgramMetrics | None:
    """Metrics of the programs that began after the warm-up; None without an SLO for programs, or without programs."""
    if slo_s is None or "session_id" not in records.workload:
        return None
    request = ints(records.requests, "request")
    session = ints(records.workload, "session_id")[request]
    names, program = np.unique(session, return_inverse=True)
    begin_s, end_s = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(begin_s, program, floats(records.workload, "arrival_s")[request])
    np.maximum.at(end_s, program, floats(records.requests, "end_s"))
    has_failed = np.zeros(len(names), np.bool_)
    np.logical_or.at(has_failed, program, records.requests["outcome"] != Outcome.FINISHED)
    chosen = (names >= 0) & (begin_s >= warmup_s)
    if not chosen.any():
        return None
    took_s = (end_s - begin_s)[chosen & ~has_failed]
    num = int(chosen.sum())
    return ProgramMetrics(num, distribution(took_s), float((took_s <= slo_s).sum()) / num)
