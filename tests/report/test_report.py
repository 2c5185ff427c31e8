"""Tables, pages and traces of made-up runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields
from plotly.offline import get_plotlyjs

import headway
import headway_papers
from browser import chromium
from headway.catalog.errors import Band, ErrorClass
from headway.core.errors import HeadwayError
from headway.core.record import FALLBACK, REFUSED
from headway.metrics.latency import DefaultSlo
from headway.metrics.seeds import SeededMetrics
from headway.metrics.summary import PARTS, flatten, summarize
from headway.report import charts, describe, dots, html, table, trace
from headway.report.page import library_name
from headway.report.run import Provenance, Run, named_by_policies
from oracle_records import Run as Made

PROVENANCE = Provenance("seed: 7\n# </script><b>&\n", 7, "0.1.0", "headway compare scenario.yaml")
ROUTERS = ("round-robin", "least-loaded", "jsq-tokens", "power-of-two")


def make(index: int, *, calibrated: bool = True, notes: tuple[str, ...] = (), **more: object) -> Run:
    made = Made(seed=index, num_requests=80, trouble=0.01 * index, **more)  # type: ignore[arg-type]
    policies = {"routing": ROUTERS[index], "ordering": "fcfs"}
    summary = summarize(made.records, slo=DefaultSlo(ttft_s=0.05))
    return Run(" + ".join(policies.values()), policies, made.records, summary, 0.1, 0.2, calibrated, notes)


@cache
def made() -> Run:
    return make(1)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [make(i) for i in range(3)]


def with_bands(run: Run) -> Run:
    basis, flat = ErrorClass("GPU", "16 bit", "low"), flatten(run.summary)
    keys = ("ttft_s.p99", "e2e_s.mean")
    return replace(run, bands={key: Band(flat[key] / 2, flat[key] * 2, 0.9, basis, 12, 4, 12) for key in keys})


# The table.


def test_bands_are_below_the_table_and_drawn() -> None:
    run = with_bands(make(0))
    band = run.bands["ttft_s.p99"]
    (note,) = table.error_notes([run])
    assert f"TTFT p99 {table.seconds(band.low)} to {table.seconds(band.high)}, E2E mean" in note
    kind = "measured runs with step times of the same GPU and another engine version"
    assert (
        note.endswith(f". The errors are those of {kind}, of models with 16 bit weights at low load.")
        and "TPOT" not in note
    )
    (of_both,) = table.error_notes([run, with_bands(make(1))])
    assert "likely: TTFT p99 within 100%, E2E mean within 100%. The errors are those of measured runs" in of_both
    assert table.error_notes([make(0)]) == [] and charts.model_error([make(0)]) == {}
    (points,) = charts.model_error([run])["model-error"]["data"]
    middle = flatten(run.summary)["ttft_s.p99"]
    assert points["y"] == ["TTFT p99", "E2E mean"] and points["x"][0] == pytest.approx(middle, rel=1e-4)
    assert points["error_x"]["array"][0] == pytest.approx(middle, rel=1e-4)
    assert points["error_x"]["arrayminus"][0] == pytest.approx(middle / 2, rel=1e-4)
    shown = html.page([run], PROVENANCE)
    assert "How sure these latencies are" in shown and note in unescape(shown)
    assert "How sure" not in html.page([make(0)], PROVENANCE)


def test_the_note_names_the_pools_and_what_is_missing() -> None:
    run = make(0, calibrated=False)
    several = [replace(run, uncalibrated=("a (l4: generic kernels)", "b (h100: generic overhead of tgi)"))]
    text = " ".join(table.render(several, width=220).split())
    expected = "Step times are not calibrated for a (l4: generic kernels), b (h100: generic overhead of tgi): trust"
    assert expected in text and expected in html.page(several, PROVENANCE)
    assert "not calibrated" not in table.render([make(0)], width=220)


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(
    labels=st.lists(
        st.dictionaries(
            st.sampled_from(["routing", "ordering", "migration", "scaling", "ordering_at"]),
            st.sampled_from(
                [
                    "fcfs",
                    f"headway({', '.join(f'argument_{i}={i}' for i in range(14))})",
                    f"headway({', '.join(f'argument_{i}={i}' for i in range(15))})",
                    "x" * 300,
                ]
            ),
            min_size=1,
        ),
        min_size=1,
        max_size=3,
    ),
    width=st.sampled_from([80, 100, 140, 200]),
)
def test_a_table_fits_and_has_metrics_whatever_its_labels(labels: list[dict[str, str]], width: int) -> None:
    """Labels are cut before the metrics are; unlike ones stay unlike, and notes have them whole."""
    text = table.render([replace(made(), policies=policies) for policies in labels], width=width)
    assert max(map(len, text.splitlines())) <= width
    value = table.seconds(flatten(made().summary)["ttft_s.p99"])  # type: ignore[arg-type]
    assert "TTFT p99" in text and text.count(value) >= len(labels)
    if width >= 140 and max(map(len, labels)) == 1:
        assert "E2E mean" in text and "SLO met" in text


def test_labels_that_are_cut_stay_unlike() -> None:
    long = ["headway(a=1, b=2, c=3)", "headway(a=1, b=2, c=4)", "fcfs", "headway(a=1, b=2, c=3)"]
    cut = table.cut_labels(long, 16)
    assert cut == ["headway(a=1, …#1", "headway(a=1, …#2", "fcfs", "headway(a=1, …#1"]
    text = " ".join(table.render([replace(made(), policies={"routing": each}) for each in long], width=80).split())
    assert "headway(a=1, …#2: headway(a=1, b=2, c=4)" in text


@pytest.mark.parametrize(("by", "groups"), [("tenant", ("quiet", "flood", "third")), ("tier", ("0", "1", "2"))])
def test_a_second_table_has_a_row_for_each_tier_or_tenant_of_each_run(
    runs: list[Run], by: str, groups: tuple[str, str, str]
) -> None:
    """Where runs have the same ones, and few of them; a narrow console drops columns."""
    first, second, third = groups

    def grouped(run: Run, of: dict[str, Any]) -> Run:
        return replace(run, summary=with_fields(run.summary, **{"tenants": {}, "tiers": {}, f"{by}s": of}))

    plain = grouped(runs[0], {}).summary
    assert f" {by} " not in table.render([replace(runs[0], summary=plain)], width=220)
    shared = [grouped(run, {first: runs[1].summary, second: runs[2].summary}) for run in runs[:2]]
    lines = table.render(shared, width=220).split(f" {by} ", 1)[1].splitlines()
    rows = [line.split() for line in lines if " fcfs " in line]
    assert [(row[0], row[2]) for row in rows] == [(name, who) for name in ROUTERS[:2] for who in (first, second)]
    assert table.seconds(flatten(runs[2].summary)["ttft_s.p99"]) in lines[3]  # type: ignore[arg-type]
    narrow = table.render(shared, width=80).split(f" {by} ", 1)[1]
    assert "TTFT p99" in narrow and "tok/s" not in narrow and max(map(len, narrow.splitlines())) <= 80
    rates = ("throughput_rps", "output_tokens_per_s")
    one, other = (with_fields(plain, **dict(zip(rates, values, strict=True))) for values in ((1e12, 1.0), (1.0, 1e12)))
    unlike = [grouped(run, {first: one, second: other}) for run in runs[:2]]
    for width in range(70, 200):  # each column is as wide as its widest cell of any group
        text = table.render(unlike, width=width)
        assert "…" not in text and max(map(len, text.splitlines())) <= width
    others = grouped(runs[1], {first: plain, third: plain})
    assert f" {by} " not in table.render([shared[0], others], width=220)
    many = grouped(runs[0], {f"t{i}": plain for i in range(40)})
    assert "t39" not in table.render([many], width=220)


def test_table_has_a_row_per_run_and_marks_the_best(runs: list[Run]) -> None:
    text = table.render(runs, width=220)
    lines = [line for line in text.split(" tier ")[0].splitlines() if " fcfs " in line]
    assert [line.split()[0] for line in lines] == list(ROUTERS[:3])
    best = min(range(3), key=lambda i: flatten(runs[i].summary)["ttft_s.p99"])  # type: ignore[arg-type,return-value]
    compared = table.compare(runs)
    column = [c.key for c in compared.columns].index("ttft_s.p99")
    assert [row[column].best for row in compared.cells] == [i == best for i in range(3)]
    assert compared.cells[best][column].text + table.BEST in lines[best]
    assert "rejected" in text and "cancelled" in text


@pytest.mark.parametrize("width", [66, 80, 100, 140, 250])
def test_table_fits_its_console(runs: list[Run], width: int) -> None:
    text = table.render(runs, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text and "TTFT p99" in text and "rejected" in text


def test_table_of_a_single_run_marks_nothing_and_notes_missing_calibration() -> None:
    text = table.render([make(0, calibrated=False, notes=("one odd thing",))], width=200)
    assert table.BEST not in text
    assert "not calibrated" in text and "one odd thing" in text


def test_table_shows_unfinished_requests() -> None:
    whole, cut = make(0), make(1, stop_s=2.0)
    assert "unfinished" in table.render([whole, cut], width=80)
    assert "unfinished" not in table.render([whole], width=200)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (0.01234, "12.3 ms"),
        (0.5, "500 ms"),
        (0.9999, "1 s"),
        (2.345, "2.35 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert table.seconds(value) == text


# The definitions.


def test_every_metric_is_defined() -> None:
    records = make(0).records
    sessions = {**records.workload, "session_id": np.arange(len(records.workload["arrival_s"]))}
    ones = np.ones(len(records.requests["request"]), dtype="i1")
    whole = with_fields(records, workload=sessions, requests={**records.requests, FALLBACK: ones, REFUSED: ones})
    flat = flatten(summarize(whole, slo=DefaultSlo(ttft_s=0.05, program_s=1.0)))
    groups = ("tier", "model", "region", "tenant", "fallback", "replica")
    keys = {key for key in flat if key.split(".")[0] not in groups}
    defined = {f"{name}.{last}" for name, part in PARTS.items() for last in part.__struct_fields__}
    assert keys == defined | (set(describe.DEFINITIONS) - set(PARTS))
    assert {key.split(".")[0] for key in flat} - {key.split(".")[0] for key in keys} == {
        front.split(".")[0] for front in describe.BREAKDOWNS
    }
    assert {last for part in PARTS.values() for last in part.__struct_fields__} == set(describe.OVER)


def test_the_page_on_metrics_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == describe.markdown(), "run: python -m headway.report.describe > docs/metrics.md"


# The HTML page.


class Fetches(HTMLParser):
    """Whatever a browser would load, and the ids of the charts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.charts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data") and value]
        if given.get("class") == "chart":
            self.charts.append(given["id"] or "")


def test_page_has_no_external_links(runs: list[Run], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write(runs, PROVENANCE, path)
    text = path.read_text()
    assert len(text) < 1.5e6
    parser = Fetches()
    parser.feed(text)
    assert parser.found == [library_name()]
    assert {"ttft", "itl", "e2e", "waiting", "running", "kv", "replicas", "tier-ttft_s"} <= set(parser.charts)
    own = re.sub(r'(?<=id="page">)[^<]*', "", text)
    assert not re.search(r"https?://|@import|url\(", own)
    for word in (
        "headway compare scenario.yaml",
        "0.1.0",
        "seed: 7",
        "&lt;/script&gt;&lt;b&gt;&amp;",
        *ROUTERS[:3],
    ):
        assert word in own
    assert {p.name for p in tmp_path.iterdir()} == {"report.html", library_name()}


def test_pages_of_a_folder_share_plotly(runs: list[Run], tmp_path: Path) -> None:
    for name in ("one.html", "two.html"):
        html.write(runs[:1], PROVENANCE, tmp_path / name)
        library = tmp_path / library_name()
        assert library.read_text() == get_plotlyjs()
        os.utime(library, (0, 0))
    assert library.stat().st_mtime == 0, "the second page left it as it was"
    assert {p.name for p in tmp_path.iterdir()} == {"one.html", "two.html", library_name()}


def test_page_draws_its_charts_in_a_browser(runs: list[Run], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write(runs, PROVENANCE, path)
    dom = _opened(path)
    parser = Fetches()
    parser.feed(path.read_text())
    drawn = re.findall(r'<div class="chart[^"]*js-plotly-plot[^"]*" id="([^"]+)"', dom)
    assert sorted(drawn) == sorted(parser.charts)
    assert dom.count('class="trace scatter') >= 3 * 7
    assert dom.count('class="points"') > 0 and 'class="hm"' in dom
    assert "No chart" not in dom


def test_a_page_that_was_sent_alone_says_what_is_missing(runs: list[Run], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write(runs, PROVENANCE, path)
    (tmp_path / library_name()).unlink()
    dom = _opened(path)
    parser = Fetches()
    parser.feed(path.read_text())
    note = f'<p class="note">No chart: {library_name()} is missing. It belongs in the folder of this page.</p>'
    assert dom.count(note) == len(parser.charts) > 10
    assert "has the lowest TTFT p99" in dom and '<td class="best">' in dom and 'class="no-charts"' in dom


def _opened(path: Path) -> str:
    """The page's document after its scripts ran in a browser."""
    command = [
        chromium(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        f"--user-data-dir={path.parent / 'profile'}",
        "--window-size=1280,2400",
        "--dump-dom",
        path.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return re.sub(r"<script[ >].*?</script>", "", dom, flags=re.DOTALL)


def test_the_page_opens_with_the_decision(runs: list[Run]) -> None:
    text = html.page(runs, PROVENANCE)
    sentence = text[text.index('class="verdict">') :].split("<")[0]
    assert "has the lowest TTFT p99" in sentence and "with one seed" in sentence
    assert text.index('id="decision"') < text.index("<h2>Summary</h2>") < text.index('id="share"')
    assert 'id="decision"' not in html.page(runs[:1], PROVENANCE), "one run decides nothing"
    assert text.count('class="svg"') == text.count('class="chart"') - 1, "all but the heatmap can be saved"


def test_pools_and_shares(runs: list[Run]) -> None:
    figures = charts.pools(runs)
    for index, bars in enumerate(figures["share"]["data"]):
        assert sum(bars["y"]) == pytest.approx(100, abs=0.5)
        placed = runs[index].records.requests["replica"]
        assert bars["y"][0] == pytest.approx(100 * (placed == 0).sum() / (placed >= 0).sum(), rel=0.01)


def test_the_verdict_lists_what_ties() -> None:
    flat = [
        [{"x": v} for v in values] for values in ([1.0, 2.0, 3.0], [1.1, 1.9, 3.1], [2.0, 1.0, 3.2], [90.0, 91, 92])
    ]
    seeded = SeededMetrics((0, 1, 2), tuple(map(tuple, flat)))
    verdict = dots.verdict(["a", "b", "c", "d"], seeded, "x")
    assert (
        verdict
        == "a has the lowest x, 2 ±2.5; b and c are indistinguishable from it; d has 91 ±2.5 (3 seeds, 95% intervals)."
    )
    figure = dots.figure(["a", "b", "c", "d"], seeded, ["x"])
    assert figure["layout"]["xaxis"]["type"] == "log" and len(figure["data"]) == 4


def test_page_of_runs_without_tokens() -> None:
    made = Made(seed=0, num_requests=1)
    run = Run("nothing", {}, made.records, summarize(made.records), 0.0, 0.0, True)
    assert "No request got a token" in html.page([run], PROVENANCE)
    with pytest.raises(HeadwayError, match="at least one run"):
        html.page([], PROVENANCE)


def test_write_errors_name_the_file(runs: list[Run], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwayError, match="cannot be written"):
        html.write(runs, PROVENANCE, tmp_path / "file" / "report.html")
    with pytest.raises(HeadwayError, match="cannot be written"):
        trace.write(runs[0], PROVENANCE, tmp_path / "file" / "trace.json")


def test_runs_are_named_by_policies_that_differ(runs: list[Run]) -> None:
    alike = [replace(run, name="demo") for run in runs]
    assert [run.name for run in named_by_policies(alike)] == list(ROUTERS[:3])
    assert [run.name for run in named_by_policies(alike[:1])] == ["demo"]
    twins = [alike[0], alike[0]]
    assert [run.name for run in named_by_policies(twins)] == ["demo", "demo"]
    text = html.page(alike, PROVENANCE)
    assert "<h1>demo: 3 runs</h1>" in text and "jsq-tokens</button>" in text


# The trace.


def test_trace_holds_every_stretch_and_request(tmp_path: Path) -> None:
    run = make(3)
    assert trace.write(run, PROVENANCE, tmp_path / "trace.json") is None
    found = json.loads((tmp_path / "trace.json").read_text())
    events = found["traceEvents"]
    assert found["otherData"]["scenario"] == PROVENANCE.scenario_yaml
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(run.records.stretches["replica"])
    assert {e["pid"] for e in slices} == {1, 2, 3}
    opened: dict[int, list[tuple[str, float]]] = {}
    names: set[str] = set()
    for event in events:
        if event["ph"] == "b":
            opened.setdefault(event["id"], []).append((event["name"], event["ts"]))
            names.add(event["name"].split()[0])
        elif event["ph"] == "e":
            name, since = opened[event["id"]].pop()
            assert name == event["name"] and event["ts"] >= since
    assert len(opened) == 80 and not any(opened.values())
    assert names == {"request", "queue", "prefill", "decode"}


def test_long_trace_is_cut_off_with_a_note(tmp_path: Path) -> None:
    run = make(0)
    note = trace.write(run, PROVENANCE, tmp_path / "trace.json", max_events=200)
    found = json.loads((tmp_path / "trace.json").read_text())
    assert note is not None and found["otherData"]["note"] == note and "200" in note
    assert 50 < len(found["traceEvents"]) < 400


def test_pages_fit_narrow_screens_and_are_scrolled_by_the_keyboard(runs: list[Run]) -> None:
    """No column of a grid has a least width that a phone lacks, and what may be wider is in a box that takes the focus:
    in each page that Headway writes."""
    folders = [Path(package.__path__[0]) for package in (headway, headway_papers)]
    sources = {path: path.read_text(encoding="utf-8") for each in folders for path in each.rglob("*.py")}
    assert [path for path, text in sources.items() if re.search(r"minmax\(\d{3,}px", text)] == []
    boxes = [each for text in sources.values() for each in re.findall(r'<div class="scroll"[^>]*>', text)]
    assert boxes == ['<div class="scroll" tabindex="0">'], "all are `scrolled`"
    text = html.page(runs, PROVENANCE)
    assert text.count('class="scroll" tabindex="0"') == text.count('class="scroll"') > 0
