"""What scaling by a forecast takes: instances for what was forecast, times a head-room, against what came."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from headway.core.forecast import Floats

HOUR_S = 3600.0
LEAST_INSTANCES = 1
WIDEST = 1000.0
CLOSE = 1e-4
"""To which a head-room is searched."""


class Demand(Struct, frozen=True):
    """What came, and what serves it."""

    fine: Floats
    """Steps that were forecast (rows), each as it came, bit by bit (columns)."""
    step_s: float
    capacity: float
    """Of one instance."""
    gpus_per_instance: int = 1


class Expected(Struct, frozen=True):
    """What was forecast of each step, and how uncertain it was."""

    median: Floats
    spread: Floats
    """From the median to a higher quantile, 0 or more."""


class Scaled(Struct, frozen=True, forbid_unknown_fields=True):
    """A forecast, scaled by."""

    headroom: float
    """How many spreads above the median there was capacity for."""
    gpu_hours: float
    exceeded_share: float
    """Of time in which demand was above capacity."""
    idle_share: float
    """Of capacity that was not asked for."""


def scaled(expected: Sequence[Expected], demand: Sequence[Demand], headroom: float) -> Scaled:
    """Of each series and step, instances for the median and `headroom` times the spread, and one at least.

    They are there when the step begins and until it ends: no start-up times, no reaction within a step.
    """
    gpu_hours = exceeded = used = had = 0.0
    for said, came in zip(expected, demand, strict=True):
        wanted = said.median + headroom * said.spread
        instances = np.maximum(np.ceil(wanted / came.capacity - 1e-9), LEAST_INSTANCES)
        capacity = instances[:, None] * came.capacity
        gpu_hours += float(instances.sum()) * came.gpus_per_instance * came.step_s / HOUR_S
        exceeded += float((came.fine > capacity).sum())
        used += float((np.minimum(came.fine, capacity) / came.capacity).sum())
        had += float(instances.sum()) * came.fine.shape[1]
    return Scaled(headroom, gpu_hours, exceeded / sum(each.fine.size for each in demand), 1 - used / had)


def matched(expected: Sequence[Expected], demand: Sequence[Demand], exceeded: float) -> Scaled | None:
    """With the least head-room, one for all series, that exceeds capacity no more often; None: none does.

    More head-room never exceeds more often, so the least is found by halving. It may be below 0.
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
