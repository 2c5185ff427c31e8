"""Modules of users beside a scenario: imported by location, with `sys.path` and the document unchanged."""

from __future__ import annotations

import copy
import json
import pickle
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.config.user_modules import loader_of
from headway.core.errors import HeadwayError
from headway_papers.reproduce.tasks import source_digest

POLICY = """
from neighbour_for_test import INDEX
from headway.core.decision import Placement


class Fixed:
    def __init__(self) -> None:
        self.num_routed = 0

    def route(self, request, view):
        self.num_routed += 1
        return Placement(view.replicas[INDEX].id)
"""


def folder(path: Path, index: int) -> Path:
    path.mkdir(exist_ok=True)
    (path / "fixed_for_test.py").write_text(POLICY)
    (path / "neighbour_for_test.py").write_text(f"INDEX = {index}\n")
    return path


def document() -> dict[str, Any]:
    return {
        "workload": {"builtin": "chat", "num_requests": 20},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "a100-80gb", "replicas": 2}],
        "policies": {"routing": "fixed_for_test:Fixed"},
    }


def test_loading_changes_neither_the_document_nor_the_path(tmp_path: Path) -> None:
    given, before = document(), list(sys.path)
    changes = {("workload", "num_requests"): ("--num-requests", 10), ("policies", "window"): ("--window", 100)}
    places = Places("f.yaml")
    chosen = scenario.assemble(given, places, folder(tmp_path, 1), changes)
    done = scenario.run(chosen)
    assert set(done.records.requests["replica"].tolist()) == {1}
    assert given == document() and not places.flags
    assert sys.path == before


def test_loading_twice_is_loading_once(tmp_path: Path) -> None:
    given = document()
    kept = copy.deepcopy(given)
    first, second = (scenario.assemble(given, Places(), folder(tmp_path, 0)) for _ in range(2))
    assert (first.spec, first.fleet) == (second.spec, second.fleet) and given == kept


def test_instances_are_pickled_into_other_processes(tmp_path: Path) -> None:
    made = scenario.policies_of(scenario.assemble(document(), Places(), folder(tmp_path, 0))).router()
    assert pickle.loads(pickle.dumps(made)).num_routed == 0
    with ProcessPoolExecutor(1, get_context("spawn")) as workers:
        assert "fixed_for_test.Fixed object" in workers.submit(repr, made).result()


def test_a_module_in_a_package_has_relative_imports(tmp_path: Path) -> None:
    (tmp_path / "mine_for_test").mkdir()
    (tmp_path / "mine_for_test" / "parts.py").write_text("LIMIT = 3\n")
    (tmp_path / "mine_for_test" / "policy.py").write_text("from .parts import LIMIT\n")
    assert loader_of(tmp_path)("mine_for_test.policy").LIMIT == 3


def test_modules_of_one_name_in_two_folders_differ(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_for_test.py").write_text(f"VALUE = {value}\n")
    assert [loader_of(tmp_path / name)("same_for_test").VALUE for name in ("a", "b")] == [1, 2]


def test_neighbours_of_one_name_in_two_folders_differ(tmp_path: Path) -> None:
    """At the import of a module or later, pickled, and in the digest of what a module imports."""
    own = "from near_for_test import Near\n\n\ndef later():\n    import near_for_test\n    return near_for_test.VALUE\n"
    found = []
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_for_test.py").write_text(own)
        (tmp_path / name / "near_for_test.py").write_text(f"VALUE = {value}\n\n\nclass Near:\n    value = VALUE\n")
        found.append(loader_of(tmp_path / name)("own_for_test"))
    assert [each.Near.value for each in found] == [1, 2]
    assert [each.later() for each in found] == [1, 2]
    assert [pickle.loads(pickle.dumps(each.Near())).value for each in found] == [1, 2]
    digests = [source_digest(each.__name__, tmp_path / name) for each, name in zip(found, "ab", strict=True)]
    assert digests[0] != digests[1]


def test_a_module_that_was_installed_is_no_neighbour(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("dumps = None\n")
    (tmp_path / "reads_for_test.py").write_text("import json\n")
    assert loader_of(tmp_path)("reads_for_test").json is json


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no module 'fixed_for_test' here or among the installed packages"):
        scenario.assemble(document(), Places(), tmp_path)


RETURNS = """
from headway.core.decision import Move, Placement, Release

class Own:
    interval_s = 0.1
    quantum = None
    preemptive = False
    def route(self, request, view): return {value}
    def rank(self, request, now): return {value}
    def moves(self, view): return {value}
    def at_phase(self, request, view): return {value}
    def holds(self, request): return True
    def release(self, view): return {value}
    def scale(self, view): return {value}
"""


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("routing", "None", "policy Own: `route` returned None; expected a Placement, as in Placement(replica.id)"),
        ("routing", "view.replicas[0].id", "policy Own: `route` returned 0; expected a Placement, as in"),
        ("ordering", "request.id if request.id % 2 else 'x'", "ordering returns_for_test:Own: ranks: '<' not "),
        ("ordering", "request.id if request.id % 2 else None", "policy Own: `rank` returned None; expected what"),
        ("routing", "Placement([0])", "policy Own: `route` returned Placement(replica=[0], decode=None, scores=());"),
        ("admission", "[Release(0, 'x')]", "policy Own: `release` returned Release(request=0, tier='x', region='');"),
        ("migration", "3", "policy Own: `moves` returned 3; expected a list of Moves, which may be empty"),
        ("migration", "[Placement(0)]", "policy Own: `moves` returned Placement(replica=0, decode=None, scores=());"),
        ("admission", "None", "policy Own: `release` returned None; expected a list of Releases, which may be empty"),
        ("admission", "[7]", "policy Own: `release` returned 7; expected a list of Releases, which may be empty"),
        ("scaling", "None", "policy Own: `scale` returned None; expected a whole number of replicas by pool, as in"),
        ("scaling", "{'a100-80gb': 1.5}", "policy Own: `scale` returned {'a100-80gb': 1.5}; expected a whole number"),
    ],
)
def test_what_a_policy_returned_and_what_is_expected_is_told(
    kind: str, value: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "returns_for_test.py").write_text(RETURNS.replace("{value}", value))
    more = {"ordering_at": "gateway", "window": 1} if kind == "ordering" else {}
    made = document() | {"policies": {kind: "returns_for_test:Own", **more}}
    made["workload"]["arrivals"] = 1000  # so that several requests wait at a time
    with pytest.raises(HeadwayError, match=re.escape(message)):
        scenario.run(scenario.assemble(made, Places(), tmp_path))


def test_moves_that_are_made_one_by_one_are_begun(tmp_path: Path) -> None:
    """`moves` is a generator: all of its moves count."""
    moves = "    def moves(self, view):\n        for each in view.replicas[0].requests: yield Move(each.id, 1)\n"
    text = RETURNS.replace("    def moves(self, view): return {value}\n", moves).replace("{value}", "None")
    (tmp_path / "returns_for_test.py").write_text(text)
    made = document() | {"policies": {"migration": "returns_for_test:Own"}}
    done = scenario.run(scenario.assemble(made, Places(), tmp_path)).records.requests
    assert done["moves"].sum() > 0
