"""Deficit round robin between tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from headway.core.record import Ended
from headway.core.view import RequestView
from headway.policies.arguments import require_above
from headway.policies.ordering.shares import (
    MOST_AT_ONCE,
    Charges,
    GivenService,
    InFlight,
    Share,
    check_room,
    checked_weights,
)

_MAX_IDLE = 4096
"""Maximum number of tenants without a request in flight whose round is kept. Beyond it, the tenant idle for longest is
forgotten."""


@dataclass(slots=True)
class _Turn:
    """One tenant's position in the rounds of its tier."""

    round: int
    left: float
    """Tokens of service left to the tenant in this round; positive."""


class DeficitRoundRobinOrdering:
    """Orders requests by tier; within a tier in rounds that give every tenant a quantum; within a tenant by arrival.

    In a round, a tenant starts requests until it has used `quantum_tokens` times its weight in `weights` (1 if it has
    none there). Service of its last request beyond the quantum is deducted from its next rounds. Of the tenants with
    some of the round left, the one with the largest remainder over its weight goes first, so that a tenant that was
    idle does not wait for the others' quanta. Such a tenant joins the current round with one quantum, and without
    credit for its idle time.

    Service is counted in tokens: `prompt_weight` for a token of the prompt and `output_weight` for one of the answer.
    The mean of the tenant's last answers is charged at the start, and the difference when the request ends.

    Source: deficit round robin (Shreedhar and Varghese, 1995), in its form for lengths that are unknown beforehand
    (surplus round robin), with the service of the virtual token counter (Sheng et al., 2024). With the router `dlpm` it
    is the distributed deficit longest prefix match (D2LPM, Cao et al., 2025), whose replicas take waiting requests in
    such rounds, ordered by cached prefix within a round.

    While a tenant's first request waits, each other tenant of its tier starts requests of at most 1 + r quanta and one
    request more. Here r is the excess of the tenant's own last requests over its quantum, in quanta, rounded up; 0 for
    a tenant that was idle. No tenant starves. Tiers are strict. `headroom` and `prompt_window` are as in `fair`.
    Several gateways count each other's service.

    This ordering applies to the gateway's queue only.
    """

    quantum: int | None = None
    preemptive = False

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        quantum_tokens: float = 16_384.0,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
        headroom: float = 1 / 16,
        prompt_window: int | None = None,
    ) -> None:
        require_above(0, quantum_tokens=quantum_tokens)
        check_room(headroom, prompt_window)
        self._weights, self._quantum_tokens = checked_weights(weights), quantum_tokens
        self._charges, self._in_flight = Charges(prompt_weight, output_weight), InFlight()
        self._given = GivenService()
        self.headroom, self.prompt_window = headroom, prompt_window
        self._turns: dict[Share, _Turn] = {}
        self._idle: OrderedDict[Share, None] = OrderedDict()
        """Tenants without a request in flight, ordered by idle time, longest first."""
        self._round: dict[int, int] = {}
        """The latest round in which a request started, by tier."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use these weights from the next request on, for the tenants named in `weights`."""
        self._weights |= checked_weights(weights)

    def share(self, request: RequestView) -> Share:
        return request.tier, request.tenant

    def rank(self, request: RequestView, now: float) -> tuple[int, int, float, float]:
        tier = request.tier
        present, turn = self._round.get(tier, 0), self._turns.get((tier, request.tenant))
        if turn is None or turn.round < present:
            return tier, present, -self._quantum_tokens, request.tier_since_s
        return tier, turn.round, -turn.left / self._weight((tier, request.tenant)), request.tier_since_s

    def _weight(self, share: Share) -> float:
        return self._weights.get(str(share[1]), 1.0)

    def is_below_share(self, request: RequestView) -> bool:
        return self._in_flight.is_below((request.tier, request.tenant))

    def started(self, request: RequestView, now: float) -> None:
        if request.id in self._in_flight:
            return  # the request is placed again
        share = request.tier, request.tenant
        weight, charge, turn = self._weight(share), self._charges.at_start(request, share), self._begin(share)
        self._idle.pop(share, None)
        self._in_flight.start(request.id, share, weight, charge)
        self._given.add(share, charge)
        self._take(turn, charge, weight)

    def _begin(self, share: Share) -> _Turn:
        """A tenant starts a request. Returns its position in the current round, or in a later round, which becomes the
        current round."""
        tier = share[0]
        present, turn = self._round.get(tier, 0), self._turns.get(share)
        if turn is None or turn.round < present:
            turn = self._turns[share] = _Turn(present, self._quantum_tokens * self._weight(share))
        self._round[tier] = turn.round
        return turn

    def given(self) -> Mapping[tuple[int, str], float]:
        """The total service of the shares that received any since the last call (`core.policy.PeerOrdering`)."""
        return self._given.take()

    def given_elsewhere(self, share: tuple[int, str], service: float, /) -> None:
        """See `core.policy.PeerOrdering`. The tenant's quanta are used as if its requests had started here."""
        weight, turn = self._weight(share), self._turns.get(share)
        if service > 0:
            turn = self._begin(share)
            self._take(turn, min(service, MOST_AT_ONCE), weight)
        elif turn is not None:
            turn.left = max(min(turn.left - service, self._quantum_tokens * weight), turn.left)
        if turn is not None and not self._in_flight.num(share):
            self._mark_idle(share)

    def _take(self, turn: _Turn, tokens: float, weight: float) -> None:
        """Deduct tokens from a tenant's quantum, and from as many later rounds as needed."""
        turn.left -= tokens
        if turn.left <= 0:
            quantum = self._quantum_tokens * weight
            rounds = int(-turn.left // quantum) + 1
            turn.round += rounds
            turn.left += rounds * quantum

    def learn(self, record: Ended | RequestView) -> None:
        found = self._in_flight.end(record.id)
        if found is None:
            return  # the request never started
        share, charged = found
        due = self._charges.at_end(record, share, charged)
        self._given.add(share, due)
        self._take(self._turns[share], due, self._weight(share))
        if not self._in_flight.num(share):
            self._mark_idle(share)

    def _mark_idle(self, share: Share) -> None:
        """A tenant has no request in flight here."""
        self._idle[share] = None
        self._idle.move_to_end(share)
        if len(self._idle) > _MAX_IDLE:
            forgotten = self._idle.popitem(last=False)[0]
            del self._turns[forgotten]
            self._given.forget(forgotten)

    ended = learn
