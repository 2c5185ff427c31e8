"""The hourly plan of SageServe's long-term scaling (sections 6.3 and 6.4): demand, forecast, instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import msgspec
import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError, unknown
from headway.core.past_demand import PastDemand
from headway.core.policy import Floats, Forecaster, InstancePlanner, MakeForecaster
from headway.core.task import InlineTask, TaskFactory
from headway.core.view import PoolCounts, PoolsView, PoolView
from headway.policies.endpoints import fewest_and_most
from headway.policies.scaling.cover import HOUR_S, GreedyCover
from headway.policies.scaling.demand import ArrivalCounts, Cell, StepRates, arrived_by_cell, past_by_cell

DAY_S = 86_400.0
_LITTLE = 1e-6


class Planning(Struct, frozen=True, forbid_unknown_fields=True):
    tps: dict[str, float] = {}
    """Input tokens per second that one replica serves within its SLOs, by pool or model. Pools without a value are not
    planned."""
    epsilon: float = 1.0
    """Share of its own peak that each region must cover itself."""
    startup_s: float = 60.0
    """Time to start one more replica; 60 s to reclaim a spot instance (7.1)."""
    miss_to_idle: float = 1.0
    """Cost of missing capacity relative to idle capacity. The forecast's quantile is m / (m + 1), as in the newsvendor
    problem. 1 is the median, as in the paper."""
    buffer: float = 0.1
    """beta: share of the last hour's mean batch load that is added to the forecast."""
    step_s: float = 300.0
    """Length of the forecast's demand steps. A period is a whole number of steps."""
    peak_s: float | None = None
    """A step's demand is the largest mean over this time within the step, because the paper plans for the maximum of an
    hour (6.3), in windows of "15 mins" (5). None: the mean of the step. A step is a whole number of these times."""
    lead_s: float = 0.0
    """The plan covers the demand from this time after the period's start: 1,200 in SageServe's artifact, whose plans
    are for 20 to 60 minutes ahead. A whole number of steps, shorter than the period."""
    period_s: float = HOUR_S
    """The period of a plan: the paper's hour, or less when a day is rehearsed in an hour."""
    recent_s: float = 60.0
    """Window of the current demand."""
    batch_tier: int = 2
    """Requests of this tier and above are batch work, which is not forecast."""

    def __post_init__(self) -> None:
        for name, value in self.tps.items():
            if not 0 < value < inf:
                raise ValueError(f"tps: {name}: {value}; expected a number above 0")
        for name in ("startup_s", "buffer", "batch_tier"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name}: {getattr(self, name)}; expected a number from 0")
        for name in ("miss_to_idle", "recent_s"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name}: {getattr(self, name)}; expected a number above 0")
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon: {self.epsilon}; expected more than 0, 1 at most")
        if not 0 < self.period_s <= DAY_S:
            raise ValueError(f"period_s: {self.period_s}; expected more than 0 seconds, a day at most")
        if not (isfinite(self.step_s) and self.step_s > 0 and self.period_s / self.step_s % 1 == 0):
            raise ValueError(f"step_s: {self.step_s}; expected seconds that fill the period of {self.period_s:g}")
        peak_s = self.window_s
        if not (isfinite(peak_s) and peak_s > 0 and self.step_s / peak_s % 1 == 0):
            raise ValueError(f"peak_s: {peak_s}; expected seconds that fill the step of {self.step_s:g}")
        if not (0 <= self.lead_s < self.period_s and self.lead_s / self.step_s % 1 == 0):
            raise ValueError(f"lead_s: {self.lead_s}; expected whole steps of {self.step_s:g}, below the period")

    @property
    def quantile(self) -> float:
        return self.miss_to_idle / (self.miss_to_idle + 1.0)

    @property
    def window_s(self) -> float:
        """The time over which demand is averaged."""
        return self.step_s if self.peak_s is None else self.peak_s

    def by_step(self, window_tps: Floats) -> Floats:
        """The demand of each whole step: the largest of its windows."""
        per_step = round(self.step_s / self.window_s)
        whole = len(window_tps) // per_step * per_step
        largest: Floats = window_tps[:whole].reshape(-1, per_step).max(axis=1, initial=0.0)
        return largest


class HourlyPlanner:
    """Counts demand, and plans at the end of each period for the next one; the first plan follows the first step.

    A plan that takes longer than the period applies once it is ready. Until then, or if it fails, the previous plan
    applies.
    """

    def __init__(
        self,
        planning: Planning | None,
        forecaster: MakeForecaster | None,
        planner: InstancePlanner | None,
        tasks: TaskFactory | None,
    ) -> None:
        self._config = config = planning or Planning()
        self._task = (tasks or InlineTask)(
            _Forecasting(
                forecaster or SameTimeYesterday(round(DAY_S / config.step_s)).of,
                planner or GreedyCover(config.tps, config.epsilon, config.startup_s),
                round(config.period_s / config.step_s),
                round(config.lead_s / config.step_s),
                config.quantile,
            )
        )
        self._is_planning = False
        self._cells: dict[Cell, _Cell] = {}
        self._past: PastDemand | None = None
        """Demand before the start; None from the first view on, which gives the names of models and regions."""
        self._num_past_steps = 0
        self._seen_s = 0.0
        self._until_s = config.step_s
        """The end of the current plan's period."""
        self.targets: Mapping[str, int] = {}
        """Planned replicas by pool."""

    def remember(self, past: PastDemand) -> None:
        """Count demand from before the start as observed. The first plan is then made at once."""
        self._past = past
        if past.length_s >= self._config.step_s:
            self._until_s = 0.0

    def update(self, view: PoolsView) -> bool:
        """Record the arrivals so far, and start or finish a plan. True if there is a new plan."""
        self._count(view)
        self._seen_s = view.now
        if view.now >= self._until_s and self._cells and not self._is_planning:
            self._until_s = (view.now // self._config.period_s + 1) * self._config.period_s
            snapshots = msgspec.convert(view.pools, list[_PoolSnapshot], from_attributes=True)
            self._task.start({cell: self._history(each) for cell, each in self._cells.items()}, snapshots)
            self._is_planning = True
        if not self._is_planning or self._task.is_busy:
            return False
        self._is_planning = False
        planned: _HourlyPlan | None = self._task.result()
        if planned is None:
            return False
        self.targets = planned.targets
        for name, expected_tps in planned.expected_tps.items():
            self._cells[name].expected_tps = expected_tps
            self._cells[name].expected_from_s = planned.expected_from_s[name]
        return True

    def ratio(self, pool: PoolView, now: float) -> float | None:
        """Current demand over forecast demand; infinite if only the forecast is 0.

        None without a forecast, or if both are 0.
        """
        cell = self._cells.get((pool.model, pool.region))
        if cell is None or not len(cell.expected_tps):
            return None
        step = min(int((now - cell.expected_from_s) / self._config.step_s), len(cell.expected_tps) - 1)
        expected_tps = cell.expected_tps[step]
        present_tps = cell.recent.rate_rps(self._config.recent_s)
        if expected_tps > 0:
            return present_tps / expected_tps
        return inf if present_tps > 0 else None

    def _recall(self, past: PastDemand, view: PoolsView) -> None:
        """Create the cells of the past demand."""
        config = self._config
        interactive = past_by_cell(past, view, config.window_s, lambda tier: tier < config.batch_tier, config.step_s)
        batch = past_by_cell(past, view, config.step_s, lambda tier: tier >= config.batch_tier)
        self._num_past_steps = int(past.length_s / config.step_s + 1e-9)
        for cell in dict.fromkeys((*interactive, *batch)):
            self._cells[cell] = self._cell(0.0, interactive.get(cell), batch.get(cell))

    def _cell(
        self, nothing_until_s: float, interactive: Sequence[float] | None = None, batch: Sequence[float] | None = None
    ) -> _Cell:
        """A cell with its rates before the start; None means no demand."""
        num, per_step = self._num_past_steps, round(self._config.step_s / self._config.window_s)
        return _Cell(self._config, nothing_until_s, interactive or [0.0] * (num * per_step), batch or [0.0] * num)

    def _count(self, view: PoolsView) -> None:
        if self._past is not None:
            self._recall(self._past, view)
            self._past = None
        counts: dict[Cell, list[int]] = {}
        for cell, tier, _, tokens in arrived_by_cell(view):
            counts.setdefault(cell, [0, 0])[tier >= self._config.batch_tier] += tokens
        for cell, (interactive, batch) in counts.items():
            if cell not in self._cells:
                self._cells[cell] = self._cell(self._seen_s)
            self._cells[cell].push(view.now, interactive, batch)

    def _history(self, cell: _Cell) -> _History:
        steps = round(self._config.period_s / self._config.step_s)
        lately, rates = cell.batch.rates[-steps:], self._config.by_step(np.array(cell.interactive.rates))
        beta_tps = self._config.buffer * sum(lately) / len(lately)
        return _History(rates, beta_tps, len(rates) * self._config.step_s - cell.past_s)


class _Cell:
    def __init__(
        self, config: Planning, nothing_until_s: float, interactive: Sequence[float], batch: Sequence[float]
    ) -> None:
        """`interactive` and `batch`: rates before the start, with equal numbers of whole steps."""
        self.interactive = StepRates(config.window_s, nothing_until_s, past=interactive)
        self.batch = StepRates(config.step_s, nothing_until_s, past=batch)
        self.past_s = len(batch) * config.step_s
        self.recent = ArrivalCounts(config.recent_s)
        self.recent.push(nothing_until_s, 0)
        self.expected_from_s = 0.0
        self.expected_tps: Sequence[float] = ()

    def push(self, now: float, interactive: int, batch: int) -> None:
        self.interactive.push(now, interactive)
        self.batch.push(now, batch)
        self.recent.push(now, interactive)


@dataclass(frozen=True)
class _History:
    interactive_tps: Floats
    beta_tps: float
    until_s: float


@dataclass(frozen=True)
class _HourlyPlan:
    targets: Mapping[str, int]
    expected_tps: Mapping[Cell, Sequence[float]]
    """The median forecast by step."""
    expected_from_s: Mapping[Cell, float]


class _Forecasting:
    """Forecasts and plans. It holds no state of the scaler, so that it can run in another process."""

    def __init__(
        self, make_forecaster: MakeForecaster, planner: InstancePlanner, steps: int, first_step: int, quantile: float
    ) -> None:
        self._make_forecaster, self._planner = make_forecaster, planner
        self._steps, self._first_step, self._quantile = steps, first_step, quantile
        self._forecasters: dict[Cell, Forecaster] = {}

    def __call__(self, histories: Mapping[Cell, _History], pools: Sequence[PoolCounts]) -> _HourlyPlan:
        demand: dict[Cell, Sequence[float]] = {}
        expected: dict[Cell, Sequence[float]] = {}
        for cell, history in histories.items():
            if cell not in self._forecasters:
                self._forecasters[cell] = self._make_forecaster(*cell)
            forecast = self._forecasters[cell].forecast(history.interactive_tps, self._steps, (0.5, self._quantile))
            expected[cell] = [float(tps) for tps in forecast[0]]
            demand[cell] = [float(tps) + history.beta_tps for tps in forecast[1][self._first_step :]]
        targets = self._planner.instances(demand, pools)
        _check(targets, pools, type(self._planner).__name__)
        return _HourlyPlan(targets, expected, {cell: history.until_s for cell, history in histories.items()})


def _check(targets: Mapping[str, int], pools: Sequence[PoolCounts], planner: str) -> None:
    """Raises HeadwayError for a plan beyond the pools' bounds. It is not clipped, because the clipped plan would not
    suffice."""
    by_name = {pool.name: pool for pool in pools}
    for name, number in targets.items():
        if name not in by_name:
            raise unknown("pool", name, by_name, f"planner {planner}")
        fewest, most = fewest_and_most(by_name[name])
        if not fewest <= number <= most:
            raise HeadwayError(f"planner {planner} plans {number} of {name}; expected {fewest} to {most}")


class _PoolSnapshot(Struct, frozen=True):
    """A copy of a pool's counts (`core.view.PoolCounts`) that can be pickled."""

    name: str
    model: str
    gpu: str
    region: str
    usd_per_hour: float
    gpus: dict[str, int]
    num_serving: int
    num_starting: int
    num_down: int
    min_replicas: int
    max_replicas: int


class SameTimeYesterday:
    """Forecasts the values of the previous day; until there is one, the last value. The default without a forecaster.

    Other quantiles are the median plus quantiles of this forecast's past errors.
    """

    cheats = False

    def __init__(self, steps_per_day: int) -> None:
        self._day = steps_per_day

    def of(self, model: str, region: str) -> SameTimeYesterday:
        """The forecaster of any series; it has no state."""
        return self

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        lag = self._day if len(history) >= self._day else 1
        forecast = np.resize(history[-lag:], steps)
        misses = history[lag:] - history[:-lag]
        offsets = np.quantile(misses, quantiles) - np.median(misses) if len(misses) else np.zeros(len(quantiles))
        return np.maximum(forecast + offsets[:, None], 0.0)
