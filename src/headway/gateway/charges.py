"""The cost of a request: the reservation in its key's budgets, and the charges for its use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.gateway.accounts.budgets import Accounts, BudgetHold, Charge
from headway.gateway.fleet.specs import ServedPool, ServingPlan
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.limits.budgets import MostTokens, TokenPrices, dearest_usd, is_charged

_FREE = TokenPrices()


class Charges:
    """Prices requests by the pools that serve them, and charges the costs to the accounts of the requests' keys."""

    def __init__(self, accounts: Accounts, pools: Mapping[str, ServedPool], plan: Callable[[], ServingPlan]) -> None:
        """`pools` are the current pools by name; `plan()` returns the current plan."""
        self.accounts, self._pools, self._plan = accounts, pools, plan

    def hold(self, owner: str, model: str, most: MostTokens) -> BudgetHold:
        """Reserve a request's tokens at the price of the most expensive pool that may serve it. Raises ApiError without
        room."""
        plan = self._plan()
        pools = [(served.pool.model.name, served.prices) for served in self._pools.values()]
        usd = dearest_usd(model, most.input, most.output, pools, plan.names, plan.fallbacks.models)
        return self.accounts.reserve(owner, most.total, usd)

    def raise_hold(self, request: InFlightRequest) -> None:
        """Raise the reservation to the request's use so far, if the use exceeds the estimate."""
        if request.budget_hold is not None and request.budget_hold.accounts:
            charges = self._charges(request)
            tokens = sum(each.input_tokens + each.output_tokens for each in charges)
            request.budget_hold.raise_to(tokens, sum(each.usd for each in charges))

    def settle(self, request: InFlightRequest) -> None:
        """Charge the request's use, including all models of a cascade. A request that no engine has begun is free."""
        hold, request.budget_hold = request.budget_hold, None
        if hold is not None:
            self.accounts.settle(hold, self._charges(request) or [Charge(request.live.model, 0, 0, 0.0)])

    def _charges(self, request: InFlightRequest) -> list[Charge]:
        """The charges for the request's use so far."""
        live, charges = request.live, list(request.earlier_charges)
        is_placed, replica = live.placed_s == live.placed_s, request.replica
        if replica is not None and is_charged(is_placed, request.outcome, live.generated_tokens):
            tokens = live.prompt_tokens, live.generated_tokens, live.cached_tokens
            charges.append(self.charge(live.model, replica.pool, *tokens))
        return charges

    def charge(self, model: str, pool: str, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> Charge:
        """The charge for tokens at a pool. `cached_tokens`: input tokens that were in a prefix cache."""
        served = self._pools.get(pool)
        prices = _FREE if served is None else served.prices
        return Charge(model, input_tokens, output_tokens, prices.usd(input_tokens, output_tokens, cached_tokens))
