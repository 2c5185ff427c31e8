"""The summary, against the same numbers worked out one request at a time."""

from __future__ import annotations

import math
import pickle
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.record import Outcome, Records
from headway.metrics import itl, tokens
from headway.metrics.columns import Ints, Rows
from headway.metrics.latency import QUANTILES, DefaultSlo, distribution, distributions, sample, slo_masks
from headway.metrics.summary import MetricsByReplica, Summary, flatten, summarize
from headway.metrics.tokens import TokenSegments
from headway.scenario import assemble, run
from oracle_records import Run


def rows(records: Records, warmup_s: float = 0.0) -> list[dict[str, float]]:
    """Each request that counts, as a plain dictionary."""
    table, workload = records.requests, records.workload
    found = []
    for i in range(len(table["request"])):
        row = {name: column[i].item() for name, column in table.items()}
        row |= {name: column[row["request"]].item() for name, column in workload.items()}
        if row["arrival_s"] >= warmup_s:
            found.append(row)
    return found


def held(row: dict[str, float], slo: DefaultSlo) -> dict[str, bool]:
    """By kind of SLO that the request has: whether it met it."""
    limits = {
        "ttft": row["slo_ttft_s"] if row["slo_ttft_s"] == row["slo_ttft_s"] else slo.ttft_s,
        "tpot": slo.tpot_s,
        "e2e": row["slo_e2e_s"] if row["slo_e2e_s"] == row["slo_e2e_s"] else slo.e2e_s,
    }
    tokens = row["generated_tokens"]
    actual = {
        "ttft": row["first_token_s"] - row["arrival_s"],
        "tpot": (row["end_s"] - row["first_token_s"]) / (tokens - 1) if tokens > 1 else 0.0,
        "e2e": row["end_s"] - row["arrival_s"],
    }
    finished = row["outcome"] == Outcome.FINISHED
    return {k: finished and actual[k] <= limit for k, limit in limits.items() if limit is not None}


def test_answers_that_were_not_streamed_count_with_their_durations_alone() -> None:
    """The day of a gateway of which a half was not streamed has the attainment of the other half."""
    run = Run(seed=3, num_requests=40)
    table = run.records.requests
    first_s = table["first_token_s"].copy()
    has_e2e = ~np.isnan(run.records.workload["slo_e2e_s"][table["request"]])
    hidden = (np.arange(len(first_s)) % 2 == 0) & (table["outcome"] == Outcome.FINISHED) & ~has_e2e
    assert 5 < hidden.sum() < len(hidden)
    first_s[hidden] = np.nan
    served = structs.replace(run.records, requests={**table, "first_token_s": first_s})
    rest = structs.replace(run.records, requests={name: column[~hidden] for name, column in table.items()})
    slo = DefaultSlo(ttft_s=0.4, tpot_s=0.03)
    assert summarize(served, slo=slo).slo_attainment == summarize(rest, slo=slo).slo_attainment
    both = summarize(served, slo=DefaultSlo(ttft_s=0.4, e2e_s=1e9))
    assert both.ttft_s is not None and both.ttft_s.count == (~np.isnan(first_s)).sum()


@pytest.mark.ci
@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([3.0, 1e9]),
    st.sampled_from([DefaultSlo(), DefaultSlo(ttft_s=0.4, tpot_s=0.03), DefaultSlo(e2e_s=2.0)]),
)
def test_summary_matches_sums_over_requests(seed: int, warmup_s: float, stop_s: float, slo: DefaultSlo) -> None:
    run = Run(seed=seed, num_requests=40, trouble=0.03, stop_s=stop_s)
    found = summarize(run.records, warmup_s=warmup_s, slo=slo)
    counted = rows(run.records, warmup_s)
    window_s = run.end_s - warmup_s
    done = [r for r in counted if r["outcome"] == Outcome.FINISHED]
    first = [r["first_token_s"] - r["arrival_s"] for r in counted if not math.isnan(r["first_token_s"])]
    assert found.num_requests == len(counted)
    assert found.num_completed == len(done)
    assert found.num_completed + found.num_cancelled + found.num_rejected + found.num_unfinished == len(counted)
    assert found.ttft_s is not None
    assert found.ttft_s.count == len(first)
    assert found.ttft_s.mean == pytest.approx(np.mean(first))
    assert found.ttft_s.p95 == pytest.approx(np.quantile(first, 0.95))
    e2e = [r["end_s"] - r["arrival_s"] for r in done]
    assert (found.e2e_s.p50 if found.e2e_s else None) == (pytest.approx(np.median(e2e)) if e2e else None)
    gaps = run.gaps([int(r["request"]) for r in counted])
    assert found.itl_s is not None and found.itl_s.count == len(gaps)
    assert found.itl_s.p99 == pytest.approx(np.quantile(gaps, 0.99))
    assert found.itl_s.max == pytest.approx(max(gaps))
    outcomes = [held(r, slo) for r in counted]
    having = [o for o in outcomes if o]
    good = sum(all(o.values()) for o in having)
    assert found.slo_attainment == (pytest.approx(good / len(having)) if having else None)
    ttft = [o["ttft"] for o in outcomes if "ttft" in o]
    assert found.slo_ttft_attainment == (pytest.approx(np.mean(ttft)) if ttft else None)
    assert found.goodput_rps == (pytest.approx(good / window_s) if having else None)
    assert found.throughput_rps == pytest.approx(len(done) / window_s)
    tokens = sum(r["generated_tokens"] for r in counted)
    assert found.output_tokens_per_s == pytest.approx(tokens / window_s)
    assert found.preemptions == sum(r["preemptions"] for r in counted)
    assert found.retries == sum(r["attempts"] - 1 for r in counted)
    assert found.gpu_hours == pytest.approx(3 * 2 * window_s / 3600)
    assert found.usd_per_million_output_tokens == pytest.approx(3 * 4 * window_s / 3600 / tokens * 1e6)


@pytest.mark.ci
@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_usage_is_the_sum_over_iterations(seed: int) -> None:
    run = Run(seed=seed, trouble=0.03)
    found = summarize(run.records)
    assert found.kv_use is not None and found.busy_share is not None
    up_s = 3 * run.end_s
    assert found.busy_share == pytest.approx(sum(r.busy_s for r in run.replicas) / up_s)
    assert found.kv_use.mean == pytest.approx(sum(r.kv_token_s for r in run.replicas) / up_s / 4000)
    for replica in run.replicas:
        own = found.replicas[str(replica.id)].kv_use
        assert own is not None
        assert own.mean == pytest.approx(replica.kv_token_s / run.end_s / 4000)
        assert own.mean <= own.peak <= found.kv_use.peak
    assert found.batch_size is not None and found.batch_size.peak <= run.max_batch


def test_breakdowns_partition_the_run() -> None:
    run = Run(seed=8, trouble=0.03)
    found = summarize(run.records)
    assert set(found.tiers) == {"0", "1", "2"}
    assert set(found.regions) == {"east", "west"}
    assert set(found.models) == {"llama-a", "llama-b"}
    assert set(found.replicas) == {"0", "1", "2"}
    for parts in (found.tiers, found.regions, found.models):
        assert sum(part.num_requests for part in parts.values()) == found.num_requests
        assert sum(part.output_tokens for part in parts.values()) == found.output_tokens
        assert found.itl_s is not None
        assert sum(part.itl_s.count for part in parts.values() if part.itl_s) == found.itl_s.count
    assert sum(part.usd for part in found.models.values()) == pytest.approx(found.usd)
    assert sum(part.num_requests for part in found.replicas.values()) == found.num_requests - 1  # one rejected
    slow = [r["first_token_s"] - r["arrival_s"] for r in rows(run.records) if r["tier"] == 2]
    assert found.tiers["2"].ttft_s is not None
    assert found.tiers["2"].ttft_s.p90 == pytest.approx(np.nanquantile(slow, 0.9))


def test_metrics_without_data_are_none() -> None:
    empty = summarize(Run(seed=0, num_requests=1).records)
    assert (empty.num_requests, empty.num_rejected) == (1, 1)
    flat = flatten(empty)
    for key in ("ttft_s.p50", "itl_s.p99", "tpot_s.mean", "throughput_rps", "usd_per_million_output_tokens"):
        assert key in flat and flat[key] is None, key
    run = Run(seed=4, num_requests=20).records
    for name in ("slo_ttft_s", "slo_e2e_s", "reasoning_tokens", "tier", "region"):
        del run.workload[name]
    bare = summarize(run)
    assert bare.slo_attainment is None and bare.goodput_rps is None and bare.answer_s is None
    assert bare.tiers == {} and bare.regions == {}
    late = summarize(run, warmup_s=1e6)
    assert late.num_requests == 0 and late.ttft_s is None and late.kv_use is None


def test_latencies_that_are_longer_by_a_factor_meet_what_is_shorter_by_it() -> None:
    records = Run(seed=3, num_requests=40).records
    workload = {name: column for name, column in records.workload.items() if not name.startswith("slo_")}
    run = structs.replace(records, workload=workload)
    as_told, shorter = (sample(run, 0.0, DefaultSlo(ttft_s=s, tpot_s=0.03, e2e_s=20 * s)) for s in (0.05, 0.025))
    longer = slo_masks(as_told, {"ttft": 2.0, "e2e": 2.0})
    for kind, (has, met) in slo_masks(shorter).items():
        assert (longer[kind][0] == has).all() and (longer[kind][1] == met).all()
    assert 0 < longer["all"][1].sum() < slo_masks(as_told)["all"][1].sum()


def test_unfinished_requests_miss_their_slos() -> None:
    run = Run(seed=6, stop_s=1.0)
    found = summarize(run.records, slo=DefaultSlo(ttft_s=1e9, e2e_s=1e9))
    assert found.num_unfinished > 0 and found.slo_attainment is not None
    assert found.slo_attainment <= found.num_completed / found.num_requests


def test_down_time_is_paid_but_not_up() -> None:
    records = Run(seed=6).records
    whole = summarize(records)
    crashed = structs.replace(records.replicas[0], down=((0.0, records.end_s / 2),))
    records.replicas = (crashed, *records.replicas[1:])
    found = summarize(records)
    assert found.usd == whole.usd
    assert found.busy_share == pytest.approx(whole.busy_share * 3 / 2.5)  # type: ignore[operator]


@pytest.mark.parametrize("warmup_s", [-1.0, float("nan"), float("inf")])
def test_invalid_warm_up_is_an_error(warmup_s: float) -> None:
    with pytest.raises(HeadwayError, match="warm-up"):
        summarize(Run(seed=0, num_requests=2).records, warmup_s=warmup_s)


def test_metrics_of_replicas_are_computed_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, again = summarize(Run(seed=8).records), summarize(Run(seed=8).records)
    flat = flatten(summary)
    by_replica = {key for key in flat if key.startswith("replica.")}
    assert len(by_replica) > 100 and flat == flatten(pickle.loads(pickle.dumps(again)))
    assert summary == again and summary != structs.replace(again, replicas={})
    monkeypatch.setattr(MetricsByReplica, "__getitem__", None)
    assert flatten(summarize(Run(seed=8).records), replicas=False) == {
        key: flat[key] for key in flat if key not in by_replica
    }


def test_flat_keys() -> None:
    summary = summarize(Run(seed=8).records)
    flat = flatten(summary)
    assert summary.ttft_s and flat["ttft_s.p50"] == summary.ttft_s.p50
    assert flat["tier.1.ttft_s.p99"] == summary.tiers["1"].ttft_s.p99  # type: ignore[union-attr]
    assert flat["replica.2.kv_use.mean"] == summary.replicas["2"].kv_use.mean  # type: ignore[union-attr]
    assert all(value is None or isinstance(value, int | float) for value in flat.values())
    assert isinstance(summary, Summary) and not any(math.isnan(v) for v in flat.values() if v is not None)


WAYS = {
    "latency._FEW_VALUES": 0,
    "gaps.FEW_GAPS": 0,
    "gaps._MOST_EXPANDED": 1,
    "gaps.SHORT_ROWS": 1,
    "itl._MOST_KEPT": 0,
    "columns.BLOCK_ROWS": 7,
    "summary._JOINT_ROWS": 1,
    "tokens._JOINT_ROWS": 1,
}
"""Sizes between ways that take less time for few values, and for many; by module."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", WAYS)
def test_each_way_gives_the_same_numbers(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, slo = Run(seed=seed, num_requests=60, num_replicas=4, trouble=0.05), DefaultSlo(ttft_s=0.4, tpot_s=0.03)
    expected = flatten(summarize(run.records, slo=slo))
    module, attribute = name.split(".")
    monkeypatch.setattr(import_module(f"headway.metrics.{module}"), attribute, WAYS[name])
    found = flatten(summarize(run.records, slo=slo))
    assert {key: (found[key], each) for key, each in expected.items() if found[key] != each} == {}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "sizes",
    [{"tokens._WINDOW_ROWS": 3, "tokens._SPAN_ROWS": 2}, {"latency.BLOCK_ROWS": 7, "summary.BLOCK_ROWS": 7}],
)
def test_a_long_run_is_summarised_in_parts(sizes: dict[str, int], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sums are rounded in another order."""
    run, slo = Run(seed=seed, num_requests=60, num_replicas=4, trouble=0.05), DefaultSlo(ttft_s=0.4, tpot_s=0.03)
    expected = flatten(summarize(run.records, slo=slo))
    for name, rows in sizes.items():
        module, attribute = name.split(".")
        monkeypatch.setattr(import_module(f"headway.metrics.{module}"), attribute, rows)
    found = flatten(summarize(run.records, slo=slo))
    assert found == {key: each if each is None else pytest.approx(each, rel=1e-12) for key, each in expected.items()}


def test_a_run_four_times_as_long_is_read_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of a replica's ticks reads the segments near it, not all of the replica's."""
    for attribute, value in (("_WINDOW_ROWS", 64), ("_SPAN_ROWS", 16)):
        monkeypatch.setattr(tokens, attribute, value, raising=False)
    monkeypatch.setattr(itl, "_MOST_KEPT", 0)
    read, ticks = list[int](), TokenSegments._ticks

    def counted(self: TokenSegments, name: str, rows: Rows) -> Ints:
        read[-1] += len(rows)
        return ticks(self, name, rows)

    monkeypatch.setattr(TokenSegments, "_ticks", counted)
    for num_requests in (300, 1200):
        workload = {"num_requests": num_requests, "arrivals": 3.0, "prompt_tokens": 100, "output_tokens": 20}
        read.append(0)
        run(assemble({"workload": workload, "fleet": [{"model": "llama-3.1-8b", "gpu": "h100"}]}, Places(), Path()))
    assert 300 < read[0] < read[1] < 5 * read[0], read


@given(st.lists(st.floats(0, 1e9) | st.just(np.nan), max_size=50))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    known = np.array([value for value in values if value == value])
    found = distribution(np.array(values))
    expected = [] if found is None else [len(known), known.mean(), *np.quantile(known, QUANTILES)]
    assert ([] if found is None else list(structs.astuple(found))) == expected


@given(st.lists(st.lists(st.floats(0, 1e9) | st.just(np.nan), max_size=20), max_size=6))
def test_distributions_of_parts_are_those_of_each_part(parts: list[list[float]]) -> None:
    ends = np.cumsum([len(part) for part in parts], dtype=int).tolist()
    whole = np.array([value for part in parts for value in part])
    assert distributions(whole, ends) == [distribution(np.array(part)) for part in parts]
