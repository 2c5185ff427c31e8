"""The cost of scaling by a forecast: instances for the forecast plus a headroom, against the actual demand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from headway.core.policy import Floats

HOUR_S = 3600.0
LEAST_INSTANCES = 1
WIDEST = 1000.0
CLOSE = 1e-4
"""Precision of the search for the headroom."""


class ObservedDemand(Struct, frozen=True):
    """Actual demand, and the capacity of an instance."""

    fine: Floats
    """Actual demand: a row for each forecast step, a column for each finer step of the measured series."""
    step_s: float
    capacity: float
    """Capacity of one instance."""
    gpus_per_instance: int = 1


class Expected(Struct, frozen=True):
    """The forecast of each step and its uncertainty."""

    median: Floats
    spread: Floats
    """The distance from the median to a higher quantile, at least 0."""


class ScalingResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of scaling by a forecast."""

    headroom: float
    """Capacity above the median, in spreads."""
    gpu_hours: float
    exceeded_share: float
    """Share of time in which demand exceeded capacity."""
    idle_share: float
    """Share of the capacity that was not used."""


def scaled(expected: Sequence[Expected], demand: Sequence[ObservedDemand], headroom: float) -> ScalingResult:
    """The result with instances, at least one, for the median plus `headroom` spreads in each series and step.

    Instances run from the start to the end of a step. There is no start-up time and no reaction within a step.
    """
    gpu_hours = exceeded = used = available = 0.0
    for forecast, actual in zip(expected, demand, strict=True):
        wanted = forecast.median + headroom * forecast.spread
        instances = np.maximum(np.ceil(wanted / actual.capacity - 1e-9), LEAST_INSTANCES)
        capacity = instances[:, None] * actual.capacity
        gpu_hours += float(instances.sum()) * actual.gpus_per_instance * actual.step_s / HOUR_S
        exceeded += float((actual.fine > capacity).sum())
        used += float((np.minimum(actual.fine, capacity) / actual.capacity).sum())
        available += float(instances.sum()) * actual.fine.shape[1]
    return ScalingResult(headroom, gpu_hours, exceeded / sum(each.fine.size for each in demand), 1 - used / available)


def matched(expected: Sequence[Expected], demand: Sequence[ObservedDemand], exceeded: float) -> ScalingResult | None:
    """The result with the smallest headroom, one for all series, that meets the SLO; None if none does.

    `exceeded` is the share of time in which demand may exceed capacity. This share never grows with the headroom, so
    bisection finds the smallest headroom. The headroom may be negative.
    """
    low, high = -WIDEST, scaled(expected, demand, WIDEST)
    if high.exceeded_share > exceeded:
        return None
    while high.headroom - low > CLOSE:
        middle = scaled(expected, demand, (low + high.headroom) / 2)
        if middle.exceeded_share > exceeded:
            low = middle.headroom
        else:
            high = middle
    return high
