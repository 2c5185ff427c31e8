"""Planning anew while requests are served: what is observed, whether it has shifted, what changes (4.4, appendix G).

Sans I/O. Whoever drives says what arrives, what is scored and what time it is; asks for replicas; and says when the
new plan's thresholds may hold. Satisfies `core.policy.CascadeReplanner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from random import Random
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, structs

from headway.core.clerk import Clerk
from headway.core.errors import HeadwayError
from headway.core.record import Ended
from headway.core.view import RequestView
from headway.planner.cascade.plan import CascadePlan
from headway.planner.cascade.problem import Floats, LatencyBudget, QualityFloor, Target
from headway.workload.quality import Scores

SURE = 1.95
"""Of the two-sample Kolmogorov-Smirnov test: 0.1% of equal samples differ by more."""
PATIENCE = 12
"""Periods after which an audited request that is not through is not waited for any more."""
MOST_PROMPTS = 1 << 18
"""Whose lengths are kept of a period, which goes on while too little is known: of more, every second one, and so on."""
Shape = tuple[str, int, int]
"""A model, and the tensor and pipeline parallelism of a replica."""
_Positive = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]


class Replan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the cascade is planned anew while it serves, and for what (Cascadia, section 4.4 and appendix G): `quality`
    or `latency_s`."""

    quality: Annotated[float, Meta(ge=0, le=100)] | None = None
    """The mean score that plans are to keep; they have the least p95 latency with it."""
    latency_s: _Positive | None = None
    """In place of it: the p95 latency that plans are to keep; they have the best quality with it."""
    every_s: _Positive = 300.0
    """How often it is looked at what has come."""
    sample: _Count = 50
    """So many requests of that time, whose prompt lengths are compared with those planned for."""
    audit_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """The share of the requests that all models answer, so that it is known what each would have scored."""
    least_audited: Annotated[int, Meta(ge=2)] = 40
    """With fewer of them, nothing is compared."""
    rate_change: _Positive = 0.2
    """By this share the rate has to differ from the one planned for, to count as a shift."""
    margin: Annotated[float, Meta(ge=0)] = 1.0
    """Points of quality that a plan aims at beyond `quality`: while serving there is no time for rehearsals."""
    planning_s: Annotated[float, Meta(ge=0)] = 20.0
    """From a shift to the new plan, in a simulation; the paper's 10 to 20 s. `headway serve` takes what it takes."""
    interval_s: _Positive = 2.0
    """How often replicas are seen to, which change one after the other."""
    num_gpus: _Count | None = None
    """That plans may use. Without it: as many as the cascade's models have in `fleet`."""
    gpus_per_server: _Count | None = None
    """Tensor parallelism stays within a server. Without it: as many as the catalog's node has."""

    def __post_init__(self) -> None:
        if (self.quality is None) == (self.latency_s is None):
            raise ValueError("expected `quality` or `latency_s`, and not both")

    @property
    def target(self) -> Target:
        """What plans are asked for."""
        if self.latency_s is not None:
            return LatencyBudget(self.latency_s)
        assert self.quality is not None
        return QualityFloor(min(self.quality + self.margin, 100.0))


class Period(Struct, frozen=True):
    """What was observed in one period."""

    rate_rps: float | None
    """None: not known."""
    prompt_tokens: tuple[float, ...]
    """Of the sampled requests."""
    scores: Scores
    """Of the audited requests."""


def shift(before: Period, now: Period, rate_change: float = 0.2) -> str | None:
    """What has changed between two periods, if anything has: rate, lengths or how hard the requests are."""
    if before.rate_rps is not None and now.rate_rps is not None:
        change = now.rate_rps / before.rate_rps - 1
        if abs(change) > rate_change:
            return f"rate: {change:+.0%}"
    if _differ(np.asarray(before.prompt_tokens), np.asarray(now.prompt_tokens)):
        return "prompt lengths"
    for i, name in enumerate(now.scores.models):
        if _differ(before.scores.scores[:, i], now.scores.scores[:, i]):
            return f"scores of {name}"
        if _differ(before.scores.output_tokens[:, i].astype("f8"), now.scores.output_tokens[:, i].astype("f8")):
            return f"answer lengths of {name}"
    return None


def _differ(one: Floats, other: Floats) -> bool:
    one, other = np.sort(one[~np.isnan(one)]), np.sort(other[~np.isnan(other)])
    if not len(one) or not len(other):
        return False
    at = np.concatenate([one, other])
    below = [np.searchsorted(each, at, side="right") / len(each) for each in (one, other)]
    furthest = float(np.abs(below[0] - below[1]).max())
    return furthest > SURE * sqrt((len(one) + len(other)) / (len(one) * len(other)))


class Standing(Struct, frozen=True):
    """What a cascade goes by: thresholds, and replicas."""

    thresholds: tuple[float, ...]
    """Of all models but the last."""
    replicas: dict[str, int]
    """By pool, of every pool that plans may use."""


def standing(found: CascadePlan, pools: Mapping[Shape, str]) -> Standing:
    """A plan in terms of these pools."""
    planned = {pools[stage.model, part.tp, part.pp]: part.count for stage in found.stages for part in stage.replicas}
    return Standing(found.thresholds, {name: planned.get(name, 0) for name in pools.values()})


def changes(before: Standing, after: Standing) -> dict[str, int]:
    """Replicas that come (above 0) and go by pool; the others stay as they are."""
    old, new = before.replicas, after.replicas
    by_pool = {name: new.get(name, 0) - old.get(name, 0) for name in sorted({*old, *new})}
    return {name: change for name, change in by_pool.items() if change}


class Replanning(Struct, frozen=True):
    """One new plan."""

    at_s: float
    """When its replicas were first asked for."""
    why: str
    plan: CascadePlan
    changes: dict[str, int]

    def __str__(self) -> str:
        levels = ", ".join(f"{each:g}" for each in self.plan.thresholds)
        moved = ", ".join(f"{name} {change:+d}" for name, change in self.changes.items()) or "the same replicas"
        return f"planned anew at {self.at_s:,.0f} s ({self.why}): thresholds {levels}; {moved}"


@dataclass
class Replanner:
    """Follows a plan until what it observes has shifted; then has another one made of what it has observed."""

    models: tuple[str, ...]
    """The smallest first."""
    pools: Mapping[Shape, str]
    """Those that plans may use."""
    first: Standing
    expected: Period | None
    """What the first plan was made for; None: what the first period shows."""
    clerk: Clerk
    """Makes a `CascadePlan` for scores at a rate."""
    config: Replan
    seed: int = 0
    planning_s: float = 0.0
    """No plan is there earlier after a shift."""
    made: list[Replanning] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    """What was planned, and when and why there was no plan."""

    def __post_init__(self) -> None:
        self._followed = self._newest = self.first
        self._since_s, self._next_s = 0.0, self.config.every_s
        self._asked: _Asked | None = None
        self._random = Random(f"{self.seed}/replanning")
        self._prompts: list[int] = []
        """How long they were: of all requests of the period, or of every `_every`th."""
        self._num_arrived, self._every = 0, 1
        self._audited: dict[int, _Audited] = {}

    def __str__(self) -> str:
        """As tables show it."""
        return f"every {self.config.every_s:g} s"

    def arrived(self, request: RequestView, now: float) -> None:
        """Count it, and draw whether it is audited."""
        if self._num_arrived % self._every == 0:
            self._prompts.append(request.prompt_tokens)
        self._num_arrived += 1
        if len(self._prompts) == MOST_PROMPTS:
            del self._prompts[1::2]
            self._every *= 2
        if self._random.random() < self.config.audit_share:
            self._audited[request.id] = _Audited(request.prompt_tokens, now)

    def audits(self, request: int) -> bool:
        """Whether all models answer this request."""
        return request in self._audited

    def scored(self, request: int, stage: int, score: float) -> None:
        """A score of an audited request is kept."""
        if (audited := self._audited.get(request)) is not None:
            audited.scores[self.models[stage]] = score

    def ended(self, record: Ended) -> None:
        """So is how long the answer was."""
        if (audited := self._audited.get(record.id)) is not None and record.generated_tokens:
            audited.output_tokens.setdefault(record.model, record.generated_tokens)

    def thresholds(self) -> Sequence[float]:
        """Of the plan that is followed."""
        return self._followed.thresholds

    def adopt(self) -> None:
        """Follow the newest plan."""
        self._followed = self._newest

    def replicas(self, now: float) -> Mapping[str, int]:
        """Of the newest plan; one that is being made is taken here, once it is there."""
        if now >= self._next_s:
            self._look(now)
        if self._asked is not None and now >= self._asked.ready_s and not self.clerk.is_busy:
            self._take(self._asked, now)
        return self._newest.replicas

    def _look(self, now: float) -> None:
        """A period is over, unless too little is known: then it goes on."""
        self._next_s = now + self.config.every_s
        found = self._period(now - self._since_s, now)
        if found is None:
            return
        self._since_s, self._prompts = now, []
        self._num_arrived, self._every = 0, 1
        if self.expected is None:
            self.expected = found
        elif self.expected.rate_rps is None:
            self.expected = structs.replace(self.expected, rate_rps=found.rate_rps)
        why = shift(self.expected, found, self.config.rate_change)
        if why is not None and self._asked is None:
            self._asked = _Asked(now + self.planning_s, why, found)
            self.clerk.ask(found.scores, found.rate_rps)

    def _take(self, asked: _Asked, now: float) -> None:
        """The clerk is done. Where that failed, everything stays as it is, and the next period is another chance."""
        self._asked = None
        plan: CascadePlan | None = None
        try:
            plan = self.clerk.answer()
        except HeadwayError as error:
            self.news.append(f"no plan at {now:,.0f} s ({asked.why}): {error}")
        if plan is None:
            return
        before, self._newest = self._newest, standing(plan, self.pools)
        self.expected = asked.seen
        self.made.append(Replanning(now, asked.why, plan, changes(before, self._newest)))
        self.news.append(str(self.made[-1]))

    def _period(self, span_s: float, now: float) -> Period | None:
        """None where too little is known. Who is not through with all models counts for the next one."""
        oldest_s = now - PATIENCE * self.config.every_s
        audited = {id: each for id, each in self._audited.items() if each.since_s >= oldest_s}
        answered = {name for each in audited.values() for name in each.scores}
        through = {id: each for id, each in audited.items() if answered <= each.scores.keys()
                   and answered <= each.output_tokens.keys()}  # fmt: skip
        is_whole = self.expected is not None or len(answered) == len(self.models)
        self._audited = audited
        if len(through) < self.config.least_audited or not self._prompts or not is_whole:
            return None
        self._audited = {id: each for id, each in audited.items() if id not in through}
        step = max(1, ceil(len(self._prompts) / self.config.sample))
        before = None if self.expected is None else self.expected.scores
        return Period(
            self._num_arrived / span_s,
            tuple(float(each) for each in self._prompts[::step]),
            _table(self.models, list(through.values()), before),
        )


@dataclass(frozen=True)
class _Asked:
    """A plan that is being made."""

    ready_s: float
    why: str
    seen: Period


@dataclass
class _Audited:
    """What is known of one request."""

    prompt_tokens: int
    since_s: float
    scores: dict[str, float] = field(default_factory=dict)
    output_tokens: dict[str, int] = field(default_factory=dict)


def _table(models: Sequence[str], audited: Sequence[_Audited], before: Scores | None) -> Scores:
    """The score table of audited requests that every model with replicas has answered.

    The others' rows are those of the table from before, in order of the first model's score; without one, all models
    have answered.
    """
    prompts = np.array([each.prompt_tokens for each in audited], "i8")
    shape = (len(audited), len(models))
    scores, lengths = np.full(shape, np.nan), np.ones(shape, "i8")
    if before is not None:
        first = np.array([each.scores[models[0]] for each in audited])
        rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")
        known = np.argsort(before.scores[:, 0], kind="stable")[(rank * len(before)) // len(audited)]
        scores, lengths = before.scores[known], before.output_tokens[known]
    for i, name in enumerate(models):
        if all(name in each.scores and name in each.output_tokens for each in audited):
            scores[:, i] = [each.scores[name] for each in audited]
            lengths[:, i] = [each.output_tokens[name] for each in audited]
    return Scores(tuple(models), scores, lengths, prompts)
