"""From a spec to a policy, and what is said about a spec that leads to none."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeRequest, fleet
from headway.core.decision import Placement
from headway.core.errors import HeadwayError
from headway.core.view import FleetView, RequestView
from headway.policies import MIGRATIONS, ORDERINGS, ROUTERS, SCALERS, resolve
from headway.policies.ordering.deadlines import EdfOrdering

MINE = """
from headway.core.decision import Placement

class Last:
    def __init__(self, offset: int, note="", weights: "Unheard | Of" = None, **more):
        if note == "bad":
            raise ValueError("a bad note")
        self.offset = offset

    def route(self, request, view):
        return Placement(view.replicas[-1 - self.offset].id)

class Backwards:
    quantum = None
    preemptive = False

    def rank(self, request, now):
        return (-request.arrival_s,)

class NoQuantum:
    preemptive = False

    def rank(self, request, now):
        return (0,)

class OddQuantum(NoQuantum):
    quantum = "many"

class OddPreemptive(NoQuantum):
    quantum = None
    preemptive = 1

class Stays:
    interval_s = None

    def moves(self, view):
        return ()

    def at_phase(self, request, view):
        return None

class OddInterval(Stays):
    interval_s = 0

class NoInterval:
    moves = Stays.moves
    at_phase = Stays.at_phase

class NoPhase:
    interval_s = 1
    moves = Stays.moves

class Sizes:
    interval_s = 30

    def scale(self, view):
        return {}

class NeverSizes(Sizes):
    interval_s = None

class EndlessSizes(Sizes):
    interval_s = float("inf")

class NoVerb:
    pass

class OddVerb:
    def route(self, request):
        return 0

function = len
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module of the user's in it."""
    (tmp_path / "mine_for_test.py").write_text(MINE)
    (tmp_path / "broken_for_test.py").write_text("x = 1\n1 / 0\n")
    (tmp_path / "odd_for_test.py").write_text("x = (\n")
    (tmp_path / "needs_for_test.py").write_text("import nothing_of_this_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in [name for name in sys.modules if name.endswith("_for_test")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_by_name(name: str) -> None:
    choice = resolve.router(name)
    assert type(choice()) is ROUTERS[name]
    assert str(choice) == choice.name == name
    assert choice.oracle == name.endswith("oracle")


@pytest.mark.parametrize("name", ORDERINGS)
def test_orderings_by_name(name: str) -> None:
    choice = resolve.ordering(name)
    assert type(choice()) is ORDERINGS[name]
    assert choice.oracle == (name in ("shortest-remaining", "shortest-to-answer"))


@pytest.mark.parametrize(
    ("of", "named"), [(resolve.migration, MIGRATIONS), (resolve.scaler, SCALERS)], ids=["migration", "scaler"]
)
def test_migrations_and_scalers_by_name(of: Any, named: dict[str, type[Any]]) -> None:
    for name, cls in named.items():
        choice = of(name)
        assert type(choice()) is cls
        assert str(choice) == choice.name == name
        assert not choice.oracle


def test_arguments_reach_the_constructor() -> None:
    choice = resolve.ordering({"name": "edf", "default_deadline_s": 7, "preemptive": True})
    made = choice()
    assert isinstance(made, EdfOrdering)
    assert made.preemptive and made.rank(FakeRequest(), 0.0) == (7.0, 0.0)
    assert str(choice) == "edf(default_deadline_s=7, preemptive=true)"


def test_each_run_has_its_own_instance() -> None:
    choice = resolve.router("round-robin")
    first, second, view = choice(), choice(), fleet(0, 0)
    assert first.route(FakeRequest(), view).replica == second.route(FakeRequest(), view).replica == 0


class Compact:
    """Has no dictionary, as a compiled class."""

    __slots__ = ("offset",)

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def route(self, request: RequestView, view: FleetView) -> Placement:
        return Placement(view.replicas[self.offset].id)


def test_an_instance_without_a_dictionary_can_be_handed_in() -> None:
    choice = resolve.router({"name": Compact(1)})
    assert choice().route(FakeRequest(), fleet(0, 0)).replica == 1
    assert choice.arguments == {"offset": 1}


def test_a_choice_can_be_sent_to_another_process() -> None:
    choice = resolve.router({"name": "least-kv", "block_size_tokens": 32})
    assert pickle.loads(pickle.dumps(choice)) == choice


def test_a_spec_is_not_changed() -> None:
    spec = {"name": "edf", "preemptive": True}
    resolve.ordering(spec)
    assert spec == {"name": "edf", "preemptive": True}


@pytest.mark.usefixtures("here")
def test_a_class_of_ones_own() -> None:
    choice = resolve.router({"name": "mine_for_test:Last", "offset": 1, "weights": [1], "any": "thing"})
    assert choice().route(FakeRequest(), fleet(0, 0, 0)).replica == 1
    assert resolve.ordering("mine_for_test:Backwards")().rank(FakeRequest(arrival_s=2.0), 0.0) == (-2.0,)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mine_for_test.Last", "one of your own is module:Class, as in mine_for_test:Last"),
        ("mine_for_test.py:Last", "expected module:Class, as in mine_for_test:Last"),
        ("least-loded", "unknown router 'least-loded'; did you mean 'least-loaded'?"),
        ("", "unknown router ''"),
        ({"name": "fcfs"}, "unknown router 'fcfs'"),
        ({}, "expected a name, or `name` and arguments, got {}"),
        ({"name": 3}, "expected a name"),
        ({"name": int}, "router int: "),
        (3, "expected a name, or `name` and arguments, got 3"),
        (["random"], "expected a name"),
        ({"name": "random", "seed": 1}, "router random: takes no arguments, got 'seed'"),
        ({"name": "least-kv", "block_size": 1}, "argument 'block_size'; did you mean 'block_size_tokens'"),
        ({"name": "least-kv", "block_size_tokens": "16"}, "block_size_tokens: expected integer, got string: '16'"),
        ({"name": "least-kv", "block_size_tokens": 1.5}, "block_size_tokens: expected integer, got number: 1.5"),
        ({"name": "least-kv", "block_size_tokens": 0}, "block_size_tokens: expected a number of at least 1"),
        ({"name": "prefix-affinity", "load_factor": 0.5}, "load_factor: expected a number of at least 1"),
        (":Last", "expected module:Class"),
        ("mine_for_test:", "expected module:Class"),
        ("no_such_for_test:Last", "no module 'no_such_for_test' here or among the installed packages"),
        ("mine_for_test.sub:Last", "mine_for_test.sub"),
        ("mine_for_test:Lost", "unknown class 'Lost'; did you mean 'Last'?"),
        ("mine_for_test:function", "unknown class 'function'"),
        ("mine_for_test:NoVerb", "has no method `route(request, view)`"),
        ("mine_for_test:OddVerb", "expected a method `route(request, view)`"),
        ("mine_for_test:Last", "needs the argument 'offset'"),
        ({"name": "mine_for_test:Last", "offset": "1"}, "offset: expected integer, got string"),
        ({"name": "mine_for_test:Last", "offset": 1, "note": "bad"}, "ValueError: a bad note"),
        ("broken_for_test:Last", "broken_for_test.py:2: ZeroDivisionError"),
        ("odd_for_test:Last", "odd_for_test.py:1: SyntaxError"),
        ("needs_for_test:Last", "needs_for_test.py:1: ModuleNotFoundError: No module named 'nothing_of"),
        ("..up:Last", "cannot be imported"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("here")
def test_what_is_said_about_a_router_spec(spec: Any, says: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        resolve.router(spec)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("fifo", "unknown ordering 'fifo'"),
        ({"name": "edf", "default_deadline": 3}, "did you mean 'default_deadline_s'?"),
        ({"name": "edf", "preemptive": 1}, "preemptive: expected boolean, got integer: 1"),
        ({"name": "edf", "default_deadline_s": 0}, "default_deadline_s: expected a number above 0"),
        ({"name": "round-robin", "quantum_tokens": 0}, "quantum_tokens: expected a number of at least 1"),
        ("mine_for_test:Last", "needs the argument 'offset'"),
        ({"name": "mine_for_test:Last", "offset": 1}, "has no method `rank(request, now)`"),
        ("mine_for_test:NoQuantum", "`quantum` must be a number of tokens, or None"),
        ("mine_for_test:OddQuantum", "`quantum` must be a number of tokens, or None"),
        ("mine_for_test:OddPreemptive", "`preemptive` must be True or False"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("here")
def test_what_is_said_about_an_ordering_spec(spec: Any, says: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        resolve.ordering(spec)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("of", "spec", "says"),
    [
        ("migration", "pascall", "unknown migration 'pascall'; did you mean 'pascal'?"),
        (
            "migration",
            {"name": "pascal", "adaptive": 1},
            "migration pascal: adaptive: expected boolean, got integer: 1",
        ),
        ("migration", {"name": "pascal", "quantum_tokens": 0}, "quantum_tokens: expected a number of at least 1"),
        ("migration", "mine_for_test:OddInterval", "`interval_s` must be seconds, more than 0, or None for never"),
        ("migration", "mine_for_test:NoInterval", "`interval_s` must be seconds, more than 0, or None for never"),
        ("migration", "mine_for_test:NoPhase", "has no method `at_phase(request, view)`"),
        ("migration", "mine_for_test:Sizes", "has no method `moves(view)`"),
        ("scaler", "pascal", "unknown scaler 'pascal'"),
        ("scaler", "mine_for_test:NeverSizes", "`interval_s` must be seconds, more than 0"),
        ("scaler", "mine_for_test:EndlessSizes", "`interval_s` must be seconds, more than 0"),
        ("scaler", "mine_for_test:Stays", "has no method `scale(view)`"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("here")
def test_what_is_said_about_other_specs(of: str, spec: Any, says: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        getattr(resolve, of)(spec)
    assert says in str(caught.value)


@pytest.mark.usefixtures("here")
def test_other_classes_of_ones_own() -> None:
    assert resolve.migration("mine_for_test:Stays")().interval_s is None
    assert resolve.scaler("mine_for_test:Sizes")().interval_s == 30


def test_policies_are_light_to_import() -> None:
    """Nothing of Headway but the vocabulary comes with them."""
    code = "import sys, headway.policies.resolve as r; print(*(m for m in sys.modules if 'headway' in m))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    allowed = ("headway.core", "headway.policies")
    assert [m for m in found.split() if m != "headway" and not m.startswith(allowed)] == []


def test_labels_leave_out_arguments_that_are_the_defaults() -> None:
    choice = resolve.ordering({"name": "edf", "default_deadline_s": 60.0})
    defaults = {each.name: each.default for each in inspect.signature(choice.made_by).parameters.values()}
    same = resolve.ordering({"name": "edf", **defaults})
    assert str(same) == "edf"
    other = resolve.ordering({"name": "edf", **defaults, "default_deadline_s": 7.0})
    assert str(other) == "edf(default_deadline_s=7)"
    assert resolve.identity(same) == resolve.identity(resolve.ordering("edf"))


def test_a_label_leaves_out_what_a_struct_has_by_default() -> None:
    assert str(resolve.scaler({"name": "lt-i", "plan": {"epsilon": 0.5}})) == "lt-i(plan=Planning(epsilon=0.5))"
