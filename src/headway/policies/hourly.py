"""The plan for the next hour that SageServe's long-term scaling works to (sections 6.3 and 6.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite

import numpy as np
from msgspec import Struct

from headway.core.forecast import Floats, Forecaster
from headway.core.policy import InstancePlanner, MakeForecaster
from headway.core.view import PoolsView, PoolView
from headway.policies.cover import HOUR_S, Cover
from headway.policies.demand import Arrivals, Steps

DAY_S = 86_400.0
_LITTLE = 1e-6
Cell = tuple[str, str]
"""A model and a region."""


class Planning(Struct, frozen=True, forbid_unknown_fields=True):
    """How demand is forecast, and met."""

    tps: dict[str, float] = {}
    """Input tokens per second that one replica serves within its SLOs, by pool or model; others are left alone."""
    epsilon: float = 1.0
    """Share of its own peak that a region must be able to serve itself."""
    startup_s: float = 60.0
    """What starting one more replica takes; 60 s to reclaim a spot instance (7.1)."""
    miss_to_idle: float = 1.0
    """How much worse capacity that is missing is than capacity that is idle: the forecast's quantile is
    m / (m + 1), the newsvendor's. 1 is the median, as in the paper."""
    buffer: float = 0.1
    """beta: share of the last hour's mean batch load that is added to the forecast."""
    step_s: float = 300.0
    """Demand is averaged over steps of this length; a period is some number of them."""
    period_s: float = HOUR_S
    """What a plan is for: the paper's hour, or less where a day is rehearsed in an hour."""
    recent_s: float = 60.0
    """What demand is now: its mean over so long."""
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

    @property
    def quantile(self) -> float:
        """Of the forecast, to be ready for."""
        return self.miss_to_idle / (self.miss_to_idle + 1.0)


class Hourly:
    """Watches demand, and plans at the end of each hour, or period, for the next; first when one step has been seen."""

    def __init__(
        self, planning: Planning | None, forecaster: MakeForecaster | None, planner: InstancePlanner | None
    ) -> None:
        self._config = config = planning or Planning()
        self._make = forecaster or LastDay(round(DAY_S / config.step_s)).of
        self._planner = planner or Cover(config.tps, config.epsilon, config.startup_s)
        self._steps = round(config.period_s / config.step_s)
        self._cells: dict[Cell, _Cell] = {}
        self._seen_s = 0.0
        self._until_s = config.step_s
        """When the present plan is over."""
        self.began_s = 0.0
        """When the present plan was made."""
        self.targets: Mapping[str, int] = {}
        """Replicas by pool."""

    def watch(self, view: PoolsView) -> bool:
        """Look at what has come by now; True: there is a new plan."""
        self._count(view)
        self._seen_s = view.now
        if view.now < self._until_s or not self._cells:
            return False
        self.began_s = view.now
        self._until_s = (view.now // self._config.period_s + 1) * self._config.period_s
        demand = {cell: self._forecast(cell) for cell in self._cells}
        self.targets = self._planner.instances(demand, view.pools)
        return True

    def ratio(self, pool: PoolView, now: float) -> float | None:
        """What comes now over what was forecast for now; None: nothing was, or the model is not asked for there."""
        cell = self._cells.get((pool.model, pool.region))
        if cell is None or not len(cell.expected_tps):
            return None
        step = min(int((now - cell.expected_from_s) / self._config.step_s), len(cell.expected_tps) - 1)
        expected_tps = cell.expected_tps[step]
        return cell.recent.rate_rps(self._config.recent_s) / expected_tps if expected_tps > 0 else None

    def _count(self, view: PoolsView) -> None:
        counts: dict[Cell, list[int]] = {}
        models = {pool.model for pool in view.pools}
        regions = {pool.region for pool in view.pools}
        for (model, region, tier), (_, tokens) in view.arrived.items():
            # Of one model, or one region, requests may go by another name, or by none.
            cell = (next(iter(models)) if len(models) == 1 else model,
                    next(iter(regions)) if len(regions) == 1 else region)  # fmt: skip
            counts.setdefault(cell, [0, 0])[tier >= self._config.batch_tier] += tokens
        for cell, (interactive, batch) in counts.items():
            if cell not in self._cells:
                self._cells[cell] = _Cell(self._config, self._seen_s, self._make(*cell))
            self._cells[cell].push(view.now, interactive, batch)

    def _forecast(self, cell: Cell) -> Sequence[float]:
        """Input tokens per second to be ready for, step by step, beta included; notes what is expected."""
        it, config = self._cells[cell], self._config
        said = it.forecaster.forecast(np.array(it.interactive.rates), self._steps, (0.5, config.quantile))
        it.expected_from_s = len(it.interactive.rates) * config.step_s
        it.expected_tps = [float(tps) for tps in said[0]]
        lately = it.batch.rates[-self._steps :]
        beta_tps = config.buffer * sum(lately) / len(lately)
        return [float(tps) + beta_tps for tps in said[1]]


class _Cell:
    """The demand for a model from a region."""

    def __init__(self, config: Planning, nothing_until_s: float, forecaster: Forecaster) -> None:
        self.interactive = Steps(config.step_s, nothing_until_s)
        self.batch = Steps(config.step_s, nothing_until_s)
        self.recent = Arrivals(config.recent_s)
        self.recent.push(nothing_until_s, 0)
        self.forecaster = forecaster
        self.expected_from_s = 0.0
        self.expected_tps: Sequence[float] = ()

    def push(self, now: float, interactive: int, batch: int) -> None:
        """So many input tokens have come by now."""
        self.interactive.push(now, interactive)
        self.batch.push(now, batch)
        self.recent.push(now, interactive)


class LastDay:
    """What was a day before; the last value until there is a day. A forecaster to do without one.

    Quantiles other than the median differ from it as the values known differed from what this would have said.
    """

    cheats = False

    def __init__(self, steps_per_day: int) -> None:
        self._day = steps_per_day

    def of(self, model: str, region: str) -> LastDay:
        """For any series: it keeps nothing."""
        return self

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """As the Protocol says."""
        lag = self._day if len(history) >= self._day else 1
        said = np.resize(history[-lag:], steps)
        misses = history[lag:] - history[:-lag]
        offsets = np.quantile(misses, quantiles) - np.median(misses) if len(misses) else np.zeros(len(quantiles))
        return np.maximum(said + offsets[:, None], 0.0)
