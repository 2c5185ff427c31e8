"""A workload is a source of requests that hears how they ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from headway.core.record import Outcome
from headway.core.request import Request
from headway.workload.table import Workload

R = TypeVar("R", bound=Request)


class Source(Protocol):
    """Requests in order of arrival. Closed loops, sessions and time-outs react to `ended`."""

    reactive: bool
    """False: `ended` never adds an arrival, so a driver need not call it."""
    num_requests: int | None
    """How many will come in all, where known (for progress)."""

    def peek_s(self) -> float | None:
        """Arrival time of the next request known so far; None = none (yet, if reactive)."""

    def pop(self, make: Callable[..., R]) -> R:
        """The next request, as `make(*fields)`, positional in `Request`'s order; its id is its row in `table`."""

    def ended(self, request: Request, now_s: float, outcome: Outcome) -> None:
        """A request ended, in whichever way."""

    def table(self) -> Workload:
        """Every request issued so far, row i = request id i."""
