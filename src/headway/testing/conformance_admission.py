"""What every admission policy must hold to, your own as well: `check_admission(MyAdmission)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from headway.core.decision import Release
from headway.core.policy import Admission
from headway.core.view import AdmissionView
from headway.testing.purity import nothing_outside
from headway.testing.stories import AdmissionStep, draw_admission_story, draw_replica
from headway.testing.strict_views import BrokenPolicyError, Visit, admission_view, request_view
from headway.testing.trial import SEEDS, check_let_go, is_oracle, learn, pickled, wrong_interval

MakeAdmission = Callable[[], Admission]
DAY_S = 86_400.0


def check_admission(make: MakeAdmission, seeds: Iterable[int] = SEEDS) -> None:
    """Every check of an admission policy, over stories drawn from these seeds."""
    for seed in seeds:
        for check in ADMISSION_CHECKS:
            check(make, seed)


def admission_reads(make: MakeAdmission, seeds: Iterable[int] = range(20)) -> set[str]:
    """What an admission policy was seen to read, such as `replica.kv_blocks_used`."""
    reads: set[str] = set()
    for seed in seeds:
        play = _Play(make(), Random(seed), reads)
        for step in draw_admission_story(seed):
            play.step(step)
    return reads


def says_how_often_to_ask(make: MakeAdmission, seed: int) -> None:
    """`interval_s` is seconds."""
    interval_s = getattr(make(), "interval_s", None)
    if wrong_interval(interval_s):
        raise BrokenPolicyError(f"interval_s is {interval_s!r}; it must be seconds, more than 0")


def lets_go_whom_it_keeps(make: MakeAdmission, seed: int) -> None:
    """Each of them once, and as of a tier that there can be; requests may have given up meanwhile."""
    _played(make(), draw_admission_story(seed), Random(seed))


def keeps_nobody_for_ever(make: MakeAdmission, seed: int) -> None:
    """With idle replicas and days to pass, everybody goes."""
    play = _Play(make(), Random(seed))
    steps = draw_admission_story(seed)
    for step in steps:
        play.step(step)
    idle = [draw_replica(Random(seed), id, "idle") for id in range(2)]
    last = replace(steps[-1], arriving=[], gone=0.0, replicas=idle, ended=None)
    for day in range(10 * len(play.held) + 10):
        play.step(replace(last, now=last.now + day * DAY_S))
    if play.held:
        raise BrokenPolicyError(f"keeps {len(play.held)} requests for ever, though replicas are idle")


def decides_the_same_again(make: MakeAdmission, seed: int) -> None:
    """The same views and the same random stream lead to the same decisions."""
    steps = draw_admission_story(seed)
    first, second = (_played(make(), steps, Random(seed)) for _ in range(2))
    if first != second:
        raise BrokenPolicyError("decided differently on the same views with the same random stream")


def survives_pickling(make: MakeAdmission, seed: int) -> None:
    """A copy of it, made when fresh or in mid-run, goes on as the original does."""
    steps = draw_admission_story(seed)
    middle = len(steps) // 2
    play = _Play(pickled(make()), Random(seed))
    for step in steps[:middle]:
        play.step(step)
    both = [_Play(each, Random(1), held=dict(play.held)) for each in (play.policy, pickled(play.policy))]
    if len({repr([each.step(step) for step in steps[middle:]]) for each in both}) > 1:
        raise BrokenPolicyError("decides differently once it was pickled and unpickled: some of its state was lost")


def leaves_views_alone(make: MakeAdmission, seed: int) -> None:
    """It neither changes what it is shown nor keeps it."""
    play = _Play(make(), Random(seed))
    for step in draw_admission_story(seed, num_steps=12):
        play.arrive(step)
        view = play.view(step)
        shown: list[Any] = [*view.held, *view.replicas]
        released = list(play.policy.release(view))
        if list(map(id, (*view.held, *view.replicas))) != list(map(id, shown)):
            raise BrokenPolicyError("changed view.held or view.replicas: sort a copy instead")
        kept = [weakref.ref(one) for one in (view, *shown)]
        del view, shown
        check_let_go(kept)
        play.leave(released, step)


def reaches_for_nothing_else(make: MakeAdmission, seed: int) -> None:
    """No clock, no environment, no I/O, no randomness but `view.random`."""
    play = _Play(make(), Random(seed))
    for step in draw_admission_story(seed, num_steps=20):
        with nothing_outside():
            play.arrive(step)
            released = list(play.policy.release(play.view(step)))
        play.leave(released, step)


ADMISSION_CHECKS: tuple[Callable[[MakeAdmission, int], None], ...] = (
    says_how_often_to_ask,
    lets_go_whom_it_keeps,
    keeps_nobody_for_ever,
    decides_the_same_again,
    survives_pickling,
    leaves_views_alone,
    reaches_for_nothing_else,
)


class _Play:
    """A policy, and who it keeps."""

    def __init__(
        self,
        policy: Admission,
        random: Random,
        reads: set[str] | None = None,
        held: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        self.policy, self.held = policy, held or {}
        self._random, self._reads = random, reads
        self._cancels = Random(0)

    def step(self, step: AdmissionStep) -> list[Release]:
        """Who goes at one moment."""
        self.arrive(step)
        visit = Visit(is_oracle(self.policy))
        released = list(self.policy.release(self.view(step, visit)))
        visit.is_over = True
        if self._reads is not None:
            self._reads |= visit.reads
        self.leave(released, step)
        return released

    def arrive(self, step: AdmissionStep) -> None:
        """Some give up, others come and are kept or not."""
        learn(self.policy, step.ended)
        self.held = {id: one for id, one in self.held.items() if self._cancels.random() >= step.gone}
        for values in step.arriving:
            visit = Visit(is_oracle(self.policy))
            keeps = self.policy.holds(request_view(values, visit))
            visit.is_over = True
            if self._reads is not None:
                self._reads |= visit.reads
            if type(keeps) is not bool:
                raise BrokenPolicyError(f"`holds` returned {keeps!r}; it must be True or False")
            if keeps:
                self.held[values["id"]] = values

    def view(self, step: AdmissionStep, visit: Visit | None = None) -> AdmissionView:
        """What it is shown."""
        visit = visit or Visit(is_oracle(self.policy))
        return admission_view(step.now, self._random, list(step.replicas), list(self.held.values()), visit)

    def leave(self, released: Sequence[Release], step: AdmissionStep) -> None:
        """They go, if they may."""
        regions = {"", *(replica["region"] for replica in step.replicas)}
        for one in released:
            if not isinstance(one, Release):
                raise BrokenPolicyError(f"returned {one!r}; an admission policy returns Releases")
            if self.held.pop(one.request, None) is None:
                raise BrokenPolicyError(f"lets request {one.request!r} go, which it does not keep")
            if one.tier is not None and (type(one.tier) is not int or one.tier < 0):
                raise BrokenPolicyError(f"lets request {one.request} go as of tier {one.tier!r}; expected 0 or more")
            if one.region not in regions:
                raise BrokenPolicyError(f"lets request {one.request} go to region {one.region!r}, where no replica is")


def _played(policy: Admission, steps: Sequence[AdmissionStep], random: Random) -> list[list[Release]]:
    play = _Play(policy, random)
    return [play.step(step) for step in steps]
