"""`headway compare --seeds`: intervals in place of a star on the best of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli import compare, main

SMALL = (
    "--workload chat --rate 20 --num-requests 60 --model llama-3.1-8b --gpu h100 --replicas 2 --no-progress "
    "--routing round-robin,least-loaded,random"
).split()


def _told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def _json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_told(capsys, *arguments, "--json"))
    for result in found["results"]:
        for name in ("simulate_s", "total_s"):
            result.pop(name)
    return found


def test_short_runs_are_repeated_with_five_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    one, several = _json(capsys, *SMALL, "--seeds", 1, "--seed", 7), _json(capsys, *SMALL, "--seed", 7)
    assert several.pop("seeds") == [7, 8, 9, 10, 11] and "seeds" not in one
    means = []
    for alone, result in zip(one["results"], several["results"], strict=True):
        intervals, verdicts = result.pop("intervals"), result.pop("verdicts")
        assert result == alone, "keys are added, and none is changed"
        found = intervals["ttft_s.p99"]
        assert found["low"] <= found["mean"] <= found["high"] and verdicts["ttft_s.p99"] in (
            "best",
            "indistinguishable",
            "worse",
        )
        means.append(intervals["e2e_s.mean"]["mean"])
    runs = [one, *(_json(capsys, *SMALL, "--seeds", 1, "--seed", seed) for seed in range(8, 12))]
    for i, mean in enumerate(means):
        assert mean == pytest.approx(sum(run["results"][i]["metrics"]["e2e_s.mean"] for run in runs) / 5)


def test_the_table_has_intervals_and_no_false_star(capsys: pytest.CaptureFixture[str]) -> None:
    text = _told(capsys, *SMALL)
    assert "±" in text and "Means over 5 seeds, ± half of the 95% interval." in text
    assert "= indistinguishable from the best of its column" in text
    assert "±" not in _told(capsys, *SMALL, "--seeds", 1)


def test_long_runs_are_not_repeated(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "FEW_REQUESTS", 10)
    assert "seeds" not in _json(capsys, *SMALL)
    assert _json(capsys, *SMALL, "--seeds", 2)["seeds"] == [0, 1]


def test_processes_give_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    few = [*SMALL[:-1], "round-robin,random", "--seeds", 3]
    assert _json(capsys, *few) == _json(capsys, *few, "--jobs", 2)


def test_a_trace_has_no_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{0.05 * i},300,{20 + i % 7}\n" for i in range(60))
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    fleet = ["--trace", trace, "--model", "llama-3.1-8b", "--gpu", "h100", "--replicas", 2, "--no-progress"]
    text = _told(capsys, *fleet, "--routing", "round-robin,least-loaded")
    assert "5 seeds give the same numbers" in text and "±" not in text
    _told(capsys, *fleet, "--routing", "round-robin,least-loaded", "--html", tmp_path / "fixed.html")
    assert "95% interval" not in (tmp_path / "fixed.html").read_text(), "there are none where nothing is random"
    drawn = _json(capsys, *fleet, "--routing", "round-robin,random")["results"]
    fixed, random = (each["intervals"]["ttft_s.mean"] for each in drawn)
    assert fixed["low"] == fixed["high"] and random["low"] < random["high"]


def test_the_page_has_the_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _told(capsys, *SMALL, "--html", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Means over 5 seeds" in page and 'class="same"' in page
