"""SageServe's long-term scaling by a forecast of the next hour (section 6.4): LT-I, LT-U and LT-UA."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.past_demand import PastDemand
from headway.core.policy import InstancePlanner, MakeForecaster
from headway.core.task import TaskFactory
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least, require_between, require_callable
from headway.policies.scaling.hourly_plan import HourlyPlanner, Planning
from headway.policies.scaling.reactive import ReactiveRule


class LongTermImmediateScaler:
    """LT-I: each pool goes to its planned number of replicas as soon as there is a plan.

    Every hour (and once after the first `step_s`) the scaler forecasts the input tokens per second of interactive work
    for each model and region, and adds beta for batch work to the chosen quantile. A planner turns this demand into
    replicas by pool. `plan` contains the settings: `tps` (rate of a replica, by pool or model; a pool without it is not
    scaled), `epsilon`, `startup_s`, `miss_to_idle`, `buffer`, `step_s`, `peak_s` (forecast the largest mean over this
    time in each step), `lead_s` (plan for the demand from this time on), `recent_s` and `batch_tier`.

    A program may pass `forecaster(model, region)`, which makes the forecaster of one series, a `planner` with
    `instances(demand_tps, pools)`, and `tasks` to run both outside of the event loop. Without them, demand is expected
    to equal that of the previous day, and is covered at the lowest cost apart from GPU limits.
    """

    def __init__(
        self,
        plan: Planning | None = None,
        interval_s: float = 5.0,
        forecaster: MakeForecaster | None = None,
        planner: InstancePlanner | None = None,
        tasks: TaskFactory | None = None,
    ) -> None:
        require_above(0, interval_s=interval_s)
        require_callable("forecaster", forecaster)
        require_callable("planner", planner, "instances")
        require_callable("tasks", tasks)
        self.interval_s = interval_s
        self._hourly = HourlyPlanner(plan, forecaster, planner, tasks)

    def remember(self, past: PastDemand) -> None:
        self._hourly.remember(past)

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        self._hourly.update(view)
        return dict(self._hourly.targets)


class LongTermUtilizationScaler(LongTermImmediateScaler):
    """LT-U: moves towards the plan of `lt-i` one replica at a time, and only when memory use requires it.

    A pool below its planned number grows while its utilisation is above `out_above`; a pool above it shrinks while its
    utilisation is below `in_below`. Steps are `cooldown_s` apart. Utilisation is effective memory utilisation, and
    `pending_guard` is that of `reactive`.
    """

    def __init__(
        self,
        plan: Planning | None = None,
        out_above: float = 0.7,
        in_below: float = 0.3,
        cooldown_s: float = 15.0,
        pending_guard: bool = True,
        interval_s: float = 5.0,
        forecaster: MakeForecaster | None = None,
        planner: InstancePlanner | None = None,
        tasks: TaskFactory | None = None,
    ) -> None:
        super().__init__(plan, interval_s, forecaster, planner, tasks)
        self._reaction = ReactiveRule(out_above, in_below, cooldown_s, pending_guard)

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        self._hourly.update(view)
        wanted: dict[str, int] = {}
        for pool in view.pools:
            if pool.name in self._hourly.targets:
                step = self._step(pool, self._hourly.targets[pool.name], view.now)
                wanted |= self._reaction.step(pool, step, view.now)
        return wanted

    def _step(self, pool: PoolView, target: int, now: float) -> int:
        """The step: +1, 0 or -1 replicas."""
        number = pool.num_serving + pool.num_starting
        direction = self._reaction.direction(pool)
        return direction if (number < target if direction > 0 else number > target) else 0


class LongTermGapScaler(LongTermUtilizationScaler):
    """LT-UA: like `lt-u`, but late in the hour, demand far from the forecast overrides the plan.

    In the last `last_s` of each hour, a pool that has reached its planned number grows further, and does not shrink,
    while the interactive input tokens per second are at least `burst` times the forecast. It shrinks further while they
    are at most `lull` times the forecast. Neither happens if the utilisation would then be below `in_below` or above
    `out_above`. These limits are Headway's: memory use would otherwise undo the step at once. The demand of the pool's
    region over `recent_s` is compared with the median forecast of the current step; with `plan.peak_s`, the forecast is
    of the step's largest mean over that time. Demand is a burst if the forecast was zero.
    """

    def __init__(
        self,
        plan: Planning | None = None,
        last_s: float = 1200.0,
        burst: float = 5.0,
        lull: float = 0.5,
        out_above: float = 0.7,
        in_below: float = 0.3,
        cooldown_s: float = 15.0,
        pending_guard: bool = True,
        interval_s: float = 5.0,
        forecaster: MakeForecaster | None = None,
        planner: InstancePlanner | None = None,
        tasks: TaskFactory | None = None,
    ) -> None:
        super().__init__(
            plan,
            out_above,
            in_below,
            cooldown_s,
            pending_guard,
            interval_s=interval_s,
            forecaster=forecaster,
            planner=planner,
            tasks=tasks,
        )
        self._period_s = (plan or Planning()).period_s
        require_between(0, self._period_s, last_s=last_s)
        require_at_least(1, burst=burst)
        require_between(0, 1, lull=lull)
        self._last_s, self._burst, self._lull = last_s, burst, lull

    def _step(self, pool: PoolView, target: int, now: float) -> int:
        step = super()._step(pool, target, now)
        ratio = self._hourly.ratio(pool, now)
        if ratio is None or now % self._period_s < self._period_s - self._last_s:
            return step
        number = pool.num_serving + pool.num_starting
        if ratio >= self._burst and number >= target:
            return int(self._reaction.may_grow(pool))
        if not step and ratio <= self._lull and number <= target:
            return -int(self._reaction.may_shrink(pool))
        return step
