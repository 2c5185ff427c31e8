"""Fair sharing between tenants, by the service that each tenant has received."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from headway.core.record import Ended
from headway.core.view import RequestView
from headway.policies.arguments import require_above, require_at_least, require_between
from headway.policies.ordering.shares import MOST_AT_ONCE

MAX_IDLE = 4096
"""Maximum number of tenants without a request in flight whose service is kept. Beyond it, the tenant idle for longest
is forgotten."""
_MEAN_OVER = 100
"""Requests over which the mean output length is taken."""
_Share = tuple[int, str]
"""Tier and tenant."""


@dataclass(slots=True)
class _Tenant:
    """One tenant's service in one tier."""

    share: _Share
    weight: float
    burst: float
    """How far before `finish` a request may start, in virtual time: the tenant's allowed burst."""
    finish: float = 0.0
    """The end of the tenant's service so far, in virtual time."""
    num_in_flight: int = 0
    given: float = 0.0
    """The service given at this scheduler."""


class FairOrdering:
    """Orders requests by tier, and within a tier the tenant with the least service first; by arrival within a tenant.

    Service is counted in tokens: `prompt_weight` for a token of the prompt and `output_weight` for one of the answer,
    divided by the tenant's weight in `weights` (1 if it has none there). A tenant whose weight is 2 gets twice the
    service of one whose weight is 1 while both have requests waiting.

    This is start-time fair queueing (Goyal, Vin and Cheng, 1996) in each tier, with the service of the virtual token
    counter (Sheng et al., 2024, whose weights are the defaults). A request starts at virtual time max(v, F - B): F is
    the end of its tenant's service, v the latest start so far, and B is `burst_tokens` over the tenant's weight. A
    tenant that was idle therefore starts at v with no credit except B, so that requests of one burst are not spaced
    out. At equal starts the least F goes first. The length of an answer is unknown at its start: the mean of the last
    answers is charged at the start, and the difference when the request ends.

    While two tenants wait, their services over their weights differ by no more than B, one request of each, and the
    errors of the charges of their requests in flight. While a tenant's first request waits, each other tenant starts at
    most one request with a later virtual start, so no tenant starves. Tiers are strict: a less urgent tier waits while
    more urgent requests exist.

    An engine starts requests in order of arrival, so everything sent to it is in front of the next tenant's request. A
    tenant that has its share of the requests in flight therefore sends more only while the replica's prompts without a
    first token have at most `prompt_window` tokens; by default as many as an iteration of the engine computes. A
    smaller window shortens the engine's iterations, and so the waits of all tenants, but lowers throughput.

    A share `headroom` of each replica's window and KV cache is reserved for tenants with less than their share of the
    requests in flight, so that they need not wait. With 0, nothing is reserved.

    This ordering applies to the gateway's queue only. Without tenants it equals `priority`.
    """

    quantum: int | None = None
    preemptive = False

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
        burst_tokens: float = 32768.0,
        headroom: float = 1 / 16,
        prompt_window: int | None = None,
    ) -> None:
        require_above(0, prompt_weight=prompt_weight)
        if prompt_window is not None:
            require_at_least(1, prompt_window=prompt_window)
        require_at_least(0, output_weight=output_weight, burst_tokens=burst_tokens)
        require_between(0, 0.5, headroom=headroom)
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            require_above(0, **{f"weights: {tenant}": weight})
        self._prompt_weight, self._output_weight, self._burst_tokens = prompt_weight, output_weight, burst_tokens
        self.headroom, self.prompt_window = headroom, prompt_window
        self._tenants: dict[_Share, _Tenant] = {}
        self._idle: OrderedDict[_Share, None] = OrderedDict()
        """Tenants without a request in flight, ordered by idle time, longest first."""
        self._virtual: dict[int, float] = {}
        """The latest start of a request in virtual time, by tier."""
        self._charged: dict[int, tuple[_Tenant, float]] = {}
        """The tenant and charge of each request in flight."""
        self._weight_in_flight = 0.0
        """The total weight of tenants with requests in flight."""
        self._mean_output_tokens, self._num_ended = 0.0, 0
        self._unreported: set[_Share] = set()
        """Shares whose `given` has changed since the last report."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use these weights from the next request on, for the tenants named in `weights`."""
        self._weights |= weights
        for (_, name), tenant in self._tenants.items():
            weight = self._weights.get(name, 1.0)
            if tenant.num_in_flight:
                self._weight_in_flight += weight - tenant.weight
            tenant.weight, tenant.burst = weight, self._burst_tokens / weight

    def share(self, request: RequestView) -> _Share:
        return request.tier, request.tenant

    def rank(self, request: RequestView, now: float) -> tuple[int, float, float, float]:
        tier = request.tier
        virtual, tenant = self._virtual.get(tier, 0.0), self._tenants.get((tier, request.tenant))
        if tenant is None:
            return tier, virtual, virtual, request.tier_since_s
        return tier, max(virtual, tenant.finish - tenant.burst), tenant.finish, request.tier_since_s

    def is_below_share(self, request: RequestView) -> bool:
        tenant = self._tenants.get((request.tier, request.tenant))
        if tenant is None:
            return True
        num = tenant.num_in_flight
        return not num or num * self._weight_in_flight < len(self._charged) * tenant.weight

    def started(self, request: RequestView, now: float) -> None:
        charged, id = self._charged, request.id
        if id in charged:
            return  # the request was charged at an earlier placement
        tier = request.tier
        tenant = self._tenants.get((tier, request.tenant))
        if tenant is None:
            tenant = self._add(tier, request.tenant)
        start, finish = self._virtual[tier], tenant.finish
        if finish - tenant.burst > start:
            start = self._virtual[tier] = finish - tenant.burst
        if not tenant.num_in_flight:
            self._idle.pop(tenant.share, None)
            self._weight_in_flight += tenant.weight
        tenant.num_in_flight += 1
        charge = self._prompt_weight * request.prompt_tokens + self._output_weight * self._mean_output_tokens
        tenant.finish = (finish if finish > start else start) + charge / tenant.weight
        charged[id] = tenant, charge
        tenant.given += charge
        self._unreported.add(tenant.share)

    def given(self) -> Mapping[_Share, float]:
        """The total service of the shares that received any since the last call (`core.policy.PeerOrdering`)."""
        changed, self._unreported = self._unreported, set()
        return {share: self._tenants[share].given for share in sorted(changed)}

    def given_elsewhere(self, share: _Share, service: float, /) -> None:
        """See `core.policy.PeerOrdering`. The share is charged as if its requests had started here."""
        tenant = self._tenants.get(share)
        if tenant is None:
            tenant = self._add(*share)
        if service > 0:
            # the same formula as for requests that started one after the other: only the last ones still count
            past = max(service - MOST_AT_ONCE, 0.0) / tenant.weight
            start = self._virtual[share[0]] = max(self._virtual[share[0]], tenant.finish + past - tenant.burst)
            tenant.finish = max(tenant.finish, start - past)
        tenant.finish += service / tenant.weight
        if not tenant.num_in_flight:
            self._idle[share] = None
            self._idle.move_to_end(share)
            self._forget_idle()

    def _add(self, tier: int, name: str) -> _Tenant:
        self._virtual.setdefault(tier, 0.0)
        weight, share = self._weights.get(name, 1.0), (tier, name)
        tenant = self._tenants[share] = _Tenant(share, weight, self._burst_tokens / weight)
        return tenant

    def learn(self, record: Ended | RequestView) -> None:
        found = self._charged.pop(record.id, None)
        if found is None:
            return  # the request never started
        tenant, charge = found
        output_tokens = record.generated_tokens
        service = self._prompt_weight * record.prompt_tokens + self._output_weight * output_tokens
        tenant.finish += (service - charge) / tenant.weight
        tenant.given += service - charge
        self._unreported.add(tenant.share)
        num_ended = self._num_ended
        if num_ended < _MEAN_OVER:
            self._num_ended = num_ended = num_ended + 1
        self._mean_output_tokens += (output_tokens - self._mean_output_tokens) / num_ended
        tenant.num_in_flight -= 1
        if tenant.num_in_flight:
            return
        self._weight_in_flight = self._weight_in_flight - tenant.weight if self._charged else 0.0
        self._idle[tenant.share] = None
        if len(self._idle) > MAX_IDLE:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget the longest idle tenants beyond the limit."""
        while len(self._idle) > MAX_IDLE:
            forgotten = self._idle.popitem(last=False)[0]
            del self._tenants[forgotten]
            self._unreported.discard(forgotten)

    ended = learn
