"""Arrival rates by pressure, found by simulation with seeds that no claim uses.

The paper calls its rates low, medium and high, without numbers. Here the *pressure* at a rate is the share of the
replicas' time, over the second half of the arrivals (the first fills the fleet), in which a request waits for memory or
a batch slot under FCFS. The pressure is 0 while all KV caches fit. Low, medium and high are the rates at which it is
5%, 25% and 50%: memory is short occasionally, often, and half of the time, at the end of a run that is served
completely. For section III, which needs an oracle that memory never limits, the rate is the highest at which the oracle
fills 80% of one GPU's KV cache at its peak. The paper prints one pair of numbers that shows its pressure: 0.69% of
answering SLOs missed, and 7.45% if every answer migrates. `pair` is the rate nearest to both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.metrics.columns import floats
from headway.metrics.qoe import phases
from headway.report.run import Run
from headway_papers.reproduce.pascal.runs import FCFS, NON_ADAPTIVE, PASCAL, TPOT_ONLY, Document, served
from headway_papers.reproduce.tasks import Measurement, SimulationTask

SHARES = {"low": 0.05, "medium": 0.25, "high": 0.5}
FILLED = 0.8
PAIR = {PASCAL: 0.0069, NON_ADAPTIVE: 0.0745}
"""V-D: violations at the paper's rate."""
PAIR_FACTORS = (0.92, 0.94, 0.96, 0.98, 1.0, 1.02)
"""Factors on the high rate from which `pair` chooses."""
SEEDS = tuple(range(1_000_000, 1_000_003))
HALVINGS = 4
"""Bisections of a range of rates from 1 to 2 times: the result is exact to 4.4%."""
MOST = 1024.0
"""Requests per second: the upper limit of searches."""


def workload(name: str, rate: float, num_requests: int, seed: int) -> Document:
    """A built-in workload, or requests of a trace (a path), with a different pair of hours for each seed."""
    document: Document = {"num_requests": num_requests, "arrivals": rate}
    if Path(name).suffix:
        search = seed >= SEEDS[0]
        return document | {"trace": {"path": name, "from_s": 7200 * ((seed - SEEDS[0] if search else seed) % 12)}}
    return document | {"builtin": name}


def levels(name: str, num_requests: int, replicas: int, wanted: list[str], seeds: list[int]) -> Measurement:
    """The rate of each wanted level."""
    pressed = cache(partial(_pressed, name, num_requests, replicas, tuple(seeds)))
    return {level: _highest(lambda rate, most=SHARES[level]: pressed(rate) <= most) for level in wanted}  # type: ignore[misc]


def pair(name: str, num_requests: int, replicas: int, high: float, seeds: list[int]) -> Measurement:
    """The rate whose violations are nearest to the paper's pair, by the ratios of both; and all tried rates."""
    tried = {}
    for factor in PAIR_FACTORS:
        rate = float(f"{high * factor:.4g}")
        tried[f"{rate:g}"] = {
            system: float(
                np.mean(
                    [
                        SimulationTask(
                            served(workload(name, rate, num_requests, seed), system, replicas=replicas),
                            seed,
                            violations,
                        ).measure(Path())["violations"]
                        for seed in seeds
                    ]
                )
            )
            for system in PAIR
        }
    nearest = min(tried, key=lambda rate: sum(abs(np.log(max(tried[rate][s], 1e-6) / PAIR[s])) for s in PAIR))
    return {"rate": float(nearest), "tried": tried}


def violations(run: Run) -> Measurement:
    """The share of missed answering SLOs, by the pace."""
    by_pace = phases(run.records, run.records.requests, TPOT_ONLY)
    return {"violations": by_pace.violations if by_pace else 0.0}


def unpressed(name: str, num_requests: int) -> Measurement:
    """The rate of section III."""
    return {"rate": _highest(lambda rate: _filled(name, num_requests, rate) <= FILLED)}


def _highest(holds: Callable[[float], bool]) -> float:
    """The highest rate for which `holds`, by doubling and bisection, assuming that it holds for low rates. `MOST` if it
    holds for all."""
    low = 0.5
    while holds(2 * low):
        low *= 2
        if low >= MOST:
            return MOST
    high = 2 * low
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return float(f"{low:.4g}")


def _pressed(name: str, num_requests: int, replicas: int, seeds: tuple[int, ...], rate: float) -> float:
    until_s = num_requests / rate
    measured = []
    for seed in seeds:
        document: dict[str, Any] = served(workload(name, rate, num_requests, seed), FCFS, replicas=replicas)
        measured.append(
            SimulationTask({**document, "simulation": {"until_s": until_s}}, seed, pressure).measure(Path())
        )
    return float(np.mean([each["pressure"] for each in measured]))


def pressure(run: Run) -> Measurement:
    """The share of the replicas' time in which a request waits, over the second half of the run."""
    table = run.records.stretches
    to_s = run.records.end_s
    from_s = to_s / 2
    k, start_s = floats(table, "iterations"), floats(table, "start_s")
    end_s = start_s + k * floats(table, "a_s") + floats(table, "b_s") * k * (k - 1) / 2
    lasted_s = np.clip(end_s, from_s, to_s) - np.clip(start_s, from_s, to_s)
    waiting_s = lasted_s[floats(table, "num_waiting") > 0].sum()
    return {"pressure": float(waiting_s / (to_s - from_s) / len(run.records.replicas))}


def _filled(name: str, num_requests: int, rate: float) -> float:
    peaks = [
        SimulationTask(served(workload(name, rate, num_requests, seed), FCFS, replicas=1), seed, peak).measure(Path())
        for seed in SEEDS
    ]
    return float(np.mean([each["peak"] for each in peaks]))


def peak(run: Run) -> Measurement:
    """The largest share of the KV cache in use."""
    use = run.summary.kv_use
    return {"peak": use.peak if use else 0.0}
