"""Checks of cascade policies: `check_cascade(MyCascade)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from headway.core.policy import Cascade
from headway.testing.stories import CascadeStep, draw_cascade_story
from headway.testing.strict_views import BrokenPolicyError, PolicyCall, cascade_view, request_view
from headway.testing.trial import SEEDS, Check, Make, Trial, common_checks, reads_of, run_checks

NUM_STEPS = 30


def check_cascade(make: Make, seeds: Iterable[int] = SEEDS) -> None:
    """Run every check of a cascade policy on stories drawn with these seeds. Raises BrokenPolicyError."""
    run_checks(CASCADE_CHECKS, make, seeds)


def cascade_reads(make: Make, seeds: Iterable[int] = range(20)) -> set[str]:
    """The attributes that a cascade policy reads, such as `cascade.stage`."""
    return reads_of(CascadeTrial, make, seeds, NUM_STEPS)


class CascadeTrial(Trial[Cascade, CascadeStep]):
    """A cascade policy, asked at each step where a request starts and whether an answer is accepted."""

    @staticmethod
    def draw_story(seed: int, num_steps: int) -> Sequence[CascadeStep]:
        return draw_cascade_story(seed, num_steps)

    def decide(self, step: CascadeStep, call: PolicyCall) -> tuple[int, bool]:
        request = request_view(step.request, call)
        entered = self.policy.enter(request, cascade_view(step.now, self.random, 0, step.stages, call))
        view = cascade_view(step.now, self.random, step.stage, step.stages, call)
        return entered, self.policy.accept(request, step.score, view)


def returns_a_stage_and_a_bool(make: Make, seed: int) -> None:
    """`enter` returns the index of a stage of the view, `accept` True or False."""
    trial = CascadeTrial(make(), Random(seed))
    for step in draw_cascade_story(seed, NUM_STEPS):
        entered, accepted = trial.play(step)
        if type(entered) is not int or not 0 <= entered < len(step.stages):
            raise BrokenPolicyError(f"enters at stage {entered!r}; it may be 0 to {len(step.stages) - 1}")
        if type(accepted) is not bool:
            raise BrokenPolicyError(f"`accept` returned {accepted!r}; it must be True or False")


CASCADE_CHECKS: tuple[Check, ...] = (returns_a_stage_and_a_bool, *common_checks(CascadeTrial, NUM_STEPS))
