"""Tenants' limits in virtual time: a gateway's rate limits and budgets of keys, with the same classes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta

from headway.control.live import Live
from headway.core.fleet import Fleet, Pool
from headway.core.record import REFUSAL_REASONS, Outcome
from headway.limits.budgets import Account, TokenPrices, dearest_usd, is_charged, most_tokens
from headway.limits.rates import Rates
from headway.limits.tenants import TenantLimits

_FIRST_DAY = date(2029, 1, 1)
"""First day of simulations: a Monday, and the first of a month."""
_DAY_S = 86_400.0
_BUDGET = 1 + REFUSAL_REASONS.index("budget")


class _Hold:
    """The reservation of a request in flight against its tenant's limits."""

    __slots__ = ("account", "charges", "rates", "tokens", "usd")

    def __init__(self, rates: Rates, account: Account, tokens: int, usd: float) -> None:
        self.rates, self.account, self.tokens, self.usd = rates, account, tokens, usd
        self.charges: dict[int, tuple[int, int, float]] = {}
        """Maps each cascade stage to (tokens counted by rates, tokens counted by the budget, dollars)."""


class SimulatedLimits:
    """The limits of all tenants. Each of several schedulers counts its own rates; budgets are shared."""

    def __init__(self, limits: Mapping[str, TenantLimits], fleet: Fleet) -> None:
        self._limits = limits
        self._rates: dict[tuple[int, str], Rates] = {}
        """Rates of each tenant at each scheduler, by (scheduler, tenant)."""
        self._accounts = {name: Account(each.budget) for name, each in limits.items()}
        self._today = _FIRST_DAY
        self._prices = {pool.name: _prices(pool) for pool in fleet.all_pools}
        self._pools = [(pool.model.name, self._prices[pool.name]) for pool in fleet.all_pools]
        self._names = {pool.model.name: pool.names for pool in fleet.all_pools}
        self._fallbacks = fleet.fallbacks.models
        self._holds: dict[int, _Hold] = {}

    def refusal(self, live: Live, now: float, num_stages: int = 1) -> int:
        """Reserve what an arriving request may use of `num_stages` models. Returns 0, or the code of the limit that
        denies it."""
        limits = self._limits.get(live.tenant)
        if limits is None:
            return 0
        rates = self._rates.get((live.scheduler, live.tenant))
        if rates is None:
            rates = self._rates[live.scheduler, live.tenant] = Rates()
            rates.change(limits.requests_per_minute, limits.tokens_per_minute, now)
        output_tokens = live.output_tokens if limits.max_tokens is None else limits.max_tokens
        most = most_tokens(live.prompt_tokens, output_tokens, num_stages=num_stages)
        tokens = most.total
        refused = rates.reserve(tokens, now)
        if refused is not None:
            return 1 + REFUSAL_REASONS.index(refused[0])
        self._begin_periods(now)
        account = self._accounts[live.tenant]
        usd = (
            dearest_usd(live.model, most.input, most.output, self._pools, self._names, self._fallbacks)
            if account.budget.usd is not None
            else 0.0
        )
        if account.lacks(tokens, usd):
            rates.give_back(tokens, now)
            return _BUDGET
        account.reserve(tokens, usd)
        self._holds[live.id] = _Hold(rates, account, tokens, usd)
        return 0

    def _begin_periods(self, now: float) -> None:
        """Reset the use of periods that have ended."""
        today = _FIRST_DAY + timedelta(days=int(now // _DAY_S))
        if today != self._today:
            for account in self._accounts.values():
                if account.budget.start(today) != account.budget.start(self._today):
                    account.used_tokens, account.used_usd = 0, 0.0
            self._today = today

    def stage_ended(self, live: Live, pool: str, outcome: Outcome, now: float) -> None:
        """Record a request's use of one model."""
        hold = self._holds.get(live.id)
        if hold is None:
            return
        tokens, paid, usd = live.prompt_tokens + live.generated_tokens, 0, 0.0
        if outcome is Outcome.REJECTED and now <= live.arrival_s and not live.shed_s:
            tokens = 0  # the request is too long or has no room: a gateway rejects it before it reserves
        if is_charged(live.placed_s == live.placed_s, outcome, live.generated_tokens):
            paid = tokens
            usd = self._prices[pool].usd(live.prompt_tokens, live.generated_tokens, live.cached_tokens)
        hold.charges[live.stage_index] = tokens, paid, usd

    def ended(self, live: Live, pool: str, outcome: Outcome, now: float) -> None:
        """Charge a request's actual use instead of its reservation."""
        self.stage_ended(live, pool, outcome, now)
        hold = self._holds.pop(live.id, None)
        if hold is None:
            return
        used, paid, usd = (sum(each) for each in zip(*hold.charges.values(), strict=True))
        hold.rates.give_back(hold.tokens - int(used), now)
        self._begin_periods(now)
        hold.account.reserve(-hold.tokens, -hold.usd)
        hold.account.use(int(paid), usd)


def _prices(pool: Pool) -> TokenPrices:
    return TokenPrices(
        pool.usd_per_million_input_tokens, pool.usd_per_million_output_tokens, pool.usd_per_million_cached_tokens
    )
