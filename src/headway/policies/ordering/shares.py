"""Common parts of the orderings that share service among tenants: weights, charges and requests in flight."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from headway.core.record import Ended
from headway.core.view import RequestView
from headway.policies.arguments import require_above, require_at_least, require_between

Share = tuple[int, str | int]
"""Tier, and tenant or program."""
_KEPT = 0.8
"""Weight of the old mean answer length when a further answer is averaged in, so that about five answers count."""
MOST_AT_ONCE = 65_536.0
"""Maximum service that one message of another scheduler charges to a tenant. More service was given while that
scheduler was unreachable."""
_MAX_MEANS = 100_000
"""Shares whose mean answer length is kept. Beyond it, the share that ended a request longest ago is forgotten."""


def checked_weights(weights: Mapping[str, float] | None) -> dict[str, float]:
    """The tenants' weights. Raises HeadwayError if one is not positive."""
    for tenant, weight in (weights or {}).items():
        require_above(0, **{f"weights: {tenant}": weight})
    return dict(weights or {})


def check_room(headroom: float, prompt_window: int | None) -> None:
    """Raises HeadwayError unless both are within the limits of `SharingOrdering`."""
    require_between(0, 0.5, headroom=headroom)
    if prompt_window is not None:
        require_at_least(1, prompt_window=prompt_window)


class Charges:
    """The service of requests in tokens: the charge at the start, and the rest at the end.

    Prompt tokens weigh `prompt_weight` and output tokens `output_weight`. An answer's length is unknown at the start:
    the mean of the share's last five or so answers is charged, and the difference at the end. Without `predicts`, the
    whole answer is charged at the end.
    """

    def __init__(self, prompt_weight: float, output_weight: float, predicts: bool = True) -> None:
        require_above(0, prompt_weight=prompt_weight)
        require_at_least(0, output_weight=output_weight)
        self._prompt_weight, self._output_weight, self._predicts = prompt_weight, output_weight, predicts
        self._mean_output_tokens: OrderedDict[Share, float] = OrderedDict()
        """Mean output tokens by share."""

    def at_start(self, request: RequestView, share: Share) -> float:
        answer_tokens = self._mean_output_tokens.get(share, 0.0)
        return self._prompt_weight * request.prompt_tokens + self._output_weight * answer_tokens

    def at_end(self, record: Ended | RequestView, share: Share, charged: float) -> float:
        """The remaining charge of a request that was charged `charged`; negative if it was charged too much."""
        means, tokens = self._mean_output_tokens, record.generated_tokens
        if self._predicts:
            means[share] = _KEPT * means.get(share, tokens) + (1 - _KEPT) * tokens
            means.move_to_end(share)
            if len(means) > _MAX_MEANS:
                means.popitem(last=False)
        return self._prompt_weight * record.prompt_tokens + self._output_weight * tokens - charged


class GivenService:
    """The service given here by tenant, in the form that other schedulers receive."""

    def __init__(self) -> None:
        self._sums: dict[Share, float] = {}
        self._changed: set[Share] = set()
        """Tenants whose total service has changed since the last report."""

    def add(self, share: Share, service: float) -> None:
        self._sums[share] = self._sums.get(share, 0.0) + service
        self._changed.add(share)

    def take(self) -> dict[tuple[int, str], float]:
        """The total services that have changed since the last call."""
        changed, self._changed = sorted(self._changed), set()
        return {(tier, str(tenant)): self._sums[tier, tenant] for tier, tenant in changed}

    def forget(self, share: Share) -> None:
        self._sums.pop(share, None)
        self._changed.discard(share)


class InFlight:
    """The requests in flight by share, with their charges."""

    def __init__(self) -> None:
        self._charged: dict[int, tuple[Share, float]] = {}
        """The share and charge of each request."""
        self._num: dict[Share, tuple[int, float]] = {}
        """Number of requests in flight and weight of each share that has any."""
        self._weight = 0.0
        """Total weight of the shares in `_num`."""

    def __contains__(self, request: int) -> bool:
        return request in self._charged

    def num(self, share: Share) -> int:
        return self._num[share][0] if share in self._num else 0

    def start(self, request: int, share: Share, weight: float, charge: float) -> None:
        num, known = self._num.get(share, (0, weight))
        if not num:
            self._weight += weight
        self._num[share] = num + 1, known
        self._charged[request] = share, charge

    def end(self, request: int) -> tuple[Share, float] | None:
        """Remove a request. Returns the request's share (its tenant) and its charge; None if the request is not in
        flight."""
        found = self._charged.pop(request, None)
        if found is not None:
            share = found[0]
            num, weight = self._num[share]
            if num > 1:
                self._num[share] = num - 1, weight
            else:
                del self._num[share]
                self._weight = self._weight - weight if self._num else 0.0
        return found

    def is_below(self, share: Share) -> bool:
        """Whether the share has less than its weighted part of the requests in flight."""
        num, weight = self._num.get(share, (0, 0.0))
        return not num or num * self._weight < len(self._charged) * weight
