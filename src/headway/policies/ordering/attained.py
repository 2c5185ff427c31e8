"""Orders the gateway's queue by the service that tenants or programs have received."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from headway.core.record import Ended
from headway.core.view import RequestView
from headway.policies.ordering.shares import (
    MOST_AT_ONCE,
    Charges,
    GivenService,
    InFlight,
    Share,
    check_room,
    checked_weights,
)

_MAX_SHARES = 100_000
"""Maximum number of tenants or programs whose service is kept. Beyond it, the one served longest ago is forgotten."""


@dataclass(slots=True)
class _Attained:
    """The service of one share: tokens divided by its weight."""

    tokens: float = 0.0


class _ServiceOrdering:
    """Common part of the orderings by attained service."""

    quantum: int | None = None
    preemptive = False

    def __init__(
        self, weights: Mapping[str, float] | None, charges: Charges, headroom: float, prompt_window: int | None
    ) -> None:
        check_room(headroom, prompt_window)
        self._weights, self._charges, self._in_flight = checked_weights(weights), charges, InFlight()
        self.headroom, self.prompt_window = headroom, prompt_window
        self._attained: OrderedDict[Share, _Attained] = OrderedDict()
        self._busy: dict[int, dict[Share, _Attained]] = {}
        """Shares with requests in flight, by tier."""

    def share(self, request: RequestView) -> Share:
        return request.tier, request.tenant

    def rank(self, request: RequestView, now: float) -> tuple[int, float, float, float]:
        share = self.share(request)
        attained = self._attained.get(share)
        own = 0.0 if attained is None else attained.tokens
        return request.tier, self._counter(share), own, request.tier_since_s

    def _counter(self, share: Share) -> float:
        """The counter at which the share would start a request now."""
        attained = self._attained.get(share)
        return 0.0 if attained is None else attained.tokens

    def is_below_share(self, request: RequestView) -> bool:
        return self._in_flight.is_below(self.share(request))

    def started(self, request: RequestView, now: float) -> None:
        if request.id in self._in_flight:
            return  # the request is placed again
        share = self.share(request)
        weight, charge = self._weight(share), self._charges.at_start(request, share)
        attained = self._lifted(share)
        self._in_flight.start(request.id, share, weight, charge)
        self._busy.setdefault(request.tier, {})[share] = attained
        self._give(share, attained, charge)

    def _lifted(self, share: Share) -> _Attained:
        """The share's service, raised to its counter for a start now. It becomes the last share to be forgotten."""
        counter, attained = self._counter(share), self._attained.setdefault(share, _Attained())
        attained.tokens = counter
        self._attained.move_to_end(share)
        if len(self._attained) > _MAX_SHARES:
            self._forgotten(self._attained.popitem(last=False)[0])
        return attained

    def _give(self, share: Share, attained: _Attained, service: float) -> None:
        attained.tokens += service / self._weight(share)

    def _forgotten(self, share: Share) -> None:
        """A share's service is no longer kept."""

    def _weight(self, share: Share) -> float:
        return self._weights.get(str(share[1]), 1.0)

    def learn(self, record: Ended | RequestView) -> None:
        found = self._in_flight.end(record.id)
        if found is None:
            return  # the request never started
        share, charged = found
        busy = self._busy[share[0]]
        self._give(share, busy[share], self._charges.at_end(record, share, charged))
        if not self._in_flight.num(share):
            del busy[share]

    ended = learn


class VtcOrdering(_ServiceOrdering):
    """Orders requests by tier, and within a tier the tenant with the smallest virtual token counter; by arrival within
    a tenant.

    A tenant's counter grows by the service of its requests over its weight in `weights` (1 if it has none there):
    `prompt_weight` for each prompt token and `output_weight` for each output token. A tenant that returns with no
    request in flight is lifted to the smallest counter of tenants with requests in flight, so that it has no credit for
    its idle time. At equal counters, the lifted tenant goes first.

    Source: virtual token counter (Sheng et al., OSDI 2024), weighted and with length prediction: the mean of the
    tenant's last answers is charged when a request starts, and the difference when it ends. `fair` limits how far a
    tenant may be ahead, allows a burst, and is meant for production.

    While two tenants of a tier wait, their services over their weights differ by no more than two requests of each, and
    the errors of the predictions for their requests in flight. While a tenant's first request waits, each other tenant
    starts requests only until its counter reaches that tenant's counter. No tenant starves. Tiers are strict.
    `headroom` and `prompt_window` are as in `fair`. Several gateways count each other's service.

    This ordering applies to the gateway's queue only.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
        headroom: float = 1 / 16,
        prompt_window: int | None = None,
    ) -> None:
        super().__init__(weights, Charges(prompt_weight, output_weight), headroom, prompt_window)
        self._given = GivenService()
        self._peer_counters: dict[int, float] = {}
        """Maps each tier to the largest counter at which a request has started at another gateway."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use these weights from the next request on, for the tenants named in `weights`."""
        self._weights |= checked_weights(weights)

    def _counter(self, share: Share) -> float:
        tier = share[0]
        busy = self._busy.get(tier)
        tokens = super()._counter(share)
        if not busy:
            return max(tokens, self._peer_counters.get(tier, 0.0))
        return tokens if share in busy else max(tokens, self._least(tier))

    def _least(self, tier: int) -> float:
        """The smallest counter of tenants with requests in flight; if there are none here, the counter of other
        gateways."""
        if busy := self._busy.get(tier):
            return min(each.tokens for each in busy.values())
        return self._peer_counters.get(tier, 0.0)

    def _give(self, share: Share, attained: _Attained, service: float) -> None:
        super()._give(share, attained, service)
        self._given.add(share, service)

    def _forgotten(self, share: Share) -> None:
        self._given.forget(share)

    def given(self) -> Mapping[tuple[int, str], float]:
        """The total service of the shares that received any since the last call (`core.policy.PeerOrdering`)."""
        return self._given.take()

    def given_elsewhere(self, share: tuple[int, str], service: float, /) -> None:
        """See `core.policy.PeerOrdering`. The tenant's counter grows as if its requests had started here."""
        tier, weight = share[0], self._weight(share)
        if service > 0:
            attained = self._lifted(share)
            self._peer_counters[tier] = max(self._peer_counters.get(tier, 0.0), attained.tokens)
            attained.tokens += min(service, MOST_AT_ONCE) / weight
        elif (known := self._attained.get(share)) is not None:
            # The share gets no more credit than an idle tenant has.
            known.tokens = max(known.tokens + service / weight, min(known.tokens, self._least(tier)))


class LeastAttainedServiceOrdering(_ServiceOrdering):
    """Orders requests by tier, and within a tier the program that has had the least service; by arrival within a
    program.

    A program is the calls of one session (`session_id`); a tenant's requests without one count as one program. Service
    is counted as by `vtc`, over all calls of the program including ended calls, and is not lifted. A short program
    therefore does not wait for the many calls of a long program, and hardly delays it. Long programs may starve.
    Source: program-level attained service (Autellix, Luo et al., 2025), which compares levels of service and preempts
    at the engine. Here the gateway holds calls, and does not interrupt a started call.

    This ordering applies to the gateway's queue only.
    """

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0) -> None:
        super().__init__(None, Charges(prompt_weight, output_weight, predicts=False), 0.0, None)

    def is_below_share(self, request: RequestView) -> bool:
        return True

    def share(self, request: RequestView) -> Share:
        session = request.session_id
        return request.tier, request.tenant if session is None else session
