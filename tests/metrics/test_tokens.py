"""Token times recovered from records, against the tokens as they came."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.metrics.gaps import Gaps, gap_runs
from headway.metrics.itl import itl_by_replica, itl_distributions
from headway.metrics.latency import gap_distribution
from headway.metrics.tokens import TokenSegments, clocks, inter_token_gaps, segment_parts, token_times
from oracle_records import Run

runs = st.builds(
    Run,
    seed=st.integers(0, 10**6),
    num_requests=st.integers(1, 50),
    num_replicas=st.integers(1, 4),
    trouble=st.sampled_from([0.0, 0.01, 0.1]),
    stop_s=st.sampled_from([2.0, 1e9]),
)


@settings(max_examples=25, deadline=None)
@given(runs)
def test_token_times_are_those_of_the_run(run: Run) -> None:
    ids = list(range(len(run.jobs)))
    found = token_times(run.records, ids)
    assert list(found) == ids
    for i in ids:
        assert found[i].tolist() == run.tokens[i]


@settings(max_examples=25, deadline=None)
@given(runs)
def test_gaps_are_those_between_tokens(run: Run) -> None:
    expected = np.sort(run.gaps())
    gaps = inter_token_gaps(run.records, np.zeros(len(run.jobs), dtype=int)).get(0, Gaps([]))
    assert gaps.total == len(expected)
    if len(expected):
        fractions = np.linspace(0, 1, 33)
        assert gaps.quantiles_s(fractions) == pytest.approx(np.quantile(expected, fractions), abs=1e-12)
        assert gaps.histogram.mean_s == pytest.approx(expected.mean(), rel=1e-12)


@settings(max_examples=12, deadline=None)
@given(runs)
def test_gaps_by_group_are_those_of_its_requests(run: Run) -> None:
    tier = run.records.workload["tier"].astype(int)
    code = np.where(tier == 2, -1, tier)
    found = inter_token_gaps(run.records, code)
    assert 2 not in found and -1 not in found
    for one in (0, 1):
        expected = run.gaps(np.flatnonzero(tier == one).tolist())
        gaps = found.get(one, Gaps([]))
        assert gaps.total == len(expected)
        if expected:
            assert gaps.quantiles_s([0.5, 0.99, 1]) == pytest.approx(np.quantile(expected, [0.5, 0.99, 1]))


def test_gaps_by_replica_add_up_without_resumptions() -> None:
    def total(run: Run) -> int:
        everyone = np.ones(len(run.jobs), dtype=bool)
        return sum(each.count for each in itl_by_replica(run.records, everyone).values() if each)

    run, troubled = Run(seed=3, trouble=0.0), Run(seed=3, trouble=0.1)
    assert total(run) == len(run.gaps())
    assert 0 < total(troubled) < len(troubled.gaps())


@settings(max_examples=25, deadline=None)
@given(runs)
def test_gaps_by_replica_are_those_of_each_replica(run: Run) -> None:
    """To the bit, though many replicas are read at once."""
    wanted = run.records.workload["tier"].astype(int) != 2
    segments = TokenSegments(run.records.segments, wanted)
    assert itl_by_replica(run.records, wanted) == {
        replica: gap_distribution(Gaps(runs for runs, _ in segment_parts(clock, segments, rows)))
        for replica, clock in clocks(run.records.stretches)
        if (rows := segments.by_replica.get(replica)) is not None
    }


@settings(max_examples=12, deadline=None)
@given(runs)
def test_two_passes_match_one_pass(run: Run) -> None:
    """Of several groupings at once, what is left out by some included; to the bit, but for sums in another order."""
    tier = run.records.workload["tier"].astype(int)
    groupings = [np.where(tier == 2, -1, tier), np.zeros_like(tier), np.arange(len(tier)) % 3]
    found = itl_distributions(run.records, tier >= 0, groupings)
    for which, group in enumerate(groupings):
        expected = {one: gap_distribution(gaps) for one, gaps in inter_token_gaps(run.records, group).items()}
        got = {one: each for (grouping, one), each in found.items() if grouping == which}
        assert got.keys() == {one for one, each in expected.items() if each}
        for one, each in got.items():
            wanted = expected[one]
            assert wanted is not None and each.mean == pytest.approx(wanted.mean, rel=1e-12)
            assert (each.count, each.p50, each.p95, each.p99, each.max) == (
                wanted.count,
                wanted.p50,
                wanted.p95,
                wanted.p99,
                wanted.max,
            )


def test_long_runs_are_counted_in_pieces_without_a_trace() -> None:
    """Runs that reach over many bins: percentiles as of the sample written out."""
    rng = np.random.default_rng(1)
    first, step = rng.uniform(0.01, 0.02, 300), rng.choice([0.0, 1e-6, 1e-4], 300)
    count, weight = rng.integers(1, 300, 300), rng.integers(1, 20, 300)
    gaps = Gaps([gap_runs(first, step, count, weight)])
    columns = zip(first, step, count, weight, strict=True)
    written = np.concatenate([np.repeat(f + s * np.arange(c), w) for f, s, c, w in columns])
    fractions = np.linspace(0, 1, 101)
    assert gaps.total == len(written)
    assert gaps.quantiles_s(fractions) == pytest.approx(np.quantile(written, fractions), rel=1e-12)


def test_order_of_rows_does_not_matter() -> None:
    run = Run(seed=5, trouble=0.05)
    expected = inter_token_gaps(run.records, np.zeros(60, dtype=int))[0].quantiles_s(np.linspace(0, 1, 9))
    for table in (run.records.stretches, run.records.segments):
        order = np.random.default_rng(1).permutation(len(table["replica"]))
        for name in table:
            table[name] = table[name][order]
    found = inter_token_gaps(run.records, np.zeros(60, dtype=int))[0].quantiles_s(np.linspace(0, 1, 9))
    assert found == pytest.approx(expected, abs=1e-12)
    assert token_times(run.records, [7])[7].tolist() == run.tokens[7]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.001, 1), st.floats(-1e-5, 0.01), st.integers(0, 80), st.integers(0, 5)),
        max_size=20,
    ),
    st.lists(st.floats(0, 1), min_size=1, max_size=9),
)
def test_quantiles_of_runs_match_the_expanded_sample(
    rows: list[tuple[float, float, int, int]], fractions: list[float]
) -> None:
    written = [f + s * k for f, s, n, w in rows for k in range(n) for _ in range(w)]
    first, step, count, weight = (np.array(c) for c in zip(*rows, strict=True)) if rows else [np.empty(0)] * 4
    gaps = Gaps([gap_runs(first, step, count, weight)])
    assert gaps.total == len(written)
    if written:
        assert gaps.quantiles_s(fractions) == pytest.approx(np.quantile(written, fractions), abs=1e-12)
        assert gaps.histogram.mean_s == pytest.approx(np.mean(written))
    else:
        assert np.isnan(gaps.histogram.mean_s) and np.isnan(gaps.quantiles_s(fractions)).all()


def test_short_parts_are_put_together_without_a_trace() -> None:
    """Many short parts say what they say in one, to the bit, in any order."""
    rng = np.random.default_rng(0)
    parts = [
        gap_runs(rng.uniform(0.001, 0.1, n), rng.choice([0.0, 1e-5], n), rng.integers(1, 90, n), rng.integers(1, 9, n))
        for n in rng.integers(0, 400, 90)
    ]
    whole = tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))
    fractions = [0.0, 0.1, 0.5, 0.9, 0.99, 1.0]
    many, one = Gaps(parts), Gaps([whole])
    assert len(many.parts) < 5 and many.total == one.total
    assert (many.quantiles_s(fractions) == one.quantiles_s(fractions)).all()
    written = np.concatenate([np.repeat(f + s * np.arange(c), w) for f, s, c, w in zip(*whole, strict=True)])
    assert many.quantiles_s(fractions) == pytest.approx(np.quantile(written, fractions), rel=1e-12)
