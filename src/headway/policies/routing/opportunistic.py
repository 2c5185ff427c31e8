"""A combo's prefill and decode replica for a request, or one idle replica for both (Cauchy, section 3.4.2).

Apart from `CauchyRouter`, whose constructor must keep its annotations, so that this is compiled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headway.core.decision import Placement
from headway.core.view import ReplicaView


class Opportunistic:
    """Chooses the replicas of a combo. `in_place`: as of `CauchyRouter`."""

    # A default, because pickle creates objects of compiled classes without arguments.
    def __init__(self, in_place: float = 0.5) -> None:
        self._in_place = in_place
        self._sent: dict[int, _DecodeTargets] = {}
        """Decode targets by prefill replica."""

    def choose_in_only(self, replicas: Sequence[ReplicaView]) -> Placement | None:
        """As `choose`, if all replicas belong to one combo; None if there are several."""
        combo = replicas[0].combo
        for each in replicas:
            if each.combo != combo:
                return None
        return self.choose(replicas)

    def choose(self, combo: Sequence[ReplicaView]) -> Placement:
        ids, able, decode = [], [], []
        for each in combo:
            ids.append(each.id)
            role = each.role
            if role != "decode":
                able.append(each)
            if role != "prefill":
                decode.append(each)
        first, load = _least_pending(able or combo)
        if not decode:
            return Placement(first.id)
        last, last_load = self._least_expected(combo, ids, decode)
        if load and not last_load:
            return Placement(last.id)
        if first.role != "prefill" or self._has_room(first, load, last_load):
            return Placement(first.id)
        targets = self._sent.get(first.id)
        if targets is None:
            targets = self._sent[first.id] = _DecodeTargets()
        targets.add(last.id)
        return Placement(first.id, last.id)

    def _least_expected(
        self, combo: Sequence[ReplicaView], ids: list[int], decode: Sequence[ReplicaView]
    ) -> tuple[ReplicaView, int]:
        """The decode replica with the fewest requests, there and on their way, idle ones first; and its own number."""
        coming: list[dict[int, int]] = []
        for i, id in enumerate(ids):
            targets = self._sent.get(id)
            if targets is not None:
                coming.append(targets.pending(combo[i].num_in_flight))
        chosen, chosen_id, chosen_load, fewest = decode[0], -1, 0, 0
        for each in decode:
            id = each.id
            num = 0
            for counts in coming:
                num += counts.get(id, 0)
            load = each.num_in_flight
            # the engine's own counts can only raise the load, and are slower to read
            if chosen_id >= 0 and load > 0 and (chosen_load == 0 or num + load > fewest):
                continue
            load = _load(each, load)
            num += load
            if chosen_id >= 0:
                if (load > 0) != (chosen_load > 0):
                    if load > 0:
                        continue
                elif num > fewest or (num == fewest and id > chosen_id):
                    continue
            chosen, chosen_id, chosen_load, fewest = each, id, load, num
        return chosen, chosen_load

    def _has_room(self, first: ReplicaView, load: int, last_load: int) -> bool:
        if not load:
            return last_load > 0
        return not (first.prefill_tokens_left > 0 or first.num_waiting > 0) and load < self._in_place * last_load


def _least_pending(able: Sequence[ReplicaView]) -> tuple[ReplicaView, int]:
    """The replica with the fewest prompt tokens left, idle ones first; and its number of requests."""
    chosen = able[0]
    chosen_load = _load(chosen, chosen.num_in_flight)
    if len(able) == 1:
        return chosen, chosen_load
    least = (chosen_load > 0, chosen.prefill_tokens_left, chosen_load, chosen.id)
    for i in range(1, len(able)):
        each = able[i]
        load = _load(each, each.num_in_flight)
        rank = (load > 0, each.prefill_tokens_left, load, each.id)
        if rank < least:
            chosen, chosen_load, least = each, load, rank
    return chosen, chosen_load


def _load(replica: ReplicaView, in_flight: int) -> int:
    seen = replica.num_waiting + replica.num_running
    return in_flight if in_flight > seen else seen


class _DecodeTargets:
    """The decode replicas of the requests at a prefill replica. Views do not show them; requests leave in order of
    arrival."""

    def __init__(self) -> None:
        self._targets: deque[int] = deque()
        self._counts: dict[int, int] = {}

    def add(self, target: int) -> None:
        self._targets.append(target)
        self._counts[target] = self._counts.get(target, 0) + 1

    def pending(self, num_in_flight: int) -> dict[int, int]:
        """Pending requests by decode replica, given that at most `num_in_flight` are pending."""
        counts, targets = self._counts, self._targets
        for _ in range(len(targets) - num_in_flight):
            counts[targets.popleft()] -= 1
        return counts
