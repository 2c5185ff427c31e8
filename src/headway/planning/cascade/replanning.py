"""Planning anew while requests are served: what is observed, whether it has shifted, what changes (4.4, appendix G).

Sans I/O. Whoever drives says what arrives, what is scored and what time it is; asks for replicas; and says when the
new plan's thresholds may hold. Satisfies `core.policy.CascadeReplanner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.problem import LatencyBudget, QualityFloor, Target
from headway.workload.quality import Scores

SURE = 1.95
"""Of the two-sample Kolmogorov-Smirnov test: 0.1% of equal samples differ by more."""
LEAST = 0.05
"""Of the requests, that have to be elsewhere in a distribution: less is no shift, however sure it is."""


class Period(Struct, frozen=True):
    """What was observed in one period."""

    rate_rps: float | None
    """None: not known."""
    prompt_tokens: tuple[float, ...]
    """Of the sampled requests."""
    scores: Scores
    """Of the audited requests."""
    firsts: tuple[float, ...] = ()
    """The first model's scores, of all requests; empty: not known."""

    @property
    def weighted(self) -> Scores:
        """As many rows as were audited, the first model's scores spread as those of all requests are.

        In place of each request stands the one whose first score is nearest to what its rank has among all.
        """
        own, firsts = self.scores.scores[:, 0], np.asarray(self.firsts)
        firsts = firsts[~np.isnan(firsts)]
        if not len(firsts) or np.isnan(own).any():
            return self.scores
        rank = np.argsort(np.argsort(own, kind="stable"), kind="stable")
        wanted = np.quantile(firsts, (rank + 0.5) / len(own))
        return self.scores.take(np.abs(own - wanted[:, None]).argmin(axis=1))


def shift(before: Period, now: Period, rate_change: float = 0.2) -> str | None:
    """What has changed between two periods, if anything has: rate, lengths or how hard the requests are."""
    if before.rate_rps is not None and now.rate_rps is not None:
        change = now.rate_rps / before.rate_rps - 1
        if abs(change) > rate_change:
            return f"rate: {change:+.0%}"
    if differ(before.prompt_tokens, now.prompt_tokens):
        return "prompt lengths"
    for i, name in enumerate(now.scores.models):
        if differ(before.scores.scores[:, i], now.scores.scores[:, i]):
            return f"scores of {name}"
        if differ(before.scores.output_tokens[:, i], now.scores.output_tokens[:, i]):
            return f"answer lengths of {name}"
    first = now.scores.models[0]
    return f"scores of {first}" if differ(before.firsts, now.firsts) else None


def differ(one: Sequence[float] | npt.NDArray[np.generic], other: Sequence[float] | npt.NDArray[np.generic]) -> bool:
    """Whether two samples are of different distributions."""
    first, second = (np.sort(np.asarray(each, "f8")) for each in (one, other))
    first, second = first[~np.isnan(first)], second[~np.isnan(second)]
    if not len(first) or not len(second):
        return False
    at = np.concatenate([first, second])
    below = [np.searchsorted(each, at, side="right") / len(each) for each in (first, second)]
    furthest = float(np.abs(below[0] - below[1]).max())
    return furthest > max(LEAST, SURE * sqrt((len(first) + len(second)) / (len(first) * len(second))))


class Kept:
    """Numbers as they come, with times that do not fall: of more than `most`, every second one, and so on."""

    def __init__(self, most: int) -> None:
        self._most, self._every, self.num = most, 1, 0
        self._items: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, at_s: float, value: float) -> None:
        """One more."""
        if self.num % self._every == 0:
            self._items.append((at_s, float(value)))
        self.num += 1
        if len(self._items) == self._most:
            del self._items[1::2]
            self._every *= 2

    def between(self, from_s: float, to_s: float = inf) -> list[float]:
        """Of those that are kept, from one time to before another."""
        return [value for at_s, value in self._items if from_s <= at_s < to_s]

    def num_since(self, from_s: float) -> int:
        """How many came, whether they are kept or not: exact where that is all of them."""
        kept = len(self.between(from_s))
        return self.num if kept == len(self._items) else kept * self._every


@dataclass
class Audited:
    """What is known of one request."""

    prompt_tokens: int
    since_s: float
    scores: dict[str, float] = field(default_factory=dict)
    output_tokens: dict[str, int] = field(default_factory=dict)


def table(models: Sequence[str], audited: Sequence[Audited], before: Scores | None) -> Scores:
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


QUARTERS = 4
"""Of a period, in which it is looked for what came since the last change."""
PATIENCE = 12
"""Periods after which an audited request that is not through is not waited for any more."""
MOST_KEPT = 1 << 18
"""Requests whose lengths and first scores are kept of a period, which goes on while too little is known."""
Shape = tuple[str, int, int]
"""A model, and the tensor and pipeline parallelism of a replica."""


def target_of(config: Replan) -> Target:
    """What plans have to keep."""
    if config.latency_s is not None:
        return LatencyBudget(config.latency_s)
    assert config.quality is not None
    return QualityFloor(min(config.quality + config.margin, 100.0))


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
    task: BackgroundTask
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
        self._prompts, self._firsts = Kept(MOST_KEPT), Kept(MOST_KEPT)
        self._latest_s = 0.0
        self._audited: dict[int, Audited] = {}

    def __str__(self) -> str:
        """As tables show it."""
        return f"every {self.config.every_s:g} s"

    def arrived(self, request: RequestView, now: float) -> None:
        """Count it, and draw whether it is audited."""
        self._latest_s = now
        self._prompts.add(now, request.prompt_tokens)
        if self._random.random() < self.config.audit_share:
            self._audited[request.id] = Audited(request.prompt_tokens, now)

    def audits(self, request: int) -> bool:
        """Whether all models answer this request."""
        return request in self._audited

    def scored(self, request: int, stage: int, score: float) -> None:
        """A score of an audited request is kept, and every score of the first model."""
        if stage == 0:
            self._firsts.add(self._latest_s, score)
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
        if self._asked is not None and now >= self._asked.ready_s and not self.task.is_busy:
            self._take(self._asked, now)
        return self._newest.replicas

    def _look(self, now: float) -> None:
        """A period is over, unless too little is known: then it goes on."""
        self._next_s = now + self.config.every_s
        found = self._period(now)
        if found is None:
            return
        self._since_s, self._prompts, self._firsts = now, Kept(MOST_KEPT), Kept(MOST_KEPT)
        if self.expected is None:
            self.expected = found
        elif self.expected.rate_rps is None:
            self.expected = structs.replace(self.expected, rate_rps=found.rate_rps)
        why = shift(self.expected, found, self.config.rate_change)
        if why is None and not self.expected.firsts:
            self.expected = structs.replace(self.expected, firsts=found.firsts)
        if why is not None and self._asked is None:
            self._asked = _Asked(now + self.planning_s, why, found)
            self.task.start(found.weighted, found.rate_rps)

    def _take(self, asked: _Asked, now: float) -> None:
        """The clerk is done. Where that failed, everything stays as it is, and the next period is another chance."""
        self._asked = None
        plan: CascadePlan | None = None
        try:
            plan = self.task.result()
        except HeadwayError as error:
            self.news.append(f"no plan at {now:,.0f} s ({asked.why}): {error}")
        if plan is None:
            return
        before, self._newest = self._newest, standing(plan, self.pools)
        self.expected = asked.seen
        self.made.append(Replanning(now, asked.why, plan, changes(before, self._newest)))
        self.news.append(str(self.made[-1]))

    def _period(self, now: float) -> Period | None:
        """None where too little is known. Who is not through with all models counts for the next one."""
        oldest_s = now - PATIENCE * self.config.every_s
        audited = {id: each for id, each in self._audited.items() if each.since_s >= oldest_s}
        answered = {name for each in audited.values() for name in each.scores}
        through = {id: each for id, each in audited.items() if answered <= each.scores.keys()
                   and answered <= each.output_tokens.keys()}  # fmt: skip
        is_whole = self.expected is not None or len(answered) == len(self.models)
        self._audited = audited
        if len(through) < self.config.least_audited or not self._prompts.num or not is_whole:
            return None
        self._audited = {id: each for id, each in audited.items() if id not in through}
        from_s = self._from_s(now, [each.since_s for each in through.values()])
        recent = [each for each in through.values() if each.since_s >= from_s or from_s <= self._since_s]
        prompts = self._prompts.between(from_s)
        step = max(1, ceil(len(prompts) / self.config.sample))
        before = None if self.expected is None else self.expected.scores
        return Period(
            self._prompts.num_since(from_s) / (now - from_s),
            tuple(prompts[::step]),
            table(self.models, recent, before),
            tuple(self._firsts.between(from_s)),
        )

    def _from_s(self, now: float, audited_s: Sequence[float]) -> float:
        """From when on all that came looks alike: a quarter of the period, or more, with enough audited requests."""
        starts = [now - (now - self._since_s) * k / QUARTERS for k in range(QUARTERS + 1)]
        parts = [self._firsts.between(a, b) for b, a in pairwise(starts)]
        known = [sum(at_s >= a for at_s in audited_s) for a in starts]
        for k in range(1, QUARTERS):
            if known[k] >= self.config.least_audited and differ(list(chain(*parts[:k])), parts[k]):
                return starts[k]
        return self._since_s


@dataclass(frozen=True)
class _Asked:
    """A plan that is being made."""

    ready_s: float
    why: str
    seen: Period
