"""Demand to requests: rates, shares, seeds, SageServe's workload as its paper tells it, files of series, mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from msgspec import ValidationError, convert

from headway import catalog
from headway.core.errors import HeadwayError
from headway.workload.arrivals import DAY_S, WEEK_S, BurstWindow
from headway.workload.generate import generate
from headway.workload.lengths import Uniform
from headway.workload.series import read_series
from headway.workload.spec import DemandSpec, ModelLengths, Population, SeriesDemand, WorkloadSpec, resolved
from headway.workload.table import Floats, Workload

LENGTHS = {"a": ModelLengths(100, 10), "b": ModelLengths(Uniform(100, 300), 20)}
JULY, NOVEMBER = "sageserve-july-2025", "sageserve-nov-2024"


def made(**spec: object) -> Workload:
    return generate(convert(spec, WorkloadSpec), 3)


def counts(rows: Workload, **where: object) -> int:
    kept = np.ones(len(rows), bool)
    for name, value in where.items():
        names = {"model": rows.models, "region": rows.regions}.get(name)
        kept &= rows.columns[name] == (names.index(str(value)) if names else value)
    return int(kept.sum())


@pytest.fixture(scope="module")
def july() -> Workload:
    return made(builtin=JULY, scale=0.05)


def test_as_many_as_the_paper_simulates(july: Workload) -> None:
    assert abs(len(july) / 500_000 - 1) < 0.05  # 10 million at scale 1
    assert july.arrival_s[-1] <= WEEK_S
    assert july.models == ("llama-2-70b", "bloom-176b", "llama-3.1-8b", "llama-3.2-3b")
    assert july.regions == ("us-east", "us-central", "us-west")


def test_shares_of_tiers_as_in_section_3(july: Workload) -> None:
    fast, normal, batch = (counts(july, tier=tier) for tier in (0, 1, 2))
    assert fast > normal > batch
    assert (fast + normal) / len(july) == pytest.approx(0.72, abs=0.02)


def test_models_by_region_as_in_section_3(july: Workload) -> None:
    east, central, west = (counts(july, tier=0, region=region) for region in july.regions)
    assert east > central > west
    a = [counts(july, tier=0, model="llama-2-70b", region=region) for region in july.regions]
    assert a[0] / a[2] == pytest.approx(4, rel=0.1)
    b = {tier: [counts(july, tier=tier, model="bloom-176b", region=r) for r in july.regions] for tier in (0, 1)}
    assert np.argmax(b[0]) == 1 and np.argmax(b[1]) == 2
    assert counts(july, tier=2, region="us-west") < 0.04 * counts(july, tier=2)


def test_interactive_work_has_a_period_and_batch_work_has_none(july: Workload) -> None:
    def hourly(tier: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.histogram(july.arrival_s[july.columns["tier"] == tier], 168, (0, WEEK_S))[0]

    def daily_correlation(tier: int) -> float:
        week = hourly(tier)[:96]
        return float(np.corrcoef(week[24:], week[:-24])[0, 1])

    assert daily_correlation(0) > 0.9 > 0.5 > daily_correlation(2)
    by_day = {tier: hourly(tier).reshape(7, 24).sum(axis=1) for tier in (0, 1, 2)}
    assert by_day[0][5:].max() < 0.4 * by_day[0][:5].min()
    assert by_day[1][2:5].min() > by_day[1][:2].max()  # more from Wednesday to Friday
    assert by_day[2][5:].min() > 0.6 * by_day[2][:5].max()


def test_prompts_above_and_outputs_below_a_thousand_tokens(july: Workload) -> None:
    assert np.mean(july.prompt_tokens > 1000) > 0.5
    assert np.mean(july.output_tokens < 1000) > 0.9
    for code, name in enumerate(july.models):
        some = july.columns["model"] == code
        longest = july.prompt_tokens[some].max() + july.output_tokens[some].max()
        assert longest <= catalog.model(name).max_context_tokens


def test_objectives_by_tier(july: Workload) -> None:
    tier = july.columns["tier"]
    for number, ttft_s in ((0, 1.0), (1, 60.0)):
        assert np.all(july.columns["slo_ttft_s"][tier == number] == ttft_s)
    batch = tier == 2
    assert np.all(np.isnan(july.columns["slo_ttft_s"][batch]))
    assert july.columns["deadline_s"][batch] - july.arrival_s[batch] == pytest.approx(DAY_S)


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")
def test_july_moves_as_the_published_series_do(july: Workload) -> None:
    """Model A's and C's interactive tokens (B and D come and go within the week there), and all batch tokens."""
    path = Path(os.environ["HEADWAY_DATA"]) / "demand" / "o365_prompt_tokens_per_minute.csv.gz"
    published = {each.name: hourly_mean(each.values) for each in read_series(path)}
    tier, code = july.columns["tier"], july.columns["model"]
    for name, model in (("A", "llama-2-70b"), ("C", "llama-3.1-8b")):
        theirs, ours = published[f"{name} prod"], by_hour(july, (tier < 2) & (code == july.models.index(model)))
        assert swing(ours) == pytest.approx(swing(theirs), rel=0.5)
        assert weekend(ours) == pytest.approx(weekend(theirs), abs=0.2)
        assert min(day_after(ours), day_after(theirs)) > 0.8
    theirs = sum((published[f"{name} dev"] for name in "BCD"), published["A dev"])
    assert abs(day_after(theirs)) < 0.3 and abs(day_after(by_hour(july, tier == 2))) < 0.3


def hourly_mean(per_minute: Floats) -> Floats:
    return np.asarray(per_minute[: 168 * 60].reshape(168, 60).mean(axis=1))


def by_hour(rows: Workload, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Floats:
    return np.histogram(rows.arrival_s[mask], 168, (0, WEEK_S), weights=rows.prompt_tokens[mask])[0]


def swing(week: Floats) -> float:
    """Of the mean of Tuesday to Thursday, busiest hour over quietest."""
    day = week.reshape(7, 24)[1:4].mean(axis=0)
    return float(day.max() / day.min())


def weekend(week: Floats) -> float:
    """Mean over mean of the working days."""
    days = week.reshape(7, 24).mean(axis=1)
    return float(days[5:].mean() / days[:5].mean())


def day_after(week: Floats) -> float:
    """Correlation of an hour with the same one a day later, Monday to Friday."""
    return float(np.corrcoef(week[24:120], week[:96])[0, 1])


def test_november_is_three_to_one_and_a_fifth() -> None:
    november = made(builtin=NOVEMBER, scale=0.1)
    assert len(november) * 10 == pytest.approx(10_000_000 / 5, rel=0.05)
    assert counts(november, tier=1) / counts(november, tier=2) == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(("interactive", "batch"), [(9, 1), (1, 1)])
def test_other_mixes_by_shares_of_tiers(interactive: int, batch: int) -> None:
    tiers = [{"tier": 1, "share": interactive, "ttft_s": 60}, {"tier": 2, "share": batch}]
    mixed = made(builtin=NOVEMBER, scale=0.1, tiers=tiers)
    assert counts(mixed, tier=1) / counts(mixed, tier=2) == pytest.approx(interactive / batch, rel=0.05)
    assert len(mixed) == pytest.approx(200_000, rel=0.05)


def test_scout_receives_a_fifth_of_the_requests() -> None:
    rows = made(builtin=JULY + "-scout", scale=0.02)
    assert counts(rows, model="llama-4-scout") / len(rows) == pytest.approx(0.2, abs=0.01)


def test_leaving_out_cells_does_not_change_the_others() -> None:
    spec = {"builtin": JULY, "scale": 0.01, "duration_s": DAY_S}
    whole, part = made(**spec), made(**spec, regions="us-west", models="llama-2-70b")
    mask = (whole.columns["region"] == 2) & (whole.columns["model"] == 0)
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "tier"):
        assert np.array_equal(whole.columns[name][mask], part.columns[name])


def test_a_model_at_twice_its_rate() -> None:
    spec = {"builtin": JULY, "scale": 0.02, "duration_s": DAY_S}
    once, twice = (made(**spec, models={"llama-2-70b": factor}) for factor in (1, 2))
    assert len(twice) == pytest.approx(2 * len(once), rel=0.05)


def test_rates_do_not_depend_on_the_start_hour() -> None:
    monday, tuesday = made(builtin=JULY, scale=0.1), made(builtin=JULY, scale=0.1, start_hour=24, duration_s=DAY_S)
    of_tuesday = (monday.arrival_s >= DAY_S) & (monday.arrival_s < 2 * DAY_S)
    expected = np.histogram(monday.arrival_s[of_tuesday] - DAY_S, 24, (0, DAY_S))[0]
    got = np.histogram(tuesday.arrival_s, 24, (0, DAY_S))[0]
    assert np.abs(got - expected).max() < 6 * np.sqrt(2 * expected.max())


def test_a_surge_of_eight() -> None:
    calm = made(builtin=JULY, scale=0.05, duration_s=7200)
    spec = [{"from_s": 1830, "to_s": 3630, "factor": 8}]
    surged = made(builtin=JULY, scale=0.05, duration_s=7200, surges=spec)

    def within(rows: Workload, low: float, high: float) -> int:
        return int(((rows.arrival_s >= low) & (rows.arrival_s < high)).sum())

    assert within(surged, 1860, 3600) / within(calm, 1860, 3600) == pytest.approx(8, rel=0.1)
    assert within(surged, 0, 1800) == pytest.approx(within(calm, 0, 1800), rel=0.1)


def test_seeds() -> None:
    spec = convert({"builtin": JULY, "scale": 0.01, "duration_s": 7200}, WorkloadSpec)
    one, same, other = generate(spec, 1), generate(spec, 1), generate(spec, 2)
    assert np.array_equal(one.arrival_s, same.arrival_s) and np.array_equal(one.prompt_tokens, same.prompt_tokens)
    assert len(one) != len(other) or not np.array_equal(one.arrival_s, other.arrival_s)


@pytest.mark.parametrize("num", [1, 777, 30_000])
def test_exactly_as_many_as_asked_for(num: int) -> None:
    rows = made(builtin=JULY, num_requests=num)
    assert len(rows) == num and np.all(np.diff(rows.arrival_s) >= 0)


def test_noise_has_its_spread_and_mean() -> None:
    cells = {"here": {"a": 1.0}}
    noisy = Population(0, cells, noise_cv=0.5, noise_s=600)
    demand = DemandSpec(lengths=LENGTHS, populations=(noisy,))
    rows = generate(WorkloadSpec(demand=demand, arrivals=2.0, duration_s=2000 * 600), 5)
    per_step = np.histogram(rows.arrival_s, 2000, (0, 2000 * 600))[0]
    assert per_step.mean() == pytest.approx(1200, rel=0.05)
    assert per_step.std() / per_step.mean() == pytest.approx(0.5, rel=0.15)


SERIES = "minute,kind,t_seconds,tokens\n" + "".join(
    f"x,{kind},{60 * t},{value}\n" for kind, value in (("p", 12_000), ("q", 40_000)) for t in range(120)
)


def test_tokens_per_minute_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "demand.csv").write_text(SERIES)
    series = {"x p": SeriesDemand("a", 0, {"east": 1, "west": 3}), "x q": SeriesDemand("b", 2, "east")}
    demand = DemandSpec(lengths=LENGTHS, path="demand.csv", series=series, per_s=60)
    rows = generate(WorkloadSpec(demand=demand), 0, tmp_path)
    tokens = [float(rows.prompt_tokens[rows.columns["model"] == code].sum()) for code in (0, 1)]
    assert tokens == pytest.approx([12_000 * 120, 40_000 * 120], rel=0.03)
    assert counts(rows, model="a", region="west") / counts(rows, model="a") == pytest.approx(0.75, abs=0.02)
    assert {int(t) for t in rows.columns["tier"]} == {0, 2}
    assert 7000 < rows.arrival_s[-1] < 7200
    later = generate(WorkloadSpec(demand=demand, start_hour=1.5, scale=2), 0, tmp_path)
    assert later.arrival_s[-1] < 1800 and len(later) == pytest.approx(len(rows) / 2, rel=0.05)


def test_requests_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "demand.csv").write_text("time_s,a,b\n" + "".join(f"{10 * t},{t},0\n" for t in range(100)))
    demand = DemandSpec(lengths=LENGTHS, path="demand.csv", series={"a": SeriesDemand("a")}, counts="requests")
    rows = generate(WorkloadSpec(demand=demand), 0, tmp_path)
    assert len(rows) == pytest.approx(10 * sum(range(100)), rel=0.03)
    assert "region" not in rows.columns
    assert len(generate(WorkloadSpec(demand=demand, num_requests=50), 0, tmp_path)) == 50


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"builtin": JULY, "models": "llama-2-7b", "num_requests": 5}, "llama-2-70b"),
        ({"builtin": JULY, "regions": "us-eas", "num_requests": 5}, "us-east"),
        ({"builtin": JULY, "tiers": [{"tier": 5}], "num_requests": 5}, "no population"),
        ({"builtin": JULY, "models": {"llama-2-70b": 0}, "num_requests": 5}, "no demand is left"),
    ],
)
def test_errors_when_demand_is_generated(spec: dict[str, object], expected: str) -> None:
    with pytest.raises(HeadwayError, match=expected):
        made(**spec)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"prompt_tokens": 1, "output_tokens": 1, "arrivals": 1, "num_requests": 1, "scale": 2}, "scale: goes with"),
        ({"demand": {"lengths": {}}}, "populations or path"),
        ({"demand": {"lengths": {}, "path": "x.csv"}}, "series: missing"),
        ({"demand": {"lengths": {}, "path": "x", "series": {"s": {"model": "m"}}}}, "m is missing"),
        ({"trace": "x", "demand": {"lengths": {}, "path": "x", "series": {"s": {"model": "m"}}}}, "m is missing"),
        ({"builtin": JULY, "start_hour": -1}, "start_hour"),
    ],
)
def test_mistakes_in_the_spec(spec: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        convert(spec, WorkloadSpec)


def test_demand_excludes_lengths_and_sessions() -> None:
    known = resolved(WorkloadSpec(builtin=JULY))
    with pytest.raises(ValueError, match="not with demand"):
        WorkloadSpec(demand=known.demand, arrivals=1, duration_s=60, prompt_tokens=3)
    with pytest.raises(ValueError, match="expected requests per second"):
        WorkloadSpec(demand=known.demand, duration_s=60)
    with pytest.raises(ValueError, match="from_s"):
        WorkloadSpec(demand=known.demand, arrivals=1, duration_s=60, surges=(BurstWindow(5, 4, 2),))
