"""Distributions of prompt and output lengths: one class per distribution, and fits of public traces by name."""

from __future__ import annotations

import math
from functools import cache
from importlib import resources
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct
from numpy.random import Generator

from headway.core.errors import HeadwayError, unknown
from headway.workload.table import MAX_TOKENS, Floats, Longs

Column = Literal["prompt_tokens", "output_tokens", "reasoning_tokens"]

Z99 = 2.3263478740408408
"""The 99th percentile of the standard normal distribution."""

_ERFC = np.frompyfunc(math.erfc, 1, 1)


class Lognormal(Struct, frozen=True, forbid_unknown_fields=True, tag="lognormal", tag_field="kind"):
    """A skewed distribution, given by `mean` and `cv` or by `p50` and `p99`."""

    mean: float | None = None
    """Mean number of tokens."""
    cv: float | None = None
    """Standard deviation over mean."""
    p50: float | None = None
    """Median number of tokens."""
    p99: float | None = None
    """99th percentile of the number of tokens."""
    min: int = 1
    """Lower bound; smaller values are raised to it."""
    max: int = MAX_TOKENS
    """Upper bound; larger values are cut to it."""

    def __post_init__(self) -> None:
        by_mean, by_median = (self.mean, self.cv), (self.p50, self.p99)
        if (None in by_mean or by_median != (None, None)) and (None in by_median or by_mean != (None, None)):
            raise ValueError("lognormal: expected mean and cv, or p50 and p99")
        if self.mean is not None and self.cv is not None:
            if not 0 < self.mean <= MAX_TOKENS:
                raise ValueError(f"mean: {self.mean}; expected a number of tokens from 0 to {MAX_TOKENS:,}")
            if not 0 <= self.cv <= 1e3:
                raise ValueError(f"cv: {self.cv}; expected 0 to 1000")
        if self.p50 is not None and self.p99 is not None and not 0 < self.p50 <= self.p99 <= MAX_TOKENS:
            raise ValueError(f"p50 {self.p50}, p99 {self.p99}; expected 0 < p50 <= p99 <= {MAX_TOKENS:,}")
        _bounds(self.min, self.max)

    def sample(self, random: Generator, num: int) -> Longs:
        return _tokens(random.lognormal(*self._mu_sigma(), num), self.min, self.max)

    def at_scores(self, scores: Floats) -> Longs:
        mu, sigma = self._mu_sigma()
        return _tokens(np.exp(mu + sigma * scores), self.min, self.max)

    def _mu_sigma(self) -> tuple[float, float]:
        if self.mean is not None and self.cv is not None:
            sigma = math.sqrt(math.log1p(self.cv**2))
            return math.log(self.mean) - sigma**2 / 2, sigma
        assert self.p50 is not None and self.p99 is not None
        mu = math.log(self.p50)
        return mu, (math.log(self.p99) - mu) / Z99


class Uniform(Struct, frozen=True, forbid_unknown_fields=True, tag="uniform", tag_field="kind"):
    """Whole numbers from `min` to `max` in steps of `step`, all with the same probability."""

    min: int
    """Fewest tokens."""
    max: int
    """Maximum number of tokens."""
    step: int = 1
    """Only min, min + step, min + 2 step and so on, up to max."""

    def __post_init__(self) -> None:
        _bounds(self.min, self.max)
        if self.step < 1 or (self.max - self.min) % self.step:
            raise ValueError(f"step: {self.step}; expected 1 or more, and max a whole number of steps above min")

    def sample(self, random: Generator, num: int) -> Longs:
        return self.min + self.step * random.integers(0, self._steps(), num, endpoint=True)

    def at_scores(self, scores: Floats) -> Longs:
        steps = np.minimum(_quantile(scores) * (self._steps() + 1), self._steps()).astype("i8")
        return self.min + self.step * steps

    def _steps(self) -> int:
        return (self.max - self.min) // self.step


class Geometric(Struct, frozen=True, forbid_unknown_fields=True, tag="geometric", tag_field="kind"):
    """Counts from 1, where each further step has the same probability, such as the turns of a session."""

    mean: float
    """Mean, 1 or more."""
    max: int = MAX_TOKENS
    """Upper bound; larger values are cut to it."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean < math.inf:
            raise ValueError(f"mean: {self.mean}; expected 1 or more")
        _bounds(1, self.max)

    def sample(self, random: Generator, num: int) -> Longs:
        return np.minimum(random.geometric(1 / self.mean, num), self.max)

    def at_scores(self, scores: Floats) -> Longs:
        if self.mean == 1:
            return np.ones(len(scores), "i8")
        further = np.log(_quantile(-scores)) / math.log1p(-1 / self.mean)
        return _tokens(np.ceil(further), 1, self.max)


class QuantileTable(Struct, frozen=True, forbid_unknown_fields=True, tag="quantiles", tag_field="kind"):
    """An empirical distribution, interpolated linearly between the given quantiles."""

    quantiles: tuple[float, ...]
    """The quantiles at which `tokens` are given, rising from 0 to 1."""
    tokens: tuple[float, ...]
    """The values at these quantiles, nondecreasing."""

    def __post_init__(self) -> None:
        at, tokens = np.asarray(self.quantiles), np.asarray(self.tokens)
        if len(at) != len(tokens) or len(at) < 2:
            raise ValueError("quantiles and tokens: expected as many of one as of the other, 2 or more")
        if at[0] != 0 or at[-1] != 1 or not bool((np.diff(at) > 0).all()):
            raise ValueError("quantiles: expected rising numbers from 0 to 1")
        if not 0 <= tokens[0] <= tokens[-1] <= MAX_TOKENS or not bool((np.diff(tokens) >= 0).all()):
            raise ValueError(f"tokens: expected numbers from 0 to {MAX_TOKENS:,} that do not fall")

    def sample(self, random: Generator, num: int) -> Longs:
        return _tokens(np.interp(random.random(num), self.quantiles, self.tokens), 1, MAX_TOKENS)

    def at_scores(self, scores: Floats) -> Longs:
        return _tokens(np.interp(_quantile(scores), self.quantiles, self.tokens), 1, MAX_TOKENS)


Distribution = Lognormal | Uniform | Geometric | QuantileTable
Length = int | str | Distribution
"""A value of `prompt_tokens:`: a number, the name of a built-in distribution, or a distribution."""


def sample(length: Length, column: Column, random: Generator, num: int, where: str = "") -> Longs:
    """Draw `num` token counts for a column. `where` is the key named in errors."""
    if isinstance(length, int):
        return np.full(num, length, "i8")
    if isinstance(length, str):
        return builtin(length, column, where).sample(random, num)
    return length.sample(random, num)


def at_scores(length: Length, column: Column, scores: Floats, where: str = "") -> Longs:
    """Token counts of a column at the quantiles of the given standard normal scores."""
    if isinstance(length, int):
        return np.full(len(scores), length, "i8")
    if isinstance(length, str):
        return builtin(length, column, where).at_scores(scores)
    return length.at_scores(scores)


class FittedLengths(Struct, frozen=True, forbid_unknown_fields=True):
    """The values of one public trace at the file's `quantiles`, by column."""

    source: str
    prompt_tokens: tuple[float, ...] | None = None
    output_tokens: tuple[float, ...] | None = None
    reasoning_tokens: tuple[float, ...] | None = None


class FittedLengthsFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The file of fitted distributions, `lengths.json`."""

    quantiles: tuple[float, ...]
    distributions: dict[str, FittedLengths]


@cache
def fitted_lengths() -> FittedLengthsFile:
    text = resources.files("headway.workload").joinpath("lengths.json").read_bytes()
    return msgspec.json.decode(text, type=FittedLengthsFile)


def builtin(name: str, column: Column, where: str = "") -> QuantileTable:
    """The built-in distribution of one column. Raises HeadwayError for an unknown name."""
    known = fitted_lengths()
    options = [n for n, f in known.distributions.items() if getattr(f, column) is not None]
    if name not in options:
        if name[:1].isdigit():
            listed = ", ".join(options)
            raise HeadwayError(f"{where or column}: {name!r}; expected a number of tokens, or one of: {listed}")
        raise unknown("length distribution", name, options, where or column)
    return QuantileTable(known.quantiles, getattr(known.distributions[name], column))


def check_length(key: str, length: Length, column: Column) -> None:
    """Raise ValueError, naming `key`, for a number out of range or an unknown name of a distribution."""
    least = 0 if key == "reasoning_tokens" else 1
    if isinstance(length, int) and not least <= length <= 10_000_000:
        raise ValueError(f"{key}: {length}; expected {least} to 10,000,000")
    if isinstance(length, str):
        try:
            builtin(length, column, key)
        except HeadwayError as error:
            raise ValueError(str(error)) from None


def _quantile(scores: Floats) -> Floats:
    """The standard normal distribution function at each score."""
    return np.asarray(_ERFC(-scores / math.sqrt(2)), "f8") / 2


def _tokens(values: Floats, low: int, high: int) -> Longs:
    return np.clip(np.rint(values), low, high).astype("i8")


def _bounds(low: int, high: int) -> None:
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ValueError(f"min {low}, max {high}; expected 1 <= min <= max <= {MAX_TOKENS:,}")
