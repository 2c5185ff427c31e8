"""Charts' series, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headway.core.record import Outcome
from headway.metrics.series import CDF_POINTS, bin_middles_s, cdf, fleet_load, itl_gaps, replica_timelines
from headway.metrics.summary import summarize
from oracle_records import Run


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_fleet_load_counts_waiting_and_running_requests(seed: int) -> None:
    run = Run(seed=seed, num_requests=30, trouble=0.03)
    found = fleet_load(run.records, bins=20)
    table, segments = run.records.requests, run.records.segments
    arrival_s = run.records.workload["arrival_s"][table["request"]]
    edges_s = found.edges_s

    def mean(i: int, from_s: np.ndarray, to_s: np.ndarray) -> float:
        inside_s = np.minimum(to_s, edges_s[i + 1]) - np.maximum(from_s, edges_s[i])
        return float(np.maximum(inside_s, 0).sum() / (edges_s[i + 1] - edges_s[i]))

    for i in range(20):
        running = mean(i, segments["admitted_s"], segments["end_s"])
        assert found.running[i] == pytest.approx(running, abs=1e-9)
        assert found.waiting[i] == pytest.approx(mean(i, arrival_s, table["end_s"]) - running, abs=1e-9)
    for i, now in enumerate(edges_s):
        assert found.arrived[i] == (arrival_s <= now).sum()
        done = (table["end_s"] <= now) & (table["outcome"] == Outcome.FINISHED)
        assert found.completed[i] == done.sum()


@pytest.mark.ci
@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200))
def test_timeline_means_agree_with_the_summary(seed: int, bins: int) -> None:
    run = Run(seed=seed, trouble=0.03)
    found, summary = replica_timelines(run.records, bins=bins), summarize(run.records)
    assert found.kv_use.shape == (3, bins) and bin_middles_s(found.edges_s).shape == (bins,)
    assert (found.kv_use >= -1e-12).all()
    for i in range(3):
        own = summary.replicas[str(i)]
        assert own.kv_use is not None and own.batch_size is not None and own.busy_share is not None
        assert found.kv_use[i].mean() == pytest.approx(own.kv_use.mean)
        assert found.batch_size[i].mean() == pytest.approx(own.batch_size.mean * own.busy_share)


def test_timeline_is_blank_where_a_replica_was_down() -> None:
    records = Run(seed=1).records
    end_s = records.end_s
    crashed = structs.replace(records.replicas[1], down=((0.25 * end_s, 0.5 * end_s),))
    late = structs.replace(records.replicas[2], up=((0.5 * end_s, end_s),))
    records.replicas = (records.replicas[0], crashed, late)
    blank = np.isnan(replica_timelines(records, bins=8).kv_use)
    assert not blank[0].any()
    assert blank[1].tolist() == [False, False, True, True, False, False, False, False]
    assert blank[2].tolist() == [True] * 4 + [False] * 4


def test_cdf_of_values_and_of_gaps_agree() -> None:
    run = Run(seed=2, num_requests=200)
    gaps = itl_gaps(run.records)
    written, runs = cdf(np.array(run.gaps())), cdf(gaps)
    assert written is not None and runs is not None
    assert len(runs.value_s) <= CDF_POINTS and (np.diff(runs.value_s) >= 0).all()
    middle = (runs.percent > 1) & (runs.percent < 99)
    assert runs.value_s[middle] == pytest.approx(written.value_s[middle], rel=0.02)
    assert cdf(np.array([np.nan])) is None and cdf(itl_gaps(run.records, 1e9)) is None


def test_itl_gaps_leave_the_warm_up_out() -> None:
    run = Run(seed=2)
    late = [job.id for job in run.jobs if job.arrival_s >= 2.0]
    assert itl_gaps(run.records, 2.0).total == len(run.gaps(late)) > 0
