"""Arrivals and lengths against what their names promise."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy import stats

from headway.core.errors import HeadwayError
from headway.workload import lengths
from headway.workload.arrivals import (
    Arrivals,
    Bursts,
    BurstWindow,
    Curve,
    Deterministic,
    Diurnal,
    Gamma,
    Poisson,
    Process,
)
from headway.workload.random_streams import draw, stream
from headway.workload.read import read

NUM = 200_000
PROCESSES: list[Process] = [
    Poisson(8.0),
    Gamma(8.0, 3.0),
    Gamma(8.0, 0.2),
    Deterministic(8.0),
    Diurnal(8.0, weekend=0.5),
    Curve((1.0, 0.0, 20.0), 60.0),
    Bursts(8.0, (BurstWindow(10, 20, 5.0),), repeat_s=100.0),
]


def times(process: Process, num: int | None = NUM, duration_s: float | None = None, seed: int = 1) -> Any:
    return process.times(stream(seed, "arrivals"), num, duration_s)


@pytest.mark.parametrize("process", PROCESSES, ids=repr)
def test_arrivals_rise_from_zero_in_the_number_asked_for(process: Process) -> None:
    arrival_s = times(process, 1000)
    assert len(arrival_s) == 1000 and arrival_s[0] >= 0 and (np.diff(arrival_s) >= 0).all()
    assert (arrival_s == times(process, 1000)).all()
    until = times(process, None, 500.0)
    assert until[-1] < 500 and (np.diff(until) >= 0).all()
    both = times(process, 10**6, 500.0)
    assert len(both) < 10**6 and both[-1] < 500
    if not isinstance(process, Deterministic):
        assert (arrival_s != times(process, 1000, seed=2)).any()


@pytest.mark.parametrize(("process", "cv"), [(Poisson(8.0), 1.0), (Gamma(8.0, 3.0), 3.0), (Gamma(8.0, 0.2), 0.2)])
def test_rate_and_burstiness(process: Process, cv: float) -> None:
    gaps = np.diff(times(process))
    error = 4 * cv / math.sqrt(NUM)  # four standard errors of the mean
    assert 1 / gaps.mean() == pytest.approx(8, rel=error)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_gaps_are_exponential_and_gamma_gaps_gamma() -> None:
    assert stats.kstest(np.diff(times(Poisson(8.0), 20_000)), "expon", (0, 1 / 8)).pvalue > 1e-3
    gamma = stats.gamma(1 / 2.25, scale=2.25 / 8)
    assert stats.kstest(np.diff(times(Gamma(8.0, 1.5), 20_000)), gamma.cdf).pvalue > 1e-3


def test_number_of_arrivals_within_a_duration_matches_the_rate() -> None:
    counts = [len(times(Poisson(5.0), None, 1000.0, seed)) for seed in range(40)]
    assert np.mean(counts) == pytest.approx(5000, abs=4 * math.sqrt(5000 / 40))
    assert np.var(counts) == pytest.approx(5000, rel=0.8)
    assert len(times(Deterministic(8.0), None, 10.0)) == 80
    assert len(times(Deterministic(3.0), None, 1.0)) == 3


def chi_square(arrival_s: Any, expected: Any, step_s: float) -> float:
    """The p-value of counts by step against a Poisson process of these expected counts."""
    counts = np.bincount((arrival_s // step_s).astype(int), minlength=len(expected))[: len(expected)]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected)))


def test_a_diurnal_week_follows_its_curve() -> None:
    diurnal = Diurnal(rate=1.0, peak_to_trough=4.0, peak_hour=14, weekend=0.4)
    hours = np.arange(7 * 24) * 3600.0
    expected = np.array([diurnal.rate_at(h + np.arange(0, 3600, 10)).sum() * 10 for h in hours])
    assert chi_square(times(diurnal, None, 7 * 86_400.0), expected, 3600) > 1e-3
    assert expected[:24].argmax() in (13, 14) and expected[:24].argmin() in (1, 2)
    assert expected[:24].sum() == pytest.approx(86_400, rel=1e-3)
    assert expected[5 * 24 :].sum() == pytest.approx(0.4 * expected[: 2 * 24].sum(), rel=1e-9)
    night = diurnal.rate_at(np.array([2 * 3600.0, 14 * 3600.0]))
    assert night[1] / night[0] == pytest.approx(4)
    shifted = Diurnal(rate=1.0, start_hour=24 * 5, weekend=0.0)
    assert times(shifted, 10)[0] > 2 * 86_400 - 1


def test_curves_and_bursts_follow_their_steps() -> None:
    curve = Curve((5.0, 0.0, 20.0), 60.0)
    counts = np.bincount((times(curve, None, 18_000.0) // 60 % 3).astype(int), minlength=3)
    assert counts[1] == 0 and counts[0] == pytest.approx(30_000, abs=700)
    assert counts[2] == pytest.approx(120_000, abs=1400)
    bursts = Bursts(2.0, (BurstWindow(10, 20, 5.0), BurstWindow(15, 30, 2.0)), repeat_s=100.0)
    expected = np.full(20, 2.0 * 5 * 500)
    expected[[2, 3]] *= [5, 10]
    expected[[4, 5]] *= 2
    assert chi_square(times(bursts, None, 50_000.0) % 100, expected, 5.0) > 1e-3
    once = times(Bursts(2.0, (BurstWindow(10, 20, 0.0),)), None, 1000.0)
    assert not ((once >= 10) & (once < 20)).any()


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"poisson","rate":0}',
        '{"kind":"poisson","rate":-1}',
        '{"kind":"gamma","rate":1,"cv":0}',
        '{"kind":"diurnal","rate":1,"peak_to_trough":0.5}',
        '{"kind":"curve","rates":[],"step_s":1}',
        '{"kind":"curve","rates":[0,0],"step_s":1}',
        '{"kind":"replay","path":"x","rate_scale":0}',
        '{"kind":"bursts","rate":1,"bursts":[{"from_s":2,"to_s":1,"factor":2}]}',
        '{"kind":"bursts","rate":1,"bursts":[{"from_s":0,"to_s":5,"factor":2}],"repeat_s":4}',
        '{"kind":"bursts","rate":1,"bursts":[{"from_s":0,"to_s":5,"factor":0}],"repeat_s":5}',
        '{"kind":"poisson","rate":1,"ratt":2}',
        '{"kind":"poison","rate":1}',
    ],
)
def test_invalid_arrivals_are_errors(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Arrivals)


def sampled(length: lengths.Length, column: lengths.Column = "prompt_tokens", num: int = NUM) -> Any:
    return lengths.sample(length, column, stream(3, column), num)


def test_lognormal_by_mean_and_cv_and_by_percentiles() -> None:
    by_mean = sampled(lengths.Lognormal(mean=1000, cv=1.0))
    assert by_mean.mean() == pytest.approx(1000, rel=0.02)
    assert by_mean.std() / by_mean.mean() == pytest.approx(1, rel=0.03)
    by_median = sampled(lengths.Lognormal(p50=300, p99=4000))
    assert np.percentile(by_median, [50, 99]) == pytest.approx([300, 4000], rel=0.03)
    sigma = math.log(4000 / 300) / 2.3263478740408408
    assert stats.kstest(np.log(by_median[:5000]), "norm", (math.log(300), sigma)).pvalue > 1e-3
    clipped = sampled(lengths.Lognormal(mean=1000, cv=2.0, min=50, max=2000))
    assert clipped.min() == 50 and clipped.max() == 2000
    assert (sampled(lengths.Lognormal(mean=70, cv=0)) == 70).all()


def test_uniform_geometric_fixed_and_quantiles() -> None:
    uniform = sampled(lengths.Uniform(min=3, max=6))
    assert set(uniform.tolist()) == {3, 4, 5, 6} and uniform.mean() == pytest.approx(4.5, abs=0.02)
    geometric = sampled(lengths.Geometric(mean=4))
    assert geometric.min() == 1 and geometric.mean() == pytest.approx(4, rel=0.02)
    assert (sampled(17) == 17).all()
    empirical = sampled(lengths.QuantileTable((0, 0.5, 1), (10, 20, 100)))
    assert np.percentile(empirical, [25, 50, 75]) == pytest.approx([15, 20, 60], abs=1)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"lognormal","mean":10}',
        '{"kind":"lognormal","mean":10,"cv":1,"p50":3}',
        '{"kind":"lognormal"}',
        '{"kind":"lognormal","p50":9,"p99":1e999}',
        '{"kind":"lognormal","mean":-1,"cv":1}',
        '{"kind":"lognormal","p50":9,"p99":3}',
        '{"kind":"uniform","min":0,"max":5}',
        '{"kind":"uniform","min":9,"max":5}',
        '{"kind":"quantiles","quantiles":[0,1],"tokens":[5,1]}',
        '{"kind":"geometric","mean":0.5}',
        '{"kind":"quantiles","quantiles":[0,0.5],"tokens":[1,5]}',
        '{"kind":"quantiles","quantiles":[0,1],"tokens":[1]}',
        "1.5",
        "true",
    ],
)
def test_invalid_lengths_are_errors(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=lengths.Length)


def test_unknown_distribution_lists_valid_names() -> None:
    with pytest.raises(HeadwayError, match=r"unknown length distribution 'azure-con'; did you mean 'azure-conv'\?"):
        sampled("azure-con")
    with pytest.raises(HeadwayError, match="reasoning_tokens"):
        sampled("azure-conv", "reasoning_tokens")


def test_every_fit_names_its_source_and_is_a_distribution() -> None:
    for name, fit in lengths.fitted_lengths().distributions.items():
        assert fit.source
        for column in ("prompt_tokens", "output_tokens", "reasoning_tokens"):
            if getattr(fit, column) is not None:
                assert (sampled(name, column, 1000) >= 1).all()


TRACES = {
    "azure-conv": ("AzureLLMInferenceTrace_conv.csv.gz", ("prompt_tokens", "output_tokens")),
    "mooncake-conversation": ("mooncake_conversation_lengths.csv.gz", ("prompt_tokens", "output_tokens")),
    "servegen-reasoning": ("servegen_reasoning_requests.csv.gz", ("prompt_tokens", "reasoning_tokens")),
}


@pytest.mark.parametrize("name", TRACES)
def test_built_in_lengths_against_the_traces_they_come_from(name: str) -> None:
    data = os.environ.get("HEADWAY_DATA")
    if not data:
        pytest.skip("HEADWAY_DATA is not set: no real traces to compare with")
    file, columns = TRACES[name]
    trace = read(Path(data) / "traces" / file)
    for column in columns:
        real, ours = trace.column(column), sampled(name, column)
        # A table of a hundred quantiles cannot be nearer than about a hundredth.
        assert stats.ks_2samp(real, ours).statistic < 0.02
        assert ours.mean() == pytest.approx(real.mean(), rel=0.02)
        assert np.percentile(ours, [50, 90, 99]) == pytest.approx(np.percentile(real, [50, 90, 99]), rel=0.03)


def test_streams_are_independent_and_reproducible() -> None:
    assert stream(1, "arrivals").random() != stream(1, "tiers").random()
    assert stream(1, "arrivals").random() != stream(2, "arrivals").random()
    # The value on the first machine that drew it: a change here changes everyone's results.
    assert stream(7, "arrivals").random() == 0.5016750168975322
    assert draw([5, 9], [0.0, 2.0], 100, 1, "x").tolist() == [9] * 100
