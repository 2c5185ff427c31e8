"""The counted demand for a model from a region, and its forecast: by a forecaster, or by recent growth."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from headway.core.policy import Floats, Forecaster, MakeForecaster
from headway.core.task import InlineTask, TaskFactory
from headway.policies.scaling.demand import ArrivalCounts, Cell, StepRates
from headway.policies.scaling.growth import MOST_DAYS, RecentGrowth

RECENT_STEP_S = 60.0
"""Step length for measuring growth, and window of the current demand."""


class CellDemand:
    """The demand for one model from one region, in input tokens."""

    def __init__(
        self, nothing_until_s: float, step_s: float, by_minute: Sequence[float] = (), by_step: Sequence[float] = ()
    ) -> None:
        """`by_minute` and `by_step`: rates before the start."""
        self.requests = self.tokens = 0
        self.recent, self.recent_requests = ArrivalCounts(RECENT_STEP_S), ArrivalCounts(RECENT_STEP_S)
        self.recent.push(nothing_until_s, 0)
        self.recent_requests.push(nothing_until_s, 0)
        week_s = (MOST_DAYS + 1) * 86_400.0
        self.by_minute = StepRates(RECENT_STEP_S, nothing_until_s, most=round(week_s / RECENT_STEP_S), past=by_minute)
        self.by_step = StepRates(step_s, nothing_until_s, most=max(round(week_s / step_s), 1), past=by_step)
        self.growth = RecentGrowth(RECENT_STEP_S)
        self.late_until_s = nothing_until_s
        """Time until which the observed load is due to a backlog."""
        self._peaks: deque[tuple[float, float]] = deque()
        """(time, need) in descending order of need. A need that a larger need follows is not a peak."""

    def push(self, now: float, requests: int, tokens: int) -> None:
        self.requests, self.tokens = requests, tokens
        for counts in (self.recent, self.by_minute, self.by_step):
            counts.push(now, tokens)
        self.recent_requests.push(now, requests)

    def present_tps(self) -> float:
        """The mean of the last minute; if requests have become more frequent within it, their current rate."""
        mean_tps, mean_rps = self.recent.rate_rps(RECENT_STEP_S), self.recent_requests.rate_rps(RECENT_STEP_S)
        if mean_rps <= 0:
            return mean_tps
        return mean_tps * max(self.recent_requests.present_rps(RECENT_STEP_S) / mean_rps, 1.0)

    def peak(self, now: float, need: float, hold_s: float) -> float:
        while self._peaks and self._peaks[-1][1] <= need:
            self._peaks.pop()
        self._peaks.append((now, need))
        while self._peaks[0][0] < now - hold_s:
            self._peaks.popleft()
        return self._peaks[0][1]


class Forecasts:
    """The expected demand until a given time: by the given forecaster, or by recent growth."""

    def __init__(self, make: MakeForecaster | None, tasks: TaskFactory | None, step_s: float, quantile: float) -> None:
        self.step_s = step_s
        self._quantile = quantile
        self._task = None if make is None else (tasks or InlineTask)(_Forecasting(make, quantile))
        self._is_running = False
        self._steps_ahead = 1
        self._num_steps = -1
        """Completed steps at the last forecast; -1 before the first."""
        self._found: dict[Cell, tuple[float, list[float]]] = {}

    def update(self, cells: Mapping[Cell, CellDemand], now: float) -> None:
        if self._task is None:
            return
        self._finish()
        done = max((cell.by_step.num_steps for cell in cells.values()), default=0)
        if done > self._num_steps and not self._is_running:
            histories = {
                name: (cell.by_step.num_steps * self.step_s, np.array(cell.by_step.rates))
                for name, cell in cells.items()
                if cell.by_step.rates
            }
            if not histories:
                return
            self._num_steps, self._is_running = done, True
            self._task.start(histories, self._steps_ahead)
            self._finish()

    def _finish(self) -> None:
        """Take over the running forecast if it is ready. After a failure the last forecast stays."""
        if self._is_running and self._task is not None and not self._task.is_busy:
            self._is_running = False
            found: dict[Cell, tuple[float, list[float]]] | None = self._task.result()
            self._found = self._found if found is None else found

    def most_tps(self, name: Cell, cell: CellDemand, lead_s: float, now: float) -> float:
        """The largest expected demand from now until `lead_s` later."""
        self._steps_ahead = max(self._steps_ahead, ceil(lead_s / self.step_s) + 1)
        if name in self._found:
            from_s, expected = self._found[name]
            first, last = ((at_s - from_s) / self.step_s for at_s in (now, now + lead_s))
            if first < len(expected):
                return max(expected[max(int(first), 0) : max(int(last), 0) + 1])
        if not cell.by_minute.rates:
            return 0.0
        steps = ceil(lead_s / RECENT_STEP_S)
        return float(cell.growth.forecast(np.array(cell.by_minute.rates), steps, (self._quantile,))[0].max())


class _Forecasting:
    """Forecasts one quantile. It holds no state of the scaler, so that it can run in another process."""

    def __init__(self, make: MakeForecaster, quantile: float) -> None:
        self._make, self._quantile = make, quantile
        self._forecasters: dict[Cell, Forecaster] = {}

    def __call__(
        self, histories: Mapping[Cell, tuple[float, Floats]], steps: int
    ) -> dict[Cell, tuple[float, list[float]]]:
        found = {}
        for cell, (until_s, rates) in histories.items():
            if cell not in self._forecasters:
                self._forecasters[cell] = self._make(*cell)
            forecast = self._forecasters[cell].forecast(rates, steps, (self._quantile,))
            found[cell] = until_s, [float(tps) for tps in forecast[0]]
        return found
