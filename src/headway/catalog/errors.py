"""Errors of predictions against measured runs, and the resulting bands around new predictions.

Split conformal prediction (Vovk, Gammerman and Shafer 2005; Lei et al. 2018): of n runs like the new one, the ceil(0.9
(n + 1))-th smallest error covers it with a probability of at least 90%, for any distribution of errors. An error is the
absolute logarithm of measured over predicted, so a band is a factor to both sides. Where a class has too few runs, its
runs are not like those of other classes, but its model may be one more like the other models: the same rank of models'
largest errors covers all runs of a new one (as two-layer data in Dunn, Wasserman and Ramdas 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain, product
from math import ceil, exp, inf, log
from operator import attrgetter
from statistics import fmean
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headway.catalog.coefficients import Coefficients
from headway.core.fleet import Model

Known = Literal["GPU and version", "GPU", "neither"]
Weights = Literal["16 bit", "8 bit", "4 bit", "experts"]
Load = Literal["low", "medium", "high"]
LeftOut = Literal["model", "run"]

KNOWN: tuple[Known, ...] = ("GPU and version", "GPU", "neither")
"""The measured part of the step times, best case first: the GPU's kernels and the engine's version, the kernels only,
or neither."""
LOADS: tuple[tuple[float, Load], ...] = ((0.25, "low"), (0.75, "medium"), (inf, "high"))
"""Upper bound of `metrics.usage.fullest`, and the load's name."""
MOST_WAITING = 0.1
"""Share of requests' time before admission above which the load counts as high at any fullness, because prompts wait
for prompts."""
LEVEL = 0.9
LEAST_RUNS, LEAST_MODELS = 9, 3
"""Minimum number of runs in a band's class, and of models in these runs. 9 is the least number of runs for which the
90% rank exists."""
METRICS = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "itl_mean", "e2e_mean", "e2e_p99")
"""Latencies with known errors."""
_STATISTICS = {"mean": "mean", "p50": "mean", "p90": "p99", "p95": "p99", "p99": "p99"}
"""Maps each statistic of a distribution to the statistic whose error is used for it."""


class ErrorClass(Struct, frozen=True, forbid_unknown_fields=True):
    """Predictions with similar errors. None: any."""

    known: Known
    weights: Weights | None = None
    load: Load | None = None

    @property
    def label(self) -> str:
        """A label such as "GPU and version measured, experts, low load"."""
        known = "GPU and version not measured" if self.known == "neither" else f"{self.known} measured"
        parts = [f"{self.weights} weights" if self.weights and self.weights != "experts" else self.weights]
        return ", ".join(filter(None, [known, *parts, f"{self.load} load" if self.load else None]))


class RunErrors(Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of the predictions for one measured run, with step times fitted without the run's model."""

    run: str
    model: str
    engine: str
    gpu: str
    known: Known
    weights: Weights
    fullness: float
    """Predicted fullness, as in `load_of`."""
    waiting_share: float
    errors: dict[str, float]
    """Logarithm of measured over predicted, by `METRICS`; positive if measured slower than predicted."""

    @property
    def load(self) -> Load:
        return load_of(self.fullness, self.waiting_share)

    @property
    def own_class(self) -> ErrorClass:
        """The class of the run's prediction."""
        return ErrorClass(self.known, self.weights, self.load)

    def is_in(self, wanted: ErrorClass) -> bool:
        return (
            self.known == wanted.known and wanted.weights in (None, self.weights) and wanted.load in (None, self.load)
        )


class ErrorFile(Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    runs: tuple[RunErrors, ...]


class Band(Struct, frozen=True, omit_defaults=True):
    """The interval that contains a measured latency, in seconds, or energy with a probability of at least `level`."""

    low: float
    high: float
    level: float
    basis: ErrorClass
    """The class of the band's runs: the prediction's class, or all runs so well known if it has too few."""
    num_runs: int
    num_models: int
    num_own_runs: int
    """Number of runs in the prediction's own class."""


class PredictionErrors:
    """Bands and probabilities from measured runs."""

    def __init__(self, runs: Sequence[RunErrors], like: PredictionErrors | None = None) -> None:
        """like: a class has its own band if it has one there, however few of its runs are in `runs`."""
        self._runs, self._like = tuple(runs), like or self
        self._factors: dict[tuple[str, ErrorClass], Band | None] = {}
        """The band of a prediction of 1, by metric and class."""

    def band(self, predicted_s: float, metric: str, wanted: ErrorClass) -> Band | None:
        """The band of one of `METRICS`; None if no class has enough runs with this metric.

        A less well known class never gets a narrower band. If a class has too few runs for its own band, the band
        contains the runs of all models, or of the `LEVEL` of them that rank below the others.
        """
        key = metric, wanted
        if key not in self._factors:
            self._factors[key] = self._factors_of(*key)
        of_one = self._factors[key]
        if of_one is None:
            return None
        return replace(of_one, low=predicted_s / of_one.high, high=predicted_s * of_one.high)

    def has_own_band(self, metric: str, wanted: ErrorClass) -> bool:
        runs = self._of(metric, wanted)
        return len(runs) >= LEAST_RUNS and len({run.model for run in runs}) >= LEAST_MODELS

    def _factors_of(self, metric: str, wanted: ErrorClass) -> Band | None:
        widest = max(self._sets(metric, wanted), key=lambda each: each.half(), default=None)
        if widest is None:
            return None
        factor = exp(widest.half())
        return Band(
            low=1.0 / factor,
            high=factor,
            level=LEVEL,
            basis=widest.basis,
            num_runs=len(widest.errors),
            num_models=len(widest.models),
            num_own_runs=len(self._of(metric, wanted)),
        )

    def chance(self, predicted_s: float, target_s: float, metric: str, wanted: ErrorClass) -> float | None:
        """Lower bound of the probability that at most `target_s` is measured; None as in `band`."""
        found = [*self._sets(metric, wanted)]
        if not found or not predicted_s > 0:
            return None
        room = log(target_s / predicted_s) if target_s > 0 else -inf
        return min(each.chance(room) for each in found)

    def joint(self, metrics: Sequence[str], known: Known) -> float | None:
        """Factor on the logarithms of these metrics' bands, so that they contain all errors of a run with probability
        `LEVEL`.

        The score of a run is its largest error as a share of half the band, from runs of other models. None: too few
        runs.
        """
        scores = []
        for model in {run.model for run in self._runs}:
            others = PredictionErrors([run for run in self._runs if run.model != model], self)
            for run in self._runs:
                if run.model == model and run.known == known:
                    found = {each: others.band(1.0, each, run.own_class) for each in metrics if each in run.errors}
                    shares = [abs(run.errors[each]) / log(band.high) for each, band in found.items() if band]
                    scores += [max(shares)] if shares else []
        return quantile(scores, LEVEL)

    def _of(self, metric: str, wanted: ErrorClass) -> list[RunErrors]:
        return [run for run in self._runs if metric in run.errors and run.is_in(wanted)]

    def _sets(self, metric: str, wanted: ErrorClass) -> Iterator[_ErrorSet]:
        """The runs of this class, and the better measured runs of the same class; of all classes, by model, if it has
        no band of its own."""
        for known in KNOWN[: KNOWN.index(wanted.known) + 1]:
            own, every = replace(wanted, known=known), ErrorClass(known)
            basis = own if self._like.has_own_band(metric, own) else every
            models: dict[str, list[float]] = {}
            for run in self._of(metric, basis) if self._like.has_own_band(metric, basis) else []:
                models.setdefault(run.model, []).append(run.errors[metric])
            if models:
                narrower = None if basis == own else tuple(run.errors[metric] for run in self._of(metric, own))
                yield _ErrorSet(basis, tuple(map(tuple, models.values())), narrower)


class _ErrorSet(Struct, frozen=True):
    """Errors of one metric over the runs of a class."""

    basis: ErrorClass
    models: tuple[tuple[float, ...], ...]
    """The errors of each model's runs."""
    narrower: tuple[float, ...] | None
    """Errors of the prediction's class, if it has too few runs to be the basis. None: it is the basis."""

    @property
    def errors(self) -> list[float]:
        return [*chain.from_iterable(self.models)]

    def half(self) -> float:
        """Half the band's width in logarithms: the `LEVEL` quantile of the runs' errors, or of the models' largest. The
        largest of all if there are fewer than `LEAST_RUNS`: of n it covers the next with probability n / (n + 1)."""
        largest = [max(map(abs, each)) for each in self.models]
        half = quantile([*map(abs, self.errors)] if self.narrower is None else largest, LEVEL)
        return max(largest) if half is None else half

    def chance(self, room: float) -> float:
        """Lower bound of the probability of an error of at most `room`: of a new model's run, if there are `LEAST_RUNS`
        models, else as if all runs were of models of their own. A narrower class's runs can only lower it."""
        if self.narrower is None:
            return share_below(self.errors, room)
        shares = [sum(error <= room for error in each) / len(each) for each in self.models]
        of_all = sum(shares) / (len(shares) + 1) if len(shares) >= LEAST_RUNS else share_below(self.errors, room)
        return min(of_all, (sum(each <= room for each in self.narrower) + 1) / (len(self.narrower) + 1))


def quantile(scores: Sequence[float], level: float) -> float | None:
    """The ceil(level (n + 1))-th smallest score. The next score does not exceed it with a probability of at least
    `level`, if all orders of the scores are equally likely. None for too few scores, which give no bound."""
    rank = ceil(level * (len(scores) + 1) - 1e-9)
    return sorted(scores)[rank - 1] if 1 <= rank <= len(scores) else None


def share_below(scores: Sequence[float], most: float) -> float:
    """Lower bound of the probability that the next score is at most `most`."""
    return sum(each <= most for each in scores) / (len(scores) + 1)


class Coverage(Struct, frozen=True):
    """How often measured values lay in bands computed without them."""

    of: ErrorClass
    num_runs: int
    num_models: int
    num_own_band: int
    """Number of the runs whose class, by weights and load, has a band of its own."""
    covered: dict[str, float]
    """Maps each metric to the share of its runs within their bands."""
    covered_all: float
    """The same of all metrics together."""
    width: dict[str, float]
    """Maps each metric to half the width of the runs' bands from all runs, in the geometric mean, as a factor minus
    1."""


def coverage(runs: Sequence[RunErrors], left_out: LeftOut = "model") -> list[Coverage]:
    """Coverage over all runs, by weights and by load, for each degree of measurement.

    The band of a run comes from the runs of other models, or from all other runs. Either way it is of the same class
    as with all runs: what is left of a class that has just enough runs does not take a wider band.
    """
    every = PredictionErrors(runs)
    unit = attrgetter("model") if left_out == "model" else attrgetter("model", "run")
    without = {out: PredictionErrors([run for run in runs if unit(run) != out], every) for out in set(map(unit, runs))}
    classes = {ErrorClass(r.known, *parts) for r in runs for parts in ((), (r.weights,), (None, r.load))}
    order = [*KNOWN, None, "16 bit", "8 bit", "4 bit", "experts", "low", "medium", "high"]
    found = []
    for wanted in sorted(classes, key=lambda c: [order.index(each) for each in (c.known, c.weights, c.load)]):
        own = [run for run in runs if run.is_in(wanted)]
        inside: dict[str, list[bool]] = {}
        halves: dict[str, list[float]] = {}
        for run, metric in product(own, METRICS):
            held_out, band = (each.band(1.0, metric, run.own_class) for each in (without[unit(run)], every))
            if metric in run.errors and held_out is not None and band is not None:
                inside.setdefault(metric, []).append(abs(run.errors[metric]) <= log(held_out.high))
                halves.setdefault(metric, []).append(log(band.high))
        if inside:
            found.append(
                Coverage(
                    of=wanted,
                    num_runs=len(own),
                    num_models=len({run.model for run in own}),
                    num_own_band=sum(every.has_own_band("e2e_mean", run.own_class) for run in own),
                    covered={metric: fmean(each) for metric, each in inside.items()},
                    covered_all=fmean(chain.from_iterable(inside.values())),
                    width={metric: exp(fmean(each)) - 1 for metric, each in halves.items()},
                )
            )
    return found


def metric_of(key: str) -> str | None:
    """The metric of `METRICS` whose errors stand for a summary key such as "ttft_s.p95"; None if there is none."""
    name, _, statistic = key.partition(".")
    metric = f"{name.removesuffix('_s')}_{_STATISTICS.get(statistic, '')}"
    is_median_gap = key == "itl_s.p50"  # the mean contains iterations with prompts, the median does not
    return metric if metric in METRICS and not is_median_gap else None


def known_of(used: Coefficients) -> Known:
    """The measured parts of these step times, as one of `KNOWN`."""
    if used.calibrated:
        return "GPU and version"
    return "neither" if any("kernels" in each for each in used.estimated) else "GPU"


def weights_of(model: Model) -> Weights:
    """The class of a model's weights: experts in any precision, otherwise dense weights by their bits."""
    if model.moe is not None:
        return "experts"
    return "4 bit" if "4" in model.dtype else "8 bit" if "8" in model.dtype else "16 bit"


def load_of(fullness: float, waiting_share: float) -> Load:
    """The load of a run, by `metrics.usage.fullest` and the share of requests' time before admission."""
    if waiting_share > MOST_WAITING:
        return "high"
    return next(name for most, name in LOADS if fullness <= most)


@cache
def prediction_errors() -> PredictionErrors:
    """The expected errors of predictions, from the measured runs of the catalog."""
    return PredictionErrors(error_file().runs)


@cache
def error_file() -> ErrorFile:
    """The errors that `scripts/fit_errors.py` found."""
    data = files("headway.catalog") / "data" / "errors.json"
    return msgspec.json.decode(data.read_bytes(), type=ErrorFile)
