"""Checks that users' policies do not change their arguments.

Requests and views are the drivers' own objects and can be written to. A guarded call compares its arguments before and
after, restores a request's values, and names the policy, its method and the change.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from headway.core.errors import HeadwayError, unusable
from headway.core.view import (
    AdmissionView,
    CascadeView,
    MigrationView,
    OracleReplicaView,
    OracleRequestView,
    PoolsView,
    PoolView,
    StageView,
)

P = TypeVar("P")
_ABSENT = object()
_OPTIONAL = ("next_change", "next_change_tokens", "queue", "share", "started", "ended", "is_below_share")
"""Optional methods of an ordering."""
_RARE = frozenset(("moves", "release", "scale"))
"""Methods that are not called for each request: everything in their view is compared each time."""
_LOOKS_AT_PARTS = 32
"""The other methods compare replicas in each of the first this many calls, and then once in this many calls."""


def _names(*protocols: type) -> frozenset[str]:
    return frozenset(name for one in protocols for name in dir(one) if isinstance(getattr(one, name), property))


_SHOWN = {
    "request": _names(OracleRequestView),
    "view": _names(MigrationView, AdmissionView, CascadeView, PoolsView),
    "part of the view": _names(OracleReplicaView, PoolView, StageView),
}


def guarded(policy: P, verbs: Iterable[str]) -> P:
    """A subclass of the policy with guarded `verbs`: they raise HeadwayError if they change an argument, and `rank`
    also if it returns None."""
    made_by = type(policy)

    def reduced(self: Any, protocol: Any) -> Any:
        """Pickle support: reduce to an instance of the original class, which a pickle can name."""
        make, arguments, *rest = super(made, self).__reduce_ex__(max(int(protocol), 2))
        make = _new if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]  # refuses another class
        return make, tuple(made_by if each is made else each for each in arguments), *rest

    space = {"__slots__": (), "__module__": made_by.__module__, "__qualname__": made_by.__qualname__}
    with suppress(TypeError):  # for a class whose instances cannot be assigned to
        made: Any = type(made_by.__name__, (made_by,), {**space, "__reduce_ex__": reduced})
        for verb in (*verbs, *_OPTIONAL):
            if callable(getattr(made_by, verb, None)):
                setattr(made, verb, _guard(made, verb))
        policy.__class__ = made
    return policy


def _new(made_by: type, *arguments: Any) -> Any:
    return made_by.__new__(made_by, *arguments)


def _guard(made: Any, verb: str) -> Callable[..., Any]:
    """A wrapper of the method that compares the arguments before and after."""
    kept = dict[type, tuple[str, ...]]()
    num_calls = 0

    def state(what: str, thing: Any) -> list[Any]:
        """The stored values of the object. Properties are left out, because they store none."""
        names = kept.get(type(thing))
        if names is None:
            names = kept[type(thing)] = tuple(
                name for name in sorted(_SHOWN[what]) if not isinstance(getattr(type(thing), name, None), property)
            )
        values = [getattr(thing, name, _ABSENT) for name in names]
        return [tuple(each) if type(each) is list else each for each in values]

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        with_parts = verb in _RARE or num_calls <= _LOOKS_AT_PARTS or num_calls % _LOOKS_AT_PARTS == 0
        given = [(what, thing, state(what, thing)) for what, thing in _things(arguments, with_parts, verb in _RARE)]
        returned = getattr(super(made, self), verb)(*arguments, **named)
        for what, thing, before in given:
            after = state(what, thing)
            if after != before:
                changed = [
                    (name, old) for name, old, new in zip(kept[type(thing)], before, after, strict=True) if old != new
                ]
                raise _error(self, verb, what, thing, changed)
        if returned is None and verb == "rank":
            raise unusable(self, verb, None, "what can be compared, such as a number or a tuple of numbers")
        return returned

    return call


def _things(arguments: Iterable[Any], with_parts: bool, with_requests: bool) -> Iterator[tuple[str, Any]]:
    for each in arguments:
        if getattr(type(each), "refuses_writes", False):  # a view of the conformance kit also notes each read
            continue
        if hasattr(each, "prompt_tokens"):
            yield "request", each
        elif hasattr(each, "random"):
            yield "view", each
            parts = [one for name in ("replicas", "pools", "stages") for one in getattr(each, name, ())]
            if with_parts:
                yield from (("part of the view", part) for part in parts)
            if with_requests:
                yield from (("request", one) for one in getattr(each, "held", ()))
                yield from (("request", one) for part in parts for one in getattr(part, "requests", ()))


def _error(policy: object, verb: str, what: str, thing: Any, changed: list[tuple[str, Any]]) -> HeadwayError:
    """The error, raised after the request's values are restored."""
    if what == "request":
        for name, old in changed:
            setattr(thing, name, old)
    listed = ", ".join(f"`{name}`" for name, _ in changed)
    return HeadwayError(
        f"policy {type(policy).__name__}: `{verb}` changed {listed} of a {what}; expected that it only reads them"
    )
