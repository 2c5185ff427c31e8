"""A policy under test, played through a story, and the checks that every kind of policy shares."""

from __future__ import annotations

import gc
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from headway.core.policy import Learner
from headway.core.record import Ended
from headway.testing.purity import forbid_side_effects
from headway.testing.strict_views import BrokenPolicyError, PolicyCall


class StoryStep(Protocol):
    @property
    def ended(self) -> Ended | None:
        """The request that ended just before the step, for a policy that learns."""


P = TypeVar("P")
S = TypeVar("S", bound=StoryStep)
Make = Callable[[], Any]
Check = Callable[[Make, int], None]
"""Takes a function that makes policies, and a seed. Raises BrokenPolicyError if the policies break a rule."""
SHORT_STORY = 24
"""Number of steps of the checks that examine each call closely."""


class Trial(ABC, Generic[P, S]):
    """One policy, called at each step of a story. The policy gets views that record and restrict its reads."""

    draw_story: ClassVar[Callable[[int, int], Sequence[Any]]]
    """The moments at which a policy of this kind is called, from a seed and the number of steps."""
    num_steps: ClassVar[int]

    def __init__(self, policy: P, random: Random) -> None:
        self.policy, self.random = policy, random
        self.reads: set[str] = set()

    @abstractmethod
    def decide(self, step: S, call: PolicyCall) -> Any:
        """Call the policy with the views of one step. Returns its decisions, checked for their types."""

    def check_decision(self, step: S, decision: Any) -> None:
        """Raise BrokenPolicyError if the decisions of this step are impossible."""
        return

    def play(self, step: S) -> Any:
        """Let the policy learn, and then decide. After the decision, the views of the call can no longer be read."""
        learn(self.policy, step.ended)
        call = PolicyCall(is_oracle(self.policy))
        decision = self.decide(step, call)
        call.is_over = True
        self.reads |= call.reads
        return decision

    def continued_by(self, policy: P) -> Trial[P, S]:
        """A trial of `policy` that continues from here."""
        return type(self)(policy, Random(1))


@dataclass(frozen=True)
class Conformance:
    """The checks that one kind of policy must pass."""

    trial: type[Trial[Any, Any]]
    checks: tuple[Check, ...]

    def check(self, make: Make, seeds: Iterable[int] = range(8)) -> None:
        """Run every check on stories drawn with these seeds. Raises BrokenPolicyError."""
        for seed in seeds:
            for check in self.checks:
                check(make, seed)

    def reads(self, make: Make, seeds: Iterable[int] = range(20)) -> set[str]:
        """The attributes that a policy reads, such as `replica.num_waiting`."""
        reads: set[str] = set()
        for seed in seeds:
            played = self.trial(make(), Random(seed))
            for step in self.trial.draw_story(seed, self.trial.num_steps):
                played.play(step)
            reads |= played.reads
        return reads


def common_checks(trial: type[Trial[Any, Any]]) -> tuple[Check, ...]:
    def decides_what_is_possible(make: Make, seed: int) -> None:
        """Every decision obeys the rules of its kind."""
        played = trial(make(), Random(seed))
        for step in trial.draw_story(seed, trial.num_steps):
            played.check_decision(step, played.play(step))

    def is_deterministic(make: Make, seed: int) -> None:
        """Equal views and equal random streams lead to equal decisions."""
        steps = trial.draw_story(seed, trial.num_steps)
        first, second = trial(make(), Random(seed)), trial(make(), Random(seed))
        if [first.play(step) for step in steps] != [second.play(step) for step in steps]:
            raise BrokenPolicyError("decided differently on the same views with the same random stream")

    def survives_pickling(make: Make, seed: int) -> None:
        """A pickled copy, made when new or in the middle of a run, continues like the original."""
        steps = trial.draw_story(seed, trial.num_steps)
        middle = trial.num_steps // 2
        played = trial(pickled(make()), Random(seed))
        for step in steps[:middle]:
            played.play(step)
        copy = played.continued_by(pickled(played.policy))
        original = played.continued_by(played.policy)
        if [original.play(step) for step in steps[middle:]] != [copy.play(step) for step in steps[middle:]]:
            raise BrokenPolicyError("decides differently after pickling and unpickling: some of its state was lost")

    def leaves_views_alone(make: Make, seed: int) -> None:
        """The policy changes no view, and keeps no view after the call."""
        played = trial(make(), Random(seed))
        for step in trial.draw_story(seed, SHORT_STORY):
            learn(played.policy, step.ended)
            call = PolicyCall(is_oracle(played.policy))
            played.decide(step, call)
            call.check_unchanged()
            check_released(call)

    def has_no_side_effects(make: Make, seed: int) -> None:
        """The policy uses no clock, environment or I/O, and no randomness but `view.random`."""
        played = trial(make(), Random(seed))
        for step in trial.draw_story(seed, SHORT_STORY):
            with forbid_side_effects():
                learn(played.policy, step.ended)
                played.decide(step, PolicyCall(is_oracle(played.policy)))

    return decides_what_is_possible, is_deterministic, survives_pickling, leaves_views_alone, has_no_side_effects


def states_its_interval(make: Make, seed: int) -> None:
    """`interval_s` is a number of seconds above 0."""
    check_interval(getattr(make(), "interval_s", None))


def check_interval(interval_s: object, otherwise: str = "") -> None:
    """Raise BrokenPolicyError unless it is a positive number of seconds; `otherwise` ends the message."""
    is_number = isinstance(interval_s, int | float) and not isinstance(interval_s, bool)
    if not is_number or not 0 < interval_s < inf:  # type: ignore[operator]
        raise BrokenPolicyError(f"interval_s is {interval_s!r}; it must be seconds, more than 0{otherwise}")


def is_oracle(policy: object) -> bool:
    return bool(getattr(policy, "oracle", False))


def learn(policy: object, ended: Ended | None) -> None:
    if ended is not None and isinstance(policy, Learner):
        policy.learn(ended)


def pickled(policy: P) -> P:
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
