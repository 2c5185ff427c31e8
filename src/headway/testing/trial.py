"""What the checks of every kind of policy share."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from math import inf
from typing import Any, TypeVar

from headway.core.policy import Learner
from headway.core.record import Ended
from headway.testing.strict_views import BrokenPolicyError

P = TypeVar("P")
SEEDS = range(8)


def wrong_interval(interval_s: object) -> bool:
    """It is no number of seconds above 0."""
    return not isinstance(interval_s, int | float) or isinstance(interval_s, bool) or not 0 < interval_s < inf


def is_oracle(policy: object) -> bool:
    """It says that it reads what only an oracle may."""
    return bool(getattr(policy, "oracle", False))


def learn(policy: object, ended: Ended | None) -> None:
    """Tell a policy that learns of what ended, if anything did."""
    if ended is not None and isinstance(policy, Learner):
        policy.learn(ended)


def pickled(policy: P) -> P:
    """A copy of it by way of pickle."""
    try:
        return pickle.loads(pickle.dumps(policy))  # type: ignore[no-any-return]
    except BrokenPolicyError:
        raise
    except Exception as error:
        raise BrokenPolicyError(f"cannot be pickled: {error}") from error


def check_let_go(kept: Sequence[weakref.ref[Any]]) -> None:
    """Nobody holds the views that these refer to."""
    if any(ref() is not None for ref in kept):
        gc.collect()
    if any(ref() is not None for ref in kept):
        raise BrokenPolicyError("kept a view after the call: copy the values that you need")
