"""A table of requests, played as it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from headway.core.record import Outcome
from headway.core.request import Request
from headway.workload.table import Workload

R = TypeVar("R", bound=Request)


class TraceSource:
    """Every row at its own arrival time, whatever becomes of it."""

    reactive = False

    def __init__(self, workload: Workload) -> None:
        self.num_requests: int | None = len(workload)
        self._workload = workload
        self._rest = workload.tuples()
        self._next = next(self._rest, None)
        self._issued = 0

    def peek_s(self) -> float | None:
        """Arrival time of the next row; None = all are issued."""
        row = self._next
        return None if row is None else row[1]

    def pop(self, make: Callable[..., R]) -> R:
        """The next row, as `make(*fields)`."""
        row = self._next
        if row is None:
            raise IndexError("pop from a source with no request left")
        self._next = next(self._rest, None)
        self._issued += 1
        return make(*row)

    def ended(self, request: Request, now_s: float, outcome: Outcome) -> None:
        """Changes nothing."""

    def table(self) -> Workload:
        """The rows issued so far."""
        return self._workload.head(self._issued)
