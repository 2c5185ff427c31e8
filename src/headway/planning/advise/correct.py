"""The speed of the engines on the recorded days: one factor on all step times, and the remaining error.

The days are rehearsed as they ran with various factors until their E2E latencies agree with the records. The remaining
model error is the largest of three: the distance of the factors by TTFT, by TPOT and by each pool's TPOT, because
prompts, decoding and GPUs may have different errors; Student's interval over the parts; and `LEAST_ERROR`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, log, nan
from typing import Any

import numpy as np
from msgspec import Struct

from headway.config.scenario import Scenario
from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.metrics.columns import Floats
from headway.metrics.interval import interval
from headway.metrics.latency import DefaultSlo, Sample, sample
from headway.planning.advise.days import Day, Part
from headway.planning.rehearsals import Rehearsal, counted

E2E = "e2e_s"
KEYS = (E2E, "tpot_s", "ttft_s")
LEAST_ERROR = 0.023
"""Error of step times fitted to the same engine on other requests (docs/calibrate.md, the row over all iterations)."""
LEVEL = 0.9
MOST_ROUNDS = 5
"""Maximum number of rehearsals of each part."""
CLOSE = 0.002
"""The search ends at this mean logarithm of measured over predicted E2E."""

LEAST_SLOPE = -0.5
"""Slope of the mean logarithm of measured over predicted E2E, over the logarithm of the factor: step times make up at
least half of a latency. A flatter line is noise."""

Means = Mapping[str, float]
"""Mean latencies of a part of a day, by `KEYS`, and by pool if there are several."""


class StepTimeFactor(Struct, frozen=True):
    """Factor between the engines' and the model's step times."""

    mean: float
    low: float
    high: float
    by: dict[str, float]
    """Holds, for each latency, the factor at which its predicted mean equals the measured one."""


class PartMeans(Struct, frozen=True):
    """Means from the rehearsal of a part of a day; empty if it cannot be rehearsed."""

    means_s: dict[str, float]


def means_rehearsal(scenario: Scenario, until_s: float) -> Rehearsal[PartMeans]:
    """The rehearsal of a part of a day as it ran."""
    return Rehearsal(scenario, partial(_part_means, until_s), PartMeans, ("means", until_s), _failed)


def _failed(_: HeadwayError) -> PartMeans:
    return PartMeans({})


def _part_means(until_s: float, scenario: Scenario, records: Records) -> PartMeans:
    spec = scenario.spec
    return PartMeans(_means(counted(records, spec.simulation.warmup_s, spec.slo, until_s)))


def measured(day: Day, part: Part) -> dict[str, float]:
    """Mean latencies of the requests that arrived in a part of a day."""
    until_s = float("inf") if part.to_s is None else float(np.nextafter(part.to_s, 0.0))
    return _means(sample(day.records, part.from_s, DefaultSlo(), until_s=until_s))


def _means(chosen: Sample) -> dict[str, float]:
    latencies = {key: getattr(chosen, key) for key in KEYS}
    pools = np.array([each.pool for each in chosen.records.replicas])
    if len(set(pools)) > 1:
        ids = np.array([each.id for each in chosen.records.replicas])
        for pool in sorted(set(pools)):
            own = np.isin(chosen.column("replica"), ids[pools == pool])
            latencies[f"tpot_s of {pool}"] = latencies["tpot_s"][own]
    finite = {key: values[np.isfinite(values)] for key, values in latencies.items()}
    return {key: mean for key, values in finite.items() if len(values) and (mean := float(values.mean())) > 0}


def correct(
    ran: Sequence[Means], rehearse: Callable[[float], Sequence[Means]], band: float, most_rounds: int = MOST_ROUNDS
) -> StepTimeFactor | None:
    """The factor on step times at which rehearsals agree with `ran`; None if a part has no E2E latency.

    `rehearse`: returns the means of the same parts for a factor on step times. `band`: largest deviation of the factor
    from 1.
    """
    most, at = log(band), 0.0
    keys = [*KEYS, *sorted(set(ran[0]) - set(KEYS))]
    tried: list[float] = []
    off: list[list[list[float]]] = []
    while len(tried) < most_rounds and at not in tried:
        found = rehearse(exp(at))
        tried.append(at)
        off.append(
            [[_log_ratio(each.get(key), one.get(key)) for key in keys] for each, one in zip(ran, found, strict=True)]
        )
        e2e = np.array(off)[:, :, 0].mean(axis=1)
        if not abs(e2e[-1]) > CLOSE:
            break
        at = _root(tried, e2e, most)
    return _factor(tried, keys, np.array(off), most)


def _log_ratio(real: float | None, found: float | None) -> float:
    return nan if real is None or found is None else log(real / found)


def _factor(tried: Sequence[float], keys: Sequence[str], off: Floats, most: float) -> StepTimeFactor | None:
    """The factor on step times at which the mean deviation of E2E is 0, and its possible range. `off`: logarithms of
    measured over predicted, by factor, part and latency."""
    of_all = off.mean(axis=1)
    by = {key: _root(tried, of_all[:, i], most) for i, key in enumerate(keys) if np.isfinite(of_all[:, i]).all()}
    of_parts = [_root(tried, off[:, i, 0], most) for i in range(off.shape[1]) if np.isfinite(off[:, i, 0]).all()]
    if E2E not in by:
        return None
    mean, least = by[E2E], log(1 + LEAST_ERROR)
    ends = [*by.values(), *(interval(of_parts, LEVEL) or ())]
    low = min(max(min(ends), -most), mean - least)
    high = max(min(max(ends), most), mean + least)
    return StepTimeFactor(exp(mean), exp(low), exp(high), {key: exp(at) for key, at in by.items()})


def _root(tried: Sequence[float], off: Floats, most: float) -> float:
    """The argument, from -`most` to `most`, at which a decreasing function is 0: on a line through two nearest points.
    `off`: the function's values at `tried`."""
    points = sorted(zip(tried, map(float, off), strict=True))
    above = [point for point in points if point[1] > 0][-2:]
    below = [point for point in points if point[1] <= 0][:2]
    line = [above[-1], below[0]] if above and below else above or below
    nearest = min(line, key=lambda point: abs(point[1]))
    slope = -1.0  # latencies scale with step times if nothing waits
    if len(line) == 2:
        slope = min((line[1][1] - line[0][1]) / (line[1][0] - line[0][0]), LEAST_SLOPE)
    return min(max(nearest[0] - nearest[1] / slope, -most), most)


def own_factor(document: Mapping[str, Any]) -> float:
    """The factor on step times in the document itself (`simulation: step_time_factor`); 1 if it has none."""
    simulation = document.get("simulation")
    found = simulation.get("step_time_factor", 1.0) if isinstance(simulation, dict) else 1.0
    # otherwise its scenario raises an error
    return float(found) if isinstance(found, int | float) and found > 0 else 1.0


def slower(document: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A document with step times multiplied by a factor."""
    if factor == 1.0:
        return dict(document)
    simulation = {**(document.get("simulation") or {}), "step_time_factor": factor * own_factor(document)}
    return {**document, "simulation": simulation}
