"""Candidates that need not be looked at: another of the service is no worse in anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headway.planner.candidates import Candidate


def undominated(
    candidates: Sequence[Candidate],
    weights: Mapping[Candidate, float],
    limited: Sequence[str],
    demand_rps: Mapping[str, float],
) -> list[Candidate]:
    """Without those that another one replaces in any plan, and in an order that is the candidates' own.

    One replaces another of its service where it weighs no more (in an objective that is minimised), takes no more
    GPUs of any limited type, and serves no less, all beyond the demand being alike. Of equals, one stays.
    """
    ordered = sorted(candidates, key=lambda each: (each.service, weights[each], each.combo.label, each.goodput_rps))
    kept: list[Candidate] = []
    for service in sorted(demand_rps):
        some = [each for each in ordered if each.service == service]
        if some:
            rows = np.array([_row(each, weights[each], limited, demand_rps[service]) for each in some])
            kept += [each for i, each in enumerate(some) if not _replaced(rows, i)]
    return kept


def _row(each: Candidate, weight: float, limited: Sequence[str], rps: float) -> list[float]:
    """Less is better in every column."""
    gpus = each.combo.gpus
    return [weight, -min(each.goodput_rps, rps), *(float(gpus.get(gpu, 0)) for gpu in limited)]


def _replaced(rows: np.ndarray, i: int) -> bool:
    """By one that is better in something, or by an equal one that stands before it."""
    no_worse = (rows <= rows[i]).all(axis=1)
    equal = (rows == rows[i]).all(axis=1)
    return bool((no_worse & ~equal).any() or equal[:i].any())
