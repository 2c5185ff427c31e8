"""Messages between gateways for scaling: demand, held requests, and drained replicas."""

from __future__ import annotations

from collections.abc import Mapping

from headway.gateway.fleet.scaling import LiveScaling
from headway.gateway.peers.leader import Leader
from headway.gateway.peers.messages import Arrived, Drained, Held, Piece, replica_key
from headway.gateway.scheduling.replica import LiveReplica

_Cell = tuple[str, str, int]
"""Model, region, tier."""
_Demand = tuple[int, int]
"""Numbers of requests and of prompt tokens."""
_NONE: _Demand = (0, 0)


class SharedScaling:
    """One gateway's part in the scaling of a shared fleet.

    Every gateway calls its scaler with the demand of all gateways; only the leader's decisions are carried out.
    """

    def __init__(self, scaling: LiveScaling, leader: Leader, settle_s: float) -> None:
        """`settle_s`: minimum time for which a drained replica is kept, until every gateway knows of the drain."""
        assert scaling.control is not None
        self._scaling, self._control, self.leader = scaling, scaling.control, leader
        self._control.leads, self._control.settle_s = lambda: leader.leads, settle_s
        self._peer_demand: dict[_Cell, _Demand] = {}
        """The demand that the other gateways have reported."""
        self._reported: dict[_Cell, _Demand] = {}
        """This gateway's demand in its last report."""
        self._received: dict[tuple[str, _Cell], _Demand] = {}
        """The last received demand by gateway and cell."""
        self._states: dict[str, tuple[Mapping[str, int], set[int]]] = {}
        """Maps each gateway to its held requests by model, and the keys of the replicas that it drains."""

    def pieces(self, replicas: list[LiveReplica]) -> list[Piece]:
        """The pieces of this gateway's scaling state for the next message."""
        found: list[Piece] = []
        for cell, (num, tokens) in self._control.demand.items():
            others, before = self._peer_demand.get(cell, _NONE), self._reported.get(cell, _NONE)
            now = num - others[0], tokens - others[1]
            if now != before:
                found.append(Arrived(*cell, *before, *now))
                self._reported[cell] = now
        found += [Held(model, num) for model, num in self._scaling.num_held().items() if num]
        if self.leader.leads:
            drained = [replicas[id] for id in sorted(self._control.drained)]
            found += [Drained(replica_key(each.model, each.url)) for each in drained]
        return found

    def arrived(self, peer: str, report: Arrived) -> None:
        """Add the growth of a sum since the sender's last message. For a sum that was not known: its growth since the
        sender's last report."""
        cell, now = (report.model, report.region, report.tier), (report.num, report.tokens)
        before = self._received.get((peer, cell), (report.num_before, report.tokens_before))
        self._received[peer, cell] = now
        for sums in (self._peer_demand, self._control.demand):
            num, tokens = sums.get(cell, _NONE)
            sums[cell] = num + now[0] - before[0], tokens + now[1] - before[1]

    def update(
        self, peer: str, held: Mapping[str, int], drained: set[int], replicas: Mapping[int, LiveReplica]
    ) -> None:
        """Take over the complete state of another gateway. `replicas` are the replicas of this gateway by key."""
        self._states[peer] = held, drained
        self._use(replicas)

    def forget(self, peer: str, replicas: Mapping[int, LiveReplica]) -> None:
        """Drop the reports of a gateway that has left."""
        if self._states.pop(peer, None) is not None:
            self._use(replicas)

    def forget_demand(self, peer: str) -> None:
        """Reset the demand of a restarted gateway, whose sums begin at 0."""
        self._received = {key: demand for key, demand in self._received.items() if key[0] != peer}

    def _use(self, replicas: Mapping[int, LiveReplica]) -> None:
        num_held: dict[str, int] = {}
        for held, _ in self._states.values():
            for model, num in held.items():
                num_held[model] = num_held.get(model, 0) + num
        keys = {key for _, drained in self._states.values() for key in drained}
        self._scaling.use_peers(num_held, {replicas[key].id for key in keys if key in replicas})
