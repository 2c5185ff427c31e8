"""Claims of papers, each with the rule that decides whether it holds, fixed before anything runs.

A rule judges one value for each seed, such as 0.41 for "TTFT falls by 41% with seed 3". Unless a claim gives a reason
for another share, it holds if the effect has the paper's direction and at least half of the paper's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import inf, isfinite
from statistics import fmean
from typing import Protocol

import msgspec

from headway.report.table import short_number
from headway.reproduce.interval import interval

Value = float | bool | None
"""Of one seed. None: the run has no such number."""


@dataclass(frozen=True)
class Verdict:
    """What a rule makes of the values. `holds` is None where that is undecided."""

    headway: str
    """As in "61.2% [58%, 64.4%], 5 seeds"."""
    holds: bool | None
    reason: str
    """Why it does not hold, or is undecided, in terms of the rule; empty where it holds."""


class Rule(Protocol):
    """Printed, it is a text for readers."""

    def judge(self, values: Sequence[Value]) -> Verdict:
        """Of a value a seed."""
        ...


@dataclass(frozen=True)
class Claim:
    """One row: a sentence of the paper, its figure, and the rule for ours. `id` is unique in the system."""

    id: str
    claim: str
    paper: str | float
    rule: Rule


@dataclass(frozen=True)
class _Threshold:
    effect: float
    """The paper's, in the terms of the values."""
    share: float = 0.5
    """Of the way from `neutral` to the paper's effect; 0 asks for the direction alone."""
    neutral: float = 0.0
    """The value of no effect: 0 for a reduction, 1 for a ratio."""
    unit: str = ""
    """"%": the values are shares, and shown times 100. Anything else is shown behind the value: "x", " s"."""
    because: str = ""
    """Why less than half is asked for."""
    exact: bool = False
    """Nothing in the value is random: one value, without an interval, decides."""

    def __post_init__(self) -> None:
        if self.share < 0.5 and not self.because:
            raise ValueError("a share below one half needs a reason (because=...)")

    @property
    def threshold(self) -> float:
        """What the whole interval must meet."""
        return self.neutral + self.share * (self.effect - self.neutral)

    def text(self, side: str) -> str:
        """As in "at least 36% (half of the paper's 72%)"."""
        paper = f"the paper's {shown(self.effect, self.unit)}"
        way = f"the way from {shown(self.neutral, self.unit)} to {paper}" if self.neutral else paper
        size = {0.0: f"the direction of {paper}", 0.5: f"half of {way}", 1.0: ""}
        parts = [size.get(self.share, f"{short_number(100 * self.share)}% of {way}"), self.because]
        inner = ": ".join(part for part in parts if part)
        return f"{side} {shown(self.threshold, self.unit)}" + (f" ({inner})" if inner else "")


class AtLeast(_Threshold):
    """The effect is upwards: all of the interval lies at the threshold or above."""

    def __str__(self) -> str:
        return self.text("at least")

    def judge(self, values: Sequence[Value]) -> Verdict:
        """False where all of the interval lies below."""
        return _judged(values, self.threshold, inf, self.unit, self.exact)


class AtMost(_Threshold):
    """The effect is downwards: all of the interval lies at the threshold or below."""

    def __str__(self) -> str:
        return self.text("at most")

    def judge(self, values: Sequence[Value]) -> Verdict:
        """False where all of the interval lies above."""
        return _judged(values, -inf, self.threshold, self.unit, self.exact)


@dataclass(frozen=True)
class Between:
    """Parity: all of the interval lies between the two."""

    low: float
    high: float
    unit: str = ""
    """As for `AtLeast`."""
    exact: bool = False
    """As for `AtLeast`."""

    def __str__(self) -> str:
        if self.low == self.high:
            return f"exactly {shown(self.low, self.unit)}"
        return f"between {shown(self.low, self.unit)} and {shown(self.high, self.unit)}"

    def judge(self, values: Sequence[Value]) -> Verdict:
        """False where all of the interval lies outside, on one side."""
        return _judged(values, self.low, self.high, self.unit, self.exact)


@dataclass(frozen=True)
class EverySeed:
    """True for every seed; a single one for which it is false refutes it. One seed is enough to say."""

    def __str__(self) -> str:
        return "true for every seed"

    def judge(self, values: Sequence[Value]) -> Verdict:
        """Never undecided, but for seeds without a value."""
        if missing := _missing(values):
            return missing
        num_true = sum(map(bool, values))
        text = f"true for {num_true} of {_seeds(len(values))}"
        holds = num_true == len(values)
        return Verdict(text, holds, "" if holds else f"False for {_seeds(len(values) - num_true)}.")


def shown(value: float, unit: str) -> str:
    """A value with its unit, as `AtLeast.unit` says."""
    return f"{short_number(100 * value)}%" if unit == "%" else f"{short_number(value)}{unit}"


def _judged(values: Sequence[Value], low: float, high: float, unit: str, exact: bool) -> Verdict:
    """Whether the mean's interval lies within [low, high], outside, or across an end."""
    if missing := _missing(values):
        return missing
    numbers = [float(value) for value in values if value is not None]
    if exact and len(set(numbers)) != 1:
        raise ValueError(f"an exact value differs between seeds: {numbers}")
    mean = numbers[0] if exact else fmean(numbers)
    found = (mean, mean) if exact else interval(numbers)
    if found is None:
        text = f"{shown(mean, unit)}, 1 seed"
        return Verdict(text, None, "One seed has no interval.")
    ends = f"[{shown(found[0], unit)}, {shown(found[1], unit)}]"
    text = f"{shown(mean, unit)}, exact" if exact else f"{shown(mean, unit)} {ends}, {_seeds(len(numbers))}"
    limit = shown(low if found[0] < low else high, unit) if found[0] < low or found[1] > high else ""
    if low <= found[0] and found[1] <= high:
        return Verdict(text, True, "")
    what = "The value" if exact else f"The interval {ends}"
    if found[1] < low or found[0] > high:
        return Verdict(text, False, f"{what} lies {'below' if found[1] < low else 'above'} {limit}.")
    return Verdict(text, None, f"{what} lies on both sides of {limit}; more seeds make it narrower.")


def _missing(values: Sequence[Value]) -> Verdict | None:
    """The verdict where a seed has no value."""
    num = sum(value is None or not isfinite(value) for value in values)
    if values and not num:
        return None
    text = f"no value for {num} of {_seeds(len(values))}"
    return Verdict(text, None, f"There is {text}.")


def _seeds(num: int) -> str:
    return f"{num} seed{'' if num == 1 else 's'}"


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

    def rule(self) -> Rule:
        if self.every_seed:
            return EverySeed()
        if self.between is not None:
            return Between(*self.between, self.unit, self.exact)
        kind, effect = (AtMost, self.at_most) if self.at_least is None else (AtLeast, self.at_least)
        if effect is None:
            raise ValueError("a rule needs at_least, at_most, between or every_seed")
        return kind(effect, self.share, self.neutral, self.unit, self.because, self.exact)


class _ClaimFields(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    claim: str
    paper: str | float
    rule: _RuleFields


def read_claims(package: str) -> Mapping[str, tuple[Claim, ...]]:
    """The claims in `claims.yaml` of a package, by group, in the order of the file."""
    text = (files(package) / "claims.yaml").read_bytes()
    groups = msgspec.yaml.decode(text, type=dict[str, list[_ClaimFields]])
    return {
        name: tuple(Claim(row.id, row.claim, row.paper, row.rule.rule()) for row in rows)
        for name, rows in groups.items()
    }
