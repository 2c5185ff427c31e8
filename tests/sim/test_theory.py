"""Queues whose answers are known in closed form.

Means come with confidence intervals by the method of batch means (30 batches, Student's t, 99 %); seeds are fixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from headway.control.policies import Policies
from headway.core.decision import Placement
from headway.core.fleet import Fleet, Pool
from headway.core.record import Records
from headway.core.view import FleetView, RequestView
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.round_robin import RoundRobinRouter
from headway.sim.cluster import simulate
from headway.workload.sources import ClosedLoop, TraceSource
from headway.workload.table import Workload
from simulation import by_request, pool, seconds, sloped

Floats = npt.NDArray[np.float64]


def run(
    arrival_s: Any, prompt: Any, output: Any, fleet: Pool, line: Any, router: Any = RoundRobinRouter, clients: int = 0
) -> Records:
    """Records of requests given as columns; a scalar holds for all."""
    n = len(arrival_s)
    columns = {
        "arrival_s": arrival_s,
        "prompt_tokens": np.broadcast_to(prompt, n),
        "output_tokens": np.broadcast_to(output, n),
    }
    table = Workload(columns)
    source = ClosedLoop(table, clients) if clients else TraceSource(table)
    return simulate(Fleet((fleet,)), source, Policies(router, FcfsOrdering), seed=0, line=line)


def interval(samples: Floats, num_batches: int = 30) -> tuple[float, float]:
    """99 % confidence interval of the mean of a correlated series, the first tenth left out."""
    kept = samples[len(samples) // 10 :]
    means = np.array([batch.mean() for batch in np.array_split(kept, num_batches)])
    half = stats.t.ppf(0.995, num_batches - 1) * means.std(ddof=1) / num_batches**0.5
    return means.mean() - half, means.mean() + half


def waits(records: Records) -> Floats:
    requests = by_request(records.requests)
    return requests["admitted_s"] - records.workload["arrival_s"]


def lindley(arrival_s: Floats, service_s: Floats) -> Floats:
    """Waiting times of a queue with one server, by Lindley's recursion."""
    wait_s, found = 0.0, [0.0]
    for gap_s, served_s in zip(np.diff(arrival_s), service_s, strict=False):
        wait_s = max(0.0, wait_s + served_s - gap_s)
        found.append(wait_s)
    return np.array(found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("batching", ["chunked", "request-level"])
def test_md1(load: float, batching: str) -> None:
    """One seat, one iteration each: Pollaczek and Khinchine say rho * D / (2 (1 - rho))."""
    service_s, n = 0.02, 25_000
    arrival_s = np.cumsum(np.random.default_rng(11).exponential(service_s / load, n))
    one = pool(max_num_seqs=1, batching=batching)
    found = waits(run(arrival_s, 10, 1, one, seconds(service_s)))
    assert np.allclose(found, lindley(arrival_s, np.full(n, service_s)), atol=1e-6)
    low, high = interval(found)
    expected = load * service_s / (2 * (1 - load))
    assert low <= expected <= high
    assert high - low < 0.35 * expected


@pytest.mark.ci
@pytest.mark.parametrize("load", [0.4, 0.7])
def test_mg1(load: float) -> None:
    """Service times lognormal through prompt lengths: W = lambda E[S^2] / (2 (1 - rho))."""
    n, per_token_s = 40_000, 1e-4
    rng = np.random.default_rng(12)
    mu, sigma = 7.0, 0.6
    prompt = np.maximum(1, np.rint(rng.lognormal(mu, sigma, n))).astype(int)
    mean_s = np.exp(mu + sigma**2 / 2) * per_token_s
    mean_square = np.exp(2 * mu + 2 * sigma**2) * per_token_s**2
    arrival_s = np.cumsum(rng.exponential(mean_s / load, n))
    one = pool(max_num_seqs=1, max_num_batched_tokens=100_000, gpu_memory_utilization=0.95)
    found = waits(run(arrival_s, prompt, 1, one, seconds(0.0, per_token_s)))
    assert np.allclose(found, lindley(arrival_s, prompt * per_token_s), atol=1e-6)
    low, high = interval(found)
    expected = load / mean_s * mean_square / (2 * (1 - load))
    assert low <= expected <= high
    assert high - low < 0.4 * expected


@pytest.mark.ci
def test_many_iterations_are_one_service() -> None:
    """An output of k tokens takes k iterations: M/G/1 with geometric services."""
    n, step_s, mean_tokens = 30_000, 0.01, 12.0
    rng = np.random.default_rng(13)
    output = rng.geometric(1 / mean_tokens, n)
    arrival_s = np.cumsum(rng.exponential(mean_tokens * step_s / 0.6, n))
    found = waits(run(arrival_s, 5, output, pool(max_num_seqs=1), seconds(step_s)))
    assert np.allclose(found, lindley(arrival_s, output * step_s), atol=1e-6)
    mean_square = (2 - 1 / mean_tokens) * mean_tokens**2 * step_s**2
    low, high = interval(found)
    assert low <= 0.6 / (mean_tokens * step_s) * mean_square / (2 * 0.4) <= high


class Counting:
    """One replica, and how many requests each arrival found in it."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def route(self, request: RequestView, view: FleetView) -> Placement:
        self.found.append(view.replicas[0].num_in_flight)
        return Placement(0)


@pytest.mark.ci
def test_little() -> None:
    """Poisson arrivals see time averages, and those are L = lambda W: found on arrival against latencies."""
    n, rate = 30_000, 20.0
    rng = np.random.default_rng(14)
    arrival_s = np.cumsum(rng.exponential(1 / rate, n))
    counting = Counting()
    shape = {"max_num_seqs": 20, "max_num_batched_tokens": 256, "kv_capacity_tokens": 8000}
    records = run(
        arrival_s, rng.integers(10, 200, n), rng.geometric(1 / 50, n), pool(**shape), sloped, lambda: counting
    )
    assert (by_request(records.requests)["admitted_s"] - arrival_s).max() > 0.1, "no queue, no test"
    e2e_s = by_request(records.requests)["end_s"] - arrival_s
    difference = np.array(counting.found) - rate * e2e_s
    low, high = interval(difference)
    assert low <= 0 <= high
    assert high - low < 0.1 * np.mean(counting.found)


def test_little_between_tables() -> None:
    """Decoding requests, integrated over stretches, are the decoding times of the segments summed."""
    n = 3_000
    rng = np.random.default_rng(15)
    arrival_s = np.cumsum(rng.exponential(0.05, n))
    records = run(arrival_s, rng.integers(10, 200, n), rng.geometric(1 / 50, n), pool(max_num_seqs=32), sloped)
    stretches, segments = records.stretches, records.segments
    k = stretches["iterations"]
    lasted_s = k * stretches["a_s"] + stretches["b_s"] * (k * (k - 1) // 2)
    in_stretches = (stretches["num_decode"] * lasted_s).sum()
    in_segments = (segments["end_s"] - segments["prefill_end_s"]).sum()
    assert in_stretches == pytest.approx(in_segments, rel=1e-9)


def test_an_endless_server_only_aligns() -> None:
    """With seats for all, E2E is the output's iterations, after half of one on average (uniform arrivals)."""
    n, step_s, output = 20_000, 0.01, 40
    arrival_s = np.cumsum(np.random.default_rng(16).exponential(0.01, n))
    records = run(arrival_s, 3, output, pool(max_num_seqs=1000), seconds(step_s))
    aligned_s = by_request(records.requests)["end_s"] - arrival_s - output * step_s
    low, high = interval(aligned_s)
    assert low <= step_s / 2 <= high
    assert aligned_s.min() >= 0 and aligned_s.max() <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("batching", ["request-level", "chunked", "whole-prompt"])
def test_saturated_throughput_of_equal_requests(batching: str) -> None:
    """Batches of B march in step: one prefill iteration, then output - 1 ticks along the line."""
    seats, rounds, prompt, output = 16, 20, 50, 30
    shape = {"max_num_seqs": seats, "max_num_batched_tokens": 2000, "batching": batching}
    fleet = pool(**shape)
    line = sloped(fleet)
    records = run(np.zeros(seats * rounds), prompt, output, fleet, sloped)
    prefill_s = line(0, 0, [(prompt, 0)] * seats, 0, 0)[0]
    ticks_s = sum(line(seats, seats * (prompt + k), (), 0, 0)[0] for k in range(output - 1))
    assert records.end_s == pytest.approx(rounds * (prefill_s + ticks_s), rel=1e-9)


def test_saturated_throughput_of_unequal_requests() -> None:
    """Each of B seats is taken for as many iterations as its request has tokens: B / (a E[output]) per second."""
    seats, step_s, n = 24, 0.01, 20_000
    output = np.random.default_rng(17).geometric(1 / 40, n)
    fleet = pool(max_num_seqs=seats)
    records = run(np.zeros(n), 4, output, fleet, seconds(step_s), clients=2 * seats)
    tail = 2 * seats * output.mean() * step_s / seats
    assert records.end_s == pytest.approx(output.sum() * step_s / seats, abs=10 * tail)
    assert output.sum() * step_s / seats > 100 * tail
