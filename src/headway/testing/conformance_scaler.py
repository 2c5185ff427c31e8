"""What every scaler must hold to, your own as well: `check_scaler(MyScaler)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from headway.core.policy import Scaler
from headway.testing.purity import nothing_outside
from headway.testing.stories import PoolsStep, draw_pools_story
from headway.testing.strict_views import BrokenPolicyError, Visit, pools_view
from headway.testing.trial import SEEDS, check_let_go, is_oracle, learn, pickled, wrong_interval

MakeScaler = Callable[[], Scaler]


def check_scaler(make: MakeScaler, seeds: Iterable[int] = SEEDS) -> None:
    """Every check of a scaler, over stories drawn from these seeds."""
    for seed in seeds:
        for check in SCALER_CHECKS:
            check(make, seed)


def scaler_reads(make: MakeScaler, seeds: Iterable[int] = range(20)) -> set[str]:
    """What a scaler was seen to read, such as `pool.num_starting`."""
    reads: set[str] = set()
    for seed in seeds:
        _play(make(), draw_pools_story(seed), Random(seed), reads)
    return reads


def says_how_often_to_ask(make: MakeScaler, seed: int) -> None:
    """`interval_s` is seconds."""
    interval_s = getattr(make(), "interval_s", None)
    if wrong_interval(interval_s):
        raise BrokenPolicyError(f"interval_s is {interval_s!r}; it must be seconds, more than 0")


def keeps_within_bounds(make: MakeScaler, seed: int) -> None:
    """Counts of pools that there are, from `min_replicas` to `max_replicas`."""
    steps = draw_pools_story(seed)
    for step, wanted in zip(steps, _play(make(), steps, Random(seed)), strict=True):
        bounds = {pool["name"]: (pool["min_replicas"], pool["max_replicas"]) for pool in step.pools}
        for name, count in wanted.items():
            if name not in bounds:
                raise BrokenPolicyError(f"scales pool {name!r}; there are {sorted(bounds)}")
            low, high = bounds[name]
            if type(count) is not int or not low <= count <= high:
                raise BrokenPolicyError(f"wants {count!r} replicas in pool {name!r}; it may have {low} to {high}")


def decides_the_same_again(make: MakeScaler, seed: int) -> None:
    """The same views and the same random stream lead to the same decisions."""
    steps = draw_pools_story(seed)
    first, second = (_play(make(), steps, Random(seed)) for _ in range(2))
    if first != second:
        raise BrokenPolicyError("decided differently on the same views with the same random stream")


def survives_pickling(make: MakeScaler, seed: int) -> None:
    """A copy of it, made when fresh or in mid-run, goes on as the original does."""
    steps = draw_pools_story(seed)
    middle = len(steps) // 2
    scaler = pickled(make())
    _play(scaler, steps[:middle], Random(seed))
    copy = pickled(scaler)
    if _play(scaler, steps[middle:], Random(1)) != _play(copy, steps[middle:], Random(1)):
        raise BrokenPolicyError("decides differently once it was pickled and unpickled: some of its state was lost")


def leaves_views_alone(make: MakeScaler, seed: int) -> None:
    """It neither changes what it is shown nor keeps it."""
    scaler, random = make(), Random(seed)
    for step in draw_pools_story(seed, num_steps=12):
        learn(scaler, step.ended)
        view = pools_view(step.now, random, _dicts(step), step.arrived, Visit(is_oracle(scaler)))
        shown: list[Any] = [*view.pools, *(replica for pool in view.pools for replica in pool.replicas)]
        scaler.scale(view)
        left = [*view.pools, *(replica for pool in view.pools for replica in pool.replicas)]
        if list(map(id, left)) != list(map(id, shown)):
            raise BrokenPolicyError("changed view.pools or pool.replicas: sort a copy instead")
        kept = [weakref.ref(one) for one in (view, *shown)]
        del view, shown, left
        check_let_go(kept)


def reaches_for_nothing_else(make: MakeScaler, seed: int) -> None:
    """No clock, no environment, no I/O, no randomness but `view.random`."""
    scaler, random = make(), Random(seed)
    for step in draw_pools_story(seed, num_steps=20):
        view = pools_view(step.now, random, _dicts(step), step.arrived, Visit(is_oracle(scaler)))
        with nothing_outside():
            learn(scaler, step.ended)
            scaler.scale(view)


SCALER_CHECKS: tuple[Callable[[MakeScaler, int], None], ...] = (
    says_how_often_to_ask,
    keeps_within_bounds,
    decides_the_same_again,
    survives_pickling,
    leaves_views_alone,
    reaches_for_nothing_else,
)


def _play(
    scaler: Scaler, steps: Sequence[PoolsStep], random: Random, reads: set[str] | None = None
) -> list[dict[str, int]]:
    """The counts that a scaler wants."""
    decisions = []
    for step in steps:
        learn(scaler, step.ended)
        visit = Visit(is_oracle(scaler))
        wanted = scaler.scale(pools_view(step.now, random, _dicts(step), step.arrived, visit))
        if not isinstance(wanted, Mapping):
            raise BrokenPolicyError(f"returned {wanted!r}; a scaler returns counts by pool")
        visit.is_over = True
        if reads is not None:
            reads |= visit.reads
        decisions.append(dict(wanted))
    return decisions


def _dicts(step: PoolsStep) -> list[Any]:
    return list(step.pools)
