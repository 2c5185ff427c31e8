"""Policies of one's own that write to what they are given: an error that names the policy, its method and the field."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

import headway as hw
from headway.core.decision import Placement
from headway.policies import resolve

POOL = {"name": "a", "model": "llama-3.1-8b", "gpu": "h100", "engine": {"name": "simulated"}, "replicas": 2}
DOCUMENT: dict[str, Any] = {
    "workload": {
        "prompt_tokens": 200,
        "output_tokens": 40,
        "reasoning_tokens": 10,
        "arrivals": 50.0,
        "num_requests": 40,
    },
    "fleet": [{**POOL, "max_replicas": 3}],
}


def change(thing: Any, name: str, value: object) -> bool:
    setattr(thing, name, value)
    return True


def policy(kind: str, verb: str, write: Callable[..., object]) -> type:
    """A policy that writes in one of its methods, and else does what is least."""
    answers: dict[str, dict[str, Callable[..., Any]]] = {
        "routing": {"route": lambda self, request, view: Placement(view.replicas[0].id)},
        "ordering": {"rank": lambda self, request, now: request.arrival_s},
        "migration": {"moves": lambda self, view: [], "at_phase": lambda self, request, view: None},
        "admission": {"holds": lambda self, request: True, "release": lambda self, view: []},
        "scaling": {"scale": lambda self, view: {}},
    }
    methods = dict(answers[kind])
    kept = methods[verb]

    def writes(self: Any, *arguments: Any) -> Any:
        write(*arguments)
        return kept(self, *arguments)

    def of_one(self: Any, one: Any) -> Any:
        return writes(self, one)

    def of_two(self: Any, one: Any, other: Any) -> Any:
        return writes(self, one, other)

    methods[verb] = of_one if kept.__code__.co_argcount == 2 else of_two
    return type("Writer", (), {"interval_s": 0.05, "quantum": None, "preemptive": False, **methods})


CASES: dict[str, tuple[str, str, str, Callable[..., object]]] = {
    "tier in a router": ("routing", "route", "tier", lambda request, view: change(request, "tier", 5)),
    "model in a router": ("routing", "route", "model", lambda request, view: change(request, "model", "x")),
    "length in a router": (
        "routing", "route", "output_tokens", lambda request, view: change(request, "output_tokens", 1)),
    "replica in a router": (
        "routing", "route", "max_num_seqs", lambda request, view: change(view.replicas[0], "max_num_seqs", 1)),
    "time in a router": ("routing", "route", "now", lambda request, view: change(view, "now", 9.0)),
    "list in a router": ("routing", "route", "replicas", lambda request, view: view.replicas.reverse()),
    "deadline in an ordering": (
        "ordering", "rank", "deadline_s", lambda request, now: change(request, "deadline_s", 1.0)),
    "tier in a migration": ("migration", "moves", "tier", lambda view: [
        change(one, "tier", 5) for each in view.replicas for one in each.requests]),
    "phase in a migration": ("migration", "at_phase", "turn", lambda request, view: change(request, "turn", 99)),
    "tier in an admission": ("admission", "holds", "tier", lambda request: change(request, "tier", 5)),
    "held in an admission": (
        "admission", "release", "tier", lambda view: [change(one, "tier", 5) for one in view.held]),
    "time in a scaler": ("scaling", "scale", "now", lambda view: change(view, "now", 9.0)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_instance", [False, True], ids=["class", "instance"])
def test_a_write_is_an_error_that_names_the_policy(case: str, is_instance: bool) -> None:
    kind, verb, field, write = CASES[case]
    made = policy(kind, verb, write)
    policies = {kind: made() if is_instance else made}
    with pytest.raises(hw.HeadwayError, match=rf"policy Writer: `{verb}` changed .*`{field}`.*only reads"):
        hw.simulate({**DOCUMENT, "policies": policies, "simulation": {"until_s": 5.0}})


def test_a_cascade_that_writes_is_an_error_too() -> None:
    class Writer:
        def enter(self, request: Any, view: Any) -> int:
            request.tier = 3
            return 0

        def accept(self, request: Any, score: float, view: Any) -> bool:
            return True

    scenario = hw.load(builtin="cascadia", changes={"workload.num_requests": 5, "cascade.policy": {"name": Writer}})
    with pytest.raises(hw.HeadwayError, match="policy Writer: `enter` changed `tier`"):
        hw.simulate(scenario)


def test_ranks_of_none_are_an_error() -> None:
    class NoRank:
        quantum, preemptive = None, False

        def rank(self, request: Any, now: float) -> None: ...

    with pytest.raises(hw.HeadwayError, match="policy NoRank: `rank` returned None; expected what can be compared"):
        hw.simulate(DOCUMENT, ordering=NoRank)


class Counts:
    """One that keeps state of its own."""

    __slots__ = ("num",)

    def __init__(self) -> None:
        self.num = 0

    def route(self, request: Any, view: Any) -> Placement:
        self.num += 1
        return Placement(view.replicas[self.num % len(view.replicas)].id)


def test_a_policy_that_only_reads_is_what_it_was() -> None:
    plain, checked = Counts(), resolve.router({"name": Counts})()
    assert type(checked).__name__ == "Counts" and isinstance(checked, Counts)
    checked.num = 3
    for again in (pickle.loads(pickle.dumps(checked)), deepcopy(checked)):
        assert again.num == 3 and isinstance(again, Counts)
    one, other = hw.simulate(DOCUMENT, routing=Counts), hw.simulate(DOCUMENT, routing=plain)
    assert one.metrics == other.metrics and plain.num == 0
