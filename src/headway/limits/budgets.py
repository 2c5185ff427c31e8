"""Budgets of tokens and dollars in periods, and the charges of requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import Literal

from msgspec import Struct

from headway.core.record import Outcome

Period = Literal["day", "week", "month", "total"]
"""The time that a budget lasts: a calendar day, a week from Monday or a month, all in UTC; or forever."""


class Budget(Struct, frozen=True):
    """Largest use of a key, a team or a tenant in each period. None: no limit."""

    tokens: int | None = None
    usd: float | None = None
    period: Period = "month"

    def __bool__(self) -> bool:
        return self.tokens is not None or self.usd is not None

    def start(self, today: date) -> date:
        """The first day of the period that contains this day."""
        return {"day": today, "week": today - timedelta(days=today.weekday()), "month": today.replace(day=1)}.get(
            self.period, date.min
        )

    def end(self, today: date) -> date | None:
        """The first day of the next period; None if there is none."""
        if self.period == "total":
            return None
        days = {"day": 1, "week": 7}.get(self.period, 32)
        later = self.start(today) + timedelta(days=days)
        return later.replace(day=1) if self.period == "month" else later


class Account:
    """A budget, and its used and reserved amounts in the current period."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.used_tokens, self.used_usd = 0, 0.0
        self.reserved_tokens, self.reserved_usd = 0, 0.0
        """(tokens, dollars) that requests in flight at this gateway have reserved."""

    def spent(self) -> tuple[int, float]:
        return self.used_tokens, self.used_usd

    def lacks(self, tokens: int, usd: float) -> Literal["", "tokens", "usd"]:
        """The quantity for which the budget has too little room; "" if it has room for this use."""
        spent_tokens, spent_usd = self.spent()
        budget = self.budget
        if budget.tokens is not None and spent_tokens + self.reserved_tokens + tokens > budget.tokens:
            return "tokens"
        is_over = budget.usd is not None and (
            spent_usd + self.reserved_usd + usd > budget.usd or spent_usd >= budget.usd
        )
        return "usd" if is_over else ""

    def reserve(self, tokens: int, usd: float) -> None:
        """Reserve an amount for a request in flight; negative: give it back."""
        self.reserved_tokens += tokens
        self.reserved_usd += usd

    def use(self, tokens: int, usd: float) -> None:
        self.used_tokens += tokens
        self.used_usd += usd


class TokenPrices(Struct, frozen=True):
    """Prices in dollars per million tokens."""

    input_usd: float = 0.0
    output_usd: float = 0.0
    cached_usd: float | None = None
    """Price of prompt tokens found in a prefix cache; None: the same as other input tokens."""

    def usd(self, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """The price of a request. `cached_tokens`: number of its input tokens that were in a prefix cache."""
        saved_usd = 0.0 if self.cached_usd is None else cached_tokens * (self.input_usd - self.cached_usd)
        return (input_tokens * self.input_usd + output_tokens * self.output_usd - saved_usd) / 1e6

    def most_usd(self, input_tokens: int, output_tokens: int) -> float:
        """The highest possible price of a request, over all possible cached parts of its input."""
        return max(self.usd(input_tokens, output_tokens, cached) for cached in (0, input_tokens))


class MostTokens(Struct, frozen=True):
    """The largest possible use of a request, for rates and budgets: of all its sequences, and of all models that may be
    charged for it."""

    input: int
    output: int

    @property
    def total(self) -> int:
        return self.input + self.output


def most_tokens(
    prompt_tokens: int, output_tokens: int, num_sequences: int = 1, echoes: bool = False, num_stages: int = 1
) -> MostTokens:
    """The largest possible use of a request. The simulator uses the same function.

    `output_tokens`: of one sequence, including its reasoning. `echoes`: each sequence begins with the prompt, which
    some engines count again. `num_stages`: models of a cascade, each of which may answer.
    """
    output_tokens = num_sequences * (output_tokens + (prompt_tokens if echoes else 0))
    return MostTokens(num_stages * prompt_tokens, num_stages * output_tokens)


def dearest_usd(
    model: str,
    input_tokens: int,
    output_tokens: int,
    pools: Iterable[tuple[str, TokenPrices]],
    names: Mapping[str, Collection[str]],
    fallbacks: Mapping[str, Sequence[str]],
) -> float:
    """The price of a request at the most expensive pool that may serve it. `pools`: (model, prices) pairs. `names`: the
    names of each model. `fallbacks`: the models that may answer in place of a model.
    """
    requested = [name for name, own in names.items() if model in own]
    may_serve = {*requested, *(each for name in requested for each in fallbacks.get(name, ()))}
    priced = [prices for name, prices in pools if name in may_serve or not requested]
    return max((prices.most_usd(input_tokens, output_tokens) for prices in priced), default=0.0)


def is_charged(is_placed: bool, outcome: Outcome | None, generated_tokens: int) -> bool:
    """Whether an ended request is charged: only if an engine has begun it."""
    return is_placed and (outcome is not Outcome.REJECTED or generated_tokens > 0)
