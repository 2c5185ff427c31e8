"""What a request costs: its reservation in its key's budgets, and the charges for what it has used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.core.record import Outcome
from headway.gateway.accounts.budgets import Accounts, BudgetHold, Charge
from headway.gateway.fleet.specs import ServedPool, ServingPlan, TokenPrices
from headway.gateway.scheduling.in_flight import InFlightRequest

_FREE = TokenPrices()


class Charges:
    """Prices requests by the pools that serve them, and charges the accounts of their keys."""

    def __init__(self, accounts: Accounts, pools: Mapping[str, ServedPool], plan: Callable[[], ServingPlan]) -> None:
        """`pools` are the present pools by name; `plan()` is the present plan."""
        self.accounts, self._pools, self._plan = accounts, pools, plan

    def hold(self, owner: str, model: str, input_tokens: int, output_tokens: int) -> BudgetHold:
        """Reserve a request's tokens, at the price of the dearest pool that may serve it. ApiError without room."""
        usd, plan = 0.0, self._plan()
        asked = [name for name, names in plan.names.items() if model in names]
        may_serve = {*asked, *(each for name in asked for each in plan.fallbacks.models.get(name, ()))}
        for served in self._pools.values():
            if served.pool.model.name in may_serve or not asked:
                usd = max(usd, served.prices.usd(input_tokens, output_tokens))
        return self.accounts.reserve(owner, input_tokens + output_tokens, usd)

    def settle(self, request: InFlightRequest) -> None:
        """Charge what the request has used, all models of a cascade included. One that no engine has begun is free."""
        hold, request.budget_hold = request.budget_hold, None
        if hold is None:
            return
        live, charges = request.live, list(request.earlier_charges)
        has_begun = live.placed_s == live.placed_s and request.replica is not None
        if has_begun and (request.outcome is not Outcome.REJECTED or live.generated_tokens):
            assert request.replica is not None
            charges.append(
                self.charge(
                    live.model, request.replica.pool, live.prompt_tokens, live.generated_tokens, live.cached_tokens
                )
            )
        self.accounts.settle(hold, charges or [Charge(live.model, 0, 0, 0.0)])

    def charge(self, model: str, pool: str, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> Charge:
        """The charge for tokens at a pool. `cached_tokens` of the input were in a prefix cache."""
        served = self._pools.get(pool)
        prices = _FREE if served is None else served.prices
        return Charge(model, input_tokens, output_tokens, prices.usd(input_tokens, output_tokens, cached_tokens))
