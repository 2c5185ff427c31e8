"""Cauchy's hierarchical request scheduler (section 3.4): which combo, then which of its instances."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from headway.core.decision import Placement
from headway.core.errors import HeadwayError
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.routing.combos import WeightedRoundRobin, by_combo, goodput_weights, next_after, tokens_left

Combo = Sequence[ReplicaView]


class WorkloadClass(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that have combos to themselves. A policy knows no output lengths: it goes by prompt and tier."""

    combos: tuple[str, ...]
    """Names of combos or pools; a combo's name stands for all of its parts."""
    min_prompt_tokens: int = 0
    max_prompt_tokens: int | None = None
    """None: however long."""
    tiers: tuple[int, ...] | None = None
    """None: all of them."""

    def __post_init__(self) -> None:
        if not self.combos:
            raise HeadwayError("classes: combos: expected at least one name")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < self.min_prompt_tokens:
            most, least = self.max_prompt_tokens, self.min_prompt_tokens
            raise HeadwayError(f"classes: max_prompt_tokens: expected at least min_prompt_tokens ({least}), got {most}")

    def has(self, request: RequestView) -> bool:
        """The request is one of them."""
        if self.tiers is not None and request.tier not in self.tiers:
            return False
        tokens = request.prompt_tokens
        return tokens >= self.min_prompt_tokens and (self.max_prompt_tokens is None or tokens <= self.max_prompt_tokens)

    def names(self, replica: ReplicaView) -> bool:
        """The replica is of a combo that they have."""
        return any(replica.pool in (name, f"{name}-prefill", f"{name}-decode") for name in self.combos)


class CauchyRouter:
    """First a combo, in proportion to goodput; in it, prefill and decode apart, or all in place where idle.

    `between` combos: `goodput` is round robin weighted by profiled goodput, with weights that follow the combos
    that are there (a combo without a profile weighs as the mean of the others); `round-robin` weighs all the same;
    `tokens` takes the combo with the most tokens left, that is room in its KV caches less prompts it has yet
    to compute (the paper's "highest remaining token count" says no more). `within` one: `strict` is prefill,
    then decode, each in turn; `opportunistic` takes the prefill replica with the least pending and the decode
    replica with the fewest requests, but if one of the two is idle and the other is not, the whole request is
    computed there in place. If both are idle, as at the start of the paper's fig. 5b, it goes from one to the other.
    A decode replica is idle with nothing in flight, for a prompt would hold up the answers that it writes. A prefill
    replica is idle with no prompt left to compute and nobody waiting, as long as it has at most `in_place` of the
    requests that the decode replica has: it writes answers between prompts, and in smaller batches than those whose
    only task it is, so that tokens are in time there too. (The paper's telemetry is of remaining tokens and pending
    requests, and what it looks for is idle capacity, 3.4.2; it gives no threshold. 0: only with nothing in flight.)
    A replica that does both phases keeps what it is given. `classes` reserve combos by prompt length and tier: the
    first class that has the request counts, the rest go to combos that no class names, and if none of
    their own are there requests go to any. (Models need no class: each has a router of its own.)
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
        self._between, self._within, self._in_place = between, within, in_place
        self._classes = classes
        self._turns: dict[int, WeightedRoundRobin] = {}
        """By class, -1 for requests of none."""
        self._last: dict[tuple[int, str], int] = {}
        """By combo and role, who had the last turn."""
        self._sent: dict[int, DecodeTargets] = {}
        """By prefill replica."""

    @property
    def answers_in_place(self) -> bool:
        """It may give all of a request to a replica that is for one phase."""
        return self._within == "opportunistic"

    def route(self, request: RequestView, view: FleetView) -> Placement:
        index = next((i for i, each in enumerate(self._classes) if each.has(request)), -1)
        combos = by_combo(self._reserved(index, view.replicas) if self._classes else view.replicas)
        # A combo that cannot compute prompts now stands back while another can.
        able = {id: combo for id, combo in combos.items() if any(replica.role != "decode" for replica in combo)}
        combo = self._combo(index, able or combos)
        return self._strict(combo) if self._within == "strict" else self._opportunistic(combo)

    def _reserved(self, index: int, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        """What a class may use; all if nothing of it is there."""
        if index >= 0:
            own = [replica for replica in replicas if self._classes[index].names(replica)]
        else:
            own = [replica for replica in replicas if not any(each.names(replica) for each in self._classes)]
        return own or replicas

    def _combo(self, index: int, combos: Mapping[int, Combo]) -> Combo:
        if self._between == "tokens":
            return max(combos.items(), key=lambda item: (tokens_left(item[1]), -item[0]))[1]
        equal = 1.0 / len(combos)
        weights = goodput_weights(combos) if self._between == "goodput" else dict.fromkeys(combos, equal)
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

    def _opportunistic(self, combo: Combo) -> Placement:
        first = min(_prefill(combo), key=_pending)
        decode = _decode(combo)
        if not decode:
            return Placement(first.id)
        last = min(decode, key=lambda replica: self._fewest(replica, combo))
        if _is_idle(last) and not _is_idle(first):
            return Placement(last.id)
        if first.role != "prefill" or self._has_room(first, last):
            return Placement(first.id)
        self._sent.setdefault(first.id, DecodeTargets()).add(last.id)
        return Placement(first.id, last.id)

    def _has_room(self, first: ReplicaView, last: ReplicaView) -> bool:
        """A prefill replica may write this answer, too."""
        if _is_idle(first):
            return not _is_idle(last)
        busy = first.prefill_tokens_left > 0 or first.num_waiting > 0
        return not busy and _load(first) < self._in_place * _load(last)

    def _fewest(self, replica: ReplicaView, combo: Combo) -> tuple[bool, int, int]:
        """Idle first, then by the requests that it has or that are being prefilled for it."""
        sent = [(each.num_in_flight, self._sent[each.id]) for each in combo if each.id in self._sent]
        coming = sum(one.still(num_in_flight)[replica.id] for num_in_flight, one in sent)
        return not _is_idle(replica), _load(replica) + coming, replica.id


class DecodeTargets:
    """Where the requests of a prefill replica will decode. Views do not say; they leave in the order they came in."""

    def __init__(self) -> None:
        self._targets: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def add(self, target: int) -> None:
        """One more."""
        self._targets.append(target)
        self._counts[target] += 1

    def still(self, num_in_flight: int) -> Mapping[int, int]:
        """Requests by where they will decode, if there are no more than so many."""
        while len(self._targets) > num_in_flight:
            self._counts[self._targets.popleft()] -= 1
        return self._counts


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise HeadwayError(f"{name}: {value!r} is unknown; expected {', '.join(known)}")


def _prefill(combo: Combo) -> Combo:
    return [replica for replica in combo if replica.role != "decode"] or combo


def _decode(combo: Combo) -> Combo:
    return [replica for replica in combo if replica.role != "prefill"]


def _load(replica: ReplicaView) -> int:
    return max(replica.num_in_flight, replica.num_waiting + replica.num_running)


def _is_idle(replica: ReplicaView) -> bool:
    return _load(replica) == 0


def _pending(replica: ReplicaView) -> tuple[bool, int, int, int]:
    return not _is_idle(replica), replica.prefill_tokens_left, _load(replica), replica.id
