"""A fleet plan in words and as a page: what it says, and that the decision is drawn in a browser, light and dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import structs
from tests.support.browser import opened

from headway.metrics.seeds import Estimate
from headway.planning.combos.problem import GpuCombo, Group
from headway.planning.fleet.answer import GROUPS, SYMBOLS, decision, nines, report
from headway.planning.fleet.problem import (
    FleetPart,
    FleetPlan,
    FleetPoint,
    FleetRun,
    PointKind,
    SizedOption,
    SplitVerdict,
    TierVerdict,
)
from headway.planning.fleet.text import said, sentences, share, short
from headway.report.page import library_name, write_page
from headway.report.render import page
from headway.report.render import text as text_of

H100, L40S = "h100-80gb-sxm", "l40s"
TOGETHER = GpuCombo("qwen3-8b", 3.0, aggregated=Group(H100))
APART = GpuCombo("chat-70b", 9.0, prefill=Group(H100), decode=Group(L40S, 2, 2))


def point(kind: PointKind, label: str, count: int, *attained: float) -> FleetPoint:
    parts = (FleetPart("qwen3-8b", TOGETHER, count), FleetPart("chat-70b", APART, 1, False, ("kernels of a100-80gb",)))
    runs = tuple(FleetRun(each, {"qwen3-8b": each, "chat-70b": 1.0}, 0.4, 0.03, None, 900, False) for each in attained)
    mean = sum(attained) / len(attained)
    interval = Estimate(mean, max(0.0, mean - 0.01), min(1.0, mean + 0.01))
    usd = sum(part.usd_per_hour for part in parts)
    return FleetPoint(kind, label, {"routing": "least-kv"}, parts, usd, runs, mean, interval, attained[0] >= 0.99)


def made(**changes: object) -> FleetPlan:
    best = point("plan", "the plan", 2, 0.9971, 0.9953)
    plan = FleetPlan(
        status="met",
        sentences=(),
        target=0.99,
        slo={"ttft_s": 2.0, "tpot_s": 0.05},
        models={"qwen3-8b": 600, "chat-70b": 300},
        limits={H100: 4, L40S: None},
        policies=best.policies,
        parts=best.parts,
        gpus={H100: 3, L40S: 4},
        usd_per_hour=best.usd_per_hour,
        points=(best, point("one less", "one less for qwen3-8b", 1, 0.71, 0.69), point("one more", "one more", 3, 1.0)),
        options=(
            SizedOption("qwen3-8b", TOGETHER, 2, 0.9971),
            SizedOption("chat-70b", APART, 1, 1.0, "", ("kernels of a100",)),
            SizedOption("chat-70b", GpuCombo("chat-70b", 3.0, aggregated=Group(H100)), None, None, "does not fit"),
        ),
        split=SplitVerdict("worth it", 15.0, 21.0),
        tiers=TierVerdict("one class"),
        seeds=(0, 1),
        notes=("step times of chat-70b on l40s are not calibrated (kernels of a100-80gb): trust the order",),
    )
    plan = structs.replace(plan, **changes)
    return structs.replace(plan, sentences=sentences(plan) if plan.points else short(plan))


def test_the_answer_is_three_sentences() -> None:
    fleet, split, tiers = made().sentences
    assert fleet == (
        "Serve qwen3-8b on 2 h100-80gb-sxm; chat-70b on 1 x (1 h100-80gb-sxm prefill, 4 l40s (tp 2) decode), with the"
        " router least-kv: 7 GPUs for $15.00 an hour keep at least 99.7% of each model's requests within TTFT 2 s,"
        " TPOT 50 ms (98.6% to 100% over 2 seeds)."
    )
    assert split == "Separate prefill and decode replicas are worth it: without them the fleet costs $21.00 an hour."
    assert tiers == "Tiers of service are not needed: all requests are of one class."


def test_one_gpu_keeps_requests_in_time() -> None:
    best = structs.replace(made().points[0], parts=made().parts[:1])
    assert "1 GPU for $15.00 an hour keeps " in made(points=(best,), gpus={H100: 1}).sentences[0]


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (SplitVerdict("worth it", 15.0, None), "without them the GPUs at hand are not enough"),
        (SplitVerdict("not worth it", 30.0, 15.0), "not worth it: the cheapest fleet that has them costs $30.00"),
        (SplitVerdict("not worth it", 15.0, 15.0), "the cheapest fleet that has them costs as much, $15.00 an hour."),
        (SplitVerdict("impossible", None, 15.0), "no such fleet of these GPUs"),
        (SplitVerdict("not tried"), "were not considered"),
    ],
)
def test_each_verdict_on_disaggregation_is_a_sentence(verdict: SplitVerdict, expected: str) -> None:
    assert expected in made(split=verdict).sentences[1]


def test_each_verdict_on_tiers_is_a_sentence() -> None:
    gain = Estimate(0.02, 0.01, 0.03)
    assert made(tiers=TierVerdict("worth it", 3, 3, gain)).sentences[2] == (
        "Serve the 3 tiers of the requests differently: that changes the share of requests in time by +1.0 to"
        " +3.0 points (95%)."
    )
    assert made(tiers=TierVerdict("not worth it", 3, 3, gain)).sentences[2].startswith("Do not serve the 3 tiers")


def test_shares_are_rounded_down() -> None:
    assert [share(each) for each in (1.0, 0.99999, 0.9996, 0.99, 0.9899, 0.5)] == [
        "100%",
        "99.99%",
        "99.96%",
        "99%",
        "98.9%",
        "50%",
    ]


def test_the_text_marks_what_is_not_calibrated() -> None:
    text = text_of(said(made()), 220)
    assert "not calibrated: kernels of a100" in text and "does not fit" in text
    assert " prefill, " in text and " decode " in text, "a unit says what each of its groups does"
    assert text.rstrip().splitlines()[-3:] == list(made().sentences) or "Serve qwen3-8b" in text


@pytest.mark.parametrize("note", ["step times are for vllm-0.25 as version 0.25.1", "The plan has little to spare."])
def test_a_note_is_one_sentence(note: str) -> None:
    wanted = f"{note[0].upper()}{note[1:].rstrip('.')}."
    plan = made(notes=(note,))
    assert wanted in text_of(said(plan), 220).splitlines() and f">{wanted}<" in page(report(plan, "day"), "")


def test_the_decision_is_the_first_picture() -> None:
    text = page(report(made(), "day", Path("/plans/fleet.yaml")), "headway plan fleet day.csv")
    assert re.search(r"<h2>([^<]+)</h2>", text)[1] == "The decision"  # type: ignore[index]
    assert 'id="decision"' in text and text.index("Serve qwen3-8b") < text.index('id="decision"')
    assert "headway simulate /plans/fleet.yaml" in text and "below 99%" in text
    assert 'class="note">Step times of chat-70b on l40s are not calibrated' in text


def test_the_choice_is_marked_and_intervals_are_drawn() -> None:
    figure = decision(made())
    star = figure["data"][-1]
    assert star["name"] == "the plan" and star["marker"]["symbol"] == ["star"] and star["marker"]["size"] > 15
    assert star["error_y"]["array"][0] > 0 and star["error_y"]["arrayminus"][0] > 0
    missed = next(each for each in figure["data"] if each["name"] == "one unit less")
    assert missed["marker"]["symbol"] == ["triangle-down-open"]
    assert len(SYMBOLS) == len(GROUPS)
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < nines(0.69) < nines(0.99) < nines(1.0) < high
    assert figure["layout"]["shapes"][0]["y0"] == nines(0.99)


def test_a_fleet_that_is_too_small_has_a_page_without_charts() -> None:
    plan = made(status="short", points=(), parts=(), usd_per_hour=None, why="chat-70b: no GPUs", notes=())
    text = page(report(plan, "day"), "headway plan fleet day.csv")
    assert "The GPUs at hand are not enough" in text and 'class="chart"' not in text


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn_in_a_browser(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.html"
    write_page(path, page(report(made(), "day"), "headway plan fleet day.csv"))
    assert path.with_name(library_name()).exists()
    with opened(path.as_uri(), tmp_path) as shown:
        shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        shown.value("new Promise(done => setTimeout(done, 300))")
        assert shown.value("document.querySelectorAll('#decision .point').length") == 3
        assert shown.value("document.querySelectorAll('#decision .yerror').length") == 3
        paper = shown.value("getComputedStyle(document.body).backgroundColor")
        drawn = shown.value("document.querySelector('#decision .main-svg').style.background")
        expected = "rgb(20, 24, 29)" if scheme == "dark" else "rgb(255, 255, 255)"
        assert paper == expected and drawn.startswith(expected)
        assert shown.value("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
        high = shown.value("decision.offsetHeight")
        shown.call("Emulation.setDeviceMetricsOverride", width=375, height=900, deviceScaleFactor=1, mobile=True)
        shown.value("new Promise(done => setTimeout(done, 300))")
        other = {"light": "dark", "dark": "light"}[scheme]
        shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": other}])
        shown.value("new Promise(done => setTimeout(done, 300))")
        assert shown.value("decision.offsetHeight") == high > 0, "a narrow chart in other colours keeps its place"
