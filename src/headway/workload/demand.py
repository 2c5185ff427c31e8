"""Demand by tier, model and region that moves over the week: what stands under `demand:` in a scenario."""

from __future__ import annotations

from math import inf
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.workload.arrivals import DAY_S, WEEK_S
from headway.workload.lengths import Length, check_length
from headway.workload.promises import positive

Floats = npt.NDArray[np.float64]


class Lengths(Struct, frozen=True, forbid_unknown_fields=True):
    """How long the requests for one model are."""

    prompt_tokens: Length
    """As outside of demand."""
    output_tokens: Length
    """As outside of demand."""

    def __post_init__(self) -> None:
        check_length("prompt_tokens", self.prompt_tokens, "prompt_tokens")
        check_length("output_tokens", self.output_tokens, "output_tokens")


class Population(Struct, frozen=True, forbid_unknown_fields=True):
    """The requests of one tier. Its part of all requests is the tier's `share`; Poisson at each moment."""

    tier: int
    """Which one; no two populations have the same."""
    cells: dict[str, dict[str, float]]
    """By region, then model: their part of the tier's requests, relative to the other cells."""
    peak_to_trough: float = 1.0
    """Of a sine over the day: the busiest moment's rate over the quietest one's."""
    peak_hour: float = 14.0
    """Hour of the day with the highest rate, 0 to 24."""
    days: tuple[float, ...] = (1.0,) * 7
    """What each day of the week, Monday first, is multiplied by."""
    noise_cv: float = 0.0
    """Spread of what no clock explains: a factor with mean 1 (lognormal), for each cell apart."""
    noise_s: float = 3600.0
    """How long such a factor holds."""

    def __post_init__(self) -> None:
        shares = [share for by_model in self.cells.values() for share in by_model.values()]
        if not shares or not all(0 <= share < inf for share in shares) or not any(shares):
            raise ValueError("cells: expected regions, models and shares from 0, not all of them 0")
        if len(self.days) != 7 or not all(0 <= day < inf for day in self.days) or not any(self.days):
            raise ValueError("days: expected seven numbers from 0, not all of them 0")
        if not 1 <= self.peak_to_trough < inf or not 0 <= self.noise_cv < inf:
            raise ValueError("peak_to_trough, noise_cv: expected 1 or more, and 0 or more")
        positive(self, "noise_s")

    def shape(self, at_s: Floats) -> Floats:
        """The rate at these times of the week, relative to the mean over a week, without noise."""
        swing = (self.peak_to_trough - 1) / (self.peak_to_trough + 1)
        within_s = at_s % WEEK_S
        hours = 1 + swing * np.cos(2 * np.pi * (within_s / DAY_S - self.peak_hour / 24))
        days = np.array(self.days)[(within_s // DAY_S).astype("i8")]
        return np.asarray(hours * days / np.mean(self.days), "f8")


class From(Struct, frozen=True, forbid_unknown_fields=True):
    """Whose demand a series of a file is."""

    model: str
    """The model asked for."""
    tier: int = 0
    """The tier of its requests."""
    regions: str | dict[str, float] = ""
    """Where they come from: a region, or several with their shares."""


class Demand(Struct, frozen=True, forbid_unknown_fields=True):
    """How many requests there are of which kind, and when: `populations`, or `path` and `series`."""

    lengths: dict[str, Lengths]
    """By model."""
    populations: tuple[Population, ...] | None = None
    """Made up, tier by tier."""
    path: str | None = None
    """A CSV file of series, gzip or not, relative to the scenario's folder: a column of times (time_s, t_seconds or
    timestamp) and columns of values; where columns hold text, each combination of texts is a series: `A prod`."""
    series: dict[str, From] = {}
    """Whose demand each series of the file is; those not named are left out."""
    counts: Literal["prompt_tokens", "requests"] = "prompt_tokens"
    """What the file's values count."""
    per_s: float = 1.0
    """In how many seconds: 60 = values are per minute."""

    def __post_init__(self) -> None:
        if (self.populations is None) == (self.path is None):
            raise ValueError("demand: expected populations or path, one of them")
        if self.path is not None and not self.series:
            raise ValueError("series: missing; say whose demand each series of the file is")
        if self.populations is not None and len({p.tier for p in self.populations}) < max(len(self.populations), 1):
            raise ValueError("populations: expected one or more, each of a tier of its own")
        positive(self, "per_s")
        for model in self.models():
            if model not in self.lengths:
                raise ValueError(f"lengths: says nothing of {model}")

    def models(self) -> tuple[str, ...]:
        """All that are asked for."""
        made = [m for p in self.populations or () for by_model in p.cells.values() for m in by_model]
        return tuple(dict.fromkeys([*made, *(each.model for each in self.series.values())]))
