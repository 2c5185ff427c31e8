"""The load error: the factor on the arrival rate at which the predicted TTFT equals the measured one.

Near saturation a small error of the capacity is a large error of TTFT: if a replica is predicted to saturate at 0.83 of
its true rate, TTFT is off by +91%. The factor measures the error of the capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

from msgspec.structs import replace

from headway.calibration.replay import replay
from headway.calibration.serving import ServingExperiment
from headway.catalog.coefficients import Coefficients
from headway.workload.transform import arriving_at

MOST = 2.0
"""Largest factor, and the reciprocal of the smallest."""
STEPS = 6
"""Bisection steps on the logarithm, which give the factor to 1%."""
NEAR, STEEP = 1.1, 1.5
"""A load is near saturation if TTFT at `NEAR` times the rate is at least `STEEP` times the TTFT at the rate over
`NEAR`."""


def load_factor(experiment: ServingExperiment, coefficients: Coefficients | None = None) -> float | None:
    """The load error; below 1 the replica is predicted to saturate too early.

    None if TTFT does not determine the load: no factor up to `MOST` gives the measured TTFT, or TTFT hardly depends on
    the rate.
    """
    if experiment.load is not None and experiment.load.concurrency is not None:
        return None  # a closed loop has no independent rate
    wanted_ms = experiment.measured.ttft_mean_ms

    def ttft_ms(factor: float) -> float:
        return float(replay(scaled(experiment, factor), (0,), coefficients=coefficients).overall.ttft_ms.mean())

    factor = crossing(ttft_ms, wanted_ms)
    if factor is None or ttft_ms(factor * NEAR) < STEEP * ttft_ms(factor / NEAR):
        return None
    return factor


def crossing(ttft_ms: Callable[[float], float], wanted_ms: float) -> float | None:
    """The factor at which an increasing `ttft_ms` reaches `wanted_ms`, by bisection from 1 outwards."""
    is_slow = ttft_ms(1.0) > wanted_ms
    low, high = (-log(MOST), 0.0) if is_slow else (0.0, log(MOST))
    edge_ms = ttft_ms(exp(low if is_slow else high))
    if (edge_ms > wanted_ms) is is_slow:
        return None
    for _ in range(STEPS):
        middle = (low + high) / 2
        if ttft_ms(exp(middle)) > wanted_ms:
            high = middle
        else:
            low = middle
    return exp((low + high) / 2)


def scaled(experiment: ServingExperiment, factor: float) -> ServingExperiment:
    """The experiment with `factor` times the arrival rate and the same number of requests."""
    load = experiment.load
    if load is not None:
        arrival_s = load.workload.arrival_s / factor
        load = replace(load, workload=arriving_at(load.workload, arrival_s))
    stages = tuple(
        replace(stage, rate_rps=stage.rate_rps * factor, duration_s=stage.duration_s / factor)
        for stage in experiment.stages
    )
    return replace(experiment, stages=stages, load=load)
