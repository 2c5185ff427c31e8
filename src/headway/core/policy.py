"""The Protocols, one verb each. A policy's constructor is its config; its state lives on its instance.

Optional on every kind: `learn(record)`, called with each `Ended` request, and `oracle = True` for a policy that
reads what only an oracle knows (drivers that cannot know it refuse such a policy).
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from headway.core.decision import Placement
from headway.core.record import Ended
from headway.core.view import FleetView, RequestView


class Router(Protocol):
    """Which replica gets a request."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        """One of `view.replicas`."""


class Ordering(Protocol):
    """Who goes first.

    `rank` sees one request's own state and says a sortable key, of one shape for all requests: lower runs first,
    and who ranks last is preempted first. Ties go to the lower request id.
    """

    quantum: int | None
    """Tokens after which a running request goes to the end of the line while others wait; None = never."""
    preemptive: bool
    """True: a waiting request takes the place of running ones that rank behind it."""

    def rank(self, request: RequestView, now: float) -> Any: ...


@runtime_checkable
class MovingOrdering(Protocol):
    """An ordering whose ranks move with time, while nothing else happens."""

    def next_change(self, request: RequestView, now: float) -> float | None:
        """When this request's rank changes next, after `now`; None = never."""


@runtime_checkable
class SteppedOrdering(Protocol):
    """An ordering whose rank of a request gets worse as the request gains tokens.

    A rank that only gets better with each token need not say so.
    """

    def next_change_tokens(self, request: RequestView) -> int | None:
        """After how many further output tokens the rank gets worse; None = never."""


@runtime_checkable
class Learner(Protocol):
    """A policy that learns from what ended."""

    def learn(self, record: Ended) -> None: ...
