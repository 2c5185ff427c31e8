"""Fits an engine's overhead, and the efficiency of unmeasured kernels, to served runs.

The result is the most probable set of values given the runs, with the catalog as prior (maximum a posteriori). Each run
is simulated completely; the residuals are the logarithms of simulated over measured time per token and TTFT.
Gauss-Newton steps use finite differences of simulations with equal random numbers. The curvature shows which terms the
runs determine: by the posterior's width over the prior's, and by pairs of terms of which only the sum is determined.
The reported error is measured on runs that a fit has not seen, each left out in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from headway.calibration.replay import ReplayResult, replay
from headway.calibration.serving import ServingExperiment
from headway.calibration.solve import FitResult, lsq_linear
from headway.calibration.terms import Term, applied, terms_of, values_at
from headway.calibration.validation import compare, validation
from headway.catalog.coefficients import Coefficients
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu

Floats = npt.NDArray[np.float64]
Progress = Callable[[float], None]
MIN_RUNS = 4
"""Minimum number of runs or stages of load."""
MIN_RUNS_BESIDE_ITERATIONS = 2
TTFT_WEIGHT = 0.5
"""Weight of a TTFT residual relative to a time-per-token residual, because TTFT depends on queueing."""
NOISE, LEAST_NOISE, MOST_NOISE = 0.05, 0.01, 0.2
"""Relative error of measurements and model: its initial value, and the bounds of its estimate from the residuals."""
NUDGE = 0.5
"""Step of the finite differences, in standard deviations of the prior."""
ROUNDS = 6
SETTLED = 0.05
"""A fit has converged when a step lowers the sum of squares by less than this share."""
BACKTRACKS = 2
"""Number of shorter steps that are tried, each a third of the step before."""
RENEWALS = 1
"""Maximum number of times that the slopes are simulated again."""
KEPT, PARTLY = 0.9, 0.5
"""Shares of the prior's width that a fit may leave: above the first share a term counts as not determined, above the
second as partly determined."""
SURE, CONFOUNDED = 0.2, 0.6
"""Two terms that the runs would determine if alone are confounded if more than the first share of both priors' widths
is left, and their posterior correlation exceeds the second value."""


class Posterior(Struct, frozen=True):
    """The fit's result in standard deviations of the prior."""

    x: Floats
    width: Floats
    """Remaining standard deviation over the prior's; 1 means that the runs determine nothing."""
    information: npt.NDArray[np.float64]
    """Curvature of the data's part of the objective."""
    slope: npt.NDArray[np.float64]
    left: Floats
    """Residuals at `x`."""
    noise: float


def fit_served(
    experiments: Sequence[ServingExperiment],
    gpu: Gpu,
    engine: Engine,
    known: Coefficients,
    is_measured: bool,
    progress: Progress | None = None,
    has_iterations: bool = False,
) -> tuple[FitResult, Coefficients, list[str]]:
    """The fit, the step times with it, and notes on undetermined terms.

    Raises HeadwayError for too few runs, and for times that are impossible on this GPU and model.
    """
    num = sum(len(e.stages) for e in experiments)
    least = MIN_RUNS_BESIDE_ITERATIONS if has_iterations else MIN_RUNS
    if num < least:
        raise HeadwayError(f"{num} served loads; expected at least {least}, at different rates")
    fit = _Fit(experiments, terms_of(experiments, known, engine, is_measured, has_iterations), known, engine)
    fit.check_possible(gpu, is_measured)
    found = fit.solve(progress)
    errors = fit.held_out(found)
    pinned = tuple(term.name for term, x in zip(fit.terms, found.x, strict=True) if _is_at_bound(term, float(x)))
    result = FitResult(
        key=f"overhead.{engine.name}",
        values=values_at(fit.terms, found.x),
        num_fitted=num,
        num_held_out=num,
        residual=errors["itl_mean_median"],
        bias=errors["itl_mean_bias"],
        at_bounds=pinned,
        prior=values_at(fit.terms, np.zeros(len(fit.terms))),
        width={term.name: float(width) for term, width in zip(fit.terms, found.width, strict=True)},
        held_out={key: value for key, value in errors.items() if not key.startswith("itl_mean_")},
    )
    return result, applied(result.values, known, engine), list(_notes(fit.terms, found))


class _Fit:
    """The experiments and the terms of one fit."""

    def __init__(
        self, experiments: Sequence[ServingExperiment], terms: tuple[Term, ...], known: Coefficients, engine: Engine
    ) -> None:
        self.experiments, self.terms = experiments, terms
        self._known, self._engine = known, engine
        self._owner = np.concatenate([[i] * 2 * len(e.stages) for i, e in enumerate(experiments)])
        one = [len(e.stages) ** -0.5 for e in experiments for _ in e.stages]
        self._weight = np.ravel([(each, TTFT_WEIGHT * each) for each in one])

    def _replayed(self, experiment: ServingExperiment, x: Floats) -> ReplayResult:
        coefficients = applied(values_at(self.terms, x), self._known, self._engine)
        return replay(experiment, (0,), coefficients=coefficients)

    def residuals(self, x: Floats) -> Floats:
        """Logarithms of simulated over measured time per token and TTFT, for each stage."""
        return np.concatenate([_log_ratios(e, self._replayed(e, x)) for e in self.experiments])

    def check_possible(self, gpu: Gpu, is_measured: bool) -> None:
        """Raises HeadwayError if the runs are far from the kernels' times, or from each other."""
        bare = replace(self._known.overhead, step_s=0.0, layer_s=0.0, sequence_s=0.0)
        bare_known = replace(self._known, overhead=bare)
        names, ratios = [], []
        for e in self.experiments:
            log_ratios = _log_ratios(e, replay(e, (0,), coefficients=bare_known))
            ratios += np.exp(-log_ratios[::2]).tolist()
            names += [f"{e.model.name} tp{e.tp} {stage.rate_rps:.3g}/s {e.id}".rstrip() for stage in e.stages]
        usual = float(np.median(ratios))
        low, high = (0.5, 50.0) if is_measured else (0.01, 1e4)
        if not low <= usual <= high:
            kernels = "what the kernels alone take" if usual < low else "what the kernels take"
            times = f"{usual:.2g} of {kernels}" if usual < low else f"{usual:.0f} times {kernels}"
            raise HeadwayError(
                f"times per token are {times} on {gpu.name} (median); are units, GPU, model and tp right?"
            )
        odd = [name for name, ratio in zip(names, ratios, strict=True) if not usual / 50 < ratio < usual * 50]
        if odd:
            raise HeadwayError(
                f"{len(odd)} of {len(ratios)} loads are far from the rest (mixed units?): {'; '.join(odd[:5])}"
            )

    def solve(self, progress: Progress | None = None) -> Posterior:
        """Gauss-Newton steps from the prior, each with a line search.

        Slopes are updated after each step (Broyden), and simulated again if a step does not help.
        """
        x, noise = np.zeros(len(self.terms)), NOISE
        left = self.residuals(x)
        slope, is_fresh, num_renewed = self._slope(x, left), True, 0
        for i in range(ROUNDS):
            if progress is not None:
                progress((i + 1) / (ROUNDS + 1))
            before = self._cost(x, left, noise)
            x_before, left_before = x, left
            x, left, after = self._step(x, left, slope, noise)
            moved = x - x_before
            if after > before * (1 - SETTLED):
                if is_fresh or num_renewed == RENEWALS:
                    break
                slope, is_fresh, num_renewed = self._slope(x, left), True, num_renewed + 1
                continue
            slope = slope + np.outer(left - left_before - slope @ moved, moved) / (moved @ moved)  # Broyden's update
            is_fresh = False
            noise = float(np.clip(1.5 * np.median(np.abs(left)), LEAST_NOISE, min(noise, MOST_NOISE)))
        scaled = slope * (self._robust(left, noise) / noise)[:, None]
        information = scaled.T @ scaled
        width = np.sqrt(np.diag(np.linalg.inv(information + np.eye(len(x)))))
        return Posterior(x, width, information, slope, left, noise)

    def _step(self, x: Floats, left: Floats, slope: Floats, noise: float) -> tuple[Floats, Floats, float]:
        """The values of the terms at which the line search ends, their residuals, and their cost."""
        best = x, left, self._cost(x, left, noise)
        step = self._linear(slope, left, x, noise, self._weight) - x
        for _ in range(BACKTRACKS):
            residuals = self.residuals(x + step)
            cost = self._cost(x + step, residuals, noise)
            if cost < best[2]:
                return x + step, residuals, cost
            step = step / 3
        return best

    def held_out(self, found: Posterior) -> dict[str, float]:
        """Errors of each run predicted from the other runs, in percent: means of E2E, ITL and TTFT. For ITL also the
        median and the bias, as shares."""
        compared = []
        for i, e in enumerate(self.experiments):
            weight = np.where(self._owner == i, 0.0, self._weight)
            x = self._linear(found.slope, found.left, found.x, found.noise, weight)
            compared.append(compare(e, self._replayed(e, x), True))
        overall = validation(compared).overall
        itl = np.array([one.errors["itl_mean"].error_pct for one in compared if "itl_mean" in one.errors]) / 100
        means: dict[str, float] = {k: overall[k] for k in ("e2e_mean", "itl_mean", "ttft_mean") if k in overall}
        return {**means, "itl_mean_median": float(np.median(np.abs(itl))), "itl_mean_bias": float(np.median(itl))}

    def _slope(self, x: Floats, left: Floats) -> Floats:
        """Change of the residuals per standard deviation of each term, by a finite difference; the step goes away from
        a bound."""
        columns = []
        for i, term in enumerate(self.terms):
            nudge = -NUDGE if x[i] + NUDGE > term.bounds[1] else NUDGE
            nudged = x + nudge * (np.arange(len(x)) == i)
            columns.append((self.residuals(nudged) - left) / nudge)
        return np.stack(columns, 1)

    def _linear(self, slope: Floats, left: Floats, at: Floats, noise: float, weight: Floats) -> Floats:
        """The most probable place if residuals are linear around `at`. Large residuals get less weight."""
        low, high = (np.array([term.bounds[side] for term in self.terms]) for side in (0, 1))
        x = at
        for _ in range(5):
            robust = weight * self._robust(left + slope @ (x - at), noise) / self._weight
            a = np.vstack([slope * (robust / noise)[:, None], np.eye(len(at))])
            b = np.concatenate([(slope @ at - left) * robust / noise, np.zeros(len(at))])
            x = lsq_linear()(a, b, bounds=(low - 1e-9, high + 1e-9)).x
        return np.clip(x, low, high)

    def _robust(self, left: Floats, noise: float) -> Floats:
        """Weights that make large residuals count linearly."""
        return self._weight / np.sqrt(1 + np.abs(left) / (2 * noise))

    def _cost(self, x: Floats, left: Floats, noise: float) -> float:
        return float(((self._robust(left, noise) * left / noise) ** 2).sum() + (x**2).sum())


def _log_ratios(experiment: ServingExperiment, found: ReplayResult) -> Floats:
    """Residuals of each stage for time per token and TTFT; 0 if nothing was measured or finished."""
    ratios = []
    for stage, simulated in zip(experiment.stages, found.stages, strict=True):
        measured = stage.measured
        is_given = experiment.load is not None
        itl_ms = measured.itl_mean_ms if is_given else measured.tpot_ms(experiment.output_tokens)
        predicted_ms = simulated.itl_mean_ms if len(simulated.e2e_ms) else float("nan")
        ttft_ms = float(simulated.ttft_ms.mean()) if len(simulated.ttft_ms) else float("nan")
        ratios += [_log(predicted_ms, itl_ms), _log(ttft_ms, measured.ttft_mean_ms)]
    return np.array(ratios)


def _log(predicted: float, measured: float) -> float:
    return float(np.log(predicted / measured)) if predicted > 0 and measured > 0 else 0.0


def _is_at_bound(term: Term, x: float) -> bool:
    low, high = term.bounds
    return x < low + 1e-3 or x > high - 1e-3


def _notes(terms: Sequence[Term], found: Posterior) -> Iterator[str]:
    kept = [term.name for term, width in zip(terms, found.width, strict=True) if width > KEPT]
    partly = [term.name for term, width in zip(terms, found.width, strict=True) if PARTLY < width <= KEPT]
    if kept:
        yield f"not determined by these runs, so near the catalog's values: {', '.join(kept)}"
    if partly:
        yield f"determined in part, between the runs and the catalog's values: {', '.join(partly)}"
    covariance = np.linalg.inv(found.information + np.eye(len(terms)))
    deviation = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(deviation, deviation)
    is_open = (np.diag(found.information) > 1) & (found.width > SURE)
    for i, j in combinations(np.flatnonzero(is_open).tolist(), 2):
        if abs(correlation[i, j]) > CONFOUNDED:
            pair = f"{terms[i].name} and {terms[j].name}"
            yield f"these runs determine {pair} only together; the catalog's values divide it"
