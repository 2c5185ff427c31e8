"""Candidates that need not be looked at: some number of another one of the service is no worse in anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headway.planning.combos.candidates import Candidate
from headway.planning.solver import Floats

ROUNDING = 1e-9
"""Relative; far below what a plan may miss a demand by."""


def undominated(
    candidates: Sequence[Candidate],
    weights: Mapping[Candidate, float],
    limited: Sequence[str],
    demand_rps: Mapping[str, float],
) -> list[Candidate]:
    """Without those that others replace in any plan, and in an order that is the candidates' own.

    k of one replace another of its service, k being as many as serve no less, where they weigh no more (in an
    objective that is minimised) and take no more GPUs of any limited type. What a candidate serves beyond the whole
    demand does not count. So a combo goes that is two of a smaller one with a higher price; of equals, one stays.
    """
    ordered = sorted(candidates, key=lambda each: (each.service, weights[each], each.combo.label, each.goodput_rps))
    kept: list[Candidate] = []
    for service in sorted(demand_rps):
        some = [each for each in ordered if each.service == service]
        if some:
            weigh = np.array([weights[each] for each in some])
            serve = np.array([min(each.goodput_rps, demand_rps[service]) for each in some])
            take = np.array([[float(each.combo.gpus.get(gpu, 0)) for gpu in limited] for each in some])
            stays = _staying(_replaces(weigh, serve, take))
            kept += [each for each, stay in zip(some, stays, strict=True) if stay]
    return kept


def _replaces(weigh: Floats, serve: Floats, take: Floats) -> np.ndarray:
    """[a, b]: whether some number of a replaces b."""
    copies = np.ceil(serve[None, :] / serve[:, None] - ROUNDING)
    slack = ROUNDING * np.abs(weigh)[None, :]
    found = copies * weigh[:, None] <= weigh[None, :] + slack
    for column in take.T:
        found &= copies * column[:, None] <= column[None, :]
    return np.asarray(found)


def _staying(replaces: np.ndarray) -> list[bool]:
    """One after the other, last ones first, so that whoever goes is replaced by what is still there."""
    stays = np.ones(len(replaces), dtype=bool)
    np.fill_diagonal(replaces, False)
    for b in reversed(range(len(replaces))):
        stays[b] = not (replaces[:, b] & stays).any()
    return [bool(stay) for stay in stays]
