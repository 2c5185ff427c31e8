"""The error of the step-time model in a run's latencies: the class of its predictions, and their bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.catalog.coefficients import Coefficients
from headway.catalog.errors import (
    KNOWN,
    LEVEL,
    Band,
    ErrorClass,
    Known,
    Weights,
    known_of,
    load_of,
    metric_of,
    prediction_errors,
    weights_of,
)
from headway.catalog.power import PowerShares, power_shares
from headway.core.fleet import Gpu, Model
from headway.metrics.latency import SLO_KINDS
from headway.metrics.summary import MetricsByReplica, Summary, flatten

SHOWN = ("ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "e2e_s.mean", "e2e_s.p99")
"""Summary keys whose bands tables and charts show."""
ENERGY = ("energy_kwh", "joules_per_output_token")


def error_class(pools: Sequence[tuple[Model, Coefficients]], full: float, waiting_share: float) -> ErrorClass:
    """The class of a run on these pools, by the least known pool. Models with different classes of weights have no
    class of weights in common: None."""
    known: Known = max((known_of(used) for _, used in pools), key=KNOWN.index)
    weights: set[Weights] = {weights_of(model) for model, _ in pools}
    return ErrorClass(known, weights.pop() if len(weights) == 1 else None, load_of(full, waiting_share))


def longest(wanted: ErrorClass) -> dict[str, float]:
    """Maps each kind of SLO to the largest ratio of measured to predicted mean latency that is 90% likely not to be
    exceeded. Kinds with unknown errors are left out."""
    bands = {kind: prediction_errors().band(1.0, f"{kind}_mean", wanted) for kind in SLO_KINDS}
    return {kind: band.high for kind, band in bands.items() if band is not None}


def so_much_longer(factors: Mapping[str, float]) -> str:
    """The beginning of a sentence on the effect of latencies that are longer by these factors (`longest`)."""
    times = ", ".join(f"{kind.upper()} x{factor:.2f}" for kind, factor in factors.items())
    return f"9 of 10 measured runs are within {times} of the predicted latencies: if all were so much longer"


def energy_bands(gpus: Sequence[Gpu], summary: Summary) -> dict[str, Band]:
    """The band of each energy of the summary by its key, at the least known GPU."""
    bases: list[tuple[float, PowerShares, Known]] = []
    for gpu in gpus:
        shares, is_measured = power_shares(gpu)
        error = shares.error if is_measured else shares.error_if_like
        bases.append((error, shares, "GPU" if is_measured else "neither"))
    by_key = {}
    for key in ENERGY if bases else ():
        value = getattr(summary, key)
        if value is not None:
            error, shares, known = max(bases, key=lambda basis: (basis[2] == "neither", basis[0]))
            own = shares.num_loads if known == "GPU" else 0
            ends = value / (1 + error), value * (1 + error)
            by_key[key] = Band(*ends, LEVEL, ErrorClass(known), shares.num_loads, shares.num_models, own)
    return by_key


def bands(pools: Sequence[tuple[Model, Coefficients]], summary: Summary) -> dict[str, Band]:
    """The band of each latency of the summary by its key; empty without pools on GPUs."""
    if not pools or summary.e2e_s is None:
        return {}
    full = summary.replicas.fullness if isinstance(summary.replicas, MetricsByReplica) else 0.0
    waited_s = summary.queueing_s.mean if summary.queueing_s is not None else 0.0
    waiting_share = waited_s / summary.e2e_s.mean if summary.e2e_s.mean > 0 else 0.0
    wanted = error_class(pools, full, waiting_share)
    by_key = {}
    for key, value in flatten(summary, replicas=False).items():
        metric = metric_of(key)
        if metric is not None and value is not None:
            band = prediction_errors().band(float(value), metric, wanted)
            if band is not None:
                by_key[key] = band
    return by_key
