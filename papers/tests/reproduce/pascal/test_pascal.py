"""Reproducing PASCAL: the caption's rules, searches, what is kept of a run, a value for every claim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.pacer import Pacer
from headway.core.record import Cause
from headway.metrics.qoe import computed_phases, phases
from headway.report.run import Run
from headway_papers.reproduce import pascal
from headway_papers.reproduce.claims import Value
from headway_papers.reproduce.pascal import load, runs
from headway_papers.reproduce.pascal.bench import FILE, MEASURED, Bench, replay_errors
from headway_papers.reproduce.pascal.runs import (
    BY_PACE,
    FCFS,
    PASCAL,
    POLICIES,
    READINGS,
    RR,
    measure,
    measure_phase,
    served,
)
from headway_papers.reproduce.pascal.tails import Tails
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call, Measurement, SimulationTask

ALL = (*POLICIES, *READINGS)


def assembled(document: Mapping[str, Any]) -> scenario.Scenario:
    return scenario.assemble(copy.deepcopy(dict(document)), Places(), Path())


def ran(document: Mapping[str, Any], seed: int = 0) -> Run:
    return scenario.run(assembled({**document, "seed": seed}))


def small(system: str, kv_tokens: int | None = 12_000, rate: float = 6.0, num_requests: int = 150) -> Run:
    """Two replicas, short of memory."""
    workload = load.workload("alpaca-eval", rate, num_requests, 0)
    return ran(served(workload, system, replicas=2, kv_capacity_tokens=kv_tokens))


@pytest.fixture(scope="module")
def pressed() -> Run:
    return small(PASCAL)


# Tails.


@pytest.mark.parametrize(
    ("num", "q"), [(5, 100), (9, 100), (10, 90), (19, 90), (20, 95), (99, 95), (100, 99), (500, 99)]
)
def test_the_tail_by_the_size_of_the_bin(num: int, q: int) -> None:
    values = np.random.default_rng(num).exponential(10.0, num)
    assert runs.tail(values) == pytest.approx(np.percentile(values, q))


@given(st.lists(st.tuples(st.integers(0, 1500), st.floats(0.1, 100.0)), min_size=1, max_size=60))
def test_bins_are_of_256_tokens_and_small_ones_are_left_out(requests: list[tuple[int, float]]) -> None:
    tokens, ttft_s = (np.array(column) for column in zip(*requests, strict=True))
    found = {first: (num, value) for first, num, value in runs.tails(tokens, ttft_s)}
    for first in range(0, 1536, 256):
        inside = [t for n, t in requests if first <= n <= first + 255]
        assert (first in found) == (len(inside) >= 5)
        if first in found:
            assert found[first] == (len(inside), pytest.approx(runs.tail(np.array(inside))))


def made(*tails: tuple[int, int, float]) -> Measurement:
    return {"tails": list(tails)}


def test_the_bin_of_a_seed_is_that_of_the_other_seeds() -> None:
    before = [made((0, 200, 50.0), (256, 9, 60.0), (512, 7, 10.0)), made((0, 200, 40.0), (256, 9, 20.0))]
    after = [made((0, 200, 10.0), (256, 9, 90.0)), made((0, 200, 30.0), (256, 9, 10.0))]
    found = Tails(before, after)
    # Cuts: 0.8 and -0.5 with seed 0, 0.25 and 0.5 with seed 1.
    assert found.most() == pytest.approx([-0.5, 0.25])
    assert found.most_s() == pytest.approx([40.0, 10.0])  # 40 and -30, 10 and 10
    assert found.worst() == pytest.approx([-0.8, -0.5])
    assert found.worst_at() == [0, 256]
    other = Tails([made((0, 200, 20.0), (256, 9, 60.0))] * 2, after)
    assert other.at_largest_cut_of(found) == pytest.approx([-0.5, -0.5])  # bin 256 with seed 0, bin 0 with seed 1
    assert [*found.means()] == [0, 256]
    assert "tails fall in 1 of 2 bins" in found.summary(FCFS)
    assert "0 to 255 reasoning tokens, 200 requests: 45.0 s with FCFS, 20.0 s with PASCAL" in found.summary(FCFS)


def verdict(id: str, values: Sequence[Value]) -> bool | None:
    (claim,) = (claim for claim in pascal.CLAIMS if claim.id == id)
    return claim.rule.judge(values).holds


def noisy(random: np.random.Generator, factor: float, noise: float = 0.15) -> list[Measurement]:
    """Tails of ten seeds in 25 bins, with the noise of small bins."""
    return [
        made(*((256 * b, 9, factor * 60.0 * float(random.lognormal(0, noise))) for b in range(25))) for _ in range(10)
    ]


def test_tails_of_equal_systems_neither_fall_nor_rise() -> None:
    random = np.random.default_rng(0)
    pairs = [Tails(noisy(random, 1.0), noisy(random, 1.0)) for _ in range(60)]
    falls = [verdict(id, each.most()) for each in pairs for id in ("heavy-tail-rr", "alpaca-tail-rr")]
    rises = [verdict(id, each.worst()) for each in pairs for id in ("heavy-worse-rr", "heavy-worse-fcfs")]
    assert falls.count(True) <= 0.05 * len(falls)
    assert rises.count(False) <= 0.05 * len(rises)


def test_tails_that_rise_do_not_fall_in_any_bin() -> None:
    random = np.random.default_rng(1)
    swapped = Tails(noisy(random, 0.75, 0.05), noisy(random, 1.0, 0.05))
    assert verdict("heavy-tail-rr", swapped.most()) is False
    assert verdict("heavy-worse-rr", swapped.worst()) is False
    right, beyond = (Tails(noisy(random, 1.0, 0.05), noisy(random, factor, 0.05)) for factor in (0.82, 0.4))
    assert verdict("heavy-tail-rr", right.most()) is True
    assert verdict("heavy-tail-rr", beyond.most()) is False


def test_without_bins_there_are_no_values() -> None:
    found = Tails([made()], [made()])
    assert found.most() == found.most_s() == found.worst() == found.at_largest_cut_of(found) == [None]
    assert found.summary(FCFS) == ""


# Rates.


@given(st.floats(1.0, 1000.0))
def test_the_search_ends_just_below_the_highest_rate(highest: float) -> None:
    asked = []

    def holds(rate: float) -> bool:
        asked.append(rate)
        return rate <= highest

    found = load._highest(holds)
    assert highest / 1.045 <= found <= highest * 1.0001
    assert len(asked) <= 16


def test_the_search_ends_where_nothing_presses() -> None:
    assert load._highest(lambda rate: True) == load.MOST


@pytest.mark.ci
def test_pressure_grows_with_the_rate_until_half_of_the_time_and_more() -> None:
    found = [load._pressed("alpaca-eval", 600, 1, (0,), rate) for rate in (0.25, 1.0, 2.0, 4.0)]
    assert found[0] == 0 and found == sorted(found) and 0.5 < found[-1] <= 1
    rates = load.levels("alpaca-eval", 600, 1, ["low", "high"], [0])
    assert 0.25 < rates["low"] < rates["high"] < 4.0
    assert load._pressed("alpaca-eval", 600, 1, (0,), rates["high"]) <= load.SHARES["high"]


def test_pressure_is_the_share_of_the_time_in_which_somebody_waits() -> None:
    run = small(FCFS)
    segments, end_s = run.records.segments, run.records.end_s
    times = np.linspace(end_s / 2, end_s, 4001)[:-1]
    waiting = np.zeros((2, len(times)), dtype=bool)
    for request, arrival_s in enumerate(run.records.workload["arrival_s"]):
        rows = np.flatnonzero(segments["request"] == request)
        since = arrival_s
        for row in rows[np.argsort(segments["admitted_s"][rows])]:
            waiting[segments["replica"][row]] |= (times >= since) & (times < segments["admitted_s"][row])
            since = segments["end_s"][row]
    assert load.pressure(run)["pressure"] == pytest.approx(waiting.mean(), abs=0.03)


def test_a_trace_gives_each_seed_another_two_hours_of_it() -> None:
    claims = [load.workload("a.csv.gz", 2.0, 100, seed)["trace"]["from_s"] for seed in range(12)]
    searches = [load.workload("a.csv.gz", 2.0, 100, load.SEEDS[0] + seed)["trace"]["from_s"] for seed in range(12)]
    assert claims == searches == [7200 * seed for seed in range(12)]


# Scenarios.


@pytest.mark.parametrize("system", ALL)
def test_every_system_is_a_scenario_on_the_papers_fleet(system: str) -> None:
    chosen = assembled(served(load.workload("arena-hard", 7.0, 10, 0), system))
    (pool,) = chosen.fleet.pools
    assert (pool.replicas, pool.gpu.name, pool.network_bytes_per_s) == (8, "h100-96gb-sxm", 12.5e9)
    assert (pool.engine.batching, pool.engine.max_num_seqs, pool.engine.preemption) == ("prefill-first", 256, "swap")
    assert chosen.spec.pacer == Pacer(None if system == BY_PACE else 0.25, 0.1)


# What is kept of a run.


def test_a_run_is_reduced_to_what_its_records_say(pressed: Run) -> None:
    found, records = measure(pressed), pressed.records
    requests, workload = records.requests, records.workload
    ttft_s = requests["answer_s"] - workload["arrival_s"][requests["request"]]
    assert found["ttft_mean_s"] == pytest.approx(ttft_s.mean())
    assert sum(num for _, num, _ in found["tails"]) <= len(ttft_s)
    assert found["ttft_quantiles_s"][100] == pytest.approx(ttft_s.max(), rel=1e-4)
    assert found["tokens_per_s"] == pytest.approx(workload["output_tokens"].sum() / records.end_s)
    by_pace = phases(records, requests, Pacer(None, 0.1))
    assert by_pace is not None and found["violations"] == by_pace.violations
    assert found["violations_with_ttfat"] >= found["violations"]
    reasons = requests["reasoning_end_s"] - workload["arrival_s"][requests["request"]]
    weighted = sum(num * mean for _, num, mean in found["reasoning"]) / sum(num for _, num, _ in found["reasoning"])
    assert np.nanmin(reasons) < weighted < np.nanmax(reasons)


@pytest.mark.parametrize("name", ["pascal-reasoning", "pascal-answering"])
def test_a_phase_is_executed_blocked_or_preempted(name: str) -> None:
    workload = load.workload(name, 3.0, 120, 0)
    free = measure_phase(ran(served(workload, FCFS, replicas=1)))
    for _, _, blocked, preempted, attained in free["lengths"]:
        assert (blocked < 0.1, preempted, attained) == (True, 0.0, 1.0)
    assert free["kv_peak_tokens"] < free["kv_capacity_tokens"]
    half = int(free["kv_peak_tokens"] / 2)
    run = ran(served(workload, RR, replicas=1, kv_capacity_tokens=half))
    short = measure_phase(run)
    alone = {length: latency for length, latency, *_ in free["lengths"]}
    assert short["preemptions"] > 0 and short["kv_peak_tokens"] <= half
    for length, latency, blocked, preempted, _ in short["lengths"]:
        assert 0.5 * alone[length] < latency - blocked - preempted < 1.5 * alone[length]


def test_time_between_stays_is_counted_one_by_one(pressed: Run) -> None:
    segments, num = pressed.records.segments, len(pressed.records.workload["arrival_s"])
    expected = np.zeros(num)
    for request in range(num):
        rows = np.flatnonzero(segments["request"] == request)
        rows = rows[np.argsort(segments["admitted_s"][rows])]
        for before, after in pairwise(rows):
            expected[request] += segments["admitted_s"][after] - segments["end_s"][before]
    assert (segments["cause"] == Cause.SWAPPED).any()
    assert runs._between_stays_s(segments, num) == pytest.approx(expected)


def test_answers_without_reasoning_are_scored_from_their_arrival() -> None:
    run = ran(served(load.workload("pascal-answering", 4.0, 60, 0), FCFS, replicas=1, kv_capacity_tokens=15_000))
    requests = run.records.requests
    assert phases(run.records, requests, Pacer()) is None
    qoe = computed_phases(run.records, requests, Pacer(0.25, 0.1)).qoe
    waited_s = requests["first_token_s"] - run.records.workload["arrival_s"][requests["request"]]
    late = waited_s > 0.25
    assert late.any() and not late.all()
    assert (qoe[late] < 1).all()
    calm = ~late & (requests["preemptions"] == 0)
    assert calm.any() and qoe[calm] == pytest.approx(1)


# All claims, from measurements that are made up.


class Canned(Runner):
    """Answers with what `of` says of a task; remembers which were asked for."""

    of: Callable[[Any, Any], Measurement]
    asked: list[Any]

    def run(self, tasks: Mapping[Any, Any]) -> dict[Any, Measurement]:
        self.asked = [*getattr(self, "asked", []), *tasks]
        return {name: self.of(name, task) for name, task in tasks.items()}


def canned(pressed: Run, **arguments: Any) -> Canned:
    """PASCAL's TTFTs are half of FCFS's; otherwise all systems are alike."""
    runner = Canned(seeds=(0, 1), **arguments)
    whole = measure(pressed)
    halved = {**whole, "tails": [(first, num, tail / 2) for first, num, tail in whole["tails"]], "ttft_mean_s": 10.0}
    whole = {**whole, "ttft_mean_s": 20.0}
    lengths = [[length, length * 0.04, 1.0, 2.0, 1.0] for length in runs.LENGTHS]

    def of(name: Any, task: Any) -> Measurement:
        if isinstance(task, Call):
            known: dict[Any, Measurement] = {
                load.levels: {"low": 1.0, "medium": 2.0, "high": 3.0},
                load.pair: {"rate": 2.5, "tried": {"2.5": load.PAIR}},
                load.unpressed: {"rate": 1.5},
                replay_errors: {
                    "e2e_mean": 0.03,
                    "ttft_mean": 0.04,
                    "tpot_mean": 0.05,
                    "num_experiments": 12,
                    "e2e_dense": 0.02,
                },
            }
            return known.get(task.function) or runs.lengths("gpqa", 50)
        assert isinstance(task, SimulationTask)
        if task.function is measure_phase:
            return {"lengths": lengths, "kv_peak_tokens": 50_000.0, "kv_capacity_tokens": 60_000, "preemptions": 0}
        if name[2] == runs.SOONEST:
            return {**whole, "ttft_mean_s": 5.0}
        return whole if name[2] == FCFS else halved

    runner.of = of
    return runner


def with_data(folder: Path) -> None:
    """The files of --data, empty; one of them in a folder of its own."""
    (folder / "traces").mkdir()
    (folder / "traces" / FILE).write_text("")
    (folder / MEASURED).write_text("")


def test_every_claim_has_a_value_a_seed_and_every_figure_is_there(pressed: Run, tmp_path: Path) -> None:
    with_data(tmp_path)
    findings = pascal.run(canned(pressed, data=tmp_path))
    assert set(findings.outcomes) == {claim.id for claim in pascal.CLAIMS}
    assert all(len(outcome.values) == 2 for outcome in findings.outcomes.values())
    assert all(claim.rule.judge(findings.outcomes[claim.id].values).headway for claim in pascal.CLAIMS)
    labels = [each.label for each in findings.exhibits]
    numbers = [int(label.split()[1].rstrip("abcd")) for label in labels if label.startswith("Figure")]
    assert numbers == sorted(numbers) and set(numbers) == {4, 5, *range(8, 17)}
    assert labels[-4:] == ["Beyond: readings", "Beyond: oracles", "Beyond: trace", "Beyond: trace"]


def test_values_are_what_the_measurements_say(pressed: Run, tmp_path: Path) -> None:
    with_data(tmp_path)
    values = {name: each.values for name, each in pascal.run(canned(pressed, data=tmp_path)).outcomes.items()}
    for name in ("alpaca-tail-fcfs", "arena-tail-fcfs", "heavy-tail-fcfs", "trace-tail-fcfs"):
        assert values[name] == pytest.approx([0.5, 0.5])
    for name in ("alpaca-tail-rr", "alpaca-slo-high", "alpaca-throughput-rr", "non-adaptive-slo", "heavy-slo-fcfs"):
        assert values[name] == pytest.approx([0.0, 0.0])
    assert values["alpaca-worse-fcfs"] == pytest.approx([-0.5, -0.5])
    assert values["oracle-gap"] == values["trace-oracle-gap"] == pytest.approx([2 / 3, 2 / 3])
    assert values["short-reasoning-fcfs"] == pytest.approx([1.0, 1.0])


def test_without_the_trace_its_rows_are_undecided(pressed: Run) -> None:
    found = pascal.run(canned(pressed, claims=frozenset({"trace-slo"})))
    assert {outcome.values == [None, None] for outcome in found.outcomes.values()} == {True}
    assert "--data" in found.outcomes["trace-slo"].why and not found.exhibits


def test_only_what_was_asked_for_is_run(pressed: Run) -> None:
    runner = canned(pressed, claims=frozenset({"heavy-slo-rr"}))
    found = pascal.run(runner)
    assert "heavy-slo-rr" in found.outcomes and "alpaca-tail-fcfs" not in found.outcomes
    assert {name[0] for name in runner.asked if isinstance(name, tuple)} == {"heavy"}


def test_nothing_is_run_twice(pressed: Run, tmp_path: Path) -> None:
    with_data(tmp_path)
    runner = canned(pressed, data=tmp_path)
    pascal.run(runner)
    main = [name for name in runner.asked if isinstance(name, tuple) and len(name) == 4]
    assert len(main) == len(set(main)) > 70


def test_quick_halves_fleet_and_requests(pressed: Run) -> None:
    assert Bench(canned(pressed, quick=True))._size("alpaca") == ("alpaca-eval", 1500, 4)
    assert Bench(canned(pressed))._size("alpaca") == ("alpaca-eval", 3000, 8)
