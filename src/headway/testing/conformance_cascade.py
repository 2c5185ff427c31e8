"""What every cascade policy must hold to, your own as well: `check_cascade(MyCascade)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from random import Random

from headway.core.policy import Cascade
from headway.testing.purity import nothing_outside
from headway.testing.stories import CascadeStep, draw_cascade_story
from headway.testing.strict_views import BrokenPolicyError, Visit, cascade_view, request_view
from headway.testing.trial import SEEDS, check_let_go, is_oracle, learn, pickled

MakeCascade = Callable[[], Cascade]
Decisions = tuple[int, bool]
"""At one moment: the stage at which a request starts, and whether an answer will do."""


def check_cascade(make: MakeCascade, seeds: Iterable[int] = SEEDS) -> None:
    """Every check of a cascade policy, over stories drawn from these seeds."""
    for seed in seeds:
        for check in CASCADE_CHECKS:
            check(make, seed)


def cascade_reads(make: MakeCascade, seeds: Iterable[int] = range(20)) -> set[str]:
    """What a cascade policy was seen to read, such as `cascade.stage`."""
    reads: set[str] = set()
    for seed in seeds:
        _play(make(), draw_cascade_story(seed), Random(seed), reads)
    return reads


def enters_at_a_stage(make: MakeCascade, seed: int) -> None:
    """One that there is; and an answer will do, or will not."""
    steps = draw_cascade_story(seed)
    for step, (entered, accepted) in zip(steps, _play(make(), steps, Random(seed)), strict=True):
        if type(entered) is not int or not 0 <= entered < len(step.stages):
            raise BrokenPolicyError(f"enters at stage {entered!r}; it may be 0 to {len(step.stages) - 1}")
        if type(accepted) is not bool:
            raise BrokenPolicyError(f"`accept` returned {accepted!r}; it must be True or False")


def decides_the_same_again(make: MakeCascade, seed: int) -> None:
    """The same views and the same random stream lead to the same decisions."""
    steps = draw_cascade_story(seed)
    first, second = (_play(make(), steps, Random(seed)) for _ in range(2))
    if first != second:
        raise BrokenPolicyError("decided differently on the same views with the same random stream")


def survives_pickling(make: MakeCascade, seed: int) -> None:
    """A copy of it, made when fresh or in mid-run, goes on as the original does."""
    steps = draw_cascade_story(seed)
    middle = len(steps) // 2
    cascade = pickled(make())
    _play(cascade, steps[:middle], Random(seed))
    copy = pickled(cascade)
    if _play(cascade, steps[middle:], Random(1)) != _play(copy, steps[middle:], Random(1)):
        raise BrokenPolicyError("decides differently once it was pickled and unpickled: some of its state was lost")


def leaves_views_alone(make: MakeCascade, seed: int) -> None:
    """It neither changes what it is shown nor keeps it."""
    cascade, random = make(), Random(seed)
    for step in draw_cascade_story(seed, num_steps=12):
        learn(cascade, step.ended)
        visit = Visit(is_oracle(cascade))
        view = cascade_view(step.now, random, step.stage, step.stages, visit)
        request = request_view(step.request, visit)
        shown = [*view.stages, *(replica for stage in view.stages for replica in stage.replicas)]
        cascade.enter(request, view)
        cascade.accept(request, step.score, view)
        left = [*view.stages, *(replica for stage in view.stages for replica in stage.replicas)]
        if list(map(id, left)) != list(map(id, shown)):
            raise BrokenPolicyError("changed view.stages or stage.replicas: sort a copy instead")
        kept = [weakref.ref(one) for one in (view, request, *shown)]
        del view, request, shown, left
        check_let_go(kept)


def reaches_for_nothing_else(make: MakeCascade, seed: int) -> None:
    """No clock, no environment, no I/O, no randomness but `view.random`."""
    cascade, random = make(), Random(seed)
    for step in draw_cascade_story(seed, num_steps=20):
        visit = Visit(is_oracle(cascade))
        view = cascade_view(step.now, random, step.stage, step.stages, visit)
        request = request_view(step.request, visit)
        with nothing_outside():
            learn(cascade, step.ended)
            cascade.enter(request, view)
            cascade.accept(request, step.score, view)


CASCADE_CHECKS: tuple[Callable[[MakeCascade, int], None], ...] = (
    enters_at_a_stage,
    decides_the_same_again,
    survives_pickling,
    leaves_views_alone,
    reaches_for_nothing_else,
)


def _play(
    cascade: Cascade, steps: Sequence[CascadeStep], random: Random, reads: set[str] | None = None
) -> list[Decisions]:
    """Where requests enter, and which answers will do."""
    decisions = []
    for step in steps:
        learn(cascade, step.ended)
        visit = Visit(is_oracle(cascade))
        request = request_view(step.request, visit)
        entered = cascade.enter(request, cascade_view(step.now, random, 0, step.stages, visit))
        judged = cascade_view(step.now, random, step.stage, step.stages, visit)
        decisions.append((entered, cascade.accept(request, step.score, judged)))
        visit.is_over = True
        if reads is not None:
            reads |= visit.reads
    return decisions
