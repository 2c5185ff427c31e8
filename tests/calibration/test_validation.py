"""Distances between distributions of latencies, by hand and against SciPy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec import json

from headway import catalog
from headway.calibration.replay import SimulatedLatencies, replay
from headway.calibration.runs.experiment import experiment
from headway.calibration.runs.run import MeasuredRun, RequestRows
from headway.calibration.scorecard import page
from headway.calibration.serving import MeasuredRequests
from headway.calibration.validation import _ks_distances, compare, ks_distance
from headway.core.fleet import Pool


@pytest.mark.parametrize("shift", [0.0, 0.3, 2.0])
def test_distances_are_scipys(shift: float) -> None:
    stats = pytest.importorskip("scipy.stats")  # here: a second of imports, in each process that collects tests
    rng = np.random.default_rng(1)
    one, other = rng.normal(0, 1, 400), rng.normal(shift, 1.3, 90).round(1)
    assert ks_distance(one, other) == pytest.approx(stats.ks_2samp(one, other).statistic)


def test_equal_samples_have_no_distance_and_separate_ones_all() -> None:
    one = np.array([1.0, 2.0, 2.0, 3.0])
    assert ks_distance(one, np.repeat(one, 3)) == 0.0
    assert ks_distance(one, one + 5.0) == 1.0


def test_what_was_not_measured_has_no_distance() -> None:
    nothing = np.array([math.nan, math.nan])
    measured = MeasuredRequests(nothing, np.array([5.0, math.nan]), np.array([1.0, 2.0]))
    simulated = SimulatedLatencies(np.array([1.0, 2.0]), np.array([1.0, 1.0]), np.array([6.0, 7.0]))
    assert _ks_distances(measured, simulated) == {"tpot": 1.0, "e2e": 0.0}


def test_a_run_with_requests_has_distances_and_its_own_prediction_none() -> None:
    pool = Pool("one", catalog.model("llama-3.1-8b"), catalog.gpu("h100"), catalog.engine("vllm-0.15"))
    start_s = np.cumsum(np.random.default_rng(2).exponential(0.2, 60))

    def measured(ttft_s: float, token_s: float) -> MeasuredRun:
        rows = RequestRows.of([(at, 300, 50, ttft_s, ttft_s + 49 * token_s, 0.0) for at in start_s])
        keys = {"ttft_mean": ttft_s, "tpot_mean": token_s, "itl_mean": token_s, "e2e_mean": ttft_s + 49 * token_s}
        rest = dict.fromkeys(("ttft_p90", "ttft_p99", "e2e_p90", "e2e_p99"), math.nan)
        return MeasuredRun("run.json", "", 60, 5.0, 300.0, 50.0, {**keys, **rest}, 5.0, rows=rows)

    far = experiment(measured(9.0, 0.5), pool)
    replayed = replay(far, (0,))
    found = compare(far, replayed, True)
    assert found.ks_distance == {"ttft": 1.0, "tpot": 1.0, "e2e": 1.0}
    text = page([found], "headway validate run.json")
    assert "K-S ttft | K-S tpot | K-S e2e |" in text and text.count("| 1.00 | 1.00 | 1.00 |") == 1
    assert b"ks_distance" in json.encode(found)
    own = replayed.overall
    same = MeasuredRequests(own.ttft_ms, own.tpot_ms, own.e2e_ms)
    assert set(_ks_distances(same, own).values()) == {0.0}
