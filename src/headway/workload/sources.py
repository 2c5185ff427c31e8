"""Sources of requests: the protocol, and sources that replay a table at its own times or in a closed loop."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.view import RequestView
from headway.workload.table import FIELDS, Workload
from headway.workload.transform import arriving_at

R = TypeVar("R")
DEADLINE = FIELDS.index("deadline_s")


class RequestSource(Protocol):
    """Requests in order of arrival. Closed loops and sessions react to the end of a request."""

    reactive: bool
    """Whether `ended` may add arrivals. If False, a driver need not call it."""
    num_requests: int | None
    """Total number of requests, for progress; None if unknown."""

    def peek_s(self) -> float | None:
        """Arrival time of the next request. None if there is none, or if a reactive source does not know it yet."""

    def pop(self, make: Callable[..., R]) -> R:
        """Return the next request as `make(*fields)`, positional in `Request`'s order. Its id is its row in `table`."""

    def ended(self, request: RequestView, now_s: float, outcome: Outcome) -> None:
        """Report the end of a request, whatever its outcome."""

    def table(self) -> Workload:
        """All requests issued so far; row i is request id i."""


class TraceSource:
    """Each row of a table at its own arrival time, independent of outcomes."""

    reactive = False

    def __init__(self, workload: Workload, ids: Sequence[int] | None = None) -> None:
        """`ids`: the requests' ids, if the table has only some rows of a workload."""
        self.num_requests: int | None = len(workload)
        self.workload = workload
        rows = workload.tuples()
        self._rest = rows if ids is None else map(_with_id, ids, rows)
        self._next = next(self._rest, None)
        self.num_issued = 0
        self.last_id = -1
        """Id of the last request sent."""

    def peek_s(self) -> float | None:
        row = self._next
        return None if row is None else row[1]

    def pop(self, make: Callable[..., R]) -> R:
        row = self._next
        if row is None:
            raise IndexError("pop from a source with no request left")
        self._next = next(self._rest, None)
        self.num_issued += 1
        self.last_id = row[0]
        return make(*row)

    def ended(self, request: RequestView, now_s: float, outcome: Outcome) -> None:
        pass

    def table(self) -> Workload:
        return self.workload.head(self.num_issued)


def _with_id(id: int, row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (id, *row[1:])


class IssuedRows:
    """The rows that a reactive source has issued, with their actual arrival times. Each row takes 16 bytes.

    `plan` is the table of everything that does not depend on arrival times.
    """

    def __init__(self, plan: Workload) -> None:
        self.plan = plan
        self.rows = array("q")
        """Row of the plan, by request id."""
        self.arrivals = array("d")

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: int, at_s: float, fields: Sequence[Any]) -> list[Any]:
        """Issue a row of the plan at `at_s` and return its `Request` fields. A deadline moves with the arrival."""
        issued = [len(self.rows), at_s, *fields[2:]]
        if len(issued) > DEADLINE and issued[DEADLINE] is not None:
            issued[DEADLINE] += at_s - fields[1]
        self.rows.append(row)
        self.arrivals.append(at_s)
        return issued

    def table(self) -> Workload:
        """The rows issued so far, in the order of request ids."""
        return arriving_at(self.plan.take(np.array(self.rows, "i8")), np.array(self.arrivals, "f8"))


class ClosedLoop:
    """A fixed number of clients, each of which sends its next request when its previous one ended.

    The clients send the rows of `workload` in order; arrival times of the table are ignored. The first `concurrency`
    requests arrive at 0. When a request ends, with any outcome, the next one arrives `think_s` later. A deadline
    keeps its distance to the arrival.
    """

    reactive = True

    def __init__(self, workload: Workload, concurrency: int, think_s: float = 0.0) -> None:
        if concurrency < 1:
            raise HeadwayError(f"concurrency: {concurrency}; expected 1 or more")
        if not 0 <= think_s < float("inf"):
            raise HeadwayError(f"think_s: {think_s}; expected 0 or more seconds")
        self.num_requests: int | None = len(workload)
        self._think_s = think_s
        self._issued = IssuedRows(workload)
        self._rest = workload.tuples()
        self._starts = deque([0.0] * min(concurrency, len(workload)))
        # Requests end in order of time and the think time is constant, so the starts are in order too.
        self._num_left = len(workload) - len(self._starts)

    def peek_s(self) -> float | None:
        """Time at which the next ready client sends a request. None if every client waits for an answer or is done."""
        return self._starts[0] if self._starts else None

    def pop(self, make: Callable[..., R]) -> R:
        at_s = self._starts.popleft()
        return make(*self._issued.add(len(self._issued), at_s, next(self._rest)))

    def ended(self, request: RequestView, now_s: float, outcome: Outcome) -> None:
        """Schedule the client's next request after its think time."""
        if outcome is not Outcome.UNFINISHED and self._num_left > 0:
            self._num_left -= 1
            self._starts.append(now_s + self._think_s)

    def table(self) -> Workload:
        """The rows issued so far, with the times at which they were sent."""
        return self._issued.table()
