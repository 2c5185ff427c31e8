"""INFaaS's routing by cost, as a baseline of K-tier Llumnix (section 3.7)."""

from __future__ import annotations

from enum import Enum
from math import inf

from headway.core.decision import Placement
from headway.core.record import Ended, Outcome
from headway.core.view import Bounds, FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_at_least, require_between


class State(Enum):
    """State of a replica. The value of a state is its penalty in the cost."""

    ACTIVE = 0.0
    INTERFERED = 0.5
    """Slow without a queue: another workload uses its GPU."""
    OVERLOADED = 1.0
    """The replica has more waiting requests than it can admit soon."""
    INACTIVE = 2.0
    """The replica drains, and is chosen only if all replicas drain."""


class InfaasRouter:
    """The replica with the lowest cost: `alpha * requests + beta * usual time + gamma * penalty of the state`.

    Requests are all that wait or run at the replica. The usual time is an EWMA, in seconds, of the time from arrival to
    end of the requests that finished there (the fleet's mean until one did). A replica is INACTIVE (penalty 2) if it
    drains, OVERLOADED (penalty 1) if more than `overload_share` of `max_num_seqs` requests wait, INTERFERED (penalty
    0.5) if its usual time is above `interference_factor` times the fleet's mean, and otherwise ACTIVE (no penalty). The
    policy ignores KV caches, never moves a request, and balances rather than packs. The source gives no constants: all
    defaults are Headway's, and `gamma` is the number of requests that outweighs a penalty of 1. Among equals, the
    fewest requests win, then the lower id.
    """

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma: float = 100.0,
        ewma_weight: float = 0.2,
        overload_share: float = 0.1,
        interference_factor: float = 1.5,
    ) -> None:
        require_at_least(0, alpha=alpha, beta=beta, gamma=gamma, overload_share=overload_share)
        require_between(0, 1, ewma_weight=ewma_weight)
        require_at_least(1, interference_factor=interference_factor)
        self._alpha, self._beta, self._gamma = alpha, beta, gamma
        self._weight = ewma_weight
        self._overload_share = overload_share
        self._interference_factor = interference_factor
        self._ewma_s: dict[int, float] = {}

    def route(self, request: RequestView, view: FleetView) -> Placement:
        mean_s = self._mean_s(view)
        costs = []

        def cost(replica: ReplicaView) -> float:
            queue, latency_s = _queue(replica), self._ewma_s.get(replica.id, mean_s)
            cost = self._alpha * queue + self._beta * latency_s + self._gamma * self.state(replica, mean_s).value
            costs.append((cost, queue, replica.id))
            return cost

        if view.find_least_score(self._bounds, (mean_s, 0.0, 0.0), cost) is None:
            costs.clear()
            for replica in view.replicas:
                cost(replica)
        return Placement(min(costs)[2])

    def _bounds(self, replica: ReplicaView) -> Bounds:
        """The cost without the penalty for interference, which depends on the mean."""
        queue, own_s, state = _queue(replica), self._ewma_s.get(replica.id), self.state(replica, inf)
        first = self._alpha * queue + self._beta * (own_s or 0.0) + self._gamma * state.value
        return first, self._beta if own_s is None else 0.0, 0.0, 0.0, (queue, own_s, state)

    def state(self, replica: ReplicaView, mean_s: float) -> State:
        if replica.is_draining:
            return State.INACTIVE
        if replica.num_waiting > self._overload_share * replica.max_num_seqs:
            return State.OVERLOADED
        if self._ewma_s.get(replica.id, mean_s) > self._interference_factor * mean_s:
            return State.INTERFERED
        return State.ACTIVE

    def learn(self, record: Ended) -> None:
        if record.outcome is Outcome.FINISHED:
            took_s = record.end_s - record.arrival_s
            before_s = self._ewma_s.get(record.replica, took_s)
            self._ewma_s[record.replica] = before_s + self._weight * (took_s - before_s)

    def _mean_s(self, view: FleetView) -> float:
        """The mean of the replicas' EWMA; 0 until a request has finished."""
        num = sum(view.map(self._has_finished))
        return sum(view.map(self._usual_s)) / num if num else 0.0

    def _has_finished(self, replica: ReplicaView) -> bool:
        return replica.id in self._ewma_s

    def _usual_s(self, replica: ReplicaView) -> float:
        return self._ewma_s.get(replica.id, 0.0)


def _queue(replica: ReplicaView) -> int:
    return max(replica.num_in_flight, replica.num_waiting + replica.num_running)
