"""Work for a planner process. In a module of its own, as the process imports it by name."""

from __future__ import annotations

import os

from headway.core.errors import HeadwayError


class Tally:
    """Adds numbers up. A negative number fails, and 0 ends the process."""

    def __init__(self) -> None:
        self._sum = 0

    def __call__(self, number: int) -> tuple[int, int]:
        if number < 0:
            raise HeadwayError(f"no plan for {number}")
        if not number:
            os._exit(1)
        self._sum += number
        return self._sum, os.getpid()
