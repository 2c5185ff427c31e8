"""Errors of predicted against measured latencies, per experiment and stage, and over all experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import isfinite

import numpy as np
from msgspec import UNSET, Struct, UnsetType, field

from headway.calibration.replay import Floats, ReplayResult, SimulatedLatencies
from headway.calibration.serving import MeasuredLatencies, MeasuredRequests, ServingExperiment

OVERALL = ("e2e_mean", "itl_mean", "tpot_mean", "ttft_mean", "e2e_p90", "e2e_p99", "ttft_p90", "ttft_p99")
"""Keys of the errors. `tpot` is the time per token computed from E2E and TTFT."""


class LatencyError(Struct, frozen=True):
    """One latency, in milliseconds. `error_pct` is positive if the prediction is too slow."""

    measured: float
    predicted: float
    error_pct: float


class ExperimentErrors(Struct, frozen=True):
    id: str
    workload: str
    model: str
    gpu: str
    tp: int
    dp: int
    calibrated: bool
    contradiction: str | None
    """An inconsistency within the measurement, if any."""
    num_unfinished: int
    errors: dict[str, LatencyError]
    stages: list[dict[str, LatencyError]]
    first_share_of_ttft: float | None = None
    """Part of the predicted mean TTFT that is due to the first hundred requests, whose prompts are not cached yet."""
    load_factor: float | None = None
    """Factor on the arrival rate at which the predicted TTFT equals the measured one; None if it was not requested or
    does not exist."""
    concurrency: float = 0.0
    """Mean share of `max_num_seqs` in use, by Little's law from the measured rate and E2E."""
    pp: int = 1
    engine: str = ""
    engine_version: str = ""
    file: str = ""
    ks_distance: dict[str, float] | UnsetType = UNSET
    """Kolmogorov-Smirnov distance between predicted and measured latencies of the requests, by `ttft`, `tpot`, `e2e`:
    the largest difference between the shares of requests below any latency, 0 to 1. Absent if the file has no requests.
    """


class Validation(Struct, frozen=True):
    """Errors of the simulator on a file of experiments, in percent, means over experiments."""

    overall: dict[str, float]
    """Mean absolute percentage errors."""
    bias: dict[str, float]
    """Mean signed percentage errors."""
    consistent: dict[str, float]
    """Like `overall`, without inconsistent experiments."""
    num_experiments: int
    contradicting: list[str]
    experiments: list[ExperimentErrors]
    refused: list[str] = field(default_factory=list)
    """Skipped rows with reasons."""
    notes: list[str] = field(default_factory=list)
    """Assumptions about the experiments."""


def compare(
    experiment: ServingExperiment,
    replayed: ReplayResult,
    calibrated: bool,
    load_factor: float | None = None,
    file: str = "",
) -> ExperimentErrors:
    """Compare every measured latency of an experiment with its prediction."""
    tokens = experiment.output_tokens
    return ExperimentErrors(
        id=experiment.id,
        workload=experiment.workload,
        model=experiment.model.name,
        gpu=experiment.gpu.name,
        tp=experiment.tp,
        dp=experiment.dp,
        calibrated=calibrated,
        contradiction=experiment.contradiction,
        num_unfinished=replayed.num_unfinished,
        errors=pairs(experiment.measured, replayed.overall, tokens),
        stages=[
            pairs(stage.measured, simulated, tokens)
            for stage, simulated in zip(experiment.stages, replayed.stages, strict=True)
        ],
        first_share_of_ttft=_first_share_of_ttft(replayed),
        load_factor=load_factor,
        concurrency=_concurrency(experiment),
        pp=experiment.pp,
        engine=experiment.engine,
        engine_version=experiment.engine_version,
        file=file,
        ks_distance=UNSET if experiment.requests is None else _ks_distances(experiment.requests, replayed.overall),
    )


def _ks_distances(measured: MeasuredRequests, simulated: SimulatedLatencies) -> dict[str, float]:
    """Distances for each measured kind of latency."""
    found = {}
    for kind in ("ttft", "tpot", "e2e"):
        real, predicted = getattr(measured, f"{kind}_ms"), getattr(simulated, f"{kind}_ms")
        real, predicted = real[np.isfinite(real)], predicted[np.isfinite(predicted)]
        if len(real) and len(predicted):
            found[kind] = ks_distance(real, predicted)
    return found


def ks_distance(one: Floats, other: Floats) -> float:
    """The largest difference between two empirical distribution functions, 0 to 1 (Kolmogorov and Smirnov)."""
    one, other = np.sort(one), np.sort(other)
    at = np.concatenate([one, other])
    below = (np.searchsorted(each, at, side="right") / len(each) for each in (one, other))
    return float(np.abs(np.subtract(*below)).max())


def _first_share_of_ttft(replayed: ReplayResult) -> float | None:
    if replayed.warm is None or not len(replayed.overall.ttft_ms):
        return None
    return float(1 - replayed.warm.ttft_ms.mean() / replayed.overall.ttft_ms.mean())


def _concurrency(experiment: ServingExperiment) -> float:
    duration_s = sum(stage.duration_s for stage in experiment.stages)
    num = sum(stage.rate_rps * stage.duration_s for stage in experiment.stages)
    in_flight = num / duration_s * experiment.measured.e2e_mean_ms / 1e3
    return in_flight / (experiment.max_num_seqs * experiment.dp)


def pairs(measured: MeasuredLatencies, simulated: SimulatedLatencies, output_tokens: int) -> dict[str, LatencyError]:
    """Errors of the measured latencies by the keys of `OVERALL`; empty without requests.

    The time per token of single-token outputs is omitted.
    """
    errors = {}
    for key in OVERALL if len(simulated.e2e_ms) else ():
        real = measured.tpot_ms(output_tokens) if key == "tpot_mean" else getattr(measured, f"{key}_ms")
        kind, statistic = key.split("_")
        if key == "itl_mean":
            predicted = simulated.itl_mean_ms
        else:
            values = getattr(simulated, f"{kind}_ms")
            values = values if simulated.gaps is None or kind != "tpot" else values[simulated.gaps > 0]
            predicted = math.nan
            if len(values):
                predicted = float(values.mean() if statistic == "mean" else np.percentile(values, int(statistic[1:])))
        if isfinite(predicted) and real > 0:
            errors[key] = LatencyError(real, predicted, (predicted / real - 1) * 100)
    return errors


def validation(
    compared: Sequence[ExperimentErrors], refused: Sequence[str] = (), notes: Sequence[str] = ()
) -> Validation:
    consistent = [one for one in compared if one.contradiction is None]
    return Validation(
        overall=_means(compared, absolute=True),
        bias=_means(compared, absolute=False),
        consistent=_means(consistent, absolute=True),
        num_experiments=len(compared),
        contradicting=[one.id for one in compared if one.contradiction is not None],
        experiments=list(compared),
        refused=list(refused),
        notes=list(notes),
    )


def _means(compared: Sequence[ExperimentErrors], absolute: bool) -> dict[str, float]:
    means: dict[str, float] = {}
    for key in OVERALL:
        errors = [one.errors[key].error_pct for one in compared if key in one.errors]
        if errors:
            means[key] = sum(abs(error) if absolute else error for error in errors) / len(errors)
    return means
