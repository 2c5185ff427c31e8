"""Modules of users beside a scenario: imported by location, with `sys.path` and the document unchanged."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.reproduce.tasks import source_digest
from headway.scenario.user_modules import loader_of

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
