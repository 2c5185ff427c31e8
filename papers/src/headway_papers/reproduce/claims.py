"""Claims of papers, each with the rule that decides whether it holds. Rules are fixed before the runs they judge.

A rule judges one value per seed, such as 0.41 for "TTFT falls by 41% with seed 3". Unless a claim gives a reason for
another share, it holds if the effect has the paper's direction and at least half of the paper's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from math import inf, isfinite
from statistics import fmean
from typing import Literal, NamedTuple, Protocol

import msgspec

from headway.metrics.interval import interval
from headway.report.table import short_number

Value = float | bool | None
"""The value of one seed; None if the run has none."""


Word = Literal["holds", "exceeds", "refuted", "undecided"]
HOLDS: Word = "holds"
EXCEEDS: Word = "exceeds"
"""The whole interval lies beyond the rule's limit, on the side of the paper's effect."""
REFUTED: Word = "refuted"
"""The whole interval lies outside of the rule, on any other side."""
UNDECIDED: Word = "undecided"
VERDICTS = (HOLDS, EXCEEDS, REFUTED, UNDECIDED)
NO_VALUE = "no value"
"""How a verdict's text begins where a seed has no value."""


@dataclass(frozen=True)
class Verdict:
    """The result of judging values by a rule."""

    headway: str
    """Text such as "61.2% [58%, 64.4%], 5 seeds"."""
    word: Word
    reason: str
    """Why the claim does not hold or is undecided, in the rule's terms; empty if it holds."""

    @property
    def holds(self) -> bool | None:
        """Whether the claim holds; None if undecided, false if it is refuted or exceeded."""
        return None if self.word == UNDECIDED else self.word == HOLDS


class Bounds(NamedTuple):
    """The values for which a claim holds, and the side of larger effects."""

    low: float
    high: float
    right: int
    """1: an effect above `high` exceeds the paper's; -1: an effect below `low` does; 0: values outside on either side
    refute the claim."""

    def word(self, low: float, high: float) -> Word:
        """The verdict on an interval [low, high] of the mean."""
        if self.low <= low and high <= self.high:
            return HOLDS
        if high < self.low:
            return EXCEEDS if self.right < 0 else REFUTED
        if low > self.high:
            return EXCEEDS if self.right > 0 else REFUTED
        return UNDECIDED


class Rule(Protocol):
    """A rule for a claim's values. str() gives its text for readers."""

    def judge(self, values: Sequence[Value]) -> Verdict:
        """The verdict on one value for each seed."""
        ...


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, the paper's figure, and the rule for the reproduction. `id` is unique in the system."""

    id: str
    claim: str
    paper: str | float
    rule: Rule


@dataclass(frozen=True)
class _Threshold:
    effect: float
    """The paper's effect, in the values' unit."""
    share: float = 0.5
    """The threshold's position between `neutral` and the paper's effect; 0 requires only the direction."""
    neutral: float = 0.0
    """The value without an effect: 0 for a reduction, 1 for a ratio."""
    unit: str = ""
    """"%": the values are shares, and shown times 100. Any other text is shown after the value: "x", " s"."""
    because: str = ""
    """The reason for a share below one half."""
    exact: bool = False
    """Whether the value is independent of seeds, and decides without an interval."""
    limit: float | None = None
    """A value beyond it, in the effect's direction, is another effect than the paper's. None = no limit."""

    def __post_init__(self) -> None:
        if self.share < 0.5 and not self.because:
            raise ValueError("a share below one half needs a reason (because=...)")
        if self.limit is not None and (self.limit - self.effect) * (self.effect - self.neutral) < 0:
            raise ValueError(f"the limit {self.limit:g} is on this side of the effect {self.effect:g}")

    @property
    def threshold(self) -> float:
        """The value that the whole interval must reach."""
        return self.neutral + self.share * (self.effect - self.neutral)

    def text(self, side: str) -> str:
        """The rule's text, such as "at least 36% (half of the paper's 72%)"."""
        paper = f"the paper's {with_unit(self.effect, self.unit)}"
        way = f"the way from {with_unit(self.neutral, self.unit)} to {paper}" if self.neutral else paper
        size = {0.0: f"the direction of {paper}", 0.5: f"half of {way}", 1.0: ""}
        parts = [size.get(self.share, f"{short_number(100 * self.share)}% of {way}"), self.because]
        inner = ": ".join(part for part in parts if part)
        limit = f", no further than {with_unit(self.limit, self.unit)}" if self.limit is not None else ""
        return f"{side} {with_unit(self.threshold, self.unit)}" + (f" ({inner})" if inner else "") + limit


class AtLeast(_Threshold):
    """An increase: the claim holds if the whole interval is at least the threshold and at most the limit."""

    def __str__(self) -> str:
        return self.text("at least")

    @property
    def bounds(self) -> Bounds:
        """The bounds, from the threshold to the limit."""
        return Bounds(self.threshold, inf if self.limit is None else self.limit, right=1)

    def judge(self, values: Sequence[Value]) -> Verdict:
        """Refuted if the whole interval is below the threshold, exceeded if it is above the limit."""
        return _judged(values, self.bounds, self.unit, self.exact)


class AtMost(_Threshold):
    """A decrease: the claim holds if the whole interval is at most the threshold and at least the limit."""

    def __str__(self) -> str:
        return self.text("at most")

    @property
    def bounds(self) -> Bounds:
        """The bounds, from the limit to the threshold."""
        return Bounds(-inf if self.limit is None else self.limit, self.threshold, right=-1)

    def judge(self, values: Sequence[Value]) -> Verdict:
        """Refuted if the whole interval is above the threshold, exceeded if it is below the limit."""
        return _judged(values, self.bounds, self.unit, self.exact)


@dataclass(frozen=True)
class Between:
    """Parity or a range: the claim holds if the whole interval is within the bounds.

    Bounds on one side of "no effect" (0 for shares and points, 1 for ratios) describe an effect, and values beyond the
    farther bound exceed it. Seconds and counts have no such side.
    """

    low: float
    high: float
    unit: str = ""
    """See `AtLeast`."""
    exact: bool = False
    """See `AtLeast`."""

    def __str__(self) -> str:
        if self.low == self.high:
            return f"exactly {with_unit(self.low, self.unit)}"
        return f"between {with_unit(self.low, self.unit)} and {with_unit(self.high, self.unit)}"

    @property
    def bounds(self) -> Bounds:
        """The values that confirm the claim, and the side on which it is exceeded."""
        neutral = _NEUTRAL.get(self.unit)
        right = 0 if neutral is None else (self.low > neutral) - (self.high < neutral)
        return Bounds(self.low, self.high, right)

    def judge(self, values: Sequence[Value]) -> Verdict:
        """Refuted or exceeded if the whole interval is on one side of the bounds."""
        return _judged(values, self.bounds, self.unit, self.exact)


@dataclass(frozen=True)
class EverySeed:
    """The claim holds if the value is true for every seed, and is refuted otherwise. One seed suffices."""

    def __str__(self) -> str:
        return "true for every seed"

    def judge(self, values: Sequence[Value]) -> Verdict:
        """Undecided only if a seed has no value."""
        if missing := _missing(values):
            return missing
        num_true = sum(map(bool, values))
        text = f"true for {num_true} of {_seeds(len(values))}"
        holds = num_true == len(values)
        reason = "" if holds else f"False for {_seeds(len(values) - num_true)}."
        return Verdict(text, HOLDS if holds else REFUTED, reason)


_NEUTRAL = {"%": 0.0, " points": 0.0, "x": 1.0}
"""The value without an effect, by unit."""


def with_unit(value: float, unit: str) -> str:
    """A value with its unit (see `AtLeast.unit`)."""
    return f"{short_number(100 * value)}%" if unit == "%" else f"{short_number(value)}{unit}"


def _judged(values: Sequence[Value], bounds: Bounds, unit: str, exact: bool) -> Verdict:
    """The verdict for the mean's interval."""
    if missing := _missing(values):
        return missing
    numbers = [float(value) for value in values if value is not None]
    if exact and len(set(numbers)) != 1:
        raise ValueError(f"an exact value differs between seeds: {numbers}")
    mean = numbers[0] if exact else fmean(numbers)
    found = (mean, mean) if exact else interval(numbers)
    if found is None:
        text = f"{with_unit(mean, unit)}, 1 seed"
        return Verdict(text, UNDECIDED, "One seed has no interval.")
    ends = f"[{with_unit(found[0], unit)}, {with_unit(found[1], unit)}]"
    text = f"{with_unit(mean, unit)}, exact" if exact else f"{with_unit(mean, unit)} {ends}, {_seeds(len(numbers))}"
    word = bounds.word(*found)
    if word == HOLDS:
        return Verdict(text, word, "")
    what = "The value" if exact else f"The interval {ends}"
    missed = with_unit(bounds.low if found[0] < bounds.low else bounds.high, unit)
    if word == UNDECIDED:
        return Verdict(text, word, f"{what} lies on both sides of {missed}; more seeds make it narrower.")
    return Verdict(text, word, f"{what} lies {'below' if found[1] < bounds.low else 'above'} {missed}.")


def _missing(values: Sequence[Value]) -> Verdict | None:
    """The verdict if a seed has no value; otherwise None."""
    num = sum(value is None or not isfinite(value) for value in values)
    if values and not num:
        return None
    text = f"{NO_VALUE} for {num} of {_seeds(len(values))}"
    return Verdict(text, UNDECIDED, f"There is {text}.")


def _seeds(num: int) -> str:
    return f"{num} seed{'' if num == 1 else 's'}"


def ids_like(claims: Sequence[Claim], *patterns: str) -> frozenset[str]:
    """The ids that match one of the patterns, in which a star stands for any letters."""
    return frozenset(claim.id for claim in claims for each in patterns if fnmatchcase(claim.id, each))


class _RuleFields(msgspec.Struct, forbid_unknown_fields=True):
    """A rule in `claims.yaml`: exactly one of the first four keys names its kind."""

    at_least: float | None = None
    at_most: float | None = None
    between: tuple[float, float] | None = None
    every_seed: bool = False
    share: float = 0.5
    neutral: float = 0.0
    unit: str = ""
    because: str = ""
    exact: bool = False
    limit: float | None = None

    def rule(self) -> Rule:
        if self.every_seed:
            return EverySeed()
        if self.between is not None:
            return Between(*self.between, self.unit, self.exact)
        kind, effect = (AtMost, self.at_most) if self.at_least is None else (AtLeast, self.at_least)
        if effect is None:
            raise ValueError("a rule needs at_least, at_most, between or every_seed")
        return kind(effect, self.share, self.neutral, self.unit, self.because, self.exact, self.limit)


class _ClaimFields(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    claim: str
    paper: str | float
    rule: _RuleFields


def read_claims(package: str) -> Mapping[str, tuple[Claim, ...]]:
    """The claims in a package's `claims.yaml`, by group, in the order of the file."""
    text = (files(package) / "claims.yaml").read_bytes()
    groups = msgspec.yaml.decode(text, type=dict[str, list[_ClaimFields]])
    return {
        name: tuple(Claim(row.id, row.claim, row.paper, row.rule.rule()) for row in rows)
        for name, rows in groups.items()
    }
