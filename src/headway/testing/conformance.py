"""What every policy must hold to, your own as well: `check_router(MyRouter)`, `check_ordering(MyOrdering)`,
`check_migration(MyMigration)`, `check_admission(MyAdmission)`, `check_cascade(MyCascade)`, `check_scaler(MyScaler)`.

`make` is whatever makes a fresh instance when called: the class itself, a lambda with arguments, or what
`headway.policies.resolve` gives. A check that fails raises `BrokenPolicyError`, an AssertionError that says
what is wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from random import Random
from typing import Any

from headway.core.decision import Placement
from headway.core.policy import MovingOrdering, Ordering, QueuedOrdering, Router, SteppedOrdering
from headway.testing.conformance_admission import check_admission
from headway.testing.conformance_cascade import check_cascade
from headway.testing.conformance_migration import check_migration
from headway.testing.conformance_scaler import check_scaler
from headway.testing.purity import nothing_outside
from headway.testing.stories import Step, draw_request, draw_story, progress
from headway.testing.strict_views import BrokenPolicyError, Visit, fleet_view, request_view
from headway.testing.trial import SEEDS, check_let_go, is_oracle, learn, pickled

__all__ = [
    "ORDERING_CHECKS", "ROUTER_CHECKS", "check_admission", "check_cascade", "check_migration", "check_ordering",
    "check_router", "check_scaler", "ordering_reads", "router_reads",
]  # fmt: skip

MakeRouter = Callable[[], Router]
MakeOrdering = Callable[[], Ordering]


def check_router(make: MakeRouter, seeds: Iterable[int] = SEEDS) -> None:
    """Every check of a router, over stories drawn from these seeds."""
    for seed in seeds:
        for check in ROUTER_CHECKS:
            check(make, seed)


def check_ordering(make: MakeOrdering, seeds: Iterable[int] = SEEDS) -> None:
    """Every check of an ordering, over requests drawn from these seeds."""
    for seed in seeds:
        for check in ORDERING_CHECKS:
            check(make, seed)


def router_reads(make: MakeRouter, seeds: Iterable[int] = range(20)) -> set[str]:
    """What a router was seen to read, such as `replica.num_waiting`."""
    reads: set[str] = set()
    for seed in seeds:
        _play(make(), draw_story(seed), Random(seed), reads)
    return reads


def ordering_reads(make: MakeOrdering, seeds: Iterable[int] = range(20)) -> set[str]:
    """What an ordering was seen to read, such as `request.tier`."""
    ordering = make()
    visit = Visit(is_oracle(ordering))
    for seed in seeds:
        for values in _requests(seed):
            _rank(ordering, values, _NOW, visit)
    return visit.reads


# Routers.


def chooses_an_offered_replica(make: MakeRouter, seed: int) -> None:
    """With one replica or many, with replicas that vanish and return, with loads unknown and absurd.

    So is where it decodes, within the combo, which only a router with `pairs = True` may say.
    """
    steps = draw_story(seed)
    router = make()
    pairs = bool(getattr(router, "pairs", False))
    for step, (chosen, decode) in zip(steps, _play(router, steps, Random(seed)), strict=True):
        combos = {replica["id"]: replica["combo"] for replica in step.replicas}
        if chosen not in combos:
            raise BrokenPolicyError(f"chose replica {chosen!r}; it was offered {sorted(combos)}")
        if decode is None:
            continue
        if not pairs:
            raise BrokenPolicyError(f"decodes at replica {decode!r}; only a router with `pairs = True` says where")
        if combos.get(decode) != combos[chosen]:
            own = sorted(id for id, combo in combos.items() if combo == combos[chosen])
            raise BrokenPolicyError(f"decodes at replica {decode!r}; of the combo it was offered {own}")


def decides_the_same_again(make: MakeRouter, seed: int) -> None:
    """The same views and the same random stream lead to the same decisions."""
    steps = draw_story(seed)
    first, second = (_play(make(), steps, Random(seed)) for _ in range(2))
    if first != second:
        raise BrokenPolicyError("decided differently on the same views with the same random stream")


def survives_pickling(make: MakeRouter, seed: int) -> None:
    """A copy of it, made when fresh or in mid-run, goes on as the original does."""
    steps = draw_story(seed)
    middle = len(steps) // 2
    router = pickled(make())
    _play(router, steps[:middle], Random(seed))
    copy = pickled(router)
    if _play(router, steps[middle:], Random(1)) != _play(copy, steps[middle:], Random(1)):
        raise BrokenPolicyError("decides differently once it was pickled and unpickled: some of its state was lost")


def leaves_views_alone(make: MakeRouter, seed: int) -> None:
    """It neither changes what it is shown nor keeps it."""
    router, random = make(), Random(seed)
    for step in draw_story(seed, num_steps=12):
        learn(router, step.ended)
        visit = Visit(is_oracle(router))
        view = fleet_view(step.now, random, _dicts(step), visit)
        request = request_view(step.request, visit)
        shown = list(view.replicas)
        router.route(request, view)
        if list(map(id, view.replicas)) != list(map(id, shown)):
            raise BrokenPolicyError("changed view.replicas: sort a copy instead")
        kept = [weakref.ref(one) for one in (view, request, *shown)]
        del view, request, shown
        check_let_go(kept)


def reaches_for_nothing_else(make: MakeRouter, seed: int) -> None:
    """No clock, no environment, no I/O, no randomness but `view.random`."""
    router, random = make(), Random(seed)
    for step in draw_story(seed, num_steps=20):
        visit = Visit(is_oracle(router))
        view = fleet_view(step.now, random, _dicts(step), visit)
        request = request_view(step.request, visit)
        with nothing_outside():
            learn(router, step.ended)
            router.route(request, view)


ROUTER_CHECKS: tuple[Callable[[MakeRouter, int], None], ...] = (
    chooses_an_offered_replica,
    decides_the_same_again,
    survives_pickling,
    leaves_views_alone,
    reaches_for_nothing_else,
)


def _play(
    router: Router, steps: Sequence[Step], random: Random, reads: set[str] | None = None
) -> list[tuple[int, int | None]]:
    """The replicas that a router chooses, for prefill and for decode. An oracle may read what only oracles may."""
    chosen = []
    for step in steps:
        learn(router, step.ended)
        visit = Visit(is_oracle(router))
        view = fleet_view(step.now, random, _dicts(step), visit)
        placement = router.route(request_view(step.request, visit), view)
        if not isinstance(placement, Placement):
            raise BrokenPolicyError(f"returned {placement!r}; a router returns a Placement")
        visit.is_over = True
        if reads is not None:
            reads |= visit.reads
        chosen.append((placement.replica, placement.decode))
    return chosen


def _dicts(step: Step) -> list[Any]:
    return list(step.replicas)


# Orderings.

_NOW = 1000.0


def says_how_it_preempts(make: MakeOrdering, seed: int) -> None:
    """`quantum` is a number of tokens or None, `preemptive` is True or False."""
    ordering = make()
    quantum, preemptive = getattr(ordering, "quantum", ""), getattr(ordering, "preemptive", "")
    if quantum is not None and (type(quantum) is not int or quantum < 1):
        raise BrokenPolicyError(f"quantum is {quantum!r}; it must be a number of tokens, or None")
    if type(preemptive) is not bool:
        raise BrokenPolicyError(f"preemptive is {preemptive!r}; it must be True or False")


def ranks_compare(make: MakeOrdering, seed: int) -> None:
    """Any two ranks have one shape, and exactly one of <, ==, > holds between them."""
    ordering = make()
    ranks = [_rank(ordering, values, _NOW) for values in _requests(seed)]
    shapes = {(type(rank), len(rank) if isinstance(rank, tuple) else 0) for rank in ranks}
    if len(shapes) > 1:
        raise BrokenPolicyError(f"ranks are of several shapes: {sorted(map(str, shapes))}")
    for one, other in [*combinations(ranks, 2), *((rank, rank) for rank in ranks)]:
        try:
            relations = (one < other) + (one == other) + (one > other)
        except TypeError as error:
            raise BrokenPolicyError(f"ranks {one!r} and {other!r} cannot be compared: {error}") from None
        if relations != 1:
            raise BrokenPolicyError(f"ranks {one!r} and {other!r} have no order; is there a NaN among them?")


def ranks_the_same_again(make: MakeOrdering, seed: int) -> None:
    """Fresh, used, or pickled, it ranks alike."""
    used, fresh = make(), make()
    requests = _requests(seed)
    ranks = [_rank(used, values, _NOW) for values in requests]
    for which, other in (("a fresh instance", fresh), ("a pickled copy", pickled(used)), ("it", used)):
        if [_rank(other, values, _NOW) for values in requests] != ranks:
            raise BrokenPolicyError(f"{which} ranked the same requests differently")


def holds_its_ranks_between_changes(make: MakeOrdering, seed: int) -> None:
    """While nothing happens to a request its rank stays, up to the instant that `next_change` names."""
    ordering = make()
    for values in _requests(seed):
        rank = _rank(ordering, values, _NOW)
        until = _next_change(ordering, values, _NOW)
        horizon = min(until, _NOW + 1e6)
        for share in (0.1, 0.5, 0.999):
            now = _NOW + share * (horizon - _NOW)
            if now < until and _rank(ordering, values, now) != rank:
                raise BrokenPolicyError(f"the rank moved between {_NOW} s and {now} s; next_change said {until} s")


def worsens_only_as_announced(make: MakeOrdering, seed: int) -> None:
    """As a request gains tokens its rank gets no worse, unless `next_change_tokens` said so."""
    ordering = make()
    for values in _requests(seed):
        left = values["output_tokens"] - values["generated_tokens"]
        steps = min(left, 50)
        if isinstance(ordering, SteppedOrdering):
            said = ordering.next_change_tokens(request_view(values, Visit(is_oracle(ordering))))
            if said is not None and said < 1:
                raise BrokenPolicyError(f"next_change_tokens said {said}; it must be at least 1")
            steps = steps if said is None else min(steps, said - 1)
        rank, phase = _rank(ordering, values, _NOW), values["phase"]
        for gained in range(1, steps + 1):
            grown = {**values, **progress(values["generated_tokens"] + gained, values["reasoning_tokens"])}
            before, rank = rank, _rank(ordering, grown, _NOW)
            may_change = isinstance(ordering, QueuedOrdering) and grown["phase"] != phase
            phase = grown["phase"]
            if rank > before and not may_change:
                raise BrokenPolicyError(
                    f"the rank got worse after {gained} tokens, and next_change_tokens did not say so"
                )


def keeps_its_queues(make: MakeOrdering, seed: int) -> None:
    """With several queues: each request is in one of them, and its rank begins with it."""
    ordering = make()
    if not isinstance(ordering, QueuedOrdering):
        return
    for values in _requests(seed):
        rank = _rank(ordering, values, _NOW)
        queue = ordering.queue(request_view(values, Visit(is_oracle(ordering))))
        if type(queue) is not int or not 0 <= queue < ordering.num_queues:
            raise BrokenPolicyError(f"queue {queue!r} of a request is none of 0 to {ordering.num_queues - 1}")
        if not isinstance(rank, tuple) or not rank or rank[0] != queue:
            raise BrokenPolicyError(f"rank {rank!r} of a request in queue {queue} does not begin with its queue")


def leaves_requests_alone(make: MakeOrdering, seed: int) -> None:
    """It neither changes a request nor keeps it."""
    ordering = make()
    for values in _requests(seed):
        request = request_view(values, Visit(is_oracle(ordering)))
        ordering.rank(request, _NOW)
        kept = [weakref.ref(request)]
        del request
        check_let_go(kept)


def looks_at_nothing_else(make: MakeOrdering, seed: int) -> None:
    """No clock, no environment, no I/O, no randomness."""
    ordering = make()
    for values in _requests(seed):
        request = request_view(values, Visit(is_oracle(ordering)))
        with nothing_outside():
            ordering.rank(request, _NOW)
            if isinstance(ordering, MovingOrdering):
                ordering.next_change(request, _NOW)
            if isinstance(ordering, SteppedOrdering):
                ordering.next_change_tokens(request)


ORDERING_CHECKS: tuple[Callable[[MakeOrdering, int], None], ...] = (
    says_how_it_preempts,
    ranks_compare,
    ranks_the_same_again,
    holds_its_ranks_between_changes,
    worsens_only_as_announced,
    keeps_its_queues,
    leaves_requests_alone,
    looks_at_nothing_else,
)


def _requests(seed: int) -> list[dict[str, Any]]:
    rng = Random(seed)
    return [draw_request(rng, id, _NOW) for id in range(24)]


def _rank(ordering: Ordering, values: dict[str, Any], now: float, visit: Visit | None = None) -> Any:
    return ordering.rank(request_view(values, visit or Visit(is_oracle(ordering))), now)


def _next_change(ordering: Ordering, values: dict[str, Any], now: float) -> float:
    if not isinstance(ordering, MovingOrdering):
        return float("inf")
    change = ordering.next_change(request_view(values, Visit(is_oracle(ordering))), now)
    if change is not None and not change > now:
        raise BrokenPolicyError(f"next_change said {change} s at {now} s; it must be later, or None")
    return float("inf") if change is None else change
