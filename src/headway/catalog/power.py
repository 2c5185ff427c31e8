"""The power of GPUs under load, as shares of their limit, with sources."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct

from headway.core.fleet import Gpu


class PowerShares(Struct, frozen=True, forbid_unknown_fields=True):
    """Power of one type of GPU, in shares of `Gpu.watts`.

    While an iteration runs, `active + memory * m + compute * sqrt(c)` beyond `idle`, at most 1 in all; m is the
    iteration's share of peak bandwidth, c of peak FLOP/s.
    """

    gpus: tuple[str, ...]
    """GPUs of the measurements."""
    like: tuple[str, ...]
    """GPUs without measurements of the same or the nearest architecture."""
    idle: float
    """With a model loaded."""
    active: float
    memory: float
    compute: float
    error: float
    """Share by which 9 of 10 measured loads differ at most from predictions by a fit without their model."""
    error_if_like: float
    """The same of loads on another GPU, predicted by these shares."""
    num_loads: int
    num_models: int
    source: str


def power_shares(gpu: Gpu) -> tuple[PowerShares, bool]:
    """The shares of a GPU, and whether they were measured on it; else they are of the nearest GPU that was measured."""
    table = _table()
    for each in table:
        if gpu.name in each.gpus:
            return each, True
    return next((each for each in table if gpu.name in each.like), table[0]), False


@cache
def _table() -> tuple[PowerShares, ...]:
    data = (files("headway.catalog") / "data" / "power.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[PowerShares, ...])
