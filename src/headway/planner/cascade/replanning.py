"""Planning anew while requests are served: what is observed, whether it has shifted, what changes (4.4, appendix G).

Sans I/O. Whoever drives says what arrives, what is scored and what time it is; asks for replicas; and says when the
new plan's thresholds may hold. Satisfies `core.policy.CascadeReplanner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from random import Random

import numpy as np
from msgspec import Struct

from headway.core.record import Ended
from headway.core.view import RequestView
from headway.planner.cascade.plan import CascadePlan
from headway.planner.cascade.problem import Floats
from headway.workload.quality import Scores

PERIOD_S = 300.0
"""How often what was observed is looked at."""
SAMPLED = 50
"""Requests of a period whose lengths are compared."""
AUDITED = 0.05
"""The share of the requests that all models answer."""
PLANNING_S = 20.0
"""From a shift to the plan: the paper's 10 to 20 s."""
LEAST = 40
"""Audited requests without which no plan is made."""
RATE_CHANGE = 0.2
SURE = 1.95
"""Of the two-sample Kolmogorov-Smirnov test: 0.1% of equal samples differ by more."""


class Period(Struct, frozen=True):
    """What was observed in one period."""

    rate_rps: float
    prompt_tokens: tuple[float, ...]
    """Of the sampled requests."""
    scores: Scores
    """Of the audited requests."""


def shift(before: Period, now: Period) -> str | None:
    """What has changed between two periods, if anything has: rate, lengths or how hard the requests are."""
    change = now.rate_rps / before.rate_rps - 1
    if abs(change) > RATE_CHANGE:
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


def pool_of(model: str, tp: int, pp: int) -> str:
    """The name of the pool of this model's replicas of this shape."""
    return f"{model} tp {tp} pp {pp}"


def replicas_of(found: CascadePlan) -> dict[str, int]:
    """A plan's replicas by pool."""
    return {pool_of(stage.model, part.tp, part.pp): part.count for stage in found.stages for part in stage.replicas}


def changes(before: CascadePlan, after: CascadePlan) -> dict[str, int]:
    """Replicas that come (above 0) and go by pool; the others stay as they are."""
    old, new = replicas_of(before), replicas_of(after)
    by_pool = {name: new.get(name, 0) - old.get(name, 0) for name in sorted({*old, *new})}
    return {name: change for name, change in by_pool.items() if change}


class Replanning(Struct, frozen=True):
    """One new plan."""

    at_s: float
    """When its replicas were first asked for."""
    why: str
    plan: CascadePlan
    changes: dict[str, int]


@dataclass
class Replanner:
    """Follows a plan until what it observes has shifted; then makes another from what it has observed."""

    first: CascadePlan
    expected: Period
    """What the first plan was made for."""
    make: Callable[[Scores, float], CascadePlan]
    """A plan for these scores at this rate."""
    seed: int = 0
    period_s: float = PERIOD_S
    planning_s: float = PLANNING_S
    made: list[Replanning] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._followed = self._newest = self.first
        self._since_s, self._next_s, self._ready_s = 0.0, self.period_s, -1.0
        self._random = Random(f"{self.seed}/replanning")
        self._models = tuple(stage.model for stage in self.first.stages)
        self._prompts: list[int] = []
        self._audited: dict[int, _Audited] = {}

    def arrived(self, request: RequestView, now: float) -> None:
        """Count it, and draw whether it is audited."""
        self._prompts.append(request.prompt_tokens)
        if self._random.random() < AUDITED:
            self._audited[request.id] = _Audited(request.prompt_tokens)

    def audits(self, request: int) -> bool:
        """Whether all models answer this request."""
        return request in self._audited

    def scored(self, request: int, stage: int, score: float) -> None:
        """A score of an audited request is kept."""
        if (audited := self._audited.get(request)) is not None:
            audited.scores[self._models[stage]] = score

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
        """Of the newest plan, which is made here when its time has come."""
        if now >= self._next_s:
            self._look(now)
        if self._ready_s >= 0 and now >= self._ready_s:
            self._replan(now)
        return replicas_of(self._newest)

    def _look(self, now: float) -> None:
        """A period is over."""
        found = self._period(now - self._since_s)
        self._since_s, self._next_s = now, now + self.period_s
        self._prompts = []
        if found is None:
            return
        why = shift(self.expected, found)
        if why is not None and self._ready_s < 0:
            self._ready_s, self._seen, self._why = now + self.planning_s, found, why

    def _replan(self, now: float) -> None:
        self._ready_s = -1.0
        before, self._newest = self._newest, self.make(self._seen.scores, self._seen.rate_rps)
        self.expected = self._seen
        self.made.append(Replanning(now, self._why, self._newest, changes(before, self._newest)))

    def _period(self, span_s: float) -> Period | None:
        """None where too little is known. Who is not through with all models counts for the next one."""
        answered = {name for each in self._audited.values() for name in each.scores}
        through = {id: each for id, each in self._audited.items() if answered <= each.scores.keys()
                   and answered <= each.output_tokens.keys()}  # fmt: skip
        self._audited = {id: each for id, each in self._audited.items() if id not in through}
        if len(through) < LEAST or not self._prompts:
            return None
        step = max(1, ceil(len(self._prompts) / SAMPLED))
        return Period(
            len(self._prompts) / span_s,
            tuple(float(each) for each in self._prompts[::step]),
            _table(self._models, list(through.values()), self.expected.scores),
        )


@dataclass
class _Audited:
    """What is known of one request."""

    prompt_tokens: int
    scores: dict[str, float] = field(default_factory=dict)
    output_tokens: dict[str, int] = field(default_factory=dict)


def _table(models: Sequence[str], audited: Sequence[_Audited], before: Scores) -> Scores:
    """The score table of audited requests that every model with replicas has answered.

    The others' rows are those of the table from before, in order of the first model's score.
    """
    prompts = np.array([each.prompt_tokens for each in audited], "i8")
    first = np.array([each.scores[models[0]] for each in audited])
    rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")
    known = np.argsort(before.scores[:, 0], kind="stable")[(rank * len(before)) // len(audited)]
    scores, lengths = before.scores[known], before.output_tokens[known]
    for i, name in enumerate(models):
        if all(name in each.scores and name in each.output_tokens for each in audited):
            scores[:, i] = [each.scores[name] for each in audited]
            lengths[:, i] = [each.output_tokens[name] for each in audited]
    return Scores(tuple(models), scores, lengths, prompts)
