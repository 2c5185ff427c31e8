"""A policy under test, played through a story, and the checks that every kind of policy shares."""

from __future__ import annotations

import gc
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import inf
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from headway.core.policy import Learner
from headway.core.record import Ended
from headway.testing.purity import forbid_side_effects
from headway.testing.strict_views import BrokenPolicyError, PolicyCall


class StoryStep(Protocol):
    """One moment of a story."""

    @property
    def ended(self) -> Ended | None:
        """A request that ended just before, for a policy that learns."""


P = TypeVar("P")
S = TypeVar("S", bound=StoryStep)
Make = Callable[[], Any]
Check = Callable[[Make, int], None]
"""Raises BrokenPolicyError if the policies that the first argument makes break a rule; the second is a seed."""
SEEDS = range(8)


class Trial(ABC, Generic[P, S]):
    """One policy, called at each step of a story with views that record and restrict what it does."""

    def __init__(self, policy: P, random: Random) -> None:
        self.policy, self.random = policy, random
        self.reads: set[str] = set()

    @staticmethod
    @abstractmethod
    def draw_story(seed: int, num_steps: int) -> Sequence[S]:
        """The moments at which a policy of this kind is called."""

    @abstractmethod
    def decide(self, step: S, call: PolicyCall) -> Any:
        """Call the policy with the views of one step. Returns its decisions, checked for their types."""

    def play(self, step: S) -> Any:
        """Let the policy learn, then decide. Afterwards the views of the call can no longer be read."""
        learn(self.policy, step.ended)
        call = PolicyCall(is_oracle(self.policy))
        decision = self.decide(step, call)
        call.is_over = True
        self.reads |= call.reads
        return decision

    def continued_by(self, policy: P) -> Trial[P, S]:
        """A trial of `policy` that goes on from here."""
        return type(self)(policy, Random(1))


def run_checks(checks: Iterable[Check], make: Make, seeds: Iterable[int]) -> None:
    """Run every check with every seed."""
    checks = tuple(checks)
    for seed in seeds:
        for check in checks:
            check(make, seed)


def reads_of(trial: type[Trial[Any, Any]], make: Make, seeds: Iterable[int], num_steps: int) -> set[str]:
    """The attributes that a policy reads, such as `replica.num_waiting`."""
    reads: set[str] = set()
    for seed in seeds:
        played = trial(make(), Random(seed))
        for step in trial.draw_story(seed, num_steps):
            played.play(step)
        reads |= played.reads
    return reads


def common_checks(trial: type[Trial[Any, Any]], num_steps: int) -> tuple[Check, ...]:
    """The checks that do not depend on the kind of policy; `num_steps` is the length of a story."""

    def is_deterministic(make: Make, seed: int) -> None:
        """The same views and the same random stream lead to the same decisions."""
        steps = trial.draw_story(seed, num_steps)
        first, second = trial(make(), Random(seed)), trial(make(), Random(seed))
        if [first.play(step) for step in steps] != [second.play(step) for step in steps]:
            raise BrokenPolicyError("decided differently on the same views with the same random stream")

    def survives_pickling(make: Make, seed: int) -> None:
        """A pickled copy, made when fresh or in the middle of a run, goes on as the original does."""
        steps = trial.draw_story(seed, num_steps)
        middle = num_steps // 2
        played = trial(pickled(make()), Random(seed))
        for step in steps[:middle]:
            played.play(step)
        copy = played.continued_by(pickled(played.policy))
        original = played.continued_by(played.policy)
        if [original.play(step) for step in steps[middle:]] != [copy.play(step) for step in steps[middle:]]:
            raise BrokenPolicyError("decides differently after pickling and unpickling: some of its state was lost")

    def leaves_views_alone(make: Make, seed: int) -> None:
        """The policy neither changes a view nor keeps one after the call."""
        played = trial(make(), Random(seed))
        for step in trial.draw_story(seed, 12):
            learn(played.policy, step.ended)
            call = PolicyCall(is_oracle(played.policy))
            played.decide(step, call)
            call.check_unchanged()
            check_released(call)

    def has_no_side_effects(make: Make, seed: int) -> None:
        """The policy uses no clock, environment or I/O, and no randomness but `view.random`."""
        played = trial(make(), Random(seed))
        for step in trial.draw_story(seed, 20):
            with forbid_side_effects():
                learn(played.policy, step.ended)
                played.decide(step, PolicyCall(is_oracle(played.policy)))

    return is_deterministic, survives_pickling, leaves_views_alone, has_no_side_effects


def states_its_interval(make: Make, seed: int) -> None:
    """`interval_s` is a number of seconds above 0."""
    check_interval(getattr(make(), "interval_s", None))


def check_interval(interval_s: object, otherwise: str = "") -> None:
    """Raise BrokenPolicyError unless it is a number of seconds above 0; `otherwise` ends the message."""
    is_number = isinstance(interval_s, int | float) and not isinstance(interval_s, bool)
    if not is_number or not 0 < interval_s < inf:  # type: ignore[operator]
        raise BrokenPolicyError(f"interval_s is {interval_s!r}; it must be seconds, more than 0{otherwise}")


def is_oracle(policy: object) -> bool:
    """Whether the policy declares that it reads what only an oracle knows."""
    return bool(getattr(policy, "oracle", False))


def learn(policy: object, ended: Ended | None) -> None:
    """Pass the ended request, if there is one, to a policy that learns."""
    if ended is not None and isinstance(policy, Learner):
        policy.learn(ended)


def pickled(policy: P) -> P:
    """A copy of the policy, made with pickle."""
    try:
        return pickle.loads(pickle.dumps(policy))  # type: ignore[no-any-return]
    except BrokenPolicyError:
        raise
    except Exception as error:
        raise BrokenPolicyError(f"cannot be pickled: {error}") from error


def check_released(call: PolicyCall) -> None:
    """Raise BrokenPolicyError if one of the call's views is still referenced."""
    call.forget_lists()
    if call.has_live_views():
        gc.collect()
    if call.has_live_views():
        raise BrokenPolicyError("kept a view after the call: copy the values that you need")
