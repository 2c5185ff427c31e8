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
""""out": add combos. "anew": replace the current combos by the best ones."""


class CombosScaler:
    """Scales combos of each kind to the mean demand of the last `local_window_s`.

    Every `interval_s`, for each model, the scaler compares the mean rate of requests with the goodput of the combos
    that serve or start. If they differ by more than `ratio`, and `local_window_s` has passed since the last step, it
    scales. Scaling out reuses draining combos, then adds the cheapest combos that cover the deficit, as far as there is
    room. Scaling in removes combos if the excess persists for `grace_s`: each time the combo whose goodput is closest
    to the remaining excess and not above it. At least one combo always serves. After `global_window_s` without a step,
    the cheapest combos for the mean rate of that window replace the current ones: new combos start first, and redundant
    ones drain once the new ones serve. Without room for both, starts and drains alternate as far as the demand allows.

    The cheapest combos have the lowest sum of prices, or of prices over `cost_efficiency` (tokens per USD by combo, as
    in the paper's eq. 16) if that is given. A program may pass a `planner` that decides instead, and `tasks` to run the
    search outside of the event loop; until a search has ended, the fleet stays as it is. A failed search is repeated a
    window later, or when demand (by more than `ratio`), prices or room have changed. `gpu_limits` are the available
    GPUs of each type; serving, starting and draining combos never exceed them. Pools without a profiled goodput are not
    scaled and not counted.
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
        tasks: TaskFactory | None = None,
    ) -> None:
        require_at_least(0, ratio=ratio, grace_s=grace_s)
        require_above(0, local_window_s=local_window_s, interval_s=interval_s)
        require_at_least(local_window_s, global_window_s=global_window_s)
        for name, num in (gpu_limits or {}).items():
            require_at_least(0, **{f"gpu_limits: {name}": num})
        for name, efficiency in (cost_efficiency or {}).items():
            require_above(0, **{f"cost_efficiency: {name}": efficiency})
        if planner is not None and not callable(getattr(planner, "best", None)):
            raise HeadwayError(f"planner: expected an object with a method `best`, got {planner!r}")
        self.interval_s = interval_s
        self._ratio, self._grace_s = ratio, grace_s
        self._local_s, self._global_s = local_window_s, global_window_s
        self._gpu_limits = gpu_limits or {}
        self._cost_efficiency = cost_efficiency
        require_callable("tasks", tasks)
        self._task = (tasks or InlineTask)(_ComboSearch(planner))
        self._pending: _Question | None = None
        self._models: dict[str, _ModelState] = {}

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        self._check(view.pools)
        left = self._free_gpus(view.pools)
        models = dict.fromkeys(pool.model for pool in view.pools)
        wanted: dict[str, int] = {}
        for model in models:
            stocks = [
                count_combos(pool, self._cost(pool)) for pool in view.pools if pool.model == model and pool.goodput_rps
            ]
            # Requests may name the only model differently, or not at all.
            arrived = sum(num for (name, *_), (num, _) in view.arrived.items() if name == model or len(models) == 1)
            state = self._models.setdefault(model, _ModelState(view.now, self._global_s))
            state.arrivals.push(view.now, arrived)
            state.now = view.now
            with suppress(_LaterError):
                wanted |= self._step(state, stocks, left, view.now)
        return wanted

    def _step(
        self, state: _ModelState, stocks: Sequence[ComboCounts], left: Counter[str], now: float
    ) -> dict[str, int]:
        """Algorithm 1, lines 7 to 28."""
        rate_rps = state.arrivals.rate_rps(self._local_s)
        provisioned_rps = sum(stock.goodput_rps * stock.num for stock in stocks)
        delta_rps = rate_rps - provisioned_rps
        is_off = abs(delta_rps) > self._ratio * provisioned_rps + _LITTLE
        if state.leaves_s is not None:
            if now < state.leaves_s - _LITTLE:
                return {}
            state.leaves_s = None
            return _reduced(stocks, surplus(stocks, -delta_rps)) if is_off else {}
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
        self, state: _ModelState, stocks: Sequence[ComboCounts], left: Counter[str], deficit_rps: float
    ) -> dict[str, int]:
        """Add combos. Draining ones are reused first, because they are running."""
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

    def _best_anew(self, state: _ModelState, stocks: Sequence[ComboCounts], left: Counter[str]) -> dict[str, int]:
        """The cheapest combos for the demand. Of each kind as few as possible are returned: other combos serve the
        rest."""
        gpus = Counter(left)
        for stock in stocks:
            for gpu in gpus:
                gpus[gpu] += (stock.num + stock.num_draining - stock.fewest) * stock.gpus.get(gpu, 0)
        rate_rps = state.arrivals.rate_rps(self._global_s)
        if any(stock.num for stock in stocks):
            rate_rps = max(rate_rps, 1e-6)  # without demand, the cheapest combo
        rest_rps = rate_rps - sum(stock.fewest * stock.goodput_rps for stock in stocks)
        most = {s.name: max((s.num if s.num_failed else s.most) - s.fewest, 0) for s in stocks}
        found = self._best(state, "anew", rest_rps, stocks, most, gpus) if rest_rps > _LITTLE else {}
        return {stock.name: stock.fewest + found.get(stock.name, 0) for stock in stocks}

    def _refine(
        self, state: _ModelState, stocks: Sequence[ComboCounts], left: Counter[str], now: float
    ) -> dict[str, int]:
        """Move towards the target: add first, and remove once the added combos serve (line 25)."""
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
        return _reduced(stocks, extra)

    def _best(
        self,
        state: _ModelState,
        purpose: _Purpose,
        demand_rps: float,
        stocks: Sequence[ComboCounts],
        most: Mapping[str, int],
        gpus: Mapping[str, int],
    ) -> Mapping[str, int]:
        """The result of the search; raises _LaterError while it runs. A result for slightly older arguments is
        accepted, too."""
        if self._pending is not None:
            if self._task.is_busy:
                raise _LaterError
            question, self._pending = self._pending, None
            found: Mapping[str, int] | None = self._task.result()
            if found is None:
                question.state.failed[question.purpose] = question
            else:
                question.state.failed.pop(question.purpose, None)
                if (question.state, question.purpose) == (state, purpose):
                    return found
        kinds = tuple(ComboKind(s.name, s.goodput_rps, s.cost, dict(s.gpus), most[s.name]) for s in stocks)
        question = _Question(state, purpose, state.now, demand_rps, kinds, dict(gpus))
        if self._failed_recently(question):
            raise _LaterError
        self._task.start(demand_rps, kinds, question.gpus)
        self._pending = question
        return self._best(state, purpose, demand_rps, stocks, most, gpus)

    def _failed_recently(self, question: _Question) -> bool:
        failed = question.state.failed.get(question.purpose)
        window_s = self._local_s if question.purpose == "out" else self._global_s
        if failed is None or question.at_s - failed.at_s + _LITTLE >= window_s:
            return False
        has_changed = abs(question.demand_rps - failed.demand_rps) > self._ratio * failed.demand_rps + _LITTLE
        return not has_changed and (question.kinds, question.gpus) == (failed.kinds, failed.gpus)

    def _free_gpus(self, pools: Sequence[PoolView]) -> Counter[str]:
        """Free GPUs of the limited types; draining combos still hold their GPUs."""
        left = Counter(self._gpu_limits)
        for pool in pools:
            stock = count_combos(pool, 0.0)
            for gpu in left:
                left[gpu] -= (stock.num + stock.num_draining) * pool.gpus.get(gpu, 0)
        return left

    def _cost(self, pool: PoolView) -> float:
        if self._cost_efficiency is None:
            return pool.usd_per_hour
        if pool.name not in self._cost_efficiency:
            raise HeadwayError(f"cost_efficiency: no value for {pool.name}, which has a goodput")
        return pool.usd_per_hour / self._cost_efficiency[pool.name]

    def _check(self, pools: Sequence[PoolView]) -> None:
        gpus = {gpu for pool in pools for gpu in pool.gpus}
        for gpu in self._gpu_limits:
            if gpu not in gpus:
                raise unknown("GPU", gpu, gpus, "gpu_limits")
        names = {pool.name for pool in pools}
        for name in self._cost_efficiency or ():
            if name not in names:
                raise unknown("combo", name, names, "cost_efficiency")


class _LaterError(Exception):
    """The search is still running or has failed, so the fleet stays unchanged."""


class _ComboSearch:
    def __init__(self, planner: ComboPlanner | None) -> None:
        self._planner = planner

    def __call__(self, demand_rps: float, kinds: Sequence[ComboKind], gpus: Mapping[str, int]) -> Mapping[str, int]:
        if self._planner is None:
            return cheapest(demand_rps, kinds, gpus)
        return self._planner.best(demand_rps, {kind.name: kind.most for kind in kinds}, gpus)


class _ModelState:
    def __init__(self, now: float, longest_s: float) -> None:
        self.arrivals = ArrivalCounts(longest_s)
        self.last_s = now
        self.leaves_s: float | None = None
        """Time at which the grace period before combos are removed ends."""
        self.target: dict[str, int] | None = None
        """Target of the current refinement."""
        self.now = now
        self.failed: dict[_Purpose, _Question] = {}


@dataclass(frozen=True, eq=False)
class _Question:
    state: _ModelState
    purpose: _Purpose
    at_s: float
    demand_rps: float
    kinds: tuple[ComboKind, ...]
    gpus: dict[str, int]


@dataclass(frozen=True)
class ComboCounts:
    name: str
    goodput_rps: float
    """Goodput of one combo."""
    cost: float
    """Cost of one combo, in the unit of the objective."""
    gpus: Mapping[str, int]
    num_serving: int
    num_starting: int
    num_draining: int
    fewest: int
    most: int
    num_failed: int = 0
    """Number of requested combos that fail to start."""

    @property
    def num(self) -> int:
        return self.num_serving + self.num_starting

    @property
    def room(self) -> int:
        """Number of combos that may be added, including draining combos that are reused; 0 while a combo fails to
        start."""
        return 0 if self.num_failed else max(self.most - self.num - self.num_draining, 0)

    @property
    def num_removable(self) -> int:
        """Number of combos that can be drained. Starting combos cannot, nor can the last serving combo while others
        start."""
        return max(min(self.num_serving - bool(self.num_starting), self.num - self.fewest), 0)


def count_combos(pool: PoolView, cost: float) -> ComboCounts:
    draining = {replica.combo for replica in pool.replicas if replica.is_draining}
    return ComboCounts(
        pool.name,
        pool.goodput_rps or 0.0,
        cost,
        gpus=pool.gpus,
        num_serving=pool.num_serving,
        num_starting=pool.num_starting,
        num_draining=len(draining),
        fewest=pool.min_replicas,
        most=pool.max_replicas,
        num_failed=pool.num_failed,
    )


def surplus(stocks: Sequence[ComboCounts], excess_rps: float, only: Mapping[str, int] | None = None) -> dict[str, int]:
    """Number of combos to remove, by kind: repeatedly the combo whose goodput is closest to the excess.

    A combo with more goodput than the remaining excess is not removed. Among equals the most expensive one is removed.
    One combo stays. `only` limits the number of each kind.
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
    """As many of the combos `more` as there is room for. Takes their GPUs from `left`."""
    fitting: Counter[str] = Counter()
    for stock in stocks:
        rooms = [left[gpu] // num for gpu, num in stock.gpus.items() if num and gpu in left]
        num = max(min([more.get(stock.name, 0), stock.room, *rooms]), 0)
        if num:
            fitting[stock.name] = num
            for gpu in left:
                left[gpu] -= num * stock.gpus.get(gpu, 0)
    return fitting


def _reduced(stocks: Sequence[ComboCounts], fewer: Mapping[str, int]) -> dict[str, int]:
    return {stock.name: max(stock.num - fewer[stock.name], stock.fewest) for stock in stocks if fewer.get(stock.name)}
