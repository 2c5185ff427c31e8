"""Replanning at run time: observations, detection of shifts, and changes by a new plan (4.4, appendix G).

No I/O. The caller reports arrivals, scores and the time, asks for replicas, and tells when the new plan's thresholds
may apply. `Replanner` implements `core.policy.CascadeReplanner`.

The judge scores every answer of the first model, so this model's scores can be compared over all requests. The scores
of the other models are known only for audited requests, which all models answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import ceil, inf, sqrt
from random import Random

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from headway.config.spec import Replan
from headway.core.errors import HeadwayError
from headway.core.record import Ended
from headway.core.task import BackgroundTask
from headway.core.view import RequestView
from headway.planning.cascade.problem import CascadePlan, LatencyBudget, QualityFloor, Replicas, Target
from headway.planning.cascade.replica_sets import Unit
from headway.workload.quality import Scores

SURE = 1.95
"""Critical value of the two-sample Kolmogorov-Smirnov test: 0.1% of sample pairs from one distribution differ by
more."""
LEAST = 0.05
"""Minimum distance between two distributions that counts as a shift, even if a smaller one is significant."""
QUARTERS = 4
"""Parts of a period in which the latest change of scores is searched."""
PATIENCE = 12
"""Periods after which an audited request without all answers is dropped."""
MOST_KEPT = 1 << 18
"""Requests of a period whose lengths and first scores are kept. A period continues while too little is known."""
ModelUnit = tuple[str, Unit]
"""A model, and the unit of replicas that starts and stops together."""
_Sample = Sequence[float] | npt.NDArray[np.generic]


def planning_target(config: Replan) -> Target:
    if config.latency_s is not None:
        return LatencyBudget(config.latency_s)
    assert config.quality is not None
    return QualityFloor(min(config.quality + config.margin, 100.0))


# Observations.


class Period(Struct, frozen=True):
    """Observations of one period."""

    rate_rps: float | None
    """Requests per second; None if unknown."""
    prompt_tokens: tuple[float, ...]
    """Prompt tokens of the sampled requests."""
    scores: Scores
    """Scores of the audited requests."""
    first_scores: tuple[float, ...] = ()
    """The first model's scores of all requests; empty if unknown."""

    @property
    def reweighted_scores(self) -> Scores:
        """A table with as many rows as audited requests, with the first model's scores distributed as over all
        requests."""
        return self.scores.reweighted(np.asarray(self.first_scores, "f8"))


@dataclass
class AuditedRequest:
    """A request that all models answer."""

    prompt_tokens: int
    since_s: float
    scores: dict[str, float] = field(default_factory=dict)
    output_tokens: dict[str, int] = field(default_factory=dict)


class ThinnedSeries:
    """Numbers with nondecreasing times. Whenever `most` are kept, every second one is dropped."""

    def __init__(self, most: int) -> None:
        self._most, self._every, self.num = most, 1, 0
        self._items: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, at_s: float, value: float) -> None:
        if self.num % self._every == 0:
            self._items.append((at_s, float(value)))
        self.num += 1
        if len(self._items) == self._most:
            del self._items[1::2]
            self._every *= 2

    def between(self, from_s: float, to_s: float = inf) -> list[float]:
        """The kept numbers with times from `from_s` up to `to_s`, excluded."""
        return [value for at_s, value in self._items if from_s <= at_s < to_s]

    def num_since(self, from_s: float) -> int:
        """The number of values added since a time, kept or not; exact if no value is older."""
        num_kept = len(self.between(from_s))
        return self.num if num_kept == len(self._items) else num_kept * self._every


def detect_shift(before: Period, now: Period, rate_change: float = 0.2) -> str | None:
    """The difference between two periods: rate, lengths, or difficulty of requests; None without a shift."""
    if before.rate_rps is not None and now.rate_rps is not None:
        change = now.rate_rps / before.rate_rps - 1
        if abs(change) > rate_change:
            return f"rate: {change:+.0%}"
    if distributions_differ(before.prompt_tokens, now.prompt_tokens):
        return "prompt lengths"
    for i, name in enumerate(now.scores.models):
        if distributions_differ(before.scores.scores[:, i], now.scores.scores[:, i]):
            return f"scores of {name}"
        if distributions_differ(before.scores.output_tokens[:, i], now.scores.output_tokens[:, i]):
            return f"answer lengths of {name}"
    first = now.scores.models[0]
    return f"scores of {first}" if distributions_differ(before.first_scores, now.first_scores) else None


def distributions_differ(one: _Sample, other: _Sample) -> bool:
    """Whether two samples come from different distributions, by the Kolmogorov-Smirnov test."""
    first, second = (np.sort(np.asarray(each, "f8")) for each in (one, other))
    first, second = first[~np.isnan(first)], second[~np.isnan(second)]
    if not len(first) or not len(second):
        return False
    at = np.concatenate([first, second])
    below = [np.searchsorted(each, at, side="right") / len(each) for each in (first, second)]
    furthest = float(np.abs(below[0] - below[1]).max())
    return furthest > max(LEAST, SURE * sqrt((len(first) + len(second)) / (len(first) * len(second))))


def audited_scores(models: Sequence[str], audited: Sequence[AuditedRequest], before: Scores | None) -> Scores:
    """The score table of requests that every model with replicas has answered.

    The columns of other models come from the earlier table, in order of the first model's score. Without an earlier
    table, all models have answered.
    """
    prompts = np.array([each.prompt_tokens for each in audited], "i8")
    shape = (len(audited), len(models))
    scores, lengths = np.full(shape, np.nan), np.ones(shape, "i8")
    if before is not None:
        first = np.array([each.scores[models[0]] for each in audited])
        rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")
        rows = np.argsort(before.scores[:, 0], kind="stable")[(rank * len(before)) // len(audited)]
        scores, lengths = before.scores[rows], before.output_tokens[rows]
    for i, name in enumerate(models):
        if all(name in each.scores and name in each.output_tokens for each in audited):
            scores[:, i] = [each.scores[name] for each in audited]
            lengths[:, i] = [each.output_tokens[name] for each in audited]
    return Scores(tuple(models), scores, lengths, prompts)


# Plans.


class CascadeSetup(Struct, frozen=True):
    """The thresholds and replicas of a plan."""

    thresholds: tuple[float, ...]
    """Thresholds of all models except the last."""
    replicas: dict[str, int]
    """Replicas by pool, for every pool that plans may use."""


def unit(tp: int, pp: int = 1, gpu: str = "") -> Unit:
    """One replica that runs both phases. `gpu`: empty if there is one type."""
    return (Replicas(tp, pp, 1, gpu),)


def setup_of(plan: CascadePlan, pools: Mapping[ModelUnit, str]) -> CascadeSetup:
    """A plan's setup with these pools. Raises HeadwayError if its replicas do not consist of whole units of the
    pools."""
    planned = dict.fromkeys(pools.values(), 0)
    for stage in plan.stages:
        mixed = [part for part in stage.replicas if part.role == "mixed"]
        for part in mixed:
            planned[pools[stage.model, (structs.replace(part, count=1),)]] += part.count
        if split := tuple(part for part in stage.replicas if part.role != "mixed"):
            name, num = _combos(stage.model, split, pools)
            planned[name] += num
    return CascadeSetup(plan.thresholds, planned)


def _combos(model: str, split: Unit, pools: Mapping[ModelUnit, str]) -> tuple[str, int]:
    """The combos that these replicas form: their name and number."""
    for (name, parts), pool in pools.items():
        num = split[0].count // max(parts[0].count, 1)
        whole = {structs.replace(part, count=num * part.count) for part in parts}
        if name == model and num and whole == set(split):
            return pool, num
    raise HeadwayError(f"{model}: {', '.join(part.label for part in split)}: no whole combos of the fleet")


def replica_changes(before: CascadeSetup, after: CascadeSetup) -> dict[str, int]:
    """Added (positive) and removed replicas by pool, without unchanged pools."""
    old, new = before.replicas, after.replicas
    by_pool = {name: new.get(name, 0) - old.get(name, 0) for name in sorted({*old, *new})}
    return {name: change for name, change in by_pool.items() if change}


class NewPlan(Struct, frozen=True):
    """A plan that was adopted at run time."""

    at_s: float
    """Time at which the plan's replicas were first requested."""
    why: str
    plan: CascadePlan
    changes: dict[str, int]

    def __str__(self) -> str:
        levels = ", ".join(f"{each:g}" for each in self.plan.thresholds)
        moved = ", ".join(f"{name} {change:+d}" for name, change in self.changes.items()) or "the same replicas"
        return f"planned anew at {self.at_s:,.0f} s ({self.why}): thresholds {levels}; {moved}"


@dataclass(frozen=True)
class _PendingPlan:
    """A plan that is being computed."""

    ready_s: float
    why: str
    observed: Period


@dataclass
class Replanner:
    """Follows a plan until the observed requests shift; then requests a new plan for them."""

    models: tuple[str, ...]
    """Models, the smallest first."""
    pools: Mapping[ModelUnit, str]
    """The pools that plans may use."""
    first: CascadeSetup
    expected: Period | None
    """The requests for which the first plan was made; None: the requests of the first period."""
    task: BackgroundTask
    """Computes a `CascadePlan` for scores and a rate."""
    config: Replan
    seed: int = 0
    planning_s: float = 0.0
    """Minimum time between a shift and the new plan."""
    new_plans: list[NewPlan] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    """Texts on new plans, and on failures to plan."""

    def __post_init__(self) -> None:
        self._followed = self._newest = self.first
        self._since_s, self._next_s = 0.0, self.config.every_s
        self._pending: _PendingPlan | None = None
        self._corrections: Callable[[], Mapping[str, tuple[float, float]]] = dict
        self._random = Random(f"{self.seed}/replanning")
        self._prompts, self._first_scores = ThinnedSeries(MOST_KEPT), ThinnedSeries(MOST_KEPT)
        self._latest_s = 0.0
        self._audited: dict[int, AuditedRequest] = {}

    def __str__(self) -> str:
        return f"every {self.config.every_s:g} s"

    def use_corrections(self, corrections: Callable[[], Mapping[str, tuple[float, float]]]) -> None:
        """Plan with observed step times: the function returns, by pool, factors on the predicted seconds of prompts and
        of decoding."""
        self._corrections = corrections

    def arrived(self, request: RequestView, now: float) -> None:
        """Count a request, and decide at random whether it is audited."""
        self._latest_s = now
        self._prompts.add(now, request.prompt_tokens)
        if self._random.random() < self.config.audit_share:
            self._audited[request.id] = AuditedRequest(request.prompt_tokens, now)

    def audits(self, request: int) -> bool:
        return request in self._audited

    def scored(self, request: int, stage: int, score: float) -> None:
        """Store the scores of audited requests, and every score of the first model."""
        if stage == 0:
            self._first_scores.add(self._latest_s, score)
        if (audited := self._audited.get(request)) is not None:
            audited.scores[self.models[stage]] = score

    def ended(self, record: Ended) -> None:
        """Store the answer lengths of audited requests."""
        if (audited := self._audited.get(record.id)) is not None and record.generated_tokens:
            audited.output_tokens.setdefault(record.model, record.generated_tokens)

    def thresholds(self) -> Sequence[float]:
        return self._followed.thresholds

    def adopt(self) -> None:
        self._followed = self._newest

    def replicas(self, now: float) -> Mapping[str, int]:
        """Replicas by pool of the newest plan. Ends a due period, and adopts a plan that is ready."""
        if now >= self._next_s:
            self._end_period(now)
        if self._pending is not None and now >= self._pending.ready_s and not self.task.is_busy:
            self._take_plan(self._pending, now)
        return self._newest.replicas

    def _end_period(self, now: float) -> None:
        """Compare the period with the plan's expectations. A period continues if too little is known."""
        self._next_s = now + self.config.every_s
        observed = self._observed(now)
        if observed is None:
            return
        self._since_s, self._prompts, self._first_scores = now, ThinnedSeries(MOST_KEPT), ThinnedSeries(MOST_KEPT)
        if self.expected is None:
            self.expected = observed
        elif self.expected.rate_rps is None:
            self.expected = structs.replace(self.expected, rate_rps=observed.rate_rps)
        why = detect_shift(self.expected, observed, self.config.rate_change)
        if why is None and not self.expected.first_scores:
            self.expected = structs.replace(self.expected, first_scores=observed.first_scores)
        if why is not None and self._pending is None:
            self._pending = _PendingPlan(now + self.planning_s, why, observed)
            corrections = self._corrections()
            self.task.start(observed.reweighted_scores, observed.rate_rps, *((corrections,) if corrections else ()))

    def _take_plan(self, pending: _PendingPlan, now: float) -> None:
        """Adopt the planner's answer. After a failure nothing changes until a later period has a shift."""
        self._pending = None
        plan: CascadePlan | None = None
        try:
            plan = self.task.result()
        except HeadwayError as error:
            self.messages.append(f"no plan at {now:,.0f} s ({pending.why}): {error}")
        if plan is None:
            return
        before, self._newest = self._newest, setup_of(plan, self.pools)
        self.expected = pending.observed
        self.new_plans.append(NewPlan(now, pending.why, plan, replica_changes(before, self._newest)))
        self.messages.append(str(self.new_plans[-1]))

    def _observed(self, now: float) -> Period | None:
        """The observed period; None if too little is known. Audited requests with missing answers count in the next
        period."""
        oldest_s = now - PATIENCE * self.config.every_s
        audited = {id: each for id, each in self._audited.items() if each.since_s >= oldest_s}
        answering = {name for each in audited.values() for name in each.scores}
        complete = {
            id: each
            for id, each in audited.items()
            if answering <= each.scores.keys() and answering <= each.output_tokens.keys()
        }
        has_all_models = self.expected is not None or len(answering) == len(self.models)
        self._audited = audited
        if len(complete) < self.config.least_audited or not self._prompts.num or not has_all_models:
            return None
        self._audited = {id: each for id, each in audited.items() if id not in complete}
        from_s = self._latest_change_s(now, [each.since_s for each in complete.values()])
        recent = [each for each in complete.values() if each.since_s >= from_s or from_s <= self._since_s]
        prompts = self._prompts.between(from_s)
        step = max(1, ceil(len(prompts) / self.config.sample))
        before = None if self.expected is None else self.expected.scores
        return Period(
            self._prompts.num_since(from_s) / (now - from_s),
            tuple(prompts[::step]),
            audited_scores(self.models, recent, before),
            tuple(self._first_scores.between(from_s)),
        )

    def _latest_change_s(self, now: float, audited_s: Sequence[float]) -> float:
        """The start of the latest part of the period with unchanged first scores.

        The part is at least a quarter of the period, and has enough audited requests.
        """
        starts = [now - (now - self._since_s) * k / QUARTERS for k in range(QUARTERS + 1)]
        parts = [self._first_scores.between(a, b) for b, a in pairwise(starts)]
        nums = [sum(at_s >= a for at_s in audited_s) for a in starts]
        for k in range(1, QUARTERS):
            if nums[k] >= self.config.least_audited and distributions_differ(list(chain(*parts[:k])), parts[k]):
                return starts[k]
        return self._since_s
