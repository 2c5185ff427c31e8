"""What a request costs: its reservation in its key's budgets, and the charges for what it has used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.core.record import Outcome
from headway.gateway.accounts.budgets import Accounts, BudgetHold, Charge
from headway.gateway.fleet.specs import ServedPool, TokenPrices
from headway.gateway.scheduling.in_flight import InFlightRequest

_FREE = TokenPrices()


class Charges:
    """Prices requests by the pools that serve them, and charges the accounts of their keys."""

    def __init__(
        self, accounts: Accounts, pools: Mapping[str, ServedPool], names: Callable[[], Mapping[str, tuple[str, ...]]]
    ) -> None:
        """`pools` are the present pools by name; `names()` returns the names of each model."""
        self.accounts, self._pools, self._names = accounts, pools, names

    def hold(self, owner: str, model: str, input_tokens: int, output_tokens: int) -> BudgetHold:
        """Reserve a request's tokens, at the price of the dearest pool that may serve it. ApiError without room."""
        usd = 0.0
        for served in self._pools.values():
            names = self._names().get(served.pool.model.name, ())
            if model in names or not any(model in each for each in self._names().values()):
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
            charges.append(self.charge(live.model, request.replica.pool, live.prompt_tokens, live.generated_tokens))
        self.accounts.settle(hold, charges or [Charge(live.model, 0, 0, 0.0)])

    def charge(self, model: str, pool: str, input_tokens: int, output_tokens: int) -> Charge:
        served = self._pools.get(pool)
        prices = _FREE if served is None else served.prices
        return Charge(model, input_tokens, output_tokens, prices.usd(input_tokens, output_tokens))
