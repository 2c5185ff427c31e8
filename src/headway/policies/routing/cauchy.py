"""Cauchy's hierarchical request scheduler (section 3.4): selects a combo, then instances in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from headway.core.decision import Placement
from headway.core.errors import HeadwayError
from headway.core.subclasses import mypyc_attr
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.routing.combos import WeightedRoundRobin, by_combo, goodput_weights, next_after, tokens_left
from headway.policies.routing.opportunistic import Opportunistic
from headway.policies.workload_class import WorkloadClass

Combo = Sequence[ReplicaView]


@mypyc_attr(allow_interpreted_subclasses=True)
class CauchyRouter:
    """Selects a combo in proportion to goodput, then a prefill and a decode replica in it, or one idle replica for
    both.

    `between` selects the combo. `goodput` is round robin weighted by profiled goodput, over the combos present at the
    moment; a combo without a profile has the mean weight of the others. `round-robin` gives all combos equal weight.
    `tokens` selects the combo with the most tokens left: free KV cache less prompt tokens yet to compute (the paper
    says no more than "highest remaining token count").

    `within` selects the replicas. `strict` selects a prefill replica and a decode replica, each in turn.
    `opportunistic` selects the prefill replica with the fewest pending tokens and the decode replica with the fewest
    requests; if one of the two is idle and the other is not, the idle replica serves the whole request. If both are
    idle, as at the start of the paper's fig. 5b, the request goes from one to the other.

    A decode replica is idle with no request in flight, because a prompt would delay its answers. A prefill replica is
    idle if it has no prompt tokens left to compute, no waiting request, and at most `in_place` times the requests of
    the decode replica. It then decodes between prompts in smaller batches than the decode replicas, so its tokens are
    in time, too. (The paper monitors remaining tokens and pending requests to find idle capacity, 3.4.2, and gives no
    threshold. With `in_place` 0, idle means no request in flight.) A replica for both phases serves the whole request.

    `classes` reserve combos by prompt length and tier. The first class that matches a request applies. Requests without
    a class go to combos that no class names. If a request's combos are all absent, it may go to any combo. Models need
    no class: each model has its own router.
    """

    pairs = True

    def __init__(
        self,
        between: Literal["goodput", "round-robin", "tokens"] = "goodput",
        within: Literal["opportunistic", "strict"] = "opportunistic",
        classes: tuple[WorkloadClass, ...] = (),
        in_place: float = 0.5,
    ) -> None:
        _one_of("between", between, ("goodput", "round-robin", "tokens"))
        _one_of("within", within, ("opportunistic", "strict"))
        if not 0 <= in_place <= 1:
            raise HeadwayError(f"in_place: expected 0 to 1, got {in_place}")
        self._between, self._within = between, within
        self._classes = classes
        self._turns: dict[int, WeightedRoundRobin] = {}
        """Round robin by class index; -1 for requests without a class."""
        self._last: dict[tuple[int, str], int] = {}
        """The replica that had the last turn, by combo and role."""
        self._opportunistic = Opportunistic(in_place)

    @property
    def answers_in_place(self) -> bool:
        """Whether a single-phase replica may get a whole request."""
        return self._within == "opportunistic"

    def route(self, request: RequestView, view: FleetView) -> Placement:
        index, replicas = -1, view.replicas
        if self._classes:
            index = next((i for i, each in enumerate(self._classes) if each.matches(request)), -1)
            replicas = self._reserved(index, replicas)
        # if no other combo has had a turn, the only one's credit would stay zero
        if self._within == "opportunistic" and index not in self._turns:
            placement = self._opportunistic.choose_in_only(replicas)
            if placement is not None:
                return placement
        combos: Mapping[int, Combo] = by_combo(replicas)
        if len(combos) > 1:  # skip combos that cannot compute prompts now, if another one can
            able = {id: combo for id, combo in combos.items() if any([each.role != "decode" for each in combo])}
            combos = able or combos
        combo = self._combo(index, combos)
        return self._strict(combo) if self._within == "strict" else self._opportunistic.choose(combo)

    def _reserved(self, index: int, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        """The replicas that a class may use; all replicas if none of its combos is present."""
        if index >= 0:
            own = [replica for replica in replicas if self._classes[index].includes(replica)]
        else:
            own = [replica for replica in replicas if not any(each.includes(replica) for each in self._classes)]
        return own or replicas

    def _combo(self, index: int, combos: Mapping[int, Combo]) -> Combo:
        if self._between == "tokens":
            return max(combos.items(), key=lambda item: (tokens_left(item[1]), -item[0]))[1]
        if len(combos) == 1:
            weights = dict.fromkeys(combos, 1.0)
        elif self._between == "goodput":
            weights = goodput_weights(combos)
        else:
            weights = dict.fromkeys(combos, 1.0 / len(combos))
        return combos[self._turns.setdefault(index, WeightedRoundRobin()).next(weights)]

    def _strict(self, combo: Combo) -> Placement:
        first = self._in_turn("prefill", _prefill(combo))
        if first.role != "prefill" or not (decode := _decode(combo)):
            return Placement(first.id)
        return Placement(first.id, self._in_turn("decode", decode).id)

    def _in_turn(self, role: str, able: Combo) -> ReplicaView:
        key = able[0].combo, role
        chosen = self._last[key] = next_after([replica.id for replica in able], self._last.get(key, -1))
        return next(replica for replica in able if replica.id == chosen)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise HeadwayError(f"{name}: {value!r} is unknown; expected {', '.join(known)}")


def _prefill(combo: Combo) -> Combo:
    return [replica for replica in combo if replica.role != "decode"] or combo


def _decode(combo: Combo) -> Combo:
    return [replica for replica in combo if replica.role != "prefill"]
