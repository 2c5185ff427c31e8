"""How far what is predicted lies from what was measured: per experiment and stage, and over all experiments."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np
from msgspec import Struct, field

from headway.calibration.replay import Latencies, Replayed
from headway.calibration.serving import Experiment, Measured

OVERALL = {
    "e2e_mean": "e2e_mean_ms",
    "itl_mean": "itl_mean_ms",
    "tpot_mean": "tpot_mean_ms",
    "ttft_mean": "ttft_mean_ms",
    "e2e_p90": "e2e_p90_ms",
    "e2e_p99": "e2e_p99_ms",
    "ttft_p90": "ttft_p90_ms",
    "ttft_p99": "ttft_p99_ms",
}
"""Keys of errors, and the latencies that they are of. `tpot` is the time per token that E2E and TTFT leave."""


class Pair(Struct, frozen=True):
    """One latency, in milliseconds. `error_pct` is signed: above 0 where the prediction is too slow."""

    measured: float
    predicted: float
    error_pct: float


class Compared(Struct, frozen=True):
    """One experiment."""

    id: str
    workload: str
    model: str
    gpu: str
    tp: int
    dp: int
    calibrated: bool
    contradiction: str | None
    """What the measurement says against itself; None if nothing."""
    num_unfinished: int
    errors: dict[str, Pair]
    stages: list[dict[str, Pair]]


class Validation(Struct, frozen=True):
    """A file of experiments against the simulator. Errors in percent, means over experiments."""

    overall: dict[str, float]
    """Mean absolute percentage errors."""
    bias: dict[str, float]
    """Mean signed ones."""
    consistent: dict[str, float]
    """As `overall`, without experiments that contradict themselves."""
    num_experiments: int
    contradicting: list[str]
    experiments: list[Compared]
    refused: list[str] = field(default_factory=list)
    """Rows that were left out, and why."""


def compare(experiment: Experiment, replayed: Replayed, calibrated: bool) -> Compared:
    """Every latency of an experiment, as measured and as predicted."""
    tokens = experiment.output_tokens
    return Compared(
        id=experiment.id,
        workload=experiment.workload,
        model=experiment.model.name,
        gpu=experiment.gpu.name,
        tp=experiment.tp,
        dp=experiment.dp,
        calibrated=calibrated,
        contradiction=experiment.contradiction,
        num_unfinished=replayed.num_unfinished,
        errors=pairs(experiment.measured, replayed.whole, tokens),
        stages=[
            pairs(stage.measured, found, tokens)
            for stage, found in zip(experiment.stages, replayed.stages, strict=True)
        ],
    )


def pairs(measured: Measured, found: Latencies, output_tokens: int) -> dict[str, Pair]:
    """By the keys of `OVERALL`; what neither side has (the time per token of one token) is left out."""
    real = {
        "e2e_mean": measured.e2e_mean_ms,
        "itl_mean": measured.itl_mean_ms,
        "tpot_mean": measured.tpot_ms(output_tokens),
        "ttft_mean": measured.ttft_mean_ms,
        "e2e_p90": measured.e2e_p90_ms,
        "e2e_p99": measured.e2e_p99_ms,
        "ttft_p90": measured.ttft_p90_ms,
        "ttft_p99": measured.ttft_p99_ms,
    }
    said = _predicted(found)
    return {
        key: Pair(real[key], said[key], (said[key] / real[key] - 1) * 100)
        for key in OVERALL
        if isfinite(said[key]) and real[key] > 0
    }


def _predicted(found: Latencies) -> dict[str, float]:
    """All requests give as many tokens, so the mean gap between tokens is the mean time per token."""
    if not len(found.e2e_ms):
        return dict.fromkeys(OVERALL, float("nan"))
    tpot = float(found.tpot_ms.mean())
    said = {"e2e_mean": float(found.e2e_ms.mean()), "itl_mean": tpot, "tpot_mean": tpot}
    said["ttft_mean"] = float(found.ttft_ms.mean())
    for kind, values in (("e2e", found.e2e_ms), ("ttft", found.ttft_ms)):
        for share in (90, 99):
            said[f"{kind}_p{share}"] = float(np.percentile(values, share))
    return said


def validation(compared: Sequence[Compared], refused: Sequence[str] = ()) -> Validation:
    """Means over experiments."""
    consistent = [one for one in compared if one.contradiction is None]
    return Validation(
        overall=_means(compared, absolute=True),
        bias=_means(compared, absolute=False),
        consistent=_means(consistent, absolute=True),
        num_experiments=len(compared),
        contradicting=[one.id for one in compared if one.contradiction is not None],
        experiments=list(compared),
        refused=list(refused),
    )


def _means(compared: Sequence[Compared], absolute: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in OVERALL:
        errors = [one.errors[key].error_pct for one in compared if key in one.errors]
        if errors:
            found[key] = sum(abs(error) if absolute else error for error in errors) / len(errors)
    return found
