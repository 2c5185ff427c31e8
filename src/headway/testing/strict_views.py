"""Views for trying policies out: they show what `core.view` names, note every read, and forbid the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from headway.core.view import (
    AdmissionView,
    CascadeView,
    FleetView,
    OracleReplicaView,
    OracleRequestView,
    PlacedRequestView,
    PoolCounts,
    PoolsView,
    PoolView,
    ReplicaView,
    RequestView,
    StageView,
)

Values = Mapping[str, Any]


class BrokenPolicyError(AssertionError):
    """A policy does what no policy may; `str(error)` says what."""


@dataclass
class Visit:
    """One call of a policy: what it may read, until when, and what it did read."""

    oracle: bool = False
    is_over: bool = False
    reads: set[str] = field(default_factory=set)
    """Such as `replica.num_waiting`."""


class StrictView:
    """A read-only view with exactly the given attributes, readable until its visit is over."""

    __slots__ = ("__weakref__", "_hidden", "_kind", "_values", "_visit")

    def __init__(self, kind: str, values: Values, hidden: frozenset[str], visit: Visit) -> None:
        for name, value in zip(self.__slots__[1:], (hidden, kind, values, visit), strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        shown = f"{self._kind}.{name}"
        if name not in self._values:
            raise AttributeError(f"{shown} is not in headway.core.view")
        if self._visit.is_over:
            raise BrokenPolicyError(f"read {shown} after the call that it was shown to: a policy may not keep a view")
        if name in self._hidden and not self._visit.oracle:
            raise BrokenPolicyError(f"read {shown}, which only a policy with `oracle = True` may")
        self._visit.reads.add(shown)
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise BrokenPolicyError(f"set {self._kind}.{name}: views are read-only")

    def __reduce__(self) -> Any:
        raise BrokenPolicyError(f"was pickled with a {self._kind} view in it: a policy may not keep a view")


def _attributes(protocol: type) -> frozenset[str]:
    return frozenset(name for name, value in vars(protocol).items() if isinstance(value, property))


_ORACLE_REQUEST = _attributes(OracleRequestView)
_ORACLE_REPLICA = _attributes(OracleReplicaView)
_SHOWN = {
    "request": _attributes(RequestView) | _ORACLE_REQUEST,
    "placed": _attributes(RequestView) | _attributes(PlacedRequestView) | _ORACLE_REQUEST,
    "replica": _attributes(ReplicaView) | _ORACLE_REPLICA,
    "view": _attributes(FleetView),
    "pool": _attributes(PoolCounts) | _attributes(PoolView),
    "pools": _attributes(PoolsView),
    "admission": _attributes(AdmissionView),
    "stage": _attributes(StageView),
    "cascade": _attributes(CascadeView),
}


def request_view(values: Values, visit: Visit, *, placed: bool = False) -> RequestView:
    """A request as a policy sees it; `placed`: the values are of one that is at a replica."""
    if placed:
        values = {name: value for name, value in values.items() if name in _SHOWN["request"]}
    return cast(RequestView, _view("request", values, _ORACLE_REQUEST, visit))


def fleet_view(now: float, random: Random, replicas: list[Values], visit: Visit) -> FleetView:
    """A fleet as a router or a migration policy sees it."""
    values = {"now": now, "random": random, "replicas": _replica_views(replicas, visit)}
    return cast(FleetView, _view("view", values, frozenset(), visit))


def pools_view(
    now: float,
    random: Random,
    pools: list[Values],
    arrived: Mapping[tuple[str, str, int], tuple[int, int]],
    visit: Visit,
) -> PoolsView:
    """Pools as a scaler sees them."""
    views = [
        _view("pool", {**pool, "replicas": _replica_views(pool["replicas"], visit)}, frozenset(), visit)
        for pool in pools
    ]
    values = {"now": now, "random": random, "pools": views, "arrived": arrived}
    return cast(PoolsView, _view("pools", values, frozenset(), visit))


def admission_view(
    now: float, random: Random, replicas: list[Values], held: list[Values], visit: Visit
) -> AdmissionView:
    """One model's replicas and who is kept back for them, as an admission policy sees them."""
    kept = [_view("request", values, _ORACLE_REQUEST, visit) for values in held]
    values = {"now": now, "random": random, "replicas": _replica_views(replicas, visit), "held": kept}
    return cast(AdmissionView, _view("admission", values, frozenset(), visit))


def cascade_view(
    now: float, random: Random, stage: int, stages: Mapping[str, Sequence[Values]], visit: Visit
) -> CascadeView:
    """A cascade's models with their replicas, at one of its stages."""
    views = [
        _view("stage", {"model": model, "replicas": _replica_views(replicas, visit)}, frozenset(), visit)
        for model, replicas in stages.items()
    ]
    values = {"now": now, "random": random, "stage": stage, "stages": views}
    return cast(CascadeView, _view("cascade", values, frozenset(), visit))


def _replica_views(replicas: Sequence[Values], visit: Visit) -> list[StrictView]:
    views = []
    for values in replicas:
        placed = [_view("placed", one, _ORACLE_REQUEST, visit) for one in values["requests"]]
        views.append(_view("replica", {**values, "requests": placed}, _ORACLE_REPLICA, visit))
    return views


def _view(kind: str, values: Values, hidden: frozenset[str], visit: Visit) -> StrictView:
    if values.keys() != _SHOWN[kind]:
        odd = sorted(values.keys() ^ _SHOWN[kind])
        raise ValueError(f"a {kind} view differs from headway.core.view in {', '.join(odd)}")
    return StrictView(kind, values, hidden, visit)
