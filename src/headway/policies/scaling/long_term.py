"""SageServe's long-term scaling by a forecast of the next hour (section 6.4): LT-I, LT-U and LT-UA."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.policy import InstancePlanner, MakeForecaster
from headway.core.task import TaskFactory
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least, require_between, require_callable
from headway.policies.endpoints import within_bounds
from headway.policies.scaling.hourly_plan import HourlyPlanner, Planning
from headway.policies.scaling.reactive import ReactiveRule


class LongTermImmediateScaler:
    """LT-I: each pool goes to the planned number of replicas as soon as there is a plan.

    Every hour (and once after the first `step_s`) the input tokens per second of interactive work are forecast for
    each model and region; to the forecast, or its quantile, is added beta for batch work; and the planner says how many
    replicas each pool needs for that. `plan` says how: `tps` (what a replica serves, by pool or model: without it a
    pool stays as it is), `epsilon`, `startup_s`, `miss_to_idle`, `buffer`, `step_s`, `recent_s` and `batch_tier`.

    `forecaster(model, region)` makes a forecaster of one series, and `planner` has `instances(demand_tps, pools)`:
    both are handed in by a program, as is `desk`, where forecasts and plans are worked out. Without them demand is
    expected to be as a day before, and met at least cost, GPU limits aside.
    """

    def __init__(
        self,
        plan: Planning | None = None,
        interval_s: float = 5.0,
        forecaster: MakeForecaster | None = None,
        planner: InstancePlanner | None = None,
        desk: TaskFactory | None = None,
    ) -> None:
        require_above("interval_s", interval_s, 0)
        require_callable("forecaster", forecaster)
        require_callable("planner", planner, "instances")
        require_callable("desk", desk)
        self.interval_s = interval_s
        self._hourly = HourlyPlanner(plan, forecaster, planner, desk)

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        self._hourly.watch(view)
        targets = self._hourly.targets
        return {pool.name: within_bounds(pool, targets[pool.name]) for pool in view.pools if pool.name in targets}


class LongTermUtilizationScaler:
    """LT-U: the plan of `lt-i` is approached one replica at a time, and only when memory asks for it.

    A pool grows while it is more than `out_above` full and below the planned number, and shrinks while it is less than
    `in_below` full and above it; steps are `cooldown_s` apart. How full is effective memory utilisation, and
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
        desk: TaskFactory | None = None,
    ) -> None:
        require_above("interval_s", interval_s, 0)
        require_callable("forecaster", forecaster)
        require_callable("planner", planner, "instances")
        require_callable("desk", desk)
        self.interval_s = interval_s
        self._hourly = HourlyPlanner(plan, forecaster, planner, desk)
        self._reaction = ReactiveRule(out_above, in_below, cooldown_s, pending_guard)

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        self._hourly.watch(view)
        wanted: dict[str, int] = {}
        for pool in view.pools:
            if pool.name in self._hourly.targets:
                target = within_bounds(pool, self._hourly.targets[pool.name])
                wanted |= self._reaction.step(pool, self._step(pool, target, view.now), view.now)
        return wanted

    def _step(self, pool: PoolView, target: int, now: float) -> int:
        """+1, 0 or -1 replicas."""
        number = pool.num_serving + pool.num_starting
        direction = self._reaction.direction(pool)
        return direction if (number < target if direction > 0 else number > target) else 0


class LongTermGapScaler(LongTermUtilizationScaler):
    """LT-UA: as `lt-u`, but at the end of the hour demand that is far off the forecast goes before the plan.

    In the last `last_s` of each hour a pool that has reached its planned number grows on, and does not shrink, while
    the interactive input tokens per second are `burst` times the forecast or more; and it shrinks on while they are
    `lull` times the forecast or less. Neither happens if memory would then be less than `in_below` full, or more than
    `out_above`: limits of ours, as memory would have the step undone at once. Traffic is what is sent from the pool's
    region, over `recent_s`, against the median forecast of that moment.
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
        desk: TaskFactory | None = None,
    ) -> None:
        super().__init__(plan, out_above, in_below, cooldown_s, pending_guard, interval_s, forecaster, planner, desk)
        self._period_s = (plan or Planning()).period_s
        require_between("last_s", last_s, 0, self._period_s)
        require_at_least("burst", burst, 1)
        require_between("lull", lull, 0, 1)
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
