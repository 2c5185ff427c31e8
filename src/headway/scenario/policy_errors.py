"""Reports exceptions in users' policies as errors of the policy: which one, where, and what happened."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import headway
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.policies.resolve import PolicyChoice

_PACKAGE = Path(headway.__file__).parent
_DECIDING = (_PACKAGE / "control", _PACKAGE / "sim")
"""Code that acts on the decisions of policies."""


@contextmanager
def as_policy_errors(policies: Policies) -> Iterator[None]:
    """Turn an exception raised in a user's policy, or by code that received its invalid result, into a HeadwayError.

    Other exceptions pass unchanged: they are Headway's own.
    """
    try:
        yield
    except (HeadwayError, MemoryError):
        raise
    except Exception as error:
        own = _user_policies(policies)
        frames = traceback.extract_tb(error.__traceback__)
        for choice in own:
            file = _file_of(choice)
            at = next((frame for frame in reversed(frames) if frame.filename == file), None)
            if at is not None:
                where = f"{Path(at.filename).name}:{at.lineno}, in {at.name}"
                raise HeadwayError(f"policy {choice.name} ({where}): {_described(error)}") from error
        last = Path(frames[-1].filename)
        if own and any(folder in last.parents for folder in _DECIDING):
            if isinstance(error, TypeError) and "not supported between" in str(error) and policies.ordering in own:
                expected = "expected keys that can be compared, such as numbers or tuples of them"
                raise HeadwayError(f"ordering {policies.ordering}: ranks: {error}; {expected}") from error
            names = ", ".join(dict.fromkeys(choice.name for choice in own))
            what = f"policy {names}: returned an invalid value, which led to {_described(error)}"
            raise HeadwayError(f"{what}; headway.testing checks policies") from error
        raise


def _user_policies(policies: Policies) -> list[PolicyChoice[Any]]:
    """The policies that are not part of Headway."""
    cascade = None if policies.cascade is None else policies.cascade.policy
    used = [policies.router, policies.ordering, policies.migration, policies.admission, cascade, policies.scaler]
    choices = [each for each in used if isinstance(each, PolicyChoice)]
    return [each for each in choices if not each.made_by.__module__.startswith("headway.policies")]


def _file_of(choice: PolicyChoice[Any]) -> str:
    with suppress(TypeError, OSError):  # a class typed into an interpreter has no file
        return inspect.getfile(choice.made_by)
    return next((each.__code__.co_filename for each in vars(choice.made_by).values() if inspect.isfunction(each)), "")


def _described(error: Exception) -> str:
    """An error on one line, as in "KeyError: 'no such replica'"."""
    return " ".join(f"{type(error).__name__}: {error}".split())
