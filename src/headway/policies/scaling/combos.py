"""Cauchy's dynamic combo-level scaling (section 3.5, algorithm 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from headway.core.errors import HeadwayError, unknown
from headway.core.policy import ComboPlanner
from headway.core.task import InlineTask, TaskFactory
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least, require_callable
from headway.policies.scaling.cheapest_combos import ComboKind, cheapest
from headway.policies.scaling.demand import ArrivalCounts

_LITTLE = 1e-9
_Purpose = Literal["out", "anew"]
"""More of them; or the best ones in place of those that there are."""


class CombosScaler:
    """As many combos of each kind as the demand of the last `local_window_s` asks for.

    Every `interval_s`, for each model: when `local_window_s` has passed since the last step and the mean rate of
    requests is more than `ratio` off the goodput of the combos that serve or start, it scales. Out: combos that
    drain are taken back, then the cheapest that cover the deficit are added (or as many as there is room for). In:
    after `grace_s`, if the excess is still there, combos are removed, each time the one with the goodput closest to
    what is left of the excess and not above it; one always serves. After `global_window_s` without a step, the
    cheapest combos for the mean rate of that time take the place of those that there are: what is new is started
    first, what is redundant goes once that serves, and where there is no room for both it goes by turns
    as far as the demand allows.

    The cheapest have the lowest sum of prices, or of prices over `cost_efficiency` (tokens per USD by combo, as
    the paper's eq. 16) where that is given; a `planner` decides instead if one is handed in. Which they are is worked
    out at the `desk`, if there is one; until it is known, everything stays as it is. What could not be worked out is
    asked again a window later, or when demand (by more than `ratio`), prices or room have changed. `gpu_limits` are
    the GPUs of each type that there are: serving, starting and draining combos never take more. Pools without a
    profiled goodput stay as they are and count for nothing.
    """

    def __init__(
        self,
        ratio: float = 0.2,
        local_window_s: float = 120.0,
        global_window_s: float = 1800.0,
        grace_s: float = 30.0,
        interval_s: float = 5.0,
        gpu_limits: dict[str, int] | None = None,
        cost_efficiency: dict[str, float] | None = None,
        planner: ComboPlanner | None = None,
        desk: TaskFactory | None = None,
    ) -> None:
        require_at_least("ratio", ratio, 0)
        require_above("local_window_s", local_window_s, 0)
        require_at_least("global_window_s", global_window_s, local_window_s)
        require_at_least("grace_s", grace_s, 0)
        require_above("interval_s", interval_s, 0)
        for name, num in (gpu_limits or {}).items():
            require_at_least(f"gpu_limits: {name}", num, 0)
        for name, efficiency in (cost_efficiency or {}).items():
            require_above(f"cost_efficiency: {name}", efficiency, 0)
        if planner is not None and not callable(getattr(planner, "best", None)):
            raise HeadwayError(f"planner: expected an object with a method `best`, got {planner!r}")
        self.interval_s = interval_s
        self._ratio, self._grace_s = ratio, grace_s
        self._local_s, self._global_s = local_window_s, global_window_s
        self._gpu_limits = gpu_limits or {}
        self._cost_efficiency = cost_efficiency
        require_callable("desk", desk)
        self._clerk = (desk or InlineTask)(_Best(planner))
        self._asked: _Question | None = None
        """What the clerk works out."""
        self._models: dict[str, _Model] = {}

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        self._check(view.pools)
        left = self._gpus_left(view.pools)
        models = dict.fromkeys(pool.model for pool in view.pools)
        wanted: dict[str, int] = {}
        for model in models:
            stocks = [
                count_combos(pool, self._cost(pool)) for pool in view.pools if pool.model == model and pool.goodput_rps
            ]
            # Requests may go by another name of the only model, or by none.
            arrived = sum(num for (name, *_), (num, _) in view.arrived.items() if name == model or len(models) == 1)
            state = self._models.setdefault(model, _Model(view.now, self._global_s))
            state.arrivals.push(view.now, arrived)
            state.now = view.now
            with suppress(_LaterError):
                wanted |= self._step(state, stocks, left, view.now)
        return wanted

    def _step(self, state: _Model, stocks: Sequence[ComboCounts], left: Counter[str], now: float) -> dict[str, int]:
        """Algorithm 1, lines 7 to 28."""
        rate_rps = state.arrivals.rate_rps(self._local_s)
        provisioned_rps = sum(stock.goodput_rps * stock.num for stock in stocks)
        delta_rps = rate_rps - provisioned_rps
        is_off = abs(delta_rps) > self._ratio * provisioned_rps + _LITTLE
        if state.leaves_s is not None:
            if now < state.leaves_s - _LITTLE:
                return {}
            state.leaves_s = None
            return _less(stocks, surplus(stocks, -delta_rps)) if is_off else {}
        waited_s = now - state.last_s + _LITTLE
        if waited_s >= self._local_s and is_off and delta_rps > 0:
            wanted = self._out(state, stocks, left, delta_rps)
            if wanted:
                state.last_s, state.target = now, None
                return wanted
        if state.target is not None:
            return self._refine(state, stocks, left, now)
        if waited_s >= self._local_s and is_off and surplus(stocks, -delta_rps):
            state.last_s, state.leaves_s = now, now + self._grace_s
        elif waited_s >= self._global_s and stocks:
            state.last_s, state.target = now, self._best_anew(state, stocks, left)
            return self._refine(state, stocks, left, now)
        return {}

    def _out(
        self, state: _Model, stocks: Sequence[ComboCounts], left: Counter[str], deficit_rps: float
    ) -> dict[str, int]:
        """More of them; who drains first, since those are up and paid for."""
        more: Counter[str] = Counter()
        for stock in sorted(stocks, key=lambda stock: (stock.cost / stock.goodput_rps, stock.name)):
            for _ in range(min(stock.num_draining, stock.most - stock.num)):
                if deficit_rps > _LITTLE:
                    more[stock.name] += 1
                    deficit_rps -= stock.goodput_rps
        if deficit_rps > _LITTLE:
            most = {stock.name: stock.room for stock in stocks}
            found = self._best(state, "out", deficit_rps, stocks, most, left)
            more += _fit(stocks, found, left)
        return {stock.name: max(stock.num + more[stock.name], stock.fewest) for stock in stocks if more[stock.name]}

    def _best_anew(self, state: _Model, stocks: Sequence[ComboCounts], left: Counter[str]) -> dict[str, int]:
        """Which combos would be best now (line 24)."""
        gpus = Counter(left)
        for stock in stocks:
            for gpu in gpus:
                gpus[gpu] += (stock.num + stock.num_draining) * stock.gpus.get(gpu, 0)
        rate_rps = state.arrivals.rate_rps(self._global_s)
        if any(stock.num for stock in stocks):
            rate_rps = max(rate_rps, 1e-6)  # without demand, the cheapest one
        most = {stock.name: stock.num if stock.num_failed else stock.most for stock in stocks}
        found = self._best(state, "anew", rate_rps, stocks, most, gpus)
        return {stock.name: max(found.get(stock.name, 0), stock.fewest) for stock in stocks}

    def _refine(self, state: _Model, stocks: Sequence[ComboCounts], left: Counter[str], now: float) -> dict[str, int]:
        """Towards the target: add first, and when that serves, remove (line 25)."""
        target = state.target or {}
        if any(stock.num_starting for stock in stocks):
            return {}
        gaps = {stock.name: target.get(stock.name, stock.num) - stock.num for stock in stocks}
        more = _fit(stocks, gaps, left)
        if more:
            state.last_s = now
            return {stock.name: stock.num + more[stock.name] for stock in stocks if more[stock.name]}
        extra = {name: -gap for name, gap in gaps.items() if gap < 0}
        is_last = all(gap <= 0 for gap in gaps.values())
        if not is_last:  # no room for both
            excess_rps = sum(stock.goodput_rps * stock.num for stock in stocks)
            excess_rps -= state.arrivals.rate_rps(self._local_s)
            extra = surplus(stocks, excess_rps, extra)
        if is_last or not (extra or any(stock.num_draining for stock in stocks)):
            state.target = None
        if extra:
            state.last_s = now
        return _less(stocks, extra)

    def _best(
        self, state: _Model, purpose: _Purpose, demand_rps: float, stocks: Sequence[ComboCounts],
        most: Mapping[str, int], gpus: Mapping[str, int],
    ) -> Mapping[str, int]:  # fmt: skip
        """The clerk's answer, once it is there; what was asked a moment ago is as good as asked now."""
        if self._asked is not None:
            if self._clerk.is_busy:
                raise _LaterError
            asked, self._asked = self._asked, None
            found: Mapping[str, int] | None = self._clerk.answer()
            if found is None:
                asked.state.failed[asked.purpose] = asked
            else:
                asked.state.failed.pop(asked.purpose, None)
                if (asked.state, asked.purpose) == (state, purpose):
                    return found
        kinds = tuple(ComboKind(s.name, s.goodput_rps, s.cost, dict(s.gpus), most[s.name]) for s in stocks)
        question = _Question(state, purpose, state.now, demand_rps, kinds, dict(gpus))
        if self._is_hopeless(question):
            raise _LaterError
        self._clerk.ask(demand_rps, kinds, question.gpus)
        self._asked = question
        return self._best(state, purpose, demand_rps, stocks, most, gpus)

    def _is_hopeless(self, question: _Question) -> bool:
        """The same was asked in this window, and came to nothing."""
        failed = question.state.failed.get(question.purpose)
        window_s = self._local_s if question.purpose == "out" else self._global_s
        if failed is None or question.at_s - failed.at_s + _LITTLE >= window_s:
            return False
        has_changed = abs(question.demand_rps - failed.demand_rps) > self._ratio * failed.demand_rps + _LITTLE
        return not has_changed and (question.kinds, question.gpus) == (failed.kinds, failed.gpus)

    def _gpus_left(self, pools: Sequence[PoolView]) -> Counter[str]:
        """Of the types that are limited; what drains still has its GPUs."""
        left = Counter(self._gpu_limits)
        for pool in pools:
            stock = count_combos(pool, 0.0)
            for gpu in left:
                left[gpu] -= (stock.num + stock.num_draining) * pool.gpus.get(gpu, 0)
        return left

    def _cost(self, pool: PoolView) -> float:
        """What one of them adds to the objective."""
        if self._cost_efficiency is None:
            return pool.usd_per_hour
        if pool.name not in self._cost_efficiency:
            raise HeadwayError(f"cost_efficiency: nothing is said of {pool.name}, which has a goodput")
        return pool.usd_per_hour / self._cost_efficiency[pool.name]

    def _check(self, pools: Sequence[PoolView]) -> None:
        """Names in the configuration are names of what there is."""
        gpus = {gpu for pool in pools for gpu in pool.gpus}
        for gpu in self._gpu_limits:
            if gpu not in gpus:
                raise unknown("GPU", gpu, gpus, "gpu_limits")
        names = {pool.name for pool in pools}
        for name in self._cost_efficiency or ():
            if name not in names:
                raise unknown("combo", name, names, "cost_efficiency")


class _LaterError(Exception):
    """It is still being worked out, or that failed: until it is known, all stays as it is."""


class _Best:
    """Which combos serve a demand best."""

    def __init__(self, planner: ComboPlanner | None) -> None:
        self._planner = planner

    def __call__(self, demand_rps: float, kinds: Sequence[ComboKind], gpus: Mapping[str, int]) -> Mapping[str, int]:
        if self._planner is None:
            return cheapest(demand_rps, kinds, gpus)
        return self._planner.best(demand_rps, {kind.name: kind.most for kind in kinds}, gpus)


class _Model:
    """Where the algorithm is with one model."""

    def __init__(self, now: float, longest_s: float) -> None:
        self.arrivals = ArrivalCounts(longest_s)
        self.last_s = now
        """When it last took a step."""
        self.leaves_s: float | None = None
        """When the grace of combos that are too many is over."""
        self.target: dict[str, int] | None = None
        """What it is being refined to."""
        self.now = now
        self.failed: dict[_Purpose, _Question] = {}
        """Questions that came to nothing, until there is an answer."""


@dataclass(frozen=True, eq=False)
class _Question:
    """What the clerk is asked, and when."""

    state: _Model
    purpose: _Purpose
    at_s: float
    demand_rps: float
    kinds: tuple[ComboKind, ...]
    gpus: dict[str, int]


@dataclass(frozen=True)
class ComboCounts:
    """A pool in numbers."""

    name: str
    goodput_rps: float
    """Of one of them."""
    cost: float
    """Of one of them, in whatever is minimised."""
    gpus: Mapping[str, int]
    """Of one of them, by type."""
    num_serving: int
    num_starting: int
    num_draining: int
    fewest: int
    most: int
    num_failed: int = 0
    """That are wanted, and do not start."""

    @property
    def num(self) -> int:
        """Those that serve or will."""
        return self.num_serving + self.num_starting

    @property
    def room(self) -> int:
        """How many more there may be, those that drain counted; none while one does not start."""
        return 0 if self.num_failed else max(self.most - self.num - self.num_draining, 0)

    @property
    def num_removable(self) -> int:
        """How many can be drained: none that is starting, nor the last that serves while others start."""
        return max(min(self.num_serving - bool(self.num_starting), self.num - self.fewest), 0)


def count_combos(pool: PoolView, cost: float) -> ComboCounts:
    """A pool as it is now."""
    draining = {replica.combo for replica in pool.replicas if replica.is_draining}
    return ComboCounts(
        pool.name, pool.goodput_rps or 0.0, cost, pool.gpus, pool.num_serving, pool.num_starting, len(draining),
        pool.min_replicas, pool.max_replicas, pool.num_failed,
    )  # fmt: skip


def surplus(stocks: Sequence[ComboCounts], excess_rps: float, only: Mapping[str, int] | None = None) -> dict[str, int]:
    """Which combos to do without, and how many: again and again the one whose goodput is closest to the excess.

    None that has more goodput than is left of the excess, and of equals the dearest. One combo stays. `only` limits
    how many of each.
    """
    going: Counter[str] = Counter()
    num_serving = sum(stock.num_serving for stock in stocks)
    most = {stock.name: stock.num_removable for stock in stocks}
    if only is not None:
        most = {name: min(num, only.get(name, 0)) for name, num in most.items()}
    while num_serving > 1:
        fitting = [s for s in stocks if going[s.name] < most[s.name] and s.goodput_rps <= excess_rps + _LITTLE]
        if not fitting:
            break
        one = max(fitting, key=lambda stock: (stock.goodput_rps, stock.cost, stock.name))
        going[one.name] += 1
        excess_rps -= one.goodput_rps
        num_serving -= 1
    return dict(going)


def _fit(stocks: Sequence[ComboCounts], more: Mapping[str, int], left: Counter[str]) -> Counter[str]:
    """As many of these as there is room for; their GPUs are no longer left."""
    fitting: Counter[str] = Counter()
    for stock in stocks:
        rooms = [left[gpu] // num for gpu, num in stock.gpus.items() if num and gpu in left]
        num = max(min([more.get(stock.name, 0), stock.room, *rooms]), 0)
        if num:
            fitting[stock.name] = num
            for gpu in left:
                left[gpu] -= num * stock.gpus.get(gpu, 0)
    return fitting


def _less(stocks: Sequence[ComboCounts], fewer: Mapping[str, int]) -> dict[str, int]:
    return {stock.name: max(stock.num - fewer[stock.name], stock.fewest) for stock in stocks if fewer.get(stock.name)}
