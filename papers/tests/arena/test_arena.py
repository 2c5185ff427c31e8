"""Small grids from end to end, by the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.core.errors import HeadwayError
from headway.planning.rehearsals import RehearsalCache
from headway_papers.arena import keys
from headway_papers.arena.grid import Grid, chosen, read
from headway_papers.arena.grids import builtin
from headway_papers.arena.play import play
from headway_papers.reproduce import tasks
from headway_papers.reproduce.runner import Runner

GRID = """
fleets:
  one kind:
    fleet: [{model: llama-3.1-8b, gpu: a100-80gb, replicas: 2, engine: vllm-0.15}]
  two kinds:
    fleet: [{model: llama-3.1-8b, gpu: h100-80gb-sxm}, {model: llama-3.1-8b, gpu: l40s}]
workloads:
  chat: {arrivals: 5, prompt_tokens: 400, output_tokens: {kind: uniform, min: 10, max: 60}, slo: {ttft_s: 0.5}}
loads: [0.5, 1.1]
seeds: 2
num_requests: 60
policies:
  routing: [round-robin, least-loaded, jsq-tokens-oracle]
"""
MINE = """
class FirstRouter:
    def route(self, request, view):
        from headway.core.decision import Placement
        return Placement(view.replicas[0].id)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid, and the cache of its measurements, which the tests share."""
    made = tmp_path_factory.mktemp("arena")
    (made / "grid.yaml").write_text(GRID)
    return made


def arena(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    """The parsed output of the command."""
    capsys.readouterr()
    assert main(["arena", *map(str, args), "--json", "--jobs", "1", "--no-progress"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.ci
def test_every_policy_is_ranked_in_every_cell_and_nothing_runs_twice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = (folder / "grid.yaml", "--cache", folder / "cache")
    first = arena(capsys, *args)
    names = {"round-robin", "least-loaded", "jsq-tokens-oracle"}
    assert {each["name"] for each in first["ranking"]} == names
    assert [each["num_cells"] for each in first["ranking"]] == [4, 4, 4]
    assert first["num_measured"] == 2 + 4 * 3 * 2
    assert [each["is_oracle"] for each in first["ranking"]].count(True) == 1
    for cell in first["cells"]:
        assert set(cell["regret"]) == names and cell["best"] in names - {"jsq-tokens-oracle"}
        goodput = {name: cell["metrics"][name]["goodput_rps"]["mean"] for name in names}
        best = max(goodput[name] for name in names - {"jsq-tokens-oracle"})
        for name in names:
            assert cell["regret"][name]["mean"] == pytest.approx(1 - goodput[name] / best)
    again = arena(capsys, *args)
    assert (again["num_measured"], again["num_found"]) == (0, first["num_measured"])
    assert again["cells"] == first["cells"]


def test_the_load_is_a_share_of_the_capacity(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = arena(capsys, folder / "grid.yaml", "--cache", folder / "cache")
    capacity = {each["fleet"]: each["requests_per_s"] for each in found["capacities"]}
    for cell in found["cells"]:
        assert cell["requests_per_s"] == pytest.approx(cell["load"] * capacity[cell["fleet"]])
    assert capacity["two kinds"] != pytest.approx(capacity["one kind"], rel=0.05)


def test_only_names_and_what_the_cache_has_of_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("--cache", folder / "cache")
    arena(capsys, folder / "grid.yaml", *shared)
    (folder / "more.yaml").write_text(GRID + "  sets: {mine: {routing: mine:FirstRouter}}\n")
    (folder / "mine.py").write_text(MINE)
    found = arena(capsys, folder / "more.yaml", "--only", "mine", "--only", "two kinds", *shared)
    assert found["num_measured"] == 2 * 2  # two loads, two seeds
    assert {cell["fleet"] for cell in found["cells"]} == {"two kinds"}
    assert {each["name"] for each in found["ranking"]} == {"mine", "round-robin", "least-loaded", "jsq-tokens-oracle"}
    (folder / "mine.py").write_text(MINE.replace("replicas[0]", "replicas[-1]"))
    changed = subprocess.run(
        [sys.executable, "-m", "headway", "arena", folder / "more.yaml", "--only", "mine", "--only", "two kinds",
         "--json", "--jobs", "1", *shared],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(changed.stdout)["num_measured"] == 2 * 2  # its code counts


def test_a_changed_router_is_measured_again_and_the_others_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, wanted = chosen(read(folder / "grid.yaml", seeds=1), ["one kind"])

    def measured() -> int:
        runner = Runner((0,), cache=RehearsalCache(folder / "cache"))
        return play(grid, wanted, runner).num_measured

    measured()
    assert measured() == 0
    own = tasks.source_digest

    def with_a_change(module: str, home: Path) -> bytes:
        return own(module, home) + (b"!" if module == "headway.policies.routing.round_robin" else b"")

    monkeypatch.setattr(keys, "source_digest", with_a_change)
    assert measured() == 2  # one for each load


def test_an_interrupted_run_goes_on(folder: Path, tmp_path: Path) -> None:
    grid, wanted = chosen(read(folder / "grid.yaml", seeds=1), ["one kind"])
    stopped_after = 3

    def stop(done: int, known: int) -> None:
        if done == stopped_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(grid, wanted, Runner((0,), cache=RehearsalCache(tmp_path), report=stop))
    runner = Runner((0,), cache=RehearsalCache(tmp_path))
    found = play(grid, wanted, runner)
    assert (found.num_found, found.num_measured) == (stopped_after, 1 + 2 * 3 - stopped_after)


def test_all_registered_policies_are_offered_and_those_that_do_not_fit_are_named(tmp_path: Path) -> None:
    text = GRID.replace("[round-robin, least-loaded, jsq-tokens-oracle]", "all\n  ordering: all\n  scaling: all")
    (tmp_path / "grid.yaml").write_text(text)
    grid = read(tmp_path / "grid.yaml", quick=True, seeds=1)
    names = {each.name for each in grid.contestants}
    assert {"least-kv", "ordering edf", "scaling reactive"} <= names
    few = ["one kind", "ordering pascal", "least-kv"]
    found = play(*chosen(grid, few), Runner((0,)))
    assert {each.name for each in found.ranking if each.num_cells} == {"least-kv"}
    notes = "\n".join(found.notes)
    assert re.search(r"ordering pascal: not in 2 cells: .*cannot order by pascal", notes), notes


def test_page_and_markdown_show_ranking_and_cells(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, tables = folder / "out" / "page.html", folder / "tables.md"
    tables.write_text("# Mine\n\n<!-- headway arena grid: begin -->\n<!-- headway arena grid: end -->\n\nEnd.\n")
    args = ["arena", str(folder / "grid.yaml"), "--cache", str(folder / "cache"), "--jobs", "1"]
    assert main([*args, "--html", str(page), "--markdown", str(tables)]) == 0
    printed = capsys.readouterr().out
    assert "jsq-tokens-oracle (oracle)" in printed and "best or tied" in printed
    text = page.read_text()
    for part in ('id="regret"', 'id="ranking"', "one kind / chat / 110%", "Method"):
        assert part in text
    lines = tables.read_text().splitlines()
    assert lines[0] == "# Mine" and lines[-1] == "End."
    assert "**TTFT p99**" in lines
    assert sum(line.startswith("| two kinds / chat / 50%") for line in lines) >= 4
    brief = folder / "brief.md"
    assert main([*args, "--metric", "ttft_s.p99", "--no-cells", "--markdown", str(brief)]) == 0
    lines = brief.read_text().splitlines()
    assert "Regret is the loss of TTFT p99" in lines[2]
    assert not any(line.startswith("| two kinds / chat") for line in lines)
    one = folder / "one.md"
    assert main([*args, "--table", "tpot_s.p99", "--markdown", str(one)]) == 0
    titles = [line for line in one.read_text().splitlines() if line.startswith("**")]
    assert titles == ["**TPOT p99**"]
    capsys.readouterr()
    assert main([*args, "--table", "tpot_s.p98"]) == 2
    assert "--table: unknown metric 'tpot_s.p98'; did you mean 'tpot_s.p99'" in capsys.readouterr().err
    assert main([*args, "--table", "tpot_s.p99", "--no-cells"]) == 2
    assert main([*args, "--metric", "ttft_s.p98"]) == 2
    assert "did you mean 'ttft_s.p99'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds: 2", "seed: 2", r"grid.yaml:10: seed: unknown key 'seed'; did you mean 'seeds'\?"),
        ("[0.5, 1.1]", "[0.5, -1]", r"grid.yaml:9: loads\[1\]: expected"),
        ("least-loaded", "least-loadd", r"grid.yaml:13: policies.routing\[1\]: .*did you mean 'least-loaded'\?"),
        ("a100-80gb, rep", "a100-81gb, rep", r"grid.yaml:4: fleet\[0\].gpu: unknown GPU 'a100-81gb'"),
        ("arrivals: 5", "arivals: 5", r"grid.yaml:8: workload.arivals: unknown key"),
        ("seeds: 2", "metric: goodput", r"grid.yaml:10: metric: unknown metric 'goodput'; did you mean 'goodput_rps'"),
        ("seeds: 2", "capacity: lmetrik", r"grid.yaml:10: .*unknown router 'lmetrik'; did you mean 'lmetric'"),
        (
            "arrivals: 5, prompt_tokens: 400, output_tokens: {kind: uniform, min: 10, max: 60}",
            "trace: my.jsonl",
            r"grid.yaml:8: workloads.chat: my.jsonl: no such file beside the grid, or in the folder of --data",
        ),
        ("[round-robin, least-loaded, jsq-tokens-oracle]", "[]", r"grid.yaml:12: policies: expected routing, ordering"),
        ("jsq-tokens-oracle", "round-robin", r"'round-robin' is there twice"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert old in GRID
    file = tmp_path / "grid.yaml"
    file.write_text(GRID.replace(old, new))
    assert main(["arena", str(file), "--cache", str(tmp_path / "cache"), "--no-progress"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--builtin", "quik"), "unknown built-in grid 'quik'; did you mean 'quick'?"),
        (("play",), "expected a grid file or --builtin"),
        (("--builtin", "quick", "--only", "lmetrc"), "unknown fleet, workload or policy 'lmetrc'"),
        (("none.yaml",), "none.yaml: no such file"),
        (("quick",), "quick: no such file; did you mean --builtin quick?"),
        (("--builtin", "quick", "--data", "/none"), "/none: no such folder"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    assert main(["arena", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_workload_whose_trace_is_missing_may_be_left_out(tmp_path: Path) -> None:
    text = GRID.replace("\nloads:", "\n  traced: {trace: my.jsonl}\nif_present: [traced]\nloads:")
    (tmp_path / "grid.yaml").write_text(text)
    grid = read(tmp_path / "grid.yaml")
    assert list(grid.spec.workloads) == ["chat"] and "my.jsonl" in grid.notes[0]
    data = tmp_path / "data" / "traces"
    data.mkdir(parents=True)
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    (data / "my.jsonl").write_text("".join(json.dumps(line | {"timestamp": 100 * i}) + "\n" for i in range(80)))
    grid, _ = chosen(read(tmp_path / "grid.yaml", data=tmp_path / "data"), ["traced", "one kind", "least-loaded"])
    found = play(grid, frozenset({"least-loaded"}), Runner((0, 1)))
    assert {cell.workload for cell in found.cells} == {"traced"}
    assert found.cells[0].metrics["least-loaded"]["cached_prompt_share"].mean > 0.5


@pytest.mark.parametrize("name", ["quick", "held-out", "slos", "caches", "staleness"])
def test_built_in_grids_can_be_played(name: str) -> None:
    grid: Grid = read(builtin(name))
    grid.check()
    assert any(each.name == "headway" for each in grid.contestants)


def test_a_bad_grid_is_a_headway_error(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("fleets: {}\n")
    with pytest.raises(HeadwayError):
        read(tmp_path / "grid.yaml")
