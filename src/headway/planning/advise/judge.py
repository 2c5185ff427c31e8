"""Decides which chosen changes hold on unseen parts of days, and estimates their gains.

The interval of a gain combines two independent errors, as the root of the sum of squares on each side. The first is due
to few days: Student's interval of the paired differences. Their variance is that within the judged days and within the
days for choosing, pooled: the choice favours days on which a change did well, which moves their mean and not their
variance. The second is due to the model: the most extreme mean gain
when all step times are as long, or as short, as their error allows. Both fleets are rehearsed with these step times, so
queues change too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from math import hypot, sqrt
from statistics import fmean

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.metrics.interval import deviation, quantile
from headway.metrics.seeds import Estimate
from headway.planning.advise.changes import Candidate, Change
from headway.planning.advise.choose import LEAST_GAIN
from headway.planning.advise.days import Part
from headway.planning.advise.trials import NOTHING, Gain, Gains, OnParts, Trials

LEVEL = 0.9
"""Confidence level of both errors."""
HOURS_PER_MONTH = 730.0
MOST_PROPOSALS = 10
MOST_TIMES = 20
"""Largest multiple of the judged days that is reported; nobody would wait longer."""
LEAST_DAYS = 3
"""Number of judged days below which the variation is taken over parts of days."""


class OnDay(Struct, frozen=True):
    """Gain of a change on one day, or part of a day."""

    day: str
    usd_per_hour: float
    attainment: float


class Proposal(Struct, frozen=True):
    """A change whose gain is positive under every considered model error and variation of days."""

    name: str
    kinds: tuple[str, ...]
    changes: tuple[Change, ...]
    worth: Estimate
    """As `trials.Gain.worth`. Proposals are ranked by this value."""
    usd_per_month: Estimate
    """Saving per month; positive means cheaper."""
    attainment: Estimate
    """Gain of SLO attainment."""
    by_day: tuple[OnDay, ...]
    worst: OnDay
    """The day with the smallest gain."""
    diff: str = ""
    """Diff of the fleet file."""


class Undecided(Struct, frozen=True):
    """A change with a positive mean gain on the judged days that is not certain."""

    name: str
    worth: Estimate
    usd_per_month: Estimate
    attainment: Estimate
    times: float | None
    """Multiple of the judged requests at which the result would be certain. None: the step times are too uncertain, or
    the days differ too much."""


class Verdict(Struct, frozen=True):
    proposals: tuple[Proposal, ...]
    undecided: tuple[Undecided, ...]
    """Undecided changes, best first."""
    rejected: tuple[str, ...]
    """Changes that gained on the parts for choosing but lost on the judged parts."""


def rehearsals_for(num: int, num_parts: int) -> int:
    """The largest number of rehearsals needed to judge `num` changes."""
    return 3 * (num + 1) * num_parts


def judge(
    chosen: Mapping[Candidate, OnParts],
    parts: Sequence[Part],
    trials: Trials,
    target: float,
    factors: Sequence[float],
) -> Verdict:
    """The changes whose gain is positive within both errors.

    `chosen`: the gains on the parts for choosing. `factors`: further possible factors on the step times.
    """
    worlds: list[Gains] = []
    alive, undecided = list(chosen), list[Undecided]()
    for factor in (1.0, *factors):
        if not alive:
            break
        worlds.append(trials.gains(alive, parts, target, factor))
        alive = [each for each in alive if all(each in one for one in worlds)]
        found = {each: _undecided(each, worlds, parts, chosen[each]) for each in alive}
        undecided += [each for each in found.values() if each.worth.low <= 0 and each.worth.mean >= LEAST_GAIN]
        alive = [each for each, one in found.items() if one.worth.low > 0]
    undecided.sort(key=lambda each: -each.worth.mean)
    proposals = [_proposal(each, [world[each] for world in worlds], parts, chosen[each]) for each in alive]
    proposals = [each for each in proposals if each.worth.mean >= LEAST_GAIN]
    proposals.sort(key=lambda each: -each.worth.mean)
    kept = _without_idle_parts(proposals)[:MOST_PROPOSALS]
    names = {each.name for each in kept}
    rejected = tuple(each.name for each in chosen if each.name not in names)
    return Verdict(tuple(kept), tuple(undecided), rejected)


def compare(
    candidate: Candidate, parts: Sequence[Part], trials: Trials, target: float, factors: Sequence[float]
) -> Proposal:
    """The gain of a change, also if it is negative. Raises HeadwayError if the change cannot be rehearsed."""
    worlds = [trials.gains([candidate], parts, target, factor) for factor in (1.0, *factors)]
    if candidate in trials.refused:
        raise HeadwayError(f"{candidate.name}: {trials.refused[candidate]}")
    return _proposal(candidate, [world[candidate] for world in worlds], parts)


def _undecided(candidate: Candidate, worlds: Sequence[Gains], parts: Sequence[Part], chosen: OnParts) -> Undecided:
    gains = [one[candidate] for one in worlds]
    times = times_needed(gains, parts, lambda each: each.worth, chosen)
    return Undecided(candidate.name, *_estimates(gains, parts, chosen), times)


def _without_idle_parts(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The proposals without combinations that gain no more than one of their changes alone."""
    return [
        each
        for each in proposals
        if not any(
            set(other.changes) < set(each.changes) and other.worth.mean >= each.worth.mean - LEAST_GAIN
            for other in proposals
        )
    ]


def _proposal(
    candidate: Candidate, worlds: Sequence[Sequence[Gain]], parts: Sequence[Part], chosen: OnParts = NOTHING
) -> Proposal:
    by_day = _grouped(worlds[0], parts, _are_days(parts))
    days = [
        OnDay(day, fmean(each.usd_per_hour for each in gains), fmean(each.attainment for each in gains))
        for day, gains in by_day.items()
    ]
    worth = {day: fmean(each.worth for each in gains) for day, gains in by_day.items()}
    return Proposal(
        candidate.name,
        candidate.kinds,
        candidate.changes,
        *_estimates(worlds, parts, chosen),
        tuple(days),
        min(days, key=lambda each: worth[each.day]),
    )


def _estimates(
    worlds: Sequence[Sequence[Gain]], parts: Sequence[Part], chosen: OnParts
) -> tuple[Estimate, Estimate, Estimate]:
    """Estimates of worth, dollars per month, and SLO attainment."""
    return (
        estimate(worlds, parts, lambda each: each.worth, chosen),
        estimate(worlds, parts, lambda each: HOURS_PER_MONTH * each.usd_per_hour, chosen),
        estimate(worlds, parts, lambda each: each.attainment, chosen),
    )


def times_needed(
    worlds: Sequence[Sequence[Gain]],
    parts: Sequence[Part],
    value: Callable[[Gain], float],
    chosen: OnParts = NOTHING,
) -> float | None:
    """The multiple of the days, or parts, at which the interval would lie above 0 for equal variation. None if even
    `MOST_TIMES` does not suffice."""
    by_day, means = _by_day(worlds, parts, value)
    num, (spread, freedom) = len(by_day[0]), _spread(by_day[0], parts, value, chosen)

    def is_told(more: int) -> bool:
        half = quantile(freedom + more - num, LEVEL) * spread / sqrt(more)
        return hypot(half, means[0] - min(means)) < means[0]

    most = MOST_TIMES * num
    return (num + bisect_left(range(num, most), True, key=is_told)) / num if is_told(most) else None


def _by_day(
    worlds: Sequence[Sequence[Gain]], parts: Sequence[Part], value: Callable[[Gain], float]
) -> tuple[list[list[float]], list[float]]:
    """Returns, for each world, the mean of each day, and the mean over the days."""
    by_day = [_means(gains, parts, value, _are_days(parts)) for gains in worlds]
    return by_day, [fmean(each) for each in by_day]


def _spread(
    judged: Sequence[float], parts: Sequence[Part], value: Callable[[Gain], float], chosen: OnParts
) -> tuple[float, int]:
    """The standard deviation within the judged days and within the days for choosing, and its degrees of freedom."""
    groups = [judged, _means(*chosen, value, _are_days(parts))]
    groups = [each for each in groups if len(each) > 1]
    freedom = sum(len(each) - 1 for each in groups)
    if not freedom:
        return 0.0, 0
    return sqrt(sum((len(each) - 1) * deviation(each) ** 2 for each in groups) / freedom), freedom


def estimate(
    worlds: Sequence[Sequence[Gain]],
    parts: Sequence[Part],
    value: Callable[[Gain], float],
    chosen: OnParts = NOTHING,
) -> Estimate:
    """The mean in the first world, where step times are as modelled, and an interval over the variation of days and
    worlds."""
    by_day, means = _by_day(worlds, parts, value)
    mean, (spread, freedom) = means[0], _spread(by_day[0], parts, value, chosen)
    half = quantile(freedom, LEVEL) * spread / sqrt(len(by_day[0])) if freedom else 0.0
    return Estimate(mean, mean - hypot(half, mean - min(means)), mean + hypot(half, max(means) - mean))


def _means(gains: Sequence[Gain], parts: Sequence[Part], value: Callable[[Gain], float], by_day: bool) -> list[float]:
    return [fmean(map(value, each)) for each in _grouped(gains, parts, by_day).values()]


def _are_days(parts: Sequence[Part]) -> bool:
    """Whether gains are compared by day. Otherwise, with fewer than `LEAST_DAYS` days, by part."""
    return len({part.day for part in parts}) >= LEAST_DAYS


def _grouped(gains: Sequence[Gain], parts: Sequence[Part], by_day: bool) -> dict[str, list[Gain]]:
    """Gains by day, or by part."""
    found: dict[str, list[Gain]] = {}
    for each, part in zip(gains, parts, strict=True):
        found.setdefault(part.day if by_day else part.name, []).append(each)
    return found
