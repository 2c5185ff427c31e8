"""Fits the terms of the step-time model to the durations of an engine's own iterations.

The result is the most probable set of values given the spans, with the catalog as prior (maximum a posteriori). Spans
are grouped into cells of similar batches. The logarithm of a cell's predicted over its measured total is one residual:
latencies are sums of iterations, so an occasional pause of the host counts with its mean. Gauss-Newton steps use finite
differences of the model itself, so the terms have the model's own meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from headway.calibration.solve import FitResult, lsq_linear
from headway.calibration.steps.read import Span
from headway.calibration.steps.regions import Region, cell, regions
from headway.calibration.terms import Term, applied, step_terms, values_at
from headway.catalog.coefficients import Coefficients
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.perf.roofline import compute_dtype
from headway.perf.speculation import step_model

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
MIN_SPANS = 200
NOISE = 0.02
"""Relative error of the step-time model in one cell of similar batches."""
SPAN_NOISE = 0.2
"""Relative error of one span's duration. A cell of n spans has this error over the root of n, in addition to its
own."""
NUDGE = 0.25
"""Step of the finite differences, in standard deviations of the prior."""
ROUNDS = 8
SETTLED = 1e-3
KEPT, PARTLY = 0.9, 0.5
"""Shares of the prior's width that a fit may leave: above the first share a term counts as not determined, above the
second as partly determined."""
FIFTH = 5
BLOCK = 20
"""Number of neighbouring spans that are held out together."""
EQUAL = "equal_contexts"
"""Factor on the speed of reading the KV cache if all contexts are equal. It explains logs of synthetic loads. Real
traffic has unequal contexts, so profiles do not contain it."""


class StepFit(Struct, frozen=True):
    result: FitResult
    coefficients: Coefficients
    before: tuple[Region, ...]
    """Errors with the previously known step times."""
    after: tuple[Region, ...]
    """Errors on unseen spans: each fifth, predicted from the other four."""
    notes: tuple[str, ...]


class SpanTimes:
    """Predicts durations of spans for any coefficients."""

    def __init__(self, spans: Sequence[Span], pool: Pool) -> None:
        self.measured_s = np.array([span.seconds for span in spans])
        self._pool = pool
        mixed = {i for i, span in enumerate(spans) if any(one.chunks for one in span.iterations)}
        plain = [(i, one) for i, span in enumerate(spans) if i not in mixed for one in span.iterations]
        self._owner = np.array([i for i, _ in plain], dtype=int)
        self._batches, self._batch = np.unique([one.decodes for _, one in plain], return_inverse=True)
        self._context = np.array([float(one.context_tokens) for _, one in plain])
        self._is_equal = np.array([spans[i].has_equal_contexts for i, _ in plain], dtype=bool)
        self._mixed = [(i, spans[i].iterations) for i in sorted(mixed)]

    @property
    def have_both(self) -> bool:
        """Whether some sequences decoded over equal contexts and others over unequal ones."""
        return bool(self._is_equal.any()) and not self._is_equal.all()

    def seconds(self, coefficients: Coefficients, equal_gain: float = 1.0) -> Floats:
        """Seconds of each span. Equal contexts are read `equal_gain` times as fast as unequal ones.

        The time of a decode-only iteration is linear in its KV tokens, so one call serves all iterations of the same
        size.
        """
        pool = self._pool
        model = step_model(pool.model, pool.gpu, pool.engine, pool.parallel, coefficients)
        found = np.zeros(len(self.measured_s))
        if len(self._batches):
            base = np.array([model.line(int(num), 0)[0] for num in self._batches])
            token = np.array([model.line(int(num), 1_000_000)[0] for num in self._batches])
            read_s = self._context * (token - base)[self._batch] / 1e6
            np.add.at(found, self._owner, base[self._batch] + np.where(self._is_equal, read_s / equal_gain, read_s))
        for i, iterations in self._mixed:
            steps = []
            for one in iterations:
                gpu_s, prompts_s, _ = model.line(one.decodes, one.context_tokens, one.chunks)
                steps.append((gpu_s, prompts_s if one.chunks else 0.0))
            found[i] = span_s(steps, pool)
        return found


def span_s(steps: Sequence[tuple[float, float]], pool: Pool) -> float:
    """Seconds from the start of a span to its end. `steps`: of each iteration, seconds of the GPU, and of the host to
    launch its prompts.

    As in `sim.timeline`: an engine that schedules ahead launches an iteration once it has reported the one before the
    last, and reports the last one after it. A span that begins with prompts begins with an idle engine.
    """
    if not pool.engine.schedule_lag:
        return sum(max(each) for each in steps)
    launch_s, reports_late = pool.engine.launch_overhead_s, pool.parallel.tp * pool.parallel.pp == 1
    scheduled_s, end_s = 0.0, steps[0][0]
    if prompts_s := steps[0][1]:
        scheduled_s, end_s = prompts_s - launch_s, max(end_s, prompts_s)
    for gpu_s, prompts_s in steps[1:]:
        launched_s = scheduled_s + (prompts_s or launch_s)
        scheduled_s = max(end_s, launched_s) if reports_late else end_s
        end_s = max(end_s + gpu_s, launched_s) if prompts_s else scheduled_s + gpu_s
    return max(end_s, scheduled_s + launch_s) if steps[-1][1] and reports_late else end_s


def fit_steps(spans: Sequence[Span], pool: Pool, known: Coefficients) -> StepFit:
    """Fit the terms that the spans determine. Raises HeadwayError for too few spans, and for times that are impossible
    for this pool."""
    if len(spans) < MIN_SPANS:
        raise HeadwayError(f"{len(spans)} durations of iterations; expected at least {MIN_SPANS}")
    times = SpanTimes(spans, pool)
    before_s = times.seconds(known)
    usual = float(np.median(times.measured_s / before_s))
    if not 0.2 <= usual <= 20:
        raise HeadwayError(
            f"iterations take {usual:.2g} times what is predicted for {pool.model.name} on {pool.gpu.name} (median);"
            " are GPU, model and tp right?"
        )
    fit, x = _best(spans, times, pool, known)
    width = fit.width(x)
    unseen_s = np.empty(len(spans))
    for turn in range(FIFTH):
        unseen = np.arange(len(spans)) // BLOCK % FIFTH == turn
        unseen_s[unseen] = fit.seconds(fit.solve(~unseen, x))[unseen]
    errors = unseen_s / times.measured_s - 1
    values = values_at(fit.terms, x)
    result = FitResult(
        key=f"steps.{pool.engine.name}",
        values=values,
        num_fitted=len(spans),
        num_held_out=len(spans),
        residual=float(np.median(np.abs(errors))),
        bias=float(unseen_s.sum() / times.measured_s.sum() - 1),
        prior=values_at(fit.terms, np.zeros(len(x))),
        width={term.name: float(each) for term, each in zip(fit.terms, width, strict=True)},
    )
    found = applied(values, fit.known, pool.engine)
    notes = tuple(_notes(fit.terms, width))
    return StepFit(result, found, regions(spans, before_s), regions(spans, unseen_s), notes)


def _best(spans: Sequence[Span], times: SpanTimes, pool: Pool, known: Coefficients) -> tuple[_Fit, Floats]:
    """The fit with smooth products or with whole tiles, whichever has the lower cost."""
    found = []
    for variant in _variants(pool, known):
        terms = step_terms(pool, variant)
        if times.have_both:
            terms = (*terms, Term(EQUAL, 1.0, 0.2, 0.5, 2.0, True))
        fit = _Fit(spans, times, terms, variant, pool)
        x = fit.solve(np.ones(len(spans), dtype=bool))
        found.append((fit.cost(x), fit, x))
    _, fit, x = min(found, key=lambda each: each[0])
    return fit, x


def _variants(pool: Pool, known: Coefficients) -> Iterator[Coefficients]:
    dtype = compute_dtype(pool.model.dtype, pool.gpu)
    product = known.kernels.gemm[dtype]
    shares = {product.wave_share, 0.0, WAVE_SHARE} if pool.gpu.num_sms else {product.wave_share}
    for share in sorted(shares):
        gemm = {**known.kernels.gemm, dtype: replace(product, wave_share=share)}
        yield replace(known, kernels=replace(known.kernels, gemm=gemm))


WAVE_SHARE = 0.3
"""Initial value for the fit with whole tiles, if the catalog has none."""


class _Fit:
    def __init__(
        self, spans: Sequence[Span], times: SpanTimes, terms: tuple[Term, ...], known: Coefficients, pool: Pool
    ) -> None:
        self.terms, self.known = terms, known
        self._times, self._pool = times, pool
        self._cells, self._index = np.unique([cell(span) for span in spans], return_inverse=True)
        self._low, self._high = (np.array([term.bounds[side] for term in terms]) for side in (0, 1))

    def seconds(self, x: Floats) -> Floats:
        """Predicted seconds of each span with these values of the terms."""
        values = values_at(self.terms, x)
        return self._times.seconds(applied(values, self.known, self._pool.engine), values.get(EQUAL, 1.0))

    def cost(self, x: Floats) -> float:
        seen = np.ones(len(self._index), dtype=bool)
        return self._cost(x, self._left(x, seen), self._scale(seen))

    def solve(self, seen: Mask, x: Floats | None = None) -> Floats:
        """The most probable place given the `seen` spans."""
        x = np.zeros(len(self.terms)) if x is None else x
        scale = self._scale(seen)
        left = self._left(x, seen)
        cost = self._cost(x, left, scale)
        for _ in range(ROUNDS):
            slope = self._slope(x, left, seen)
            for share in (1.0, 0.5, 0.2):
                to = x + share * (self._linear(slope, left, x, scale) - x)
                there = self._left(to, seen)
                if (after := self._cost(to, there, scale)) < cost:
                    break
            if after >= cost * (1 - SETTLED):
                break
            x, left, cost = to, there, after
        return x

    def width(self, x: Floats) -> Floats:
        """Remaining standard deviation of each term over its prior's."""
        seen = np.ones(len(self._index), dtype=bool)
        left = self._left(x, seen)
        scaled = self._slope(x, left, seen) * _robust(left / self._scale(seen))[:, None] / self._scale(seen)[:, None]
        return np.asarray(np.sqrt(np.diag(np.linalg.inv(scaled.T @ scaled + np.eye(len(x))))))

    def _left(self, x: Floats, seen: Mask) -> Floats:
        """Returns, for each cell, the logarithm of predicted over measured seconds; 0 for a cell without a seen
        span."""
        predicted, measured = (
            np.bincount(self._index, np.where(seen, each, 0.0), len(self._cells))
            for each in (self.seconds(x), self._times.measured_s)
        )
        return np.asarray(np.log(np.where(measured > 0, predicted, 1.0) / np.where(measured > 0, measured, 1.0)))

    def _scale(self, seen: Mask) -> Floats:
        """Returns, for each cell, the standard deviation of its residual."""
        num = np.maximum(np.bincount(self._index, seen, len(self._cells)), 1)
        return np.asarray(np.sqrt(NOISE**2 + SPAN_NOISE**2 / num))

    def _slope(self, x: Floats, left: Floats, seen: Mask) -> Floats:
        columns = []
        for i in range(len(x)):
            nudge = -NUDGE if x[i] + NUDGE > self._high[i] else NUDGE
            columns.append((self._left(x + nudge * (np.arange(len(x)) == i), seen) - left) / nudge)
        return np.stack(columns, 1)

    def _linear(self, slope: Floats, left: Floats, at: Floats, scale: Floats) -> Floats:
        x = at
        for _ in range(4):
            weight = _robust((left + slope @ (x - at)) / scale) / scale
            a = np.vstack([slope * weight[:, None], np.eye(len(at))])
            b = np.concatenate([(slope @ at - left) * weight, np.zeros(len(at))])
            x = lsq_linear()(a, b, bounds=(self._low - 1e-9, self._high + 1e-9)).x
        return np.clip(x, self._low, self._high)

    def _cost(self, x: Floats, left: Floats, scale: Floats) -> float:
        return float(((_robust(left / scale) * left / scale) ** 2).sum() + (x**2).sum())


def _robust(scaled: Floats) -> Floats:
    """Weights that make large residuals count linearly."""
    return np.asarray(1 / np.sqrt(1 + np.abs(scaled) / 2))


def _notes(terms: Sequence[Term], width: Floats) -> Iterator[str]:
    kept = [term.name for term, left in zip(terms, width, strict=True) if left > KEPT]
    partly = [term.name for term, left in zip(terms, width, strict=True) if PARTLY < left <= KEPT]
    if kept:
        yield f"not determined by these iterations, so near the catalog's values: {', '.join(kept)}"
    if partly:
        yield f"determined in part, between the iterations and the catalog's values: {', '.join(partly)}"
