"""The search of a policy's arguments: its space, its halves, its rungs, and a search that can be checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest

from headway.cli import main
from headway.core.errors import HeadwayError
from headway.policies import resolve
from headway_papers.arena.grid import read
from headway_papers.arena.search import halved, halves
from headway_papers.arena.space import Argument, space

GRID = """
fleets:
  pair: {fleet: [{model: llama-3.1-8b, gpu: a100-80gb, replicas: 2, engine: vllm-0.15}]}
workloads:
  chat: {arrivals: 5, prompt_tokens: 400, output_tokens: {kind: uniform, min: 10, max: 60}}
loads: [0.6, 0.9]
seeds: 4
num_requests: 60
metric: ttft_s.mean
policies: {routing: [least-loaded]}
"""
MINE = """
from headway.core.decision import Placement

class Biased:
    def __init__(self, share: float = 1.0, limit: int = 4, mode: str = "plain") -> None:
        if limit == 3:
            raise ValueError("not three")
        self.share = share

    def route(self, request, view):
        # The share of the requests that the first replica gets; half would be best.
        return Placement(view.replicas[0 if request.id % 100 < 100 * self.share else 1].id)
"""


class Kinds:
    def __init__(
        self,
        weight: float = 2.0,
        num: int = 4,
        flag: bool = False,
        how: Literal["a", "b"] = "a",
        start: float = 0.0,
        most: int | None = None,
        name: str = "x",
    ) -> None:
        pass

    def route(self, request: Any, view: Any) -> Any:
        pass


def test_the_space_comes_from_the_constructor() -> None:
    found = {each.name: each for each in space(resolve.router({"name": Kinds}))}
    assert found["weight"] == Argument("weight", False, 0.25, 16.0)
    assert found["num"] == Argument("num", True, 1.0, 32.0)
    assert found["flag"].choices == (False, True)
    assert found["how"].choices == ("a", "b")
    assert found["start"] == Argument("start", False, 0.0, 1.0)
    assert set(found) == {"weight", "num", "flag", "how", "start"}  # the others have no range of their own


def test_draws_are_in_range_and_whole_where_the_argument_is() -> None:
    random = Random(1)
    drawn: list[Any] = [Argument("num", True, 1.0, 32.0).draw(random) for _ in range(200)]
    assert all(type(each) is int for each in drawn) and 1 <= min(drawn) < 4 < 20 < max(drawn) <= 32
    weights: list[Any] = [Argument("w", False, 0.25, 16.0).draw(random) for _ in range(200)]
    assert 0.25 <= min(weights) < 1 < 8 < max(weights) <= 16


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("weigth", r"unknown argument 'weigth'; did you mean 'weight'\?"),
        ("weight=3:1", "expected two numbers, the lower one first"),
        ("name", "has no range of its own; expected name=LOW:HIGH or name=A,B,C"),
    ],
)
def test_a_bad_range_is_refused(vary: str, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        space(resolve.router({"name": Kinds}), [vary])


def test_given_ranges() -> None:
    found = space(resolve.router({"name": Kinds}), ["most=2:9", "name=x,y", "weight"])
    assert found[0] == Argument("most", True, 2, 9)
    assert found[1].choices == ("x", "y")
    assert found[2] == Argument("weight", False, 0.25, 16.0)


def test_a_policy_without_arguments_has_nothing_to_search() -> None:
    with pytest.raises(HeadwayError, match="no argument with a range"):
        space(resolve.router("lmetric"))


@pytest.mark.parametrize("hold_out", ["seeds", "cells"])
def test_halves_have_no_run_in_common(tmp_path: Path, hold_out: Literal["seeds", "cells"]) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    grid = read(tmp_path / "grid.yaml")
    train, test = halves(grid, hold_out)
    assert len(train) == len(test) == 4
    at = 1 if hold_out == "seeds" else 0
    assert not {run[at] for run in train} & {run[at] for run in test}


def test_better_trials_get_more_runs() -> None:
    asked: list[tuple[int, int]] = []

    class Judge:
        def gains(self, points: Any, runs: Any) -> Any:
            asked.append((len(points), len(runs)))
            return [dict.fromkeys(runs, point["x"]) for point in points]

    points: list[Any] = [{"x": x} for x in (3, 1, 8, 5, 7, 2, 6, 4, 0)]
    found = halved(points, list(range(9)), Judge())  # type: ignore[arg-type]
    assert asked == [(9, 3), (3, 9)]
    assert [each.arguments["x"] for each in found] == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert [each.num_runs for each in found] == [9] * 3 + [3] * 6


def test_it_finds_what_is_best_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    (tmp_path / "mine.py").write_text(MINE)
    won = tmp_path / "won.yaml"
    args = [
        "arena", "search", str(tmp_path / "grid.yaml"), "--policy", "mine:Biased", "--vary", "share=0.1:1.0",
        "--trials", "6", "--cache", str(tmp_path / "cache"), "--jobs", "1", "--no-progress", "--out", str(won),
    ]  # fmt: skip
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.3 < found["arguments"]["share"] < 0.7
    assert found["verdict"] == "better" and found["test_gain"]["low"] > 0
    assert (found["num_train_runs"], found["num_test_runs"]) == (4, 4)
    text = won.read_text()
    assert re.search(r"policies:\n  routing:\n    name: mine:Biased\n    share: 0\.\d+", text), text
    assert main(args) == 0
    printed = capsys.readouterr().out
    assert "better than the defaults on the test half" in printed and "0 runs in" in printed


def test_bad_options_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    file = str(tmp_path / "grid.yaml")
    for args, message in (
        ([file, "--policy", "lmetrik"], "unknown router 'lmetrik'; did you mean 'lmetric'?"),
        ([file, "--policy", "headway", "--seeds", "1"], "--hold-out seeds: the grid has one of them"),
        ([file], "Missing option '--policy'"),
    ):
        assert main(["arena", "search", *args, "--cache", str(tmp_path / "cache"), "--no-progress"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
