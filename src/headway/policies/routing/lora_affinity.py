"""Sends requests for a LoRA adapter to replicas that have the adapter in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

from headway.core.decision import Placement
from headway.core.policy import Learner, MakeRouter
from headway.core.record import Ended
from headway.core.view import FleetView, ReplicaView, RequestView, UnkeptValues
from headway.policies.arguments import require_at_least
from headway.policies.routing.combos import by_combo
from headway.policies.routing.least_loaded import LeastLoadedRouter


@dataclass(frozen=True)
class NarrowedView(UnkeptValues):
    """A view of some of the replicas, for a nested router."""

    now: float
    random: Random
    replicas: Sequence[ReplicaView]
    wants_scores: bool = False


class LoraAffinityRouter:
    """Another router chooses among the replicas with the best rank for the request's LoRA adapter.

    The ranks from the best are: a slot that holds the adapter, a free slot, a queue that already waits for the adapter,
    any other replica. This is the order of the LoRA affinity scorer of the Gateway API Inference Extension
    (kubernetes-sigs), where it is one score among others. Here the rank decides first, with bounded load as in
    `prefix-affinity`: a combo whose requests in flight reach `ceil(load_factor * (requests in flight + 1) / combos) +
    spare_requests` is passed over while another has room. A replica on its own is a combo; a combo counts as its worst
    replica. Requests without an adapter are left to the other router, `among`: the name of any router, with its
    arguments.
    """

    def __init__(
        self, among: MakeRouter = LeastLoadedRouter, load_factor: float = 1.25, spare_requests: int = 4
    ) -> None:
        require_at_least(1, load_factor=load_factor)
        require_at_least(0, spare_requests=spare_requests)
        self._load_factor, self._spare_requests = load_factor, spare_requests
        self._among = among()
        for name in ("pairs", "answers_in_place", "oracle"):
            setattr(self, name, getattr(self._among, name, False))

    def route(self, request: RequestView, view: FleetView) -> Placement:
        if not request.lora or len(view.replicas) == 1:
            return self._among.route(request, view)
        replicas = self._best(request.lora, list(by_combo(view.replicas).values()))
        return self._among.route(request, NarrowedView(view.now, view.random, replicas))

    def learn(self, record: Ended) -> None:
        """Let the router `among` learn, if it can."""
        if isinstance(self._among, Learner):
            self._among.learn(record)

    def _best(self, lora: str, combos: Sequence[Sequence[ReplicaView]]) -> Sequence[ReplicaView]:
        """The replicas of the combos with the best rank among combos with room."""
        loads = [sum(replica.num_in_flight for replica in combo) for combo in combos]
        room = ceil(self._load_factor * (sum(loads) + 1) / len(combos)) + self._spare_requests
        able = [combo for combo, load in zip(combos, loads, strict=True) if load < room]
        ranks = [max(_rank(lora, replica) for replica in combo) for combo in able]
        best = min(ranks)
        return [replica for combo, rank in zip(able, ranks, strict=True) if rank == best for replica in combo]


def _rank(lora: str, replica: ReplicaView) -> int:
    """The rank of a replica for an adapter; 0 is the best."""
    loras, waiting = replica.loras, replica.loras_waiting
    if lora in loras:
        return 0
    if len({*loras, *waiting}) < replica.max_loras:
        return 1
    return 2 if lora in waiting else 3
