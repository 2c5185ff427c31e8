"""Arrival processes: one class for each value of `arrivals:` in a scenario."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from numpy.random import Generator

from headway.core.column import Column
from headway.core.counts import MOST_OTHER
from headway.core.errors import HeadwayError
from headway.workload.random_streams import column_of
from headway.workload.spill import LONG_ROWS, SpillFile

Floats = npt.NDArray[np.float64]

DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
LEAST_CV, MOST_CV = 1e-3, 1e3


def check_positive(struct: Struct, *names: str) -> None:
    """Raise ValueError for the first of these fields that is not positive, or for a count that is too large. None is
    allowed."""
    for name in names:
        value = getattr(struct, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}: {value}; expected a number above 0")
        if isinstance(value, int) and value > MOST_OTHER:
            raise ValueError(f"{name}: {value}; expected at most {MOST_OTHER:,}")


class Poisson(Struct, frozen=True, forbid_unknown_fields=True, tag="poisson", tag_field="kind"):
    """Independent arrivals at a constant rate."""

    rate: float
    """Requests per second."""

    def __post_init__(self) -> None:
        check_positive(self, "rate")

    def times(self, random: Generator, num: int | None, duration_s: float | None) -> Floats:
        """Nondecreasing arrival times from 0: `num` of them, or those before `duration_s`."""
        return _renewal(lambda n: random.exponential(1 / self.rate, n), self.rate, num, duration_s)


class Gamma(Struct, frozen=True, forbid_unknown_fields=True, tag="gamma", tag_field="kind"):
    """Gaps from a gamma distribution: burstier than Poisson with a `cv` above 1, smoother below."""

    rate: float
    """Requests per second, on average."""
    cv: float
    """Standard deviation of the gaps over their mean; 1 is Poisson."""

    def __post_init__(self) -> None:
        check_positive(self, "rate", "cv")
        if not LEAST_CV <= self.cv <= MOST_CV:
            raise ValueError(f"cv: {self.cv}; expected {LEAST_CV:g} to {MOST_CV:g}")

    def times(self, random: Generator, num: int | None, duration_s: float | None) -> Floats:
        shape = 1 / self.cv**2
        return _renewal(lambda n: random.gamma(shape, 1 / (shape * self.rate), n), self.rate, num, duration_s)


class Deterministic(Struct, frozen=True, forbid_unknown_fields=True, tag="deterministic", tag_field="kind"):
    """One arrival every 1 / rate seconds, the first at 0."""

    rate: float
    """Requests per second."""

    def __post_init__(self) -> None:
        check_positive(self, "rate")

    def times(self, random: Generator, num: int | None, duration_s: float | None) -> Floats:
        expected = (duration_s or 0.0) * self.rate if num is None else num
        _check_number(expected)
        count = math.ceil(expected)
        arrival_s = np.arange(count) / self.rate
        return arrival_s if duration_s is None else arrival_s[arrival_s < duration_s]


class Diurnal(Struct, frozen=True, forbid_unknown_fields=True, tag="diurnal", tag_field="kind"):
    """A sine over the day with a lower rate at weekends. Poisson at each moment."""

    rate: float
    """Requests per second, averaged over a working day."""
    peak_to_trough: float = 3.0
    """The busiest moment's rate over the quietest one's, 1 or more."""
    peak_hour: float = 14.0
    """Hour of the day with the highest rate, 0 to 24."""
    weekend: float = 1.0
    """Factor on the rate on the sixth and seventh day of a week."""
    start_hour: float = 0.0
    """Hour of the week at which the workload begins; 0 is Monday, midnight."""

    def __post_init__(self) -> None:
        check_positive(self, "rate")
        if not 1 <= self.peak_to_trough < math.inf:
            raise ValueError(f"peak_to_trough: {self.peak_to_trough}; expected 1 or more")
        if not 0 <= self.weekend < math.inf:
            raise ValueError(f"weekend: {self.weekend}; expected 0 or more")

    def rate_at(self, at_s: Floats) -> Floats:
        week_s = (at_s + self.start_hour * 3600) % WEEK_S
        swing = (self.peak_to_trough - 1) / (self.peak_to_trough + 1)
        day = 1 + swing * np.cos(2 * np.pi * (week_s / DAY_S - self.peak_hour / 24))
        rate: Floats = self.rate * day * np.where(week_s >= 5 * DAY_S, self.weekend, 1.0)
        return rate

    def times(self, random: Generator, num: int | None, duration_s: float | None) -> Floats:
        swing = (self.peak_to_trough - 1) / (self.peak_to_trough + 1)
        peak = self.rate * (1 + swing) * max(1.0, self.weekend)
        return _thinned(random, self.rate_at, peak, self.rate, num, duration_s)


class Curve(Struct, frozen=True, forbid_unknown_fields=True, tag="curve", tag_field="kind"):
    """A measured demand curve: rates that hold for one step each, repeated. Poisson at each moment."""

    rates: tuple[float, ...]
    """Requests per second, step by step."""
    step_s: float
    """Duration of each rate."""

    def __post_init__(self) -> None:
        check_positive(self, "step_s")
        if not self.rates or not all(0 <= r < math.inf for r in self.rates) or not any(self.rates):
            raise ValueError("rates: expected numbers from 0, not all of them 0")

    def rate_at(self, at_s: Floats) -> Floats:
        step = (at_s // self.step_s).astype("i8") % len(self.rates)
        rate: Floats = np.asarray(self.rates, "f8")[step]
        return rate

    def times(self, random: Generator, num: int | None, duration_s: float | None) -> Floats:
        mean = sum(self.rates) / len(self.rates)
        return _thinned(random, self.rate_at, max(self.rates), mean, num, duration_s)


class BurstWindow(Struct, frozen=True, forbid_unknown_fields=True):
    """A period with more (or fewer) requests than usual."""

    from_s: float
    """Start of the period."""
    to_s: float
    """End of the period."""
    factor: float
    """Factor on the base rate."""

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < self.to_s:
            raise ValueError(f"from_s {self.from_s}, to_s {self.to_s}; expected 0 <= from_s < to_s")
        if not 0 <= self.factor < math.inf:
            raise ValueError(f"factor: {self.factor}; expected 0 or more")


class Bursts(Struct, frozen=True, forbid_unknown_fields=True, tag="bursts", tag_field="kind"):
    """A base rate multiplied within windows of time; overlapping factors multiply. Poisson at each moment."""

    rate: float
    """Requests per second outside all bursts."""
    bursts: tuple[BurstWindow, ...]
    """The windows of bursts."""
    repeat_s: float | None = None
    """Period after which the windows repeat; without it, they occur once."""

    def __post_init__(self) -> None:
        check_positive(self, "rate")
        check_positive(self, "repeat_s")
        if self.repeat_s is not None and any(b.to_s > self.repeat_s for b in self.bursts):
            raise ValueError(f"bursts: expected windows that end by repeat_s, {self.repeat_s}")
        if self._peak() <= 0:
            raise ValueError("bursts: expected some time with a rate above 0")

    def rate_at(self, at_s: Floats) -> Floats:
        within_s = at_s if self.repeat_s is None else at_s % self.repeat_s
        rate = np.full(len(at_s), self.rate)
        for burst in self.bursts:
            rate[(within_s >= burst.from_s) & (within_s < burst.to_s)] *= burst.factor
        return rate

    def times(self, random: Generator, num: int | None, duration_s: float | None) -> Floats:
        return _thinned(random, self.rate_at, self._peak(), self.rate, num, duration_s)

    def _peak(self) -> float:
        """The highest rate, which begins at the edge of some window."""
        edges = np.array([0.0, *(edge for b in self.bursts for edge in (b.from_s, b.to_s))])
        return float(self.rate_at(edges).max())


class Replay(Struct, frozen=True, forbid_unknown_fields=True, tag="replay", tag_field="kind"):
    """The arrival times of a trace. Lengths come from the rest of the workload."""

    path: str
    """The trace, in any supported format, relative to the scenario's folder."""
    format: str | None = None
    """Format of the file; without it, recognised by the first line."""
    rate_scale: float = 1.0
    """2 = twice the rate, in half the time."""
    sort: bool = False
    """Sort the trace by arrival first."""

    def __post_init__(self) -> None:
        check_positive(self, "rate_scale")


Process = Poisson | Gamma | Deterministic | Diurnal | Curve | Bursts
Arrivals = Process | Replay


def _renewal(gaps: Callable[[int], Floats], rate: float, num: int | None, duration_s: float | None) -> Floats:
    if num is not None:
        arrival_s = np.cumsum(gaps(num)) if num <= LONG_ROWS else _cumulated(gaps, num)
        return arrival_s if duration_s is None else arrival_s[: int(np.searchsorted(arrival_s, duration_s))]
    assert duration_s is not None
    return _until(lambda start_s, n: start_s + np.cumsum(gaps(n)) if start_s else _cumulated(gaps, n), rate, duration_s)


def _cumulated(gaps: Callable[[int], Floats], num: int) -> Floats:
    last_s = 0.0

    def more(n: int) -> Floats:
        nonlocal last_s
        gaps_s = gaps(n)
        gaps_s[:1] += last_s
        times_s = np.cumsum(gaps_s)
        last_s = float(times_s[-1]) if n else last_s
        return times_s

    return column_of(num, "f8", more)


def _check_number(expected: float) -> None:
    """Raises HeadwayError for more draws than a workload may have."""
    if expected > MOST_OTHER:
        raise HeadwayError(f"workload: arrivals: {expected:.3g} would be drawn; expected at most {MOST_OTHER:,}")


def _until(more: Callable[[float, int], Floats], rate: float, duration_s: float) -> Floats:
    """Arrivals before `duration_s`, drawn in batches of about the number still expected."""
    _check_number(duration_s * rate)
    parts, last_s = list[Floats](), 0.0
    while last_s < duration_s:
        expected = (duration_s - last_s) * rate
        part = more(last_s, int(expected + 4 * math.sqrt(expected)) + 16)
        parts.append(part)
        last_s = float(part[-1])
    arrival_s = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])
    return arrival_s[: int(np.searchsorted(arrival_s, duration_s))]


def _thinned(
    random: Generator,
    rate_at: Callable[[Floats], Floats],
    peak: float,
    mean: float,
    num: int | None,
    duration_s: float | None,
) -> Floats:
    """A Poisson process with a varying rate: candidates at the peak rate, each kept with probability rate / peak.

    After Lewis and Shedler, "Simulation of nonhomogeneous Poisson processes by thinning" (1979).
    """
    _check_number(min(math.inf if num is None else num * peak / mean, peak * (duration_s or math.inf)))
    accepted = Column(np.dtype(np.float64), SpillFile)
    num_accepted, last_s, end_s = 0, 0.0, math.inf if duration_s is None else duration_s
    while last_s < end_s and (num is None or num_accepted < num):
        expected = (end_s - last_s) * mean if num is None else num - num_accepted
        batch = int(min(max(expected * peak / mean * 1.02, 0) + 1000, 4_000_000))
        candidates = last_s + np.cumsum(random.exponential(1 / peak, batch))
        chosen = candidates[random.random(batch) * peak < rate_at(candidates)]
        accepted.extend(chosen)
        num_accepted, last_s = num_accepted + len(chosen), float(candidates[-1])
    arrival_s = accepted.values()
    return arrival_s[: int(np.searchsorted(arrival_s, end_s))][:num]


def poisson_of_rate(rate: float) -> Process:
    """The process for a bare number under `arrivals:`."""
    try:
        return Poisson(rate)
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None
