"""Choices of other routers, which are called with the state that the decision log recorded.

A router that learns from ended requests first learns from those in the records. The choice is unknown, with a reason,
if a router reads a value that the log lacks, draws at random, or remembers its earlier choices.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from msgspec import Struct

from headway.control.decisions import Decision
from headway.core.policy import Router
from headway.core.record import Ended
from headway.core.view import FleetView, RequestView, UnkeptValues
from headway.policies import ROUTERS

NOT_RECORDED = "reads what is not recorded: "


class Rehearsed(Struct, frozen=True):
    """The choice of one router."""

    router: str
    replica: str | None
    """The chosen replica; None: unknown."""
    unknown: str = ""
    """Why the choice is unknown."""


class _NotLoggedError(Exception):
    """A router has read a value that was not logged."""


class _View:
    """A view of the logged values, by attribute."""

    def __init__(self, what: str, known: Mapping[str, Any]) -> None:
        self._what, self._known = what, known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._known:
            raise _NotLoggedError(f"{NOT_RECORDED}{self._what}'s {name}")
        return self._known[name]


class _Fleet(UnkeptValues):
    """A router's view of the offered replicas."""

    wants_scores = False

    def __init__(self, now: float, replicas: Sequence[_View]) -> None:
        self.now, self.replicas = now, replicas

    @cached_property
    def random(self) -> Any:
        raise _NotLoggedError("draws at random")


def rehearsed(
    decision: Decision,
    request: Mapping[str, Any],
    replicas: Mapping[int, Mapping[str, Any]],
    ended: Sequence[Ended],
    now: float,
) -> list[Rehearsed]:
    """The choice of each built-in router. `request` and `replicas` (by number) hold known attributes that the log
    lacks. `ended`: the requests that had ended, in order. `now`: seconds since the start of the run."""
    shown = []
    for each in decision.replicas:
        known = {
            **replicas.get(each.replica, {}),
            "id": each.replica,
            "num_in_flight": each.in_flight,
            "num_waiting": each.waiting,
        }
        logged = {
            "num_running": each.running,
            "prefill_tokens_left": each.prompt_tokens_left,
            "tokens_generated": each.tokens_generated,
            "kv_blocks_used": each.kv_blocks_used,
            "kv_blocks_total": each.kv_blocks_total,
        }
        shown.append(_View("a replica", known | {name: value for name, value in logged.items() if value is not None}))
    names = {each.replica: each.name or str(each.replica) for each in decision.replicas}
    view, asks = _Fleet(now, shown), _View("the request", request)
    return [
        _answer(name, made_by, asks, view, names, ended) for name, made_by in ROUTERS.items() if not _is_oracle(made_by)
    ]


def _is_oracle(router: type[Router]) -> bool:
    return bool(getattr(router, "oracle", False))


def _answer(
    name: str, made_by: type[Router], request: _View, view: _Fleet, names: Mapping[int, str], ended: Sequence[Ended]
) -> Rehearsed:
    try:
        router = made_by()
        learn = getattr(router, "learn", None)
        if learn is not None:
            for each in ended:
                learn(each)
        before = pickle.dumps(router)
        placement = router.route(cast(RequestView, request), cast(FleetView, view))
        after = pickle.dumps(router)
    except _NotLoggedError as error:
        return Rehearsed(name, None, str(error))
    except (TypeError, ValueError, AttributeError, LookupError, pickle.PicklingError) as error:
        return Rehearsed(name, None, f"cannot be rehearsed from the log ({type(error).__name__})")
    if before != after:
        return Rehearsed(name, None, "remembers earlier requests")
    return Rehearsed(name, names.get(placement.replica, str(placement.replica)))
