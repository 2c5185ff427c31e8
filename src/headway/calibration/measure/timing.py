"""How long a kernel takes. The clock and the kernel are arguments; nothing here knows of a device."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from msgspec import Struct

ROUND_S = 0.02
"""A round repeats the kernel for about this long, so that the clock's and the launch's own time do not show."""
NUM_ROUNDS = 5
MOST_REPEATS = 2000


class Kernel(Struct, frozen=True):
    """Something to time."""

    run: Callable[[], object]
    """May return before the device is done."""
    wait: Callable[[], object]
    """Returns when it is."""
    calls: int = 1
    """How many times the operator runs in one `run`."""


def time_s(kernel: Kernel, clock: Callable[[], float]) -> float:
    """Median seconds of one call of the operator, over rounds, when warm."""
    for _ in range(2):
        kernel.run()
    kernel.wait()
    once_s = _round_s(kernel, 1, clock)
    repeats = max(1, min(MOST_REPEATS, round(ROUND_S / once_s))) if once_s > 0 else MOST_REPEATS
    rounds = [_round_s(kernel, repeats, clock) for _ in range(NUM_ROUNDS)]
    return median(rounds) / repeats / kernel.calls


def _round_s(kernel: Kernel, repeats: int, clock: Callable[[], float]) -> float:
    start_s = clock()
    for _ in range(repeats):
        kernel.run()
    kernel.wait()
    return clock() - start_s
