"""The gateway's queue by the service that tenants or programs have had."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from headway.core.record import Ended
from headway.core.view import RequestView
from headway.policies.arguments import require_above, require_at_least

_MAX_SHARES = 100_000
"""Tenants or programs whose service is remembered. Of more, the one served longest ago is forgotten."""


@dataclass(slots=True)
class _Attained:
    """The service of one share, in tokens."""

    tokens: float = 0.0
    num_in_flight: int = 0


class VtcOrdering:
    """By tier, and within a tier the tenant with the smallest virtual token counter; by arrival within a tenant.

    A tenant's counter grows by `prompt_weight` for each prompt token when a request starts, and by `output_weight` for
    each output token when it ends. A tenant that comes back with no request in flight is lifted to the smallest counter
    of those that have some, so that it has no credit for the time without; at equal counters, the one that was lifted
    goes first. Source: virtual token counter (Sheng et
    al., OSDI 2024), which counts output tokens as they are generated; `fair` charges a mean beforehand, limits how
    far a tenant may be ahead, and is meant for production.

    It orders the gateway's queue only.
    """

    quantum: int | None = None
    preemptive = False
    headroom = 0.0
    prompt_window: int | None = None

    def __init__(self, prompt_weight: float = 1.0, output_weight: float = 2.0) -> None:
        require_above(0, prompt_weight=prompt_weight)
        require_at_least(0, output_weight=output_weight)
        self._prompt_weight, self._output_weight = prompt_weight, output_weight
        self._attained: OrderedDict[Hashable, _Attained] = OrderedDict()
        self._started: dict[int, Hashable] = {}
        """By request in flight, its share."""
        self._busy: dict[int, dict[Hashable, _Attained]] = {}
        """By tier, the shares with requests in flight."""

    def share(self, request: RequestView) -> Hashable:
        return request.tier, request.tenant

    def rank(self, request: RequestView, now: float) -> tuple[int, float, float, float]:
        attained = self._attained.get(self.share(request))
        own = 0.0 if attained is None else attained.tokens
        return request.tier, self._counter(request), own, request.arrival_s

    def _counter(self, request: RequestView) -> float:
        """The counter with which the request's share would start now."""
        attained = self._attained.get(self.share(request))
        tokens = 0.0 if attained is None else attained.tokens
        busy = self._busy.get(request.tier)
        if busy and (attained is None or not attained.num_in_flight):
            return max(tokens, min(each.tokens for each in busy.values()))
        return tokens

    def is_below_share(self, request: RequestView) -> bool:
        return True

    def started(self, request: RequestView, now: float) -> None:
        if request.id in self._started:
            return  # placed again
        share = self.share(request)
        lifted = self._counter(request)
        attained = self._attained.setdefault(share, _Attained())
        attained.tokens = lifted + self._prompt_weight * request.prompt_tokens
        attained.num_in_flight += 1
        self._started[request.id] = share
        self._busy.setdefault(request.tier, {})[share] = attained
        self._attained.move_to_end(share)
        if len(self._attained) > _MAX_SHARES:
            self._attained.popitem(last=False)

    def learn(self, record: Ended | RequestView) -> None:
        share = self._started.pop(record.id, None)
        if share is None:
            return  # it never started
        busy = self._busy[record.tier]
        attained = busy[share]
        attained.tokens += self._output_weight * record.generated_tokens
        attained.num_in_flight -= 1
        if not attained.num_in_flight:
            del busy[share]

    ended = learn


class LeastAttainedServiceOrdering(VtcOrdering):
    """By tier, and within a tier the program that has had the least service; by arrival within a program.

    A program is the calls of one session (`session_id`); a tenant's requests without one count as one program. Service
    is counted as by `vtc`, over all calls of the program, ended ones too, and is not lifted. So a short program does
    not wait behind the many calls of a long one, whose end it hardly delays. Long programs may starve. Source:
    program-level attained service (Autellix, Luo et al., 2025), which compares levels of service and preempts at the
    engine; here the gateway holds calls back, and a call that has started stays.

    It orders the gateway's queue only.
    """

    def share(self, request: RequestView) -> Hashable:
        session = request.session_id
        return request.tier, request.tenant if session is None else session

    def _counter(self, request: RequestView) -> float:
        attained = self._attained.get(self.share(request))
        return 0.0 if attained is None else attained.tokens
