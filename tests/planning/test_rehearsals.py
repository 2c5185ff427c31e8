"""Rehearsals, their cache, and the keys of its results."""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

import grimp
import pytest

import headway
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.planning.advise import trials
from headway.planning.rehearsals import (
    SIMULATING,
    Rehearsal,
    RehearsalCache,
    Rehearsals,
    Resources,
    content_key,
    scenario_key,
)
from headway.planning.source_digests import imported_names, sources
from headway.scenario import Scenario, Simulator, assemble
from headway.scenario.processes import processes

WORKLOAD = {"arrivals": 5, "num_requests": 10, "prompt_tokens": 50, "output_tokens": 5}
FLEET = [{"model": "llama-3.1-8b", "gpu": "l4"}]
SCENARIO = assemble({"workload": dict(WORKLOAD), "fleet": copy.deepcopy(FLEET)}, Places(), Path())


def requests(factor: int, scenario: Scenario, records: Records) -> int:
    """What is measured: requests, times a factor. HeadwayError for 0."""
    if not factor:
        raise HeadwayError("nothing to measure")
    return factor * len(records.workload["arrival_s"])


def rehearsal(factor: int, failed: Callable[[HeadwayError], int] | None = None) -> Rehearsal[int]:
    return Rehearsal(SCENARIO, partial(requests, factor), int, (factor,), failed)


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_are_in_order_and_simulated_once(tmp_path: Path, jobs: int) -> None:
    told: list[tuple[int, int]] = []
    with processes(jobs) as pool:
        made = [Rehearsals(Resources(Simulator(), tmp_path, lambda *num: told.append(num), pool)) for _ in range(2)]
        assert made[0].all([rehearsal(3), rehearsal(1)]) == [30, 10]
        assert made[1].all([rehearsal(each) for each in (1, 2, 3)]) == [10, 20, 30] and made[1].one(rehearsal(2)) == 20
    assert [(each.num_simulated, each.num_found) for each in made] == [(2, 0), (1, 3)]
    assert told == [(1, 2), (2, 2), (1, 3), (2, 3), (3, 3), (4, 4)]
    assert made[1].counted == "1 simulated, 3 found in the cache"


def test_what_cannot_be_measured_is_an_error_or_a_result() -> None:
    rehearsals = Rehearsals(Resources(Simulator()))
    with pytest.raises(HeadwayError, match="nothing to measure"):
        rehearsals.one(rehearsal(0))
    assert rehearsals.all([rehearsal(0, lambda error: -1), rehearsal(2)]) == [-1, 20]


def test_without_a_cache_a_plan_may_remember() -> None:
    for remembers, num in ((False, 2), (True, 1)):
        rehearsals = Rehearsals(Resources(Simulator()), remembers=remembers)
        assert rehearsals.one(rehearsal(1)) == rehearsals.one(rehearsal(1)) == 10
        assert rehearsals.num_simulated == num and rehearsals.num_done == 2


def test_without_a_folder_nothing_is_kept() -> None:
    cache = RehearsalCache(None)
    cache.keep("a", 1.0)
    assert cache.find("a", float) is None and cache.notes == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"key": "b", "result": 1.0}', b'{"key": "a", "result": "text"}'])
def test_invalid_files_are_ignored_with_a_note(tmp_path: Path, content: bytes) -> None:
    cache = RehearsalCache(tmp_path)
    (tmp_path / "a.json").write_bytes(content)
    assert cache.find("a", float) is None and cache.num_found == 0
    assert cache.notes == [f"{tmp_path / 'a.json'}: not a result that Headway wrote; ignored, and simulated anew"]
    cache.keep("a", 3.0)
    assert cache.find("a", float) == 3.0 and RehearsalCache(tmp_path, fresh=True).find("a", float) is None


def test_infinity_is_null_in_a_file(tmp_path: Path) -> None:
    cache = RehearsalCache(tmp_path)
    cache.keep("a", {"latency": inf})
    assert cache.find("a", dict[str, float | None]) == {"latency": None}


def test_a_key_covers_facts_files_and_digests(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("1")
    keys = [content_key([1]), content_key([2]), content_key([1], [file]), content_key([1], digests=[b"x"])]
    assert len(set(keys)) == 4 and content_key([1], [file]) == keys[2]
    file.write_text("22")
    assert content_key([1], [file]) != keys[2]


@pytest.mark.ci
def test_a_rehearsal_depends_on_what_simulates_and_measures_and_on_no_planner_or_gateway() -> None:
    package = Path(headway.__file__).parent
    found = {file for module in (SIMULATING, trials.__name__) for file in sources(module, package)}
    names = {".".join(file.relative_to(package).with_suffix("").parts) for file in found}
    graph = grimp.build_graph("headway")
    needed = {each for module in (SIMULATING, trials.__name__) for each in graph.find_upstream_modules(module)}
    assert {each.removeprefix("headway.") for each in needed} - {"headway"} <= {
        each.removesuffix(".__init__") for each in names
    }
    assert {"sim.engine_scheduler", "report.model_error", "planning.advise.trials"} <= names, sorted(names)
    assert not names & {"planning.advise.choose", "planning.advise.text", "serving.autopilot", "gateway.server.app"}


def test_no_import_of_a_source_is_missed() -> None:
    """Against the syntax trees of all sources, and for what these do not have."""
    own = """
if x: import a.b
x = 1; import c as d, e
from .f import (  # (g
    h as i,  # )
    j,
)
if x:
    from k \\
        import l, m  # n
from o import *
def q(): from r import s
"""
    texts = [own, *(file.read_text() for file in Path(headway.__file__).parent.rglob("*.py"))]
    for text in texts:
        named = set[str]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module, *(f"{node.module}.{each.name}" for each in node.names if each.name != "*")}
            elif isinstance(node, ast.Import):
                named |= {each.name for each in node.names}
        assert named <= set(imported_names(text))


def test_another_version_of_a_users_policy_is_another_key(tmp_path: Path) -> None:
    document = {"fleet": FLEET, "policies": {"routing": "own:Own"}, "workload": WORKLOAD}
    keys = []
    for i, body in enumerate(("return None", "return None", "return 1")):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        (folder / "beside.py").write_text(f"def choose(request, view):\n    {body}\n")
        (folder / "own.py").write_text("class Own:\n    def route(self, request, view):\n        import beside\n")
        keys.append(scenario_key(assemble(copy.deepcopy(document), Places(), folder), modules=(SIMULATING,)))
    assert keys[0] == keys[1] != keys[2]


def test_weights_count_by_size_and_time_alone(tmp_path: Path) -> None:
    """They have gigabytes."""
    files = tmp_path / "first.gguf", tmp_path / "second.gguf"  # two, as contents are kept by file and time
    for content, file in zip((b"1", b"2"), files, strict=True):
        file.write_bytes(content)
        os.utime(file, (1, 1))
    first = content_key([1], files[:1])
    assert content_key([1], files[1:]) == first
    os.utime(files[0], (2, 2))
    assert content_key([1], files[:1]) != first
