"""A fixed number of clients, each of which sends its next request when its last one ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.request import Request
from headway.workload.issued import Issued
from headway.workload.table import Workload

R = TypeVar("R", bound=Request)


class ClosedLoop:
    """The rows of `workload` in order, `concurrency` of them at a time; their arrival times do not count.

    The first `concurrency` requests arrive at 0; each end, whatever its outcome, brings the next one
    `think_s` later. A deadline keeps its distance to the arrival.
    """

    reactive = True

    def __init__(self, workload: Workload, concurrency: int, think_s: float = 0.0) -> None:
        if concurrency < 1:
            raise HeadwayError(f"concurrency: {concurrency}; expected 1 or more")
        if not 0 <= think_s < float("inf"):
            raise HeadwayError(f"think_s: {think_s}; expected 0 or more seconds")
        self.num_requests: int | None = len(workload)
        self._think_s = think_s
        self._issued = Issued(workload)
        self._rest = workload.tuples()
        self._starts = deque([0.0] * min(concurrency, len(workload)))
        # Ends come in order of time and think time is constant, so these are in order too.
        self._left = len(workload) - len(self._starts)

    def peek_s(self) -> float | None:
        """When the next client that is ready sends; None = all of them wait for an answer, or are done."""
        return self._starts[0] if self._starts else None

    def pop(self, make: Callable[..., R]) -> R:
        """The next row, arriving when its client is ready."""
        at_s = self._starts.popleft()
        return make(*self._issued.add(len(self._issued), at_s, next(self._rest)))

    def ended(self, request: Request, now_s: float, outcome: Outcome) -> None:
        """Its client thinks, then sends the next request."""
        if outcome is not Outcome.UNFINISHED and self._left > 0:
            self._left -= 1
            self._starts.append(now_s + self._think_s)

    def table(self) -> Workload:
        """The rows issued so far, with the times at which they were sent."""
        return self._issued.table()
