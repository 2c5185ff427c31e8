"""The power of GPUs under load, as shares of their limit, with sources."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct

from headway.core.fleet import Gpu


class PowerShares(Struct, frozen=True, forbid_unknown_fields=True):
    """Power of one type of GPU, in shares of `Gpu.watts`.

    While an iteration runs, `active + memory * m + compute * sqrt(c)` is added to `idle`; the total is at most 1. Here
    m is the iteration's share of peak bandwidth, and c its share of peak FLOP/s.
    """

    gpus: tuple[str, ...]
    """Measured GPUs."""
    like: tuple[str, ...]
    """Unmeasured GPUs of the same or the nearest architecture."""
    idle: float
    """Power of an idle GPU with a model loaded."""
    active: float
    memory: float
    compute: float
    error: float
    """90% bound of the relative error on measured loads, each predicted by a fit without the loads of its model."""
    error_if_like: float
    """As `error`, for loads on another GPU that are predicted by these shares."""
    num_loads: int
    num_models: int
    source: str


def power_shares(gpu: Gpu) -> tuple[PowerShares, bool]:
    """The shares of a GPU, and whether they were measured on it; otherwise they belong to the nearest measured GPU."""
    table = _table()
    for each in table:
        if gpu.name in each.gpus:
            return each, True
    return next((each for each in table if gpu.name in each.like), table[0]), False


@cache
def _table() -> tuple[PowerShares, ...]:
    data = (files("headway.catalog") / "data" / "power.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[PowerShares, ...])
