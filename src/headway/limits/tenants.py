"""The limits of a simulated tenant in a scenario."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from headway.limits.budgets import Budget, Period

_Positive = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]


class TenantLimits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a workload's tenant: the limits of a key, and its budget. Requests beyond them are denied."""

    requests_per_minute: _Positive | None = None
    """Average rate, and largest burst."""
    tokens_per_minute: _Positive | None = None
    """As `requests_per_minute`, for prompt and output tokens together."""
    budget_tokens: _Count | None = None
    """Prompt and output tokens in a period."""
    budget_usd: _Positive | None = None
    """Maximum dollars in a period, by the prices of the pools (`usd_per_million_input_tokens` and the other prices)."""
    period: Period = "month"
    """The time that a budget lasts: a day, a week from Monday, a month, or all of the run. A simulation begins on a
    Monday that is the first of a month, at midnight."""
    max_tokens: _Count | None = None
    """The `max_tokens` that the tenant's requests ask for. Until a request ends, the limits reserve this amount for it.
    Default: the request's actual output."""

    @property
    def budget(self) -> Budget:
        return Budget(self.budget_tokens, self.budget_usd, self.period)


def rates_of_keys(rates: list[float | None]) -> float | None:
    """The rate of a tenant whose keys have these rates; None if any of the keys has no limit."""
    limited = [each for each in rates if each is not None]
    return sum(limited) if len(limited) == len(rates) else None
