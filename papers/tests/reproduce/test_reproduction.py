"""Reproductions: rules, processes, the cache, what is printed and drawn."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

import reproduced
from headway.cli import main
from headway.core.errors import HeadwayError
from headway.metrics.interval import interval, quantile
from headway.planning.rehearsals import RehearsalCache
from headway.report.page import library_name
from headway.scenario.processes import processes
from headway_papers.reproduce import SYSTEMS
from headway_papers.reproduce import tasks as tasks_module
from headway_papers.reproduce.claims import VERDICTS, AtLeast, AtMost, Between, EverySeed, Rule, Value
from headway_papers.reproduce.markdown import BEGIN, END
from headway_papers.reproduce.page import page
from headway_papers.reproduce.reproduction import chosen, load, reproduce
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call, SimulationTask, cache_key

KEYS = ["id", "claim", "paper", "headway", "rule", "verdict", "holds", "why", "values"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setitem(SYSTEMS, "tiny", "reproduced")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return "tiny"


def run_cli(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> tuple[str, str]:
    assert main(["reproduce", *map(str, args)]) == code
    out, err = capsys.readouterr()
    return out, err


def error_of(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    out, err = run_cli(capsys, *args, code=2)
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").strip()


# Intervals.


@pytest.mark.parametrize("freedom", [*range(1, 40), 100, 999])
def test_the_quantile_is_students(freedom: int) -> None:
    assert quantile(freedom) == pytest.approx(student.ppf(0.975, freedom), rel=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_the_interval_is_around_the_mean(values: list[float]) -> None:
    found = interval(values)
    assert found is not None
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    assert found == pytest.approx((fmean(values) - half, fmean(values) + half), rel=1e-6, abs=1e-9)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    samples = np.random.default_rng(1).normal(3.0, 2.0, (4000, 5))
    ends = [interval(row.tolist()) or (0.0, 0.0) for row in samples]
    assert np.mean([low <= 3.0 <= high for low, high in ends]) == pytest.approx(0.95, abs=0.015)


# Rules.


@pytest.mark.parametrize(
    ("rule", "values", "holds"),
    [
        (AtLeast(0.8), [0.5, 0.52, 0.51], True),
        (AtLeast(0.8), [0.3, 0.32, 0.31], False),
        (AtLeast(0.8), [0.3, 0.5, 0.4], None),
        (AtLeast(0.8), [-0.5, -0.52, -0.51], False),
        (AtLeast(0.8, share=1.0), [0.5, 0.52, 0.51], False),
        (AtLeast(0.8, share=0.0, because="tiny"), [0.01, 0.02, 0.015], True),
        (AtLeast(3.0, neutral=1.0), [2.1, 2.2, 2.15], True),
        (AtLeast(3.0, neutral=1.0), [1.8, 1.9, 1.85], False),
        (AtMost(0.2, neutral=1.0), [0.55, 0.56, 0.54], True),
        (AtMost(0.2, neutral=1.0), [0.65, 0.66, 0.64], False),
        (AtMost(0.2, neutral=1.0), [0.4, 0.8, 0.6], None),
        (AtMost(0.05, share=1.0), [-1.0, -1.1], True),
        (Between(-0.03, 0.03), [0.01, 0.01, 0.02], True),
        (Between(-0.03, 0.03), [0.06, 0.061, 0.062], False),
        (Between(-0.03, 0.03), [-0.06, -0.061, -0.062], False),
        (Between(-0.03, 0.03), [0.02, 0.03, 0.04], None),
        (Between(-0.03, 0.03), [-1.0, 0.0, 1.0], None),
        (EverySeed(), [True, True], True),
        (EverySeed(), [True, False], False),
        (EverySeed(), [True], True),
        (EverySeed(), [False], False),
        (AtLeast(0.8), [0.9], None),
        (AtLeast(0.8), [], None),
        (AtLeast(0.8), [0.9, None, 0.9], None),
        (AtLeast(0.8), [0.9, float("inf"), 0.9], None),
        (EverySeed(), [True, None], None),
        (EverySeed(), [], None),
        (AtLeast(0.8), [0.4, 0.4, 0.4], True),
        (AtLeast(0.8, exact=True), [0.4], True),
        (AtLeast(0.8, exact=True), [0.39], False),
        (Between(12, 12, exact=True), [12], True),
        (Between(12, 12, exact=True), [13], False),
    ],
)
def test_a_rule_judges(rule: Rule, values: Sequence[Value], holds: bool | None) -> None:
    verdict = rule.judge(values)
    assert verdict.holds is holds
    assert bool(verdict.reason) == (holds is not True)


@settings(max_examples=300)
@given(st.lists(st.floats(-2, 2), min_size=2, max_size=6), st.floats(-2, 2), st.floats(-1, 1))
def test_the_whole_interval_decides(values: list[float], effect: float, neutral: float) -> None:
    low, high = interval(values) or (0.0, 0.0)
    threshold = (effect + neutral) / 2
    if min(abs(low - threshold), abs(high - threshold)) < 1e-9:
        return
    least = AtLeast(effect, neutral=neutral).judge(values)
    most = AtMost(effect, neutral=neutral).judge(values)
    assert least.holds is (True if low > threshold else False if high < threshold else None)
    assert most.holds is (None if least.holds is None else not least.holds)
    assert least.headway == most.headway


def test_rules_and_results_as_texts() -> None:
    assert str(AtLeast(0.72, unit="%")) == "at least 36% (half of the paper's 72%)"
    assert str(AtLeast(1.8, neutral=1.0, unit="x")) == "at least 1.40x (half of the way from 1x to the paper's 1.80x)"
    assert str(AtMost(0.05, share=1.0, unit="%")) == "at most 5%"
    weak = AtLeast(0.8, share=0.25, unit="%", because="our links are slower")
    assert str(weak) == "at least 20% (25% of the paper's 80%: our links are slower)"
    assert str(AtMost(-3, share=0.0, because="sign only")) == "at most 0 (the direction of the paper's -3: sign only)"
    assert str(Between(-0.03, 0.03, unit="%")) == "between -3% and 3%"
    assert AtLeast(0.72, unit="%").judge([0.6, 0.62]).headway == "61% [48.3%, 73.7%], 2 seeds"
    assert AtLeast(2.0, unit=" s").judge([1.5]).headway == "1.50 s, 1 seed"
    assert EverySeed().judge([True, False, True]).headway == "true for 2 of 3 seeds"
    assert AtLeast(1.0).judge([1.0, None]).headway == "no value for 1 of 2 seeds"


def test_less_than_half_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        AtLeast(0.8, share=0.4)


def test_an_exact_value_that_differs_is_not_exact() -> None:
    with pytest.raises(ValueError, match="differs"):
        AtLeast(0.8, exact=True).judge([0.4, 0.5])


# Running.


def results(jobs: int, seeds: Sequence[int] = (0, 1, 2)) -> dict[Any, Any]:
    tasks = {
        (replicas, seed): SimulationTask(reproduced.document(replicas, 30), seed, reproduced.measure)
        for replicas in (2, 1)
        for seed in seeds
    }
    with processes(jobs) as pool:
        return Runner(tuple(seeds), pool=pool).run(tasks)


@pytest.mark.ci
def test_the_number_of_processes_changes_nothing() -> None:
    alone, together = results(1), results(2)
    assert list(alone) == list(together) == [(n, seed) for n in (2, 1) for seed in (0, 1, 2)]
    assert alone == together
    assert results(1, (2, 0, 1)) == alone
    assert len({found["e2e_s"] for found in alone.values()}) == 6
    assert all(found["never"] is None for found in alone.values())
    assert all(isinstance(found["tokens"], int) and len(found["e2e_values_s"]) == 20 for found in alone.values())


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_an_interrupted_run_goes_on(tmp_path: Path, jobs: int) -> None:
    marker = tmp_path / "marker"
    tasks = {("call", i): Call(reproduced.interrupted, {"number": i, "marker": str(marker)}) for i in range(4)}
    keys = [cache_key(task, Path()) for task in tasks.values()]
    with processes(jobs) as pool, pytest.raises(HeadwayError, match="call, 2: no such luck"):
        Runner((0,), cache=RehearsalCache(tmp_path / "cache"), pool=pool).run(tasks)
    kept = {file.stem for file in (tmp_path / "cache").iterdir()}
    assert kept <= set(keys) and (jobs > 1 or kept == set(keys[:2]))
    marker.mkdir()  # a file would be part of the key
    progress: list[tuple[int, int]] = []
    with processes(jobs) as pool:
        again = Runner(
            (0,), cache=RehearsalCache(tmp_path / "cache"), pool=pool, report=lambda *done: progress.append(done)
        )
        found = again.run({name: task for name, task in tasks.items() if name != ("call", 2)})
        assert again.num_found == len(kept) and again.num_found + again.num_measured == 3
        found |= again.run({("call", 2): tasks["call", 2]})
    assert [found[name]["number"] for name in tasks] == [0, 1, 2, 3]
    assert progress[-1] == (4, 4) and progress == sorted(progress)


def test_a_corrupt_file_is_ignored_with_a_note(tmp_path: Path) -> None:
    tasks = {i: Call(reproduced.plan, {"demand": [i]}) for i in range(3)}
    first = Runner((0,), cache=RehearsalCache(tmp_path))
    whole = first.run(tasks)
    bad, swapped, good = (tmp_path / f"{cache_key(task, Path())}.json" for task in tasks.values())
    bad.write_bytes(b'{"key": "')
    swapped.write_bytes(good.read_bytes())
    again = Runner((0,), cache=RehearsalCache(tmp_path))
    assert again.run(tasks) == whole
    assert (again.num_measured, again.num_found) == (2, 1)
    assert again.cache and [note.split(":")[0] for note in again.cache.notes] == [str(bad), str(swapped)]
    mended = Runner((0,), cache=RehearsalCache(tmp_path))
    mended.run(tasks)
    assert mended.num_found == 3 and mended.cache and mended.cache.notes == []
    fresh = Runner((0,), cache=RehearsalCache(tmp_path, fresh=True))
    fresh.run(tasks)
    assert fresh.num_measured == 3


def test_a_key_is_of_all_that_matters(tmp_path: Path) -> None:
    document = reproduced.document(1, 10)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,10\n")
    traced = {**document, "workload": {"trace": {"path": "trace.csv"}}}
    tasks = [
        SimulationTask(document, 0, reproduced.measure),
        SimulationTask(document, 1, reproduced.measure),
        SimulationTask(reproduced.document(2, 10), 0, reproduced.measure),
        SimulationTask(document, 0, reproduced.plan),
        SimulationTask(traced, 0, reproduced.measure),
        Call(reproduced.plan, {"demand": [1]}),
        Call(reproduced.interrupted, {"demand": [1]}),
    ]
    keys = [cache_key(task, tmp_path) for task in tasks]
    assert len(set(keys)) == len(keys)
    assert keys == [cache_key(task, tmp_path) for task in tasks]
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,11\n")
    assert cache_key(tasks[4], tmp_path) != keys[4]
    assert cache_key(tasks[0], tmp_path) == keys[0]


def test_a_module_counts_with_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "outer": "from headway_papers.reproduce import inner\n",
        "headway_papers.reproduce.inner": "import headway.metrics\n",
    }
    files = {"outer": "outer.py", "headway_papers.reproduce.inner": "inner.so"}  # the second one is compiled
    (tmp_path / "inner.so").write_bytes(b"\x7fELF\0")
    digests = []
    for name, text in names.items():
        module = ModuleType(name)
        module.__file__ = str(tmp_path / files[name])
        Path(module.__file__).with_suffix(".py").write_text(text)
        monkeypatch.setitem(sys.modules, name, module)
    for change in ("", "RATE = 3\n", ""):
        (tmp_path / "inner.py").write_text(names["headway_papers.reproduce.inner"] + change)
        tasks_module.source_digest.cache_clear()
        digests.append(tasks_module.source_digest("outer", tmp_path))
    assert digests[0] == digests[2] != digests[1]


def test_what_was_imported_before_does_not_change_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function's own import counts before it has run, too."""
    package = tmp_path / "late"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("def run():\n    from late import second\n")
    (package / "second.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("late.first")
    digests = [tasks_module.source_digest.__wrapped__("late.first", package)]
    importlib.import_module("late.second")
    digests.append(tasks_module.source_digest.__wrapped__("late.first", package))
    (package / "second.py").write_text("VALUE = 2\n")
    digests.append(tasks_module.source_digest.__wrapped__("late.first", package))
    assert digests[0] == digests[1] != digests[2]


def test_a_bad_scenario_and_a_dead_process_are_named() -> None:
    document = {**reproduced.document(1, 10), "fleat": 1}
    with pytest.raises(HeadwayError, match=r"seed 3: .*fleat.*did you mean 'fleet'"):
        Runner((0,)).run({("seed 3",): SimulationTask(document, 3, reproduced.measure)})
    with processes(2) as pool, pytest.raises(HeadwayError, match=r"last: a process died.*--jobs"):
        Runner((0,), pool=pool).run({"last": Call(reproduced.dies, {})})


# The command.


def test_json_has_its_stable_keys(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run_cli(capsys, tiny, "--jobs", 1, "--json")
    printed = json.loads(out)
    assert err == ""
    assert list(printed) == ["system", "quick", "seeds", "wall_s", "counts", "abstract", "claims"]
    verdicts = Counter(row["verdict"] for row in printed["claims"])
    assert printed["counts"] == {word: verdicts[word] for word in VERDICTS} and printed["counts"]["refuted"] == 2
    assert (printed["system"], printed["quick"], printed["seeds"]) == ("tiny", False, 4)
    assert [list(row) for row in printed["claims"]] == [KEYS] * len(reproduced.CLAIMS)
    rows = {row["id"]: row for row in printed["claims"]}
    assert list(rows) == [claim.id for claim in reproduced.CLAIMS]
    assert rows["speed-up"]["holds"] is False and rows["order"]["holds"] is rows["plan"]["holds"] is True
    assert all(row["why"] for row in rows.values() if row["holds"] is not True)
    assert len(rows["ttft"]["values"]) == 4 and rows["plan"]["paper"] == 12
    low, high = interval(rows["ttft"]["values"]) or (0.0, 0.0)
    assert f"[{100 * low:.1f}%, {100 * high:.1f}%]" in rows["ttft"]["headway"]


def test_the_abstract_comes_first_with_the_verdicts_of_its_readings(
    tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    printed = json.loads(run_cli(capsys, tiny, "--jobs", 1, "--json")[0])
    rows = {row["id"]: row for row in printed["claims"]}
    said = [(each["says"], each["experiment"]) for each in printed["abstract"]]
    assert said == [(each.says, each.experiment) for each in reproduced.ABSTRACT]
    readings = [each for sentence in printed["abstract"] for each in sentence["readings"]]
    assert [(each["claim"], each["chosen"]) for each in readings] == [
        ("speed-up", "before"),
        ("tpot", "after"),
        ("plan", "before"),
    ]
    for each in readings:
        assert {key: each[key] for key in ("paper", "headway", "verdict")} == {
            key: rows[each["claim"]][key] for key in ("paper", "headway", "verdict")
        }
    file = tmp_path / "tiny.md"
    out, _ = run_cli(capsys, tiny, "--jobs", 1, "--markdown", file)
    for text in (out, file.read_text()):
        places = [
            text.index(each)
            for each in (
                "Twice the replicas halve",
                "refuted. Paper: 3x. Headway: ",
                "What would change this: A load",
                "It costs 12 GPUs.",
                "holds. Paper: 12. Headway: 12, exact (the plan).",
                "What would change this: A larger demand",
                "time per <token>",
                "All claims",
                reproduced.CLAIMS[0].claim,
            )
        ]
        assert places == sorted(places)
    one, _ = run_cli(capsys, tiny, "--jobs", 1, "--claim", "tpot")
    assert "Twice the replicas halve" in one and "mean E2E" not in one and "12 GPUs" not in one
    none, _ = run_cli(capsys, tiny, "--jobs", 1, "--claim", "order")
    assert "All claims" not in none


def test_quick_keeps_every_claim_and_seeds_are_as_many_as_asked(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    quick = json.loads(run_cli(capsys, tiny, "--jobs", 1, "--json", "--quick")[0])
    one = json.loads(run_cli(capsys, tiny, "--jobs", 1, "--json", "--quick", "--seeds", 1)[0])
    assert (quick["quick"], quick["seeds"], one["seeds"]) == (True, 2, 1)
    for printed in (quick, one):
        assert [row["id"] for row in printed["claims"]] == [claim.id for claim in reproduced.CLAIMS]
    holds = {row["id"]: row["holds"] for row in one["claims"]}
    assert holds == {"ttft": None, "speed-up": None, "tpot": None, "tokens": None, "order": True, "plan": True}


def test_the_table_and_the_exit_code(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run_cli(capsys, tiny, "--jobs", 1)
    assert all(f" {claim.id} " in out and claim.claim in out for claim in reproduced.CLAIMS)
    assert re.search(r"✗ refuted\n", out) and "speed-up: asked for at least 2x" in out
    assert "9 measurements" in out
    again, _ = run_cli(capsys, tiny, "--jobs", 1, "--strict", code=1)
    assert "0 measurements, 9 more from the cache" in again
    anew, _ = run_cli(capsys, tiny, "--jobs", 1, "--fresh", "--claim", "order", "--claim", "plan", "--strict")
    assert "9 measurements." in anew and "speed-up" not in anew
    assert "2 hold, 0 exceed, 0 refuted, 0 undecided." in anew


def test_listing_runs_nothing(tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "tiny" in run_cli(capsys, "--list")[0]
    listed = {each["system"]: each for each in json.loads(run_cli(capsys, "--list", "--json")[0])}
    assert listed["tiny"] == {"system": "tiny", "title": reproduced.TITLE, "claims": 6}
    rules = json.loads(run_cli(capsys, "tiny", "--list", "--json")[0])["claims"]
    assert [row["rule"] for row in rules] == [str(claim.rule) for claim in reproduced.CLAIMS]
    assert "at least 45%" in run_cli(capsys, "tiny", "--list")[0]
    assert not (tmp_path / "cache").exists()


def test_mistakes_are_one_line(tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert error_of(capsys, "tinny") == "unknown system 'tinny'; did you mean 'tiny'?"
    assert error_of(capsys, tiny, "--claim", "speedup") == "unknown claim 'speedup'; did you mean 'speed-up'?"
    assert "--list" in error_of(capsys)
    assert "no such folder" in error_of(capsys, tiny, "--data", tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "cannot be written" in error_of(capsys, tiny, "--jobs", 1, "--cache", tmp_path / "file" / "cache")


def test_the_page_shows_every_claim_and_exhibit(tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "out" / "tiny.html"
    _, err = run_cli(capsys, tiny, "--jobs", 1, "--html", file)
    assert err == f"wrote {file}\n"
    own = file.read_text()
    assert {each.name for each in file.parent.iterdir()} == {file.name, library_name()}
    assert not re.search(r"https?://|@import|url\(", own)
    for claim in reproduced.CLAIMS:
        assert f"<code>{claim.id}</code>" in own and claim.claim in own
    assert own.count("refuted</td>") == 4 and own.count("holds</td>") == 5
    assert (
        own.index("Twice the replicas")
        < own.index("time per &lt;token&gt;")
        < own.index("It costs 12")
        < own.index("Claims</h2>")
    )
    assert own.index('class="claims"') < own.index("Figure 1: TTFT &lt;/script&gt;") < own.index("Method")
    assert "Tiny: &lt;Twice&gt; the Replicas &amp; Half the Wait" in own and "<Twice>" not in own
    charts = json.loads(re.search(r"const charts = (.*);\n", own)[1])  # type: ignore[index]
    assert list(charts) == ["exhibit-0", "exhibit-1", "exhibit-2"]
    assert all(f'id="{name}"' in own for name in charts)
    assert charts["exhibit-0"]["data"][0]["error_y"]["array"][0] > 0
    assert "<h3>Table 1: GPUs</h3>" in own


def test_markdown_goes_between_the_marker_lines_of_a_page(
    tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tiny.md"
    run_cli(capsys, tiny, "--jobs", 1, "--markdown", file)
    written = file.read_text()
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{claim.id}`" for claim in reproduced.CLAIMS]
    assert [row[-1] for row in rows].count("**refuted** |") == 2
    assert "- `ttft`: " in written and "**Table 1: GPUs.** What was planned." in written and "`tokens`: " not in written
    assert f"`headway reproduce {tiny} --markdown`" in written and str(tmp_path) not in written
    file.write_text(f"# Tiny\n\n{BEGIN}\nold\n{END}\n\nLast words.\n")
    run_cli(capsys, tiny, "--jobs", 1, "--markdown", file)
    assert file.read_text() == f"# Tiny\n\n{written}\nLast words.\n"


def test_a_page_keeps_the_rows_that_were_not_run(tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A page of rows that were run one by one says the same as one of a run of all."""
    whole, single = tmp_path / "whole.md", tmp_path / "single.md"
    cache = tmp_path / "cache"
    run_cli(capsys, tiny, "--jobs", 1, "--cache", cache, "--markdown", whole)
    for claim in reversed(reproduced.CLAIMS):
        run_cli(capsys, tiny, "--jobs", 1, "--cache", cache, "--claim", claim.id, "--markdown", single)
    note = " Some rows were run alone, by `--claim`, later or with other seeds."
    assert single.read_text().replace(note, "") == whole.read_text()
    run_cli(capsys, tiny, "--jobs", 1, "--cache", cache, "--claim", "order", "--seeds", 2, "--markdown", whole)
    differ = [line for line in whole.read_text().splitlines() if line not in single.read_text().splitlines()]
    (row,) = differ
    assert row.startswith("| `order` |") and "true for 2 of 2 seeds" in row


def test_a_page_without_marker_lines_is_refused_before_anything_runs(
    tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduced, "run", lambda runner: pytest.fail("it ran"))
    file = tmp_path / "tiny.md"
    for text, line in (("# Tiny\n", BEGIN), (f"{BEGIN}\n# Tiny\n", END)):
        file.write_text(text)
        assert error_of(capsys, tiny, "--markdown", file).startswith(f"{file}: has no line '{line}'")
        assert file.read_text() == text


def test_the_page_says_undecided(tiny: str) -> None:
    text = page(reproduce(tiny, seeds=1), "headway reproduce tiny --seeds 1")
    assert text.count("undecided</td>") == 6 and "for 1 seed (0);" in text


# The systems that are there.


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_says_what_it_claims(name: str) -> None:
    system = load(name)
    ids = [claim.id for claim in system.CLAIMS]
    assert ids and len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9.-]+", each) for each in ids)
    assert all(claim.claim.endswith(".") and str(claim.paper) and str(claim.rule) for claim in system.CLAIMS)
    assert system.SEEDS >= system.QUICK_SEEDS >= 2
    assert system.TITLE and callable(system.run)
    assert chosen(system, ids[-1:]) == system.CLAIMS[-1:]
    assert importlib.import_module(SYSTEMS[name]) is system
