"""Modules of users beside a scenario: imported by location, with `sys.path` and the document unchanged."""

from __future__ import annotations

import copy
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


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are imported by their plain names: each test has its own."""
    monkeypatch.delitem(sys.modules, "neighbour_for_test", raising=False)


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


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no module 'fixed_for_test' here or among the installed packages"):
        scenario.assemble(document(), Places(), tmp_path)
