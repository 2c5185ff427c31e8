"""Checks whether the simulator reproduces the recorded days: each day is rehearsed as it ran, and its latencies are
compared.

If some measured latencies of a day lie outside the bands of the step times' error (`catalog.errors`), the model of this
fleet is worse than usual, and its rehearsals are no basis for advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, isfinite, log
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import Struct

from headway.catalog.coefficients import Coefficients
from headway.catalog.errors import metric_of, prediction_errors
from headway.config import strict_yaml
from headway.config.scenario import Scenario, StepTimes
from headway.core.errors import HeadwayError
from headway.core.fleet import Model
from headway.core.record import Records
from headway.metrics.summary import flatten, summarize
from headway.planning.advise.correct import own_factor, slower
from headway.planning.advise.days import Day, Part
from headway.planning.rehearsals import Rehearsal
from headway.report import model_error

KEYS = ("ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "tpot_s.p99", "e2e_s.mean", "e2e_s.p99")
STEP_TIMES = "e2e_s.mean"
"""The latency whose band is used for step times: iterations make up nearly all of it, and waits grow faster than
iterations."""


class Rehearsed(Struct, frozen=True):
    """A recorded day, simulated as it ran."""

    latencies_s: dict[str, float]
    """Latencies by `KEYS`."""
    factors: dict[str, float]
    """Maps each latency to a factor: 90% of measured values lie between the prediction divided by the factor and the
    prediction times the factor."""
    joint: float
    """Exponent for all `factors`: 90% of measured runs have every latency within its factor to this power."""
    cached_share: float | None
    """Share of prompt tokens that were cached."""
    error: str = ""
    """Why the day cannot be simulated."""


class Residual(Struct, frozen=True):
    """The residual of one latency on one day."""

    day: str
    key: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def is_inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


class Term(Struct, frozen=True):
    """The residual of one latency over all days."""

    key: str
    error: float
    """Measured over predicted, minus 1; the geometric mean over the days."""
    band: float
    """Largest usual error, as a factor minus 1: in 90% of measured runs the errors of all terms are within their
    bands."""

    @property
    def is_off(self) -> bool:
        return abs(log(1 + self.error)) > log(1 + self.band)


class TwinCheck(Struct, frozen=True):
    residuals: tuple[Residual, ...]
    terms: tuple[Term, ...]
    step_time_factor: float | None
    """Largest possible factor on the model's step times; None: unknown, so no advice is possible."""
    notes: tuple[str, ...] = ()

    @property
    def off(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if term.is_off)

    @property
    def is_met(self) -> bool:
        return self.step_time_factor is not None and bool(self.terms) and not self.off


def day_rehearsal(scenario: Scenario) -> Rehearsal[Rehearsed]:
    """The rehearsal of a day as it ran."""
    return Rehearsal(scenario, _rehearsed, Rehearsed, ("twin",), _failed)


def _failed(error: HeadwayError) -> Rehearsed:
    return Rehearsed({}, {}, 1.0, None, str(error))


def _rehearsed(scenario: Scenario, records: Records) -> Rehearsed:
    spec = scenario.spec
    summary = summarize(records, warmup_s=spec.simulation.warmup_s, slo=spec.slo)
    pools = [pool for pool in scenario.fleet.all_pools if pool.hosted is None]
    coefficients = StepTimes(scenario).coefficients
    on_gpus = [(each.model, coefficients[each.name]) for each in pools]
    bands = model_error.bands(on_gpus, summary)
    found = _latencies(flatten(summary, replicas=False))
    return Rehearsed(
        found,
        {key: bands[key].high / found[key] for key in found if key in bands and found[key] > 0},
        _joint(on_gpus),
        summary.cached_prompt_share,
    )


def _joint(on_gpus: Sequence[tuple[Model, Coefficients]]) -> float:
    if not on_gpus:
        return 1.0
    metrics = dict.fromkeys(metric for key in KEYS if (metric := metric_of(key)))
    known = model_error.error_class(on_gpus, 0.0, 0.0).known
    return max(prediction_errors().joint(tuple(metrics), known) or 1.0, 1.0)


def _latencies(flat: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(flat[key]) for key in KEYS if flat.get(key) is not None and isfinite(flat[key])}


def as_it_ran(day: Day, document: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The document of the fleet that ran, with today's step times, and a note if today's fleet was used instead.

    Pools and policies come from the records. A pool's coefficients come from the pool with the same name in today's
    file, because they are being checked.
    """
    today = dict(document)
    if not day.fleet_text:
        return today, f"{day.name}: the records do not have the fleet file; today's was taken for what ran"
    try:
        ran, _ = strict_yaml.parse(day.fleet_text, f"{day.folder}: its fleet file")
    except HeadwayError as error:
        return today, f"{day.name}: today's fleet was taken for what ran ({error})"
    made = {**ran, "name": ran.get("name", day.name)}
    for key in ("fleet", "combos"):
        if isinstance(made.get(key), list):
            made[key] = [_with_step_times(each, today.get(key)) for each in made[key]]
    for key in ("gpus", "models", "engines", "slo"):
        if key in today:
            made[key] = today[key]
    made = slower(made, own_factor(today) / own_factor(made))
    return {**made, "workload": today.get("workload", {})}, ""


def _with_step_times(pool: Any, todays: Any) -> Any:
    if not isinstance(pool, dict):
        return pool
    named = [each for each in todays or () if isinstance(each, dict) and each.get("name") == pool.get("name")]
    kept = {key: value for key, value in pool.items() if key != "coefficients"}
    given = {"coefficients": named[0]["coefficients"]} if named and "coefficients" in named[0] else {}
    return {**kept, **given}


def check(days: Sequence[Day], rehearsed: Sequence[Rehearsed], slo: Any) -> TwinCheck:
    """The residuals of each day, and of each latency over all days. Raises HeadwayError if no day can be rehearsed."""
    residuals, notes, factors = [], [], []
    logs: dict[str, list[tuple[float, float]]] = {}
    for day, one in zip(days, rehearsed, strict=True):
        if one.error:
            notes.append(f"{day.name}: cannot be rehearsed as it ran: {one.error}")
            continue
        summary = summarize(day.records, slo=slo)
        measured = _latencies(flatten(summary, replicas=False))
        for key, factor in one.factors.items():
            real, predicted = measured.get(key, 0.0), one.latencies_s[key]
            if not real > 0:
                continue
            residuals.append(Residual(day.name, key, real, predicted, predicted / factor, predicted * factor))
            logs.setdefault(key, []).append((log(real / predicted), one.joint * log(factor)))
        if STEP_TIMES in one.factors:
            factors.append(one.factors[STEP_TIMES] ** one.joint)
        notes += _on_caches(day, summary.cached_prompt_share, one.cached_share)
    if notes and not any(one.latencies_s for one in rehearsed):
        raise HeadwayError(notes[0])
    terms = tuple(
        Term(key, exp(fmean(off for off, _ in found)) - 1, exp(fmean(wide for _, wide in found)) - 1)
        for key in KEYS
        if (found := logs.get(key))
    )
    if not factors:
        notes.append("no measured runs are like these pools, so that the error of their step times is not known")
    return TwinCheck(tuple(residuals), terms, max(factors, default=None), tuple(notes))


def _on_caches(day: Day, measured: float | None, rehearsed: float | None) -> list[str]:
    more = (measured or 0.0) - (rehearsed or 0.0)
    if abs(more) < 0.05:
        return []
    return [
        f"{day.name}: {measured or 0:.0%} of the prompt tokens were cached, and {rehearsed or 0:.0%} in the rehearsal:"
        " the records do not say which prompts share a prefix"
    ]


def whole(day: Day) -> Part:
    return Part(day.name, str(Path(day.folder)), 0.0, None, True, day.num_requests)
