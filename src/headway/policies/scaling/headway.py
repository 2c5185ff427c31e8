"""Headway's scaler: a forecast as the minimum, a guarded reaction above it, and measured start times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import exp, sqrt
from operator import attrgetter

from headway.core.past_demand import PastDemand
from headway.core.policy import MakeForecaster
from headway.core.task import TaskFactory
from headway.core.view import PoolsView, PoolView, ReplicaView
from headway.policies.arguments import require_above, require_at_least, require_between, require_callable
from headway.policies.endpoints import grouped
from headway.policies.scaling.demand import Cell, arrived_by_cell, past_by_cell
from headway.policies.scaling.expected_demand import RECENT_STEP_S, CellDemand, Forecasts
from headway.policies.scaling.start_times import StartTimes

SMOOTHING_S = 60.0
"""Time constant of the observed load, because KV use and unfinished prompts change from iteration to iteration."""
LEARNING_S = 1800.0
"""Time constant of the learnt rate that a replica serves at full use."""
FULL_S, FULL_USE = 60.0, 0.9
"""Time constant of the rate of a full replica, and the use from which a replica is full, if requests wait longer than
their SLO."""
TOLERANCE = 0.1
"""A load above the target by less than this share counts as met, and so does a need of less than this share of a
replica."""
LEAST_HOLD_S = 1800.0
"""Peaks of published demand return within the hour, and the cost of keeping replicas that long is repaid by fewer late
requests."""
RETRY_S = 60.0
"""Seconds for which a pool that did not start the requested units counts as full."""
DEFAULT_TTFT_S = 1.0
MOST_MORE = 4
"""Units that may be added in one step in addition to the current number, as in Kubernetes' autoscaler (100%, or 4
pods)."""
FEW_REQUESTS = 20
"""Number of requests below which the rate that a replica serves counts as unknown."""


class HeadwayScaler:
    """Provides replicas for the forecast until new ones would be up, and more while the observed load requires them.

    For each model and region, the need is the largest of three values. The forecast: the quantile `miss_to_idle /
    (miss_to_idle + 1)` of the demand expected until a replica requested now would serve. The current demand: that of
    the last minute. The load: the largest of KV block use, batch slot use, L / (1 + L) for L unfinished prompts per
    replica, and the predicted TTFT over its SLO should equal `use`; and tokens that cannot be served within the SLO
    should be processed within one start time. Starting replicas count as capacity.

    The rate of a replica is learnt: served input tokens over the use at which they were served. The initial value, and
    the ratio between pools, is `tps` (input tokens per second, by pool or model) or the profiled goodput of combos,
    otherwise the KV cache size. Start times are measured in the pool; `startup_s` applies before the first start.

    Replicas are added where capacity is cheapest. A pool that does not start the requested replicas is skipped for a
    minute. In one step the fleet at most doubles, plus four. A replica is removed, the most expensive capacity first,
    if neither a need of the last `hold_s` (None: the start time, at least half an hour) nor an expected need requires
    it, nothing starts in its pool, and another replica of its model and region stays. `epsilon` is the share of its own
    need that each region covers itself; all regions together cover all of it.

    Requests of tier `batch_tier` and above can wait and do not count as demand; None: no tier can wait. A program may
    pass `forecaster(model, region)`, for steps of `step_s`, and `tasks` to run it outside of the event loop. Without
    it, or until its first forecast, demand is expected to grow as it did recently and at this time on earlier days.
    `ttft_s` is the TTFT SLO of requests without one.
    """

    live_settings = frozenset(("use", "hold_s", "epsilon", "interval_s"))

    def __init__(
        self,
        use: float = 0.7,
        miss_to_idle: float = 4.0,
        startup_s: float = 60.0,
        hold_s: float | None = None,
        epsilon: float = 1.0,
        tps: dict[str, float] | None = None,
        batch_tier: int | None = None,
        ttft_s: float = DEFAULT_TTFT_S,
        step_s: float = 300.0,
        interval_s: float = 5.0,
        forecaster: MakeForecaster | None = None,
        tasks: TaskFactory | None = None,
    ) -> None:
        require_between(0, 1, use=use, epsilon=epsilon)
        require_above(0, use=use, epsilon=epsilon, miss_to_idle=miss_to_idle, ttft_s=ttft_s)
        require_above(0, step_s=step_s, interval_s=interval_s)
        require_at_least(0, startup_s=startup_s)
        for name, value in {"hold_s": hold_s, "batch_tier": batch_tier}.items():
            if value is not None:
                require_at_least(0, **{name: value})
        require_above(0, **{f"tps: {name}": value for name, value in (tps or {}).items()})
        require_callable("forecaster", forecaster)
        require_callable("tasks", tasks)
        self.interval_s = interval_s
        self._use, self._epsilon, self._hold_s = use, epsilon, hold_s
        self._ttft_s, self._batch_tier, self._miss_to_idle = ttft_s, batch_tier, miss_to_idle
        self._weights = _Weights(tps or {})
        self._starts = StartTimes(startup_s)
        self._forecasts = Forecasts(forecaster, tasks, step_s, miss_to_idle / (miss_to_idle + 1.0))
        self._cells: dict[Cell, CellDemand] = {}
        self._models: dict[str, _Served] = {}
        self._loads: dict[str, _PoolLoad] = {}
        self._past: PastDemand | None = None
        """Demand before the start; None from the first view on, which gives the names of models and regions."""
        self._requested: dict[str, int] = {}
        self._full_until_s: dict[str, float] = {}
        self._seen_s: float | None = None

    def go_on(self, before: HeadwayScaler) -> None:
        self._cells, self._models, self._loads = before._cells, before._models, before._loads
        self._weights, self._starts, self._past = before._weights, before._starts, before._past
        self._forecasts = before._forecasts
        self._requested, self._full_until_s, self._seen_s = before._requested, before._full_until_s, before._seen_s
        for served in self._models.values():
            served.use = self._use

    def remember(self, past: PastDemand) -> None:
        self._past = past

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        elapsed_s = 0.0 if self._seen_s is None else max(view.now - self._seen_s, 0.0)
        self._starts.update(view.pools, view.now)
        self._count(view)
        self._note_refusals(view)
        wanted: dict[str, int] = {}
        for model, pools in grouped(view.pools, attrgetter("model")).items():
            self._observe(model, pools, elapsed_s, view.now)
            needs = self._needs(model, pools, view.now)
            wanted |= self._resized(pools, needs, view.now)
        self._requested = wanted
        self._seen_s = view.now
        return wanted

    def _count(self, view: PoolsView) -> None:
        """Demand so far, by model and region."""
        if self._past is not None:
            self._recall(self._past, view)
            self._past = None
        totals: dict[Cell, list[int]] = {}
        for cell, tier, requests, tokens in arrived_by_cell(view):
            if self._is_demand(tier):
                total = totals.setdefault(cell, [0, 0])
                total[0], total[1] = total[0] + requests, total[1] + tokens
        for cell, (requests, tokens) in totals.items():
            if cell not in self._cells:
                self._cells[cell] = CellDemand(self._seen_s or 0.0, self._forecasts.step_s)
            self._cells[cell].push(view.now, requests, tokens)
        self._forecasts.update(self._cells, view.now)

    def _is_demand(self, tier: int) -> bool:
        return self._batch_tier is None or tier < self._batch_tier

    def _recall(self, past: PastDemand, view: PoolsView) -> None:
        """Create the cells of the past demand."""
        step_s = self._forecasts.step_s
        by_step = past_by_cell(past, view, step_s, self._is_demand)
        for cell, rates in past_by_cell(past, view, RECENT_STEP_S, self._is_demand).items():
            self._cells[cell] = CellDemand(0.0, step_s, rates, by_step[cell])

    def _note_refusals(self, view: PoolsView) -> None:
        """Count a pool as full if it has neither started nor cancelled the requested units, because views show no GPU
        limits."""
        for pool in view.pools:
            if _number(pool) < self._requested.get(pool.name, 0) and not pool.num_down:
                self._full_until_s[pool.name] = view.now + RETRY_S

    def _observe(self, model: str, pools: Sequence[PoolView], elapsed_s: float, now: float) -> None:
        """Observe the load of the pools, and the rate that the model's replicas serve under it."""
        cells = [cell for name, cell in self._cells.items() if name[0] == model]
        requests, tokens = sum(cell.requests for cell in cells), sum(cell.tokens for cell in cells)
        prompt_tokens = tokens / requests if requests else 0.0
        unit = self._weights.update(pools, prompt_tokens)
        serving = {pool.name: self._weights[pool] * pool.num_serving for pool in pools}
        capacity = sum(serving.values())
        for pool in pools:
            load = self._loads.setdefault(pool.name, _PoolLoad(self._ttft_s))
            load.observe(pool, self._batch_tier, prompt_tokens, elapsed_s)
        served = self._models.get(model)
        if served is None or served.unit != unit:
            self._models[model] = served = _Served(self._use, unit, capacity, now)
        backlog = sum(self._loads[pool.name].backlog_tokens for pool in pools)
        used = sum(serving[pool.name] * self._loads[pool.name].use for pool in pools)
        served.learn(tokens, backlog, used, capacity, elapsed_s, self._ttft_s_of(pools))
        served.is_known = served.rate > 0 and (requests >= FEW_REQUESTS or served.is_assumed)

    def _needs(self, model: str, pools: Sequence[PoolView], now: float) -> dict[str, _Need]:
        """Returns, for each region, the capacity needed now, and the largest recent need."""
        needs: dict[str, _Need] = {}
        by_region = grouped(pools, attrgetter("region"))
        regions = dict.fromkeys((*by_region, *(region for name, region in self._cells if name == model)))
        for region in regions:
            own = by_region.get(region, [])
            cell = self._cells.setdefault((model, region), CellDemand(self._seen_s or now, self._forecasts.step_s))
            lead_s = max((self._starts.lead_s(pool, now) for pool in own or pools), default=0.0) + self.interval_s
            present_tps = cell.present_tps()
            capacity = self._demand_capacity(model, region, cell, present_tps, lead_s, now)
            backlog = self._backlog_capacity(model, own, present_tps, lead_s, now)
            if self._is_late(model, own):
                cell.late_until_s = now + 2 * SMOOTHING_S
            # a batch filled by a backlog does not show what the demand needs
            if not capacity or now >= cell.late_until_s:
                capacity = max(capacity, self._load_capacity(own))
            hold_s = max(lead_s, LEAST_HOLD_S) if self._hold_s is None else self._hold_s
            # In tokens, because the rate of a replica changes as it is learnt.
            rate = self._models[model].rate or 1.0
            lately = cell.peak(now, capacity * rate, hold_s) / rate
            needs[region] = _Need(capacity + backlog, max(capacity, lately) + backlog, hold_s)
        return needs

    def _demand_capacity(
        self, model: str, region: str, cell: CellDemand, present_tps: float, lead_s: float, now: float
    ) -> float:
        """The capacity for the current and the expected demand."""
        served = self._models[model]
        if not served.is_known:
            return 0.0
        expected_tps = self._forecasts.most_tps((model, region), cell, lead_s, now)
        return max(present_tps, expected_tps) / served.rate

    def _load_capacity(self, pools: Sequence[PoolView]) -> float:
        """The capacity at which the current load would have the target use; 0 within the tolerance."""
        capacity = sum(self._weights[pool] * pool.num_serving for pool in pools)
        used = sum(self._weights[pool] * pool.num_serving * self._loads[pool.name].use for pool in pools)
        needed = used / self._use
        return needed if needed > capacity * (1.0 + TOLERANCE) else 0.0

    def _backlog_capacity(
        self, model: str, pools: Sequence[PoolView], present_tps: float, lead_s: float, now: float
    ) -> float:
        """The capacity that processes the expected backlog beyond the tokens that are served within the SLO.

        For a backlog B at a demand of d, extra capacity x processes B in B / x, during which d B / x tokens are late.
        The extra capacity exists for at least about one start time. If a late token costs `miss_to_idle` idle ones, the
        cost is least at x = sqrt(miss_to_idle d B / start time).
        """
        served = self._models[model]
        if not pools or served.rate <= 0:
            return 0.0
        full_tps = self._full_tps(model, pools)
        started_tokens = served.full_rate * sum(
            self._weights[pool] * self._starts.elapsed_s(pool, now) for pool in pools
        )
        waiting = sum(self._loads[pool.name].backlog_tokens for pool in pools) - self._ttft_s_of(pools) * full_tps
        if served.is_known:
            # One start time from now: tokens that starting units will have served, for as long as they have been
            # starting.
            waiting += (present_tps - full_tps) * lead_s - started_tokens
        if waiting <= 0:
            return 0.0
        return sqrt(self._miss_to_idle * present_tps * waiting / lead_s) / served.full_rate

    def _is_late(self, model: str, pools: Sequence[PoolView]) -> bool:
        """Whether more tokens wait than are served within the SLO."""
        waiting = sum(self._loads[pool.name].backlog_tokens for pool in pools)
        return bool(pools) and waiting > self._ttft_s_of(pools) * self._full_tps(model, pools)

    def _full_tps(self, model: str, pools: Sequence[PoolView]) -> float:
        return self._models[model].full_rate * sum(self._weights[pool] * pool.num_serving for pool in pools)

    def _ttft_s_of(self, pools: Sequence[PoolView]) -> float:
        return min((self._loads[pool.name].slo_ttft_s for pool in pools), default=self._ttft_s)

    def _resized(self, pools: Sequence[PoolView], needs: Mapping[str, _Need], now: float) -> dict[str, int]:
        fleet = _Counts(pools, self._weights)
        growing = [pool for pool in pools if not pool.num_failed and now >= self._full_until_s.get(pool.name, 0.0)]
        for region, need in needs.items():
            fleet.add(
                [pool for pool in growing if pool.region == region],
                self._epsilon * need.now,
                [pool for pool in pools if pool.region == region],
            )
        fleet.add(growing, sum(need.now for need in needs.values()), pools)
        served = self._models[pools[0].model]
        seen_for_s = now - served.since_s
        if fleet.is_unchanged and served.is_known and seen_for_s >= max(need.hold_s for need in needs.values()):
            least = {region: self._epsilon * need.lately for region, need in needs.items()}
            fleet.remove(pools, least, sum(need.lately for need in needs.values()))
        return fleet.changes()


class _Need:
    def __init__(self, now: float, lately: float, hold_s: float) -> None:
        self.now, self.lately, self.hold_s = now, lately, hold_s


class _PoolLoad:
    """How full a pool is, as averages over the last minute."""

    def __init__(self, ttft_s: float) -> None:
        self.use = 0.0
        """Share of the fullest resource that is in use, 0 to 1."""
        self.backlog_tokens = 0.0
        """Prompt tokens that are not computed yet."""
        self._default_ttft_s = ttft_s
        self._slos_s: deque[float] = deque(maxlen=32)
        self._num_sampled = 0
        self._means = [0.0, 0.0, 0.0]
        self._is_first = True

    @property
    def slo_ttft_s(self) -> float:
        return min(self._slos_s, default=self._default_ttft_s)

    def observe(self, pool: PoolView, batch_tier: int | None, prompt_tokens: float, elapsed_s: float) -> None:
        """`prompt_tokens`: mean of a request."""
        staying = [replica for replica in pool.replicas if not replica.is_draining]
        if not staying:
            self.use = self.backlog_tokens = 0.0
            return
        self._sample_slos(staying, batch_tier)
        shares = [_urgent_share(replica, batch_tier) for replica in staying]
        roles = grouped(zip(staying, shares, strict=True), lambda pair: pair[0].role).values()
        self.backlog_tokens = pool.num_queued * prompt_tokens + sum(
            share * max(replica.prefill_tokens_left - replica.expected_cached_tokens, 0)
            for replica, share in zip(staying, shares, strict=True)
        )
        share = 1.0 if self._is_first else 1.0 - exp(-elapsed_s / SMOOTHING_S)
        self._is_first = False
        # Used amounts are averaged, and not their shares of the capacity, so that a second, empty replica halves the
        # share at once.
        num = len(staying)
        for i, value in enumerate(
            (num * max(map(_kv_use, roles)), num * max(map(_seat_use, roles)), self.backlog_tokens)
        ):
            self._means[i] += share * (value - self._means[i])
        kv, seats, backlog = self._means
        prefilling = sum(replica.role != "decode" for replica in staying) or num
        prompts = backlog / prompt_tokens / prefilling if prompt_tokens > 0 else 0.0
        self.use = min(max(kv / num, seats / num, prompts / (1.0 + prompts)), 1.0)

    def _sample_slos(self, replicas: Sequence[ReplicaView], batch_tier: int | None) -> None:
        """Read the requests of one replica, a different replica each time."""
        self._num_sampled += 1
        slos = [
            request.slo_ttft_s
            for request in replicas[self._num_sampled % len(replicas)].requests
            if request.slo_ttft_s and (batch_tier is None or request.tier < batch_tier)
        ]
        if slos:
            self._slos_s.append(min(slos))


def _urgent_share(replica: ReplicaView, batch_tier: int | None) -> float:
    """The share of a replica's requests that cannot wait."""
    if batch_tier is None:
        return 1.0
    total = sum(replica.num_by_tier.values())
    return sum(num for tier, num in replica.num_by_tier.items() if tier < batch_tier) / total if total else 1.0


def _kv_use(pairs: Iterable[tuple[ReplicaView, float]]) -> float:
    used = total = 0.0
    for replica, share in pairs:
        used += share * replica.kv_blocks_used
        total += replica.kv_blocks_total
    return min(used / total, 1.0) if total else 0.0


def _seat_use(pairs: Iterable[tuple[ReplicaView, float]]) -> float:
    used = total = 0.0
    for replica, share in pairs:
        used += share * replica.num_running
        total += replica.max_num_seqs
    return min(used / total, 1.0) if total else 0.0


class _Weights:
    """Capacity of a unit of each pool relative to other pools: by `tps` where it is known, otherwise by KV tokens.

    A pool without either is weighted by its price.
    """

    def __init__(self, tps: Mapping[str, float]) -> None:
        self._tps = tps
        self._kv_tokens: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def __getitem__(self, pool: PoolView) -> float:
        return self._weights[pool.name]

    def update(self, pools: Sequence[PoolView], prompt_tokens: float) -> str:
        """The unit of the weights of one model's pools: "tps", "KV tokens" or "USD"."""
        profiled = {pool.name: self._profiled_tps(pool, prompt_tokens) for pool in pools}
        for pool in pools:
            units = len({replica.combo for replica in pool.replicas})
            if units:
                total = sum(float(replica.kv_blocks_total * replica.block_size_tokens) for replica in pool.replicas)
                self._kv_tokens[pool.name] = total / units
        seen = {pool.name: self._kv_tokens.get(pool.name, 0.0) for pool in pools}
        unit, known = ("tps", profiled) if any(profiled.values()) else ("KV tokens", seen)
        if not any(known.values()):
            unit, known = "USD", {pool.name: pool.usd_per_hour or 1.0 for pool in pools}
        ratios = sorted(known[pool.name] / (pool.usd_per_hour or 1.0) for pool in pools if known[pool.name])
        for pool in pools:
            by_price = ratios[len(ratios) // 2] * (pool.usd_per_hour or 1.0)
            self._weights[pool.name] = known[pool.name] or by_price
        return unit

    def _profiled_tps(self, pool: PoolView, prompt_tokens: float) -> float:
        own = self._tps.get(pool.name, self._tps.get(pool.model))
        return (pool.goodput_rps or 0.0) * prompt_tokens if own is None else own


class _Served:
    """The rate served per unit of weight at the target use, in input tokens per second: served tokens over used
    capacity.

    Observations at other use count little, because a batch twice as full serves less than twice as much.
    """

    def __init__(self, use: float, unit: str, capacity: float, now: float) -> None:
        self.since_s = now
        self.unit = unit
        self.is_assumed = unit == "tps"
        self.use = use
        # the assumed value has the weight of five minutes at the target use
        self._tokens = 300.0 * capacity if self.is_assumed else 0.0
        self._used = 300.0 * capacity * use if self.is_assumed else 0.0
        self._done_tokens: float | None = None
        self.is_known = self.is_assumed
        self._full_rate = 0.0
        """Rate observed at full use; 0 before the first observation."""

    @property
    def full_rate(self) -> float:
        """The rate per unit of weight at full use, at least the rate at the target use."""
        return max(self._full_rate, self.rate) if self._full_rate else self.rate / self.use

    @property
    def rate(self) -> float:
        return self.use * self._tokens / self._used if self._used > 0 else float(self.is_assumed)

    def learn(
        self, tokens: int, backlog_tokens: float, used: float, capacity: float, elapsed_s: float, ttft_s: float
    ) -> None:
        """Learn from `elapsed_s` in which `used` of `capacity` was used. `tokens` have arrived so far, of which
        `backlog_tokens` still wait."""
        done, self._done_tokens = self._done_tokens, tokens - backlog_tokens
        if done is None or used <= 0 or elapsed_s <= 0:
            return
        done_tokens = max(self._done_tokens - done, 0.0)
        if used >= FULL_USE * capacity > 0 and backlog_tokens > ttft_s * capacity * self.full_rate > 0:
            share = 1.0 - exp(-elapsed_s / FULL_S)
            self._full_rate = self.full_rate + share * (done_tokens / (capacity * elapsed_s) - self.full_rate)
        relative = used / capacity / self.use
        share = min(relative, 1.0 / relative) ** 2
        kept = exp(-elapsed_s * share / LEARNING_S)
        self._tokens = kept * self._tokens + share * done_tokens
        self._used = kept * self._used + share * used * elapsed_s


class _Counts:
    """Numbers of one model's units by pool, and the changes to them."""

    def __init__(self, pools: Sequence[PoolView], weights: _Weights) -> None:
        self._pools, self._weights = pools, weights
        self._before = {pool.name: _number(pool) for pool in pools}
        self._after = {p.name: min(max(_number(p), p.min_replicas), p.max_replicas) for p in pools}
        self._left = sum(self._before.values()) + MOST_MORE

    @property
    def is_unchanged(self) -> bool:
        return self._before == self._after

    def changes(self) -> dict[str, int]:
        return {name: number for name, number in self._after.items() if number != self._before[name]}

    def capacity(self, pools: Iterable[PoolView]) -> float:
        return sum(self._weights[pool] * self._after[pool.name] for pool in pools)

    def add(self, growing: Sequence[PoolView], needed: float, present: Sequence[PoolView]) -> None:
        """Add the cheapest capacity until the present pools have the needed capacity, or no more may be added."""
        while self._left > 0:
            able = [pool for pool in growing if self._after[pool.name] < pool.max_replicas]
            if not able:
                return
            best = min(able, key=lambda pool: (self._usd(pool), self._of_region(pool.region), pool.name))
            if self.capacity(present) + TOLERANCE * self._weights[best] >= needed:
                return
            self._after[best.name] += 1
            self._left -= 1

    def remove(self, pools: Sequence[PoolView], least: Mapping[str, float], total: float) -> None:
        """Remove the most expensive capacity that neither its region nor the total needs."""
        while True:
            able = [pool for pool in pools if self._can_remove(pool, least.get(pool.region, 0.0), total)]
            if not able:
                return
            worst = max(able, key=lambda pool: (self._usd(pool), self._of_region(pool.region), pool.name))
            self._after[worst.name] -= 1

    def _can_remove(self, pool: PoolView, least: float, total: float) -> bool:
        own = [each for each in self._pools if each.region == pool.region]
        if pool.num_starting or self._after[pool.name] <= pool.min_replicas:
            return False
        if sum(self._after[each.name] for each in own) < 2:
            return False
        weight = self._weights[pool]
        return self.capacity(own) - weight >= least and self.capacity(self._pools) - weight >= total

    def _usd(self, pool: PoolView) -> float:
        return pool.usd_per_hour / self._weights[pool]

    def _of_region(self, region: str) -> float:
        return self.capacity(pool for pool in self._pools if pool.region == region)


def _number(pool: PoolView) -> int:
    return pool.num_serving + pool.num_starting
