"""Quality of experience from records, against a reader who is followed token by token."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import catalog
from headway import records as files
from headway.control.live import Live
from headway.control.policies import Policies
from headway.core.fleet import DraftSchedule, Engine, Fleet, Pool, Speculative, by_rate
from headway.core.pacer import Pacer
from headway.core.record import (
    MOVE_COLUMNS,
    REQUEST_COLUMNS,
    SEGMENT_COLUMNS,
    STRETCH_COLUMNS,
    MoveOutcome,
    Outcome,
    Records,
)
from headway.gateway.telemetry.recording import Recording
from headway.metrics import qoe
from headway.metrics.qoe import Phases, phases
from headway.metrics.summary import flatten, summarize
from headway.metrics.tokens import token_times
from headway.policies import resolve
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload
from oracle_records import NAN, Run, columns


def found(records: Records, pacer: Pacer) -> Phases:
    result = phases(records, records.requests, pacer)
    assert result is not None
    return result


def area(times_s: list[float], until_s: float) -> float:
    """Under the curve of how many of these have been, piece by piece."""
    total = 0.0
    for count, (from_s, to_s) in enumerate(zip(times_s, [*times_s[1:], until_s], strict=True), start=1):
        total += count * (to_s - from_s)
    return total


def followed(tokens_s: list[float], start_s: float, tpot_s: float) -> float:
    """QoE of an answer whose tokens came at these times to a reader who wants the first at `start_s`."""
    wanted = [start_s + k * tpot_s for k in range(len(tokens_s))]
    read: list[float] = []
    for token_s, wanted_s in zip(tokens_s, wanted, strict=True):
        read.append(max(token_s, wanted_s, read[-1] + tpot_s if read else -math.inf))
    until_s = read[-1] + tpot_s
    return area(read, until_s) / area(wanted, until_s)


def one_request(
    times_s: list[float], reasoning: int, arrival_s: float = 0.0, cut: int | None = None, seen_s: float = 0.0
) -> Records:
    """A request alone at a replica, a stretch for each tick. `cut`: it is swapped out after so many tokens."""
    segments, stretches = [], []
    for tick, (before_s, time_s) in enumerate(pairwise(times_s)):
        resumed = cut is not None and tick + 1 == cut
        start_s = max(before_s, time_s - 0.03) if resumed else before_s  # an iteration takes as long as it takes
        stretches.append((0, tick, start_s, time_s - start_s, 0.0, 1, 0, 100, 0, 1, 1))
    ends = [len(times_s)] if cut is None else [cut, len(times_s)]
    for begin, end in pairwise([0, *ends]):
        first_s = times_s[0] if begin == 0 else NAN
        segments.append((0, 0, 0, -1, arrival_s, arrival_s, first_s, max(begin - 1, 0), end - 1, times_s[end - 1], 0))
    reasoning_end_s = times_s[reasoning - 1] + seen_s if reasoning else NAN
    answer_s = times_s[reasoning] + seen_s
    request = (
        0, 0, 1, 0, 0, arrival_s, arrival_s, times_s[0] + seen_s, answer_s, times_s[-1] + seen_s, len(times_s), 0,
        reasoning_end_s, 0, -1, NAN,
    )  # fmt: skip
    workload = {
        "arrival_s": np.array([arrival_s]),
        "prompt_tokens": np.array([10]),
        "reasoning_tokens": np.array([reasoning]),
    }
    return Records(
        workload=workload,
        models=(),
        regions=(),
        replicas=(),
        end_s=times_s[-1],
        requests=columns(REQUEST_COLUMNS, [request]),
        segments=columns(SEGMENT_COLUMNS, segments),
        stretches=columns(STRETCH_COLUMNS, stretches),
    )


@settings(max_examples=30, deadline=None)
@given(
    run=st.builds(
        Run,
        seed=st.integers(0, 10**6),
        num_requests=st.integers(2, 50),
        num_replicas=st.integers(1, 4),
        trouble=st.sampled_from([0.0, 0.03, 0.2]),
        stop_s=st.sampled_from([2.0, 1e9]),
    ),
    pacer=st.builds(Pacer, st.sampled_from([None, 0.0, 0.05, 0.25]), st.sampled_from([1e-3, 0.015, 0.02, 0.03, 0.1])),
)
def test_qoe_is_that_of_a_reader_followed(run: Run, pacer: Pacer) -> None:
    if not any(job.reasoning for job in run.jobs):
        return
    got = found(run.records, pacer)
    for row, id in enumerate(run.records.requests["request"].tolist()):
        job = run.jobs[id]
        answer = job.tokens[job.reasoning :]
        if not answer:
            assert math.isnan(got.qoe[row])
            continue
        end_s = job.tokens[job.reasoning - 1] if job.reasoning else job.arrival_s
        start_s = answer[0] if pacer.ttfat_s is None else min(answer[0], end_s + pacer.ttfat_s)
        assert got.qoe[row] == pytest.approx(followed(answer, start_s, pacer.tpot_s), abs=1e-9)
        assert got.reasoning_s[row] == pytest.approx(end_s - job.arrival_s if job.reasoning else NAN, nan_ok=True)
        assert got.ttfat_s[row] == pytest.approx(answer[0] - end_s if job.reasoning else NAN, nan_ok=True)
        if job.reasoning:
            assert 0 <= got.blocking_s[row] < got.ttfat_s[row]


def test_qoe_of_a_burst_a_pause_and_late_tokens() -> None:
    """As in Fig. 3 of PASCAL, one token a second wanted: four at once, three that come two seconds late each."""
    records = one_request([5.0, 10.0, 10.1, 10.2, 10.3, 16.0, 16.5, 18.0], reasoning=1)
    expected = sum(9 - k for k in range(7))
    digested = sum(9 - read for read in (0, 1, 2, 3, 6, 7, 8))
    assert found(records, Pacer(None, 1.0)).qoe == pytest.approx([digested / expected])


def test_pause_within_buffered_tokens_does_not_lower_qoe() -> None:
    records = one_request([1.0, 2.0, 2.1, 2.2, 2.3, 6.0], reasoning=1)
    assert found(records, Pacer(None, 1.0)).qoe == 1.0
    assert found(records, Pacer(None, 0.99)).qoe < 1.0


@given(late_s=st.floats(0.001, 100), num_tokens=st.integers(1, 50))
def test_late_start_counts_only_with_a_ttfat_target(late_s: float, num_tokens: int) -> None:
    answer = [3.25 + late_s + 0.1 * k for k in range(num_tokens)]
    records = one_request([3.0, *answer], reasoning=1)
    assert found(records, Pacer(None, 0.1)).qoe == pytest.approx([1.0], abs=1e-9)
    expected = 0.1 * num_tokens * (num_tokens + 1) / 2
    got = found(records, Pacer(0.25, 0.1)).qoe
    assert got == pytest.approx([expected / (expected + num_tokens * late_s)], rel=1e-6)


@given(gaps=st.lists(st.sampled_from([0.01, 0.0625, 0.125, 0.5]), min_size=1, max_size=40))
def test_qoe_is_1_exactly_if_no_token_is_late(gaps: list[float]) -> None:
    times = [1.0, *(1.0 + np.cumsum(gaps))]
    on_time = all(time_s - times[1] <= 0.125 * k for k, time_s in enumerate(times[1:]))
    assert (found(one_request(times, reasoning=1), Pacer(None, 0.125)).qoe[0] == 1.0) == on_time


def test_requests_without_reasoning_are_scored_from_arrival() -> None:
    records = one_request([2.0, 2.1], reasoning=0, arrival_s=1.0)
    assert phases(records, records.requests, Pacer()) is None  # nothing reasons at all
    records.workload["reasoning_tokens"] = np.array([0, 3])  # another does, that never came
    records.workload["arrival_s"] = np.array([1.0, 9.0])
    got = found(records, Pacer(0.25, 0.1))
    assert got.qoe == pytest.approx([followed([2.0, 2.1], 1.25, 0.1)])
    assert all(np.isnan(column[0]) for column in (got.reasoning_s, got.ttfat_s, got.blocking_s))


@pytest.mark.parametrize("seen_s", [0.0, 0.01])
def test_blocking_ends_where_the_iteration_of_the_first_answering_token_begins(seen_s: float) -> None:
    times = [1.0, 1.03, 1.06, 4.0, 4.03]
    straight = found(one_request(times, reasoning=2, seen_s=seen_s), Pacer())
    assert straight.blocking_s == pytest.approx([0.0]) and straight.ttfat_s == pytest.approx([0.03])
    blocked = found(one_request(times, reasoning=3, cut=3, seen_s=seen_s), Pacer())
    assert blocked.ttfat_s == pytest.approx([2.94])
    assert blocked.blocking_s == pytest.approx([2.91])


def test_the_time_to_the_client_changes_no_score() -> None:
    times = [1.0, 1.5, 1.9, 2.0, 4.0]
    near, far = (one_request(times, reasoning=1, seen_s=seen_s) for seen_s in (0.0, 0.125))
    assert found(far, Pacer(0.25, 0.1)).qoe == pytest.approx(found(near, Pacer(0.25, 0.1)).qoe)


@pytest.mark.parametrize("schedule", [None, (), ((1, 6, 3), (7, 40, 1))], ids=["plain", "drafts", "fewer-drafts"])
def test_qoe_of_what_an_engine_records(schedule: DraftSchedule | None) -> None:
    """Quanta, preemptions and the time to the client; more work than two replicas can do at reading pace.

    With drafts, all tokens of an iteration arrive at once.
    """
    drafts = None
    if schedule is not None:
        drafts = Speculative(
            method="ngram",
            num_speculative_tokens=3,
            acceptance=by_rate(0.6, 3),
            num_speculative_tokens_per_batch_size=schedule,
        )
    rng = np.random.default_rng(0)
    reasoning = rng.integers(0, 200, 150)
    columns = {
        "arrival_s": np.cumsum(rng.exponential(0.034, 150)),
        "prompt_tokens": rng.integers(1, 600, 150),
        "output_tokens": reasoning + rng.integers(1, 200, 150),
        "reasoning_tokens": reasoning,
    }
    engine = Engine(
        "simulated", max_num_seqs=40, max_num_batched_tokens=512, response_overhead_s=0.004, speculative=drafts
    )
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb")
    pool = Pool("main", model, gpu, engine, replicas=2, kv_capacity_tokens=12800)
    policies = Policies(resolve.router("pascal"), resolve.ordering({"name": "pascal", "quantum_tokens": 50}))
    source = TraceSource(Workload(columns))
    step_s = 0.012 if schedule is None else 0.022 if schedule else 0.035
    records = simulate(Fleet((pool,)), source, policies, seed=1, line=lambda pool: lambda *batch: (step_s, 0.0, None))
    got, pacer = found(records, Pacer(0.5, 0.03)), Pacer(0.5, 0.03)
    assert records.requests["preemptions"].sum() > 100
    assert 0.1 < (got.qoe < 0.95).mean() < 0.9
    times = token_times(records, range(150))
    assert [len(times[id]) for id in records.requests["request"]] == records.requests["generated_tokens"].tolist()
    assert bool(records.drafts) == (drafts is not None)
    for row, id in enumerate(records.requests["request"].tolist()):
        seen_s = (times[id] + 0.004).tolist()
        answer = seen_s[reasoning[id] :]
        end_s = seen_s[reasoning[id] - 1] if reasoning[id] else columns["arrival_s"][id]
        start_s = pacer.start_s(end_s, answer[0])
        assert start_s is not None and got.qoe[row] == pytest.approx(followed(answer, start_s, 0.03), abs=1e-9)


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(seed=11, num_requests=80, trouble=0.1)
    whole = found(run.records, Pacer(0.05, 0.02))
    monkeypatch.setattr(qoe, "CHUNK_TOKENS", 100)
    parts = found(run.records, Pacer(0.05, 0.02))
    for name in Phases.__slots__:
        np.testing.assert_array_equal(getattr(whole, name), getattr(parts, name))


def test_the_summary_shows_phases_where_something_reasons() -> None:
    run = Run(seed=8, trouble=0.05)
    records, pacer = run.records, Pacer(0.05, 0.02)
    summary = summarize(records, pacer=pacer)
    all_of_them = found(records, pacer)
    assert summary.qoe_violations == pytest.approx(np.mean(all_of_them.qoe[~np.isnan(all_of_them.qoe)] < 0.95))
    assert 0 < summary.qoe_violations < 1
    assert summary.ttfat_s is not None and summary.ttfat_s.p99 == np.nanquantile(all_of_them.ttfat_s, 0.99)
    assert summary.blocking_s is not None and summary.blocking_s.max == np.nanmax(all_of_them.blocking_s)
    assert summary.reasoning_s is not None and summary.reasoning_s.mean == pytest.approx(
        np.nanmean(all_of_them.reasoning_s)
    )
    assert sum(tier.ttfat_s.count for tier in summary.tiers.values() if tier.ttfat_s) == summary.ttfat_s.count
    assert summarize(records, warmup_s=3.0).ttfat_s != summary.ttfat_s
    records.workload["reasoning_tokens"][:] = 0
    flat = flatten(summarize(records))
    assert all(flat[key] is None for key in ("ttfat_s.p99", "blocking_s.p99", "reasoning_s.p50", "qoe_violations"))


def test_a_served_run_has_the_phases_that_a_gateway_can_know(tmp_path: Path) -> None:
    """It has no iterations of engines: neither the times of tokens nor QoE. From memory and from files."""
    recording = Recording(enabled=True)
    for id, reasoning in ((0, 4), (1, 0), (2, 3)):
        live = Live(id, float(id), 10, 1, model="m")
        live.generated_tokens, live.reasoning_tokens = 9, reasoning
        recording.add(live)
        end_s = id + 2.5 if reasoning else NAN
        row = (id, Outcome.FINISHED, 1, 0, 0, id, id, id + 1, id + 3, id + 5, 9, 0, end_s, 0, -1, NAN)
        recording.recorder.requests.write(row)
    records = recording.records([], 50.0)
    files.save(records, tmp_path, {})
    for each in (records, files.load(tmp_path)[0]):
        summary = summarize(each)
        assert summary.reasoning_s is not None and summary.reasoning_s.mean == 2.5
        assert summary.ttfat_s is not None and summary.ttfat_s.mean == 0.5 and summary.ttfat_s.count == 2
        assert summary.blocking_s is None and summary.qoe_violations is None


def test_transfers_are_of_moves_that_were_made_with_a_kv_cache() -> None:
    records = Run(seed=8).records
    assert summarize(records).moves == 0 and summarize(records).transfer_s is None
    rows = [
        (5, 0, 1, 1.0, 1.0, 1.5, 900, 9e6, MoveOutcome.DONE),
        (6, 0, 1, 1.0, 1.0, 9.5, 900, 9e6, MoveOutcome.FULL),
        (7, 2, 1, 2.0, NAN, 2.0, 0, 0.0, MoveOutcome.DONE),
        (8, 0, 2, 3.0, 3.0, 3.1, 90, 9e5, MoveOutcome.DONE),
    ]
    records.moves = columns(MOVE_COLUMNS, rows)
    records.requests["moves"][np.isin(records.requests["request"], [5, 7, 8])] = 1
    summary = summarize(records)
    assert summary.moves == 3
    assert summary.transfer_s is not None
    assert (summary.transfer_s.count, summary.transfer_s.max) == (2, 0.5)
    late = summarize(records, warmup_s=records.workload["arrival_s"][7])
    assert late.moves == 2 and late.transfer_s is not None and late.transfer_s.count == 1
