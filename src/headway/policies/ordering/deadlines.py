"""Orderings by the deadline of a request's first token."""

from __future__ import annotations

from math import inf, nextafter

from headway.core.view import RequestView
from headway.policies.arguments import require_above, require_at_least


def _due_s(request: RequestView, default_s: float) -> float:
    """The deadline of the first token, from which SageServe computes d_r (section 6.5).

    The deadline is the arrival plus the TTFT SLO. Without a TTFT SLO it is the first of these that is set: the
    request's own deadline, the arrival plus the end-to-end SLO, the arrival plus `default_s`. A request that an
    admission policy has promoted is due as if it had arrived at the promotion, because a deadline hours away would give
    it no rank among interactive requests.
    """
    since_s, deadline_s, slo_e2e_s = request.tier_since_s, request.deadline_s, request.slo_e2e_s
    if request.slo_ttft_s is not None:
        return since_s + request.slo_ttft_s
    if slo_e2e_s is not None and deadline_s is None:
        deadline_s = request.arrival_s + slo_e2e_s
    if deadline_s is None:
        return since_s + default_s
    return deadline_s if since_s == request.arrival_s else min(deadline_s, since_s + default_s)


class EdfOrdering:
    """Orders requests by the deadline of the first token, and by arrival among equals.

    The deadline is the arrival plus the TTFT SLO, as in SageServe (section 6.5). Without a TTFT SLO it is the request's
    own deadline, the arrival plus the end-to-end SLO, or the arrival plus `default_deadline_s`: the first one that is
    set. A promoted request is due at most `default_deadline_s` after its promotion by the admission policy.
    """

    quantum: int | None = None

    def __init__(self, default_deadline_s: float = 60.0, preemptive: bool = False) -> None:
        require_above(0, default_deadline_s=default_deadline_s)
        self._default_deadline_s = default_deadline_s
        self.preemptive = preemptive

    def rank(self, request: RequestView, now: float) -> tuple[float, float]:
        return _due_s(request, self._default_deadline_s), request.tier_since_s


_STARTED, _SEVERELY_EXPIRED, _URGENT, _NOT_URGENT, _RECENTLY_EXPIRED, _BATCH = range(6)


class DeadlinePriorityOrdering:
    """Severely expired, then urgent, then other requests by tier, then recently expired; by arrival within a class.

    With d the time left until the TTFT deadline, a request is severely expired if d < -`tau_n_s`, recently expired if
    -`tau_n_s` <= d < 0, urgent if 0 <= d <= `tau_p_s`, and not urgent otherwise. Urgent and not urgent requests are
    ordered by tier first. Requests of tier `batch_tier` and above run when no other request waits.

    Deadlines are those of `edf`. A request with its first token has no TTFT deadline any more: no waiting request goes
    before it, since running requests are preempted only when memory runs out. The paper gives no values for tau.
    """

    quantum: int | None = None
    preemptive = False

    def __init__(
        self, tau_n_s: float = 10.0, tau_p_s: float = 1.0, batch_tier: int = 2, default_deadline_s: float = 60.0
    ) -> None:
        require_at_least(0, tau_n_s=tau_n_s, tau_p_s=tau_p_s)
        require_at_least(1, batch_tier=batch_tier)
        require_above(0, default_deadline_s=default_deadline_s)
        self._tau_n_s, self._tau_p_s = tau_n_s, tau_p_s
        self._batch_tier = batch_tier
        self._default_deadline_s = default_deadline_s

    def rank(self, request: RequestView, now: float) -> tuple[int, int, float]:
        if request.generated_tokens:
            return _STARTED, 0, request.tier_since_s
        if request.tier >= self._batch_tier:
            return _BATCH, 0, request.tier_since_s
        urgent_s, expired_s, severe_s = self._bounds(request)
        if now >= severe_s:
            return _SEVERELY_EXPIRED, 0, request.tier_since_s
        if now >= expired_s:
            return _RECENTLY_EXPIRED, 0, request.tier_since_s
        return (_URGENT if now >= urgent_s else _NOT_URGENT), request.tier, request.tier_since_s

    def next_change(self, request: RequestView, now: float) -> float | None:
        if request.generated_tokens or request.tier >= self._batch_tier:
            return None
        return next((change_s for change_s in self._bounds(request) if change_s > now), None)

    def _bounds(self, request: RequestView) -> tuple[float, float, float]:
        """The times at which the request becomes urgent, expired and severely expired.

        The last two are the first floating-point times after d = 0 and d = -tau_n.
        """
        deadline_s = _due_s(request, self._default_deadline_s)
        return deadline_s - self._tau_p_s, nextafter(deadline_s, inf), nextafter(deadline_s + self._tau_n_s, inf)
