"""Step times of a hosted pool: its published speed at any load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.core.errors import HeadwayError
from headway.core.fleet import Hosted

Line = Callable[[int, int, Sequence[tuple[int, int]], int, int], tuple[float, float, int | None]]
"""The step function's type, as in `sim.timeline`."""


def hosted_line(hosted: Hosted) -> Line:
    """A step function in which every request gets one token per step, and its first token in its prompt's step.

    Raises HeadwayError if the pool's speed is unknown.
    """
    if not hosted.tokens_per_s:
        raise HeadwayError("hosted: `tokens_per_s` is missing; expected it to simulate the pool")
    step_s = 1.0 / hosted.tokens_per_s

    def line(
        num_decode: int, context_tokens: int, chunks: Sequence[tuple[int, int]] = (), *_: int
    ) -> tuple[float, float, int | None]:
        return step_s, 0.0, 1 if chunks else None

    return line
