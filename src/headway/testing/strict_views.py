"""Views for policy tests: they have the attributes of `core.view`, record every read, and forbid all other access."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, cast

from headway.core.view import (
    AdmissionView,
    Bounds,
    CascadeView,
    MigrationView,
    OracleReplicaView,
    OracleRequestView,
    PlacedRequestView,
    PoolsView,
    PoolView,
    ReplicaView,
    RequestView,
    StageView,
)

Values = Mapping[str, Any]


class BrokenPolicyError(AssertionError):
    """A policy broke a rule that all policies must keep; the text names the rule."""


class PolicyCall:
    """One call of a policy: the values that the policy may read, whether the call is over, and the values that it has
    read."""

    def __init__(self, oracle: bool = False) -> None:
        self.oracle = oracle
        self.is_over = False
        self.reads: set[str] = set()
        self._views: list[weakref.ref[StrictView]] = []
        self._lists: list[tuple[str, list[StrictView], list[int]]] = []

    def view(self, kind: str, values: Values, hidden: frozenset[str] = frozenset()) -> StrictView:
        """A view of these values that only this call may read. Only oracles may read the `hidden` values."""
        if values.keys() != _SHOWN[kind]:
            odd = sorted(values.keys() ^ _SHOWN[kind])
            raise ValueError(f"a {kind} view differs from headway.core.view in {', '.join(odd)}")
        view = StrictView(kind, values, hidden, self)
        self._views.append(weakref.ref(view))
        return view

    def listed(self, name: str, views: list[StrictView]) -> list[StrictView]:
        """A copy of the list, remembered so that `check_unchanged` can tell whether the policy changed it."""
        self._lists.append((name, views, list(map(id, views))))
        return views

    def check_unchanged(self) -> None:
        for name, views, ids in self._lists:
            if list(map(id, views)) != ids:
                raise BrokenPolicyError(f"changed {name}: sort a copy instead")

    def forget_lists(self) -> None:
        """Drop this object's own references to views."""
        self._lists.clear()

    def has_live_views(self) -> bool:
        return any(view() is not None for view in self._views)


class StrictView:
    """A read-only view with exactly the given attributes, readable until its call is over."""

    __slots__ = ("__weakref__", "_call", "_hidden", "_kind", "_values")
    refuses_writes = True

    def __init__(self, kind: str, values: Values, hidden: frozenset[str], call: PolicyCall) -> None:
        for name, value in zip(self.__slots__[1:], (call, hidden, kind, values), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        shown = f"{self._kind}.{name}"
        if name not in self._values:
            raise AttributeError(f"{shown} is not in headway.core.view")
        if self._call.is_over:
            raise BrokenPolicyError(f"read {shown} after the call it belongs to: a policy may not keep a view")
        if name in self._hidden and not self._call.oracle:
            raise BrokenPolicyError(f"read {shown}, which only a policy with `oracle = True` may")
        self._call.reads.add(shown)
        return self._method(name) if name in _METHODS else self._values[name]

    def _method(self, name: str) -> Callable[[Any], float]:
        """A method of a replica's view.

        The method returns, by its name: seconds of KV transfer, seconds to another region, or a share of a request's
        tokens.
        """
        value, call = self._values[name], self._call

        def answer(argument: Any) -> float:
            if call.is_over:
                raise BrokenPolicyError(f"called replica.{name} after the call it belongs to: a policy may not keep it")
            if name == "kv_transfer_s":
                return float(value * argument)
            if name == "latency_s":
                return float(value if argument and argument != self._values["region"] else 0.0)
            if not isinstance(argument, StrictView) or argument._kind not in ("request", "placed"):
                raise BrokenPolicyError(f"called replica.{name} with {argument!r}; expected the view of a request")
            tokens: int = argument._values["prompt_tokens"] + argument._values["generated_tokens"] - 1
            return int(value * tokens)

        return answer

    def __setattr__(self, name: str, value: object) -> None:
        raise BrokenPolicyError(f"set {self._kind}.{name}: views are read-only")

    def __reduce__(self) -> Any:
        raise BrokenPolicyError(f"was pickled with a {self._kind} view in it: a policy may not keep a view")


def _attributes(protocol: type) -> frozenset[str]:
    return frozenset(name for name in dir(protocol) if isinstance(getattr(protocol, name), property))


_METHODS = frozenset(("cached_tokens", "loadable_tokens", "kv_transfer_s", "latency_s"))
"""Methods of `core.view.ReplicaView`."""
_ORACLE_REQUEST = _attributes(OracleRequestView) - _attributes(RequestView)
_ORACLE_REPLICA = _attributes(OracleReplicaView) - _attributes(ReplicaView)
_SHOWN = {
    "request": _attributes(OracleRequestView),
    "placed": _attributes(PlacedRequestView) | _ORACLE_REQUEST,
    "replica": _attributes(OracleReplicaView) | _METHODS,
    "view": _attributes(MigrationView) | {"find_least", "find_least_score", "map", "num_reasoning"},
    "pool": _attributes(PoolView),
    "pools": _attributes(PoolsView),
    "admission": _attributes(AdmissionView),
    "stage": _attributes(StageView),
    "cascade": _attributes(CascadeView),
}


def request_view(values: Values, call: PolicyCall, *, placed: bool = False) -> RequestView:
    """A request as a policy sees it. With `placed`, the values belong to a request at a replica."""
    if placed:
        values = {name: value for name, value in values.items() if name in _SHOWN["request"]}
    return cast(RequestView, call.view("request", values, _ORACLE_REQUEST))


def fleet_view(now: float, random: Random, replicas: Sequence[Values], call: PolicyCall) -> MigrationView:
    views = _replica_views("view.replicas", replicas, call)

    def map(key: Callable[[StrictView], object]) -> Sequence[object]:
        return tuple(key(view) for view in views)

    def find_least(key: Callable[[StrictView], Any], grows: bool = False) -> StrictView:
        return min(views, key=key)

    def find_least_score(
        bounds: Callable[[StrictView], Bounds],
        weights: tuple[float, float, float],
        score: Callable[[StrictView], float],
        falls: bool = False,
    ) -> StrictView:
        return find_least(lambda view: (score(view), view.id))

    def num_reasoning(replica: StrictView, /) -> int:
        return int(replica.queue_lengths[0])

    values = {"now": now, "random": random, "replicas": views, "wants_scores": True, "map": map}
    values |= {"num_reasoning": num_reasoning, "find_least": find_least, "find_least_score": find_least_score}
    return cast(MigrationView, call.view("view", values))


def pools_view(
    now: float,
    random: Random,
    pools: Sequence[Values],
    arrived: Mapping[tuple[str, str, int], tuple[int, int]],
    call: PolicyCall,
) -> PoolsView:
    views = [
        call.view("pool", {**pool, "replicas": _replica_views("pool.replicas", pool["replicas"], call)})
        for pool in pools
    ]
    values = {"now": now, "random": random, "pools": call.listed("view.pools", views), "arrived": arrived}
    return cast(PoolsView, call.view("pools", values))


def admission_view(
    now: float, random: Random, replicas: Sequence[Values], held: Sequence[Values], call: PolicyCall
) -> AdmissionView:
    """The replicas of one model and the requests held for them, as an admission policy sees them."""
    values = {
        "now": now,
        "random": random,
        "replicas": _replica_views("view.replicas", replicas, call),
        "held": call.listed("view.held", [call.view("request", values, _ORACLE_REQUEST) for values in held]),
    }
    return cast(AdmissionView, call.view("admission", values))


def cascade_view(
    now: float, random: Random, stage: int, stages: Mapping[str, Sequence[Values]], call: PolicyCall
) -> CascadeView:
    views = [
        call.view("stage", {"model": model, "replicas": _replica_views("stage.replicas", replicas, call)})
        for model, replicas in stages.items()
    ]
    values = {"now": now, "random": random, "stage": stage, "stages": call.listed("view.stages", views)}
    return cast(CascadeView, call.view("cascade", values))


def _replica_views(name: str, replicas: Sequence[Values], call: PolicyCall) -> list[StrictView]:
    views = []
    for values in replicas:
        placed = [call.view("placed", one, _ORACLE_REQUEST) for one in values["requests"]]
        values = {**values, "requests": call.listed("replica.requests", placed)}
        paused = [call.view("placed", one, _ORACLE_REQUEST) for one in values["paused"]]
        values["paused"] = call.listed("replica.paused", paused)
        views.append(call.view("replica", values, _ORACLE_REPLICA))
    return call.listed(name, views)
