"""Every registered policy passes the conformance checks of its kind, and its constructor refuses bad arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from headway.core.errors import HeadwayError
from headway.policies import ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS, resolve
from headway.testing import kinds, orderings
from simulation import num_examples

KINDS: tuple[tuple[Any, dict[str, Any], tuple[Callable[..., None], ...]], ...] = (
    (resolve.router, ROUTERS, kinds.ROUTERS.checks),
    (resolve.ordering, ORDERINGS, orderings.ORDERINGS.checks),
    (resolve.migration, MIGRATIONS, kinds.MIGRATIONS.checks),
    (resolve.scaler, SCALERS, kinds.SCALERS.checks),
    (resolve.admission, ADMISSIONS, kinds.ADMISSIONS.checks),
    (resolve.cascade, CASCADES, kinds.CASCADES.checks),
)
"""Of each kind: the function that resolves a name, the policies by name, and their checks."""

NUM_STORIES = num_examples(6)
"""Few, since drawing a story takes as long as a check of it: all checks share those that were drawn."""
FIRST_STORIES = range(max(NUM_STORIES // 2, 1))
BAD_NUMBERS = (-1, float("nan"), float("inf"), "many", None, True, [3])


def _label(each: Any) -> str:
    return getattr(each, "__name__", str(each))


@pytest.mark.parametrize(
    ("policy", "check"),
    [
        pytest.param(policy, check, id=f"{_label(of)}-{name}-{_label(check)}")
        for of, named, checks in KINDS
        for name, policy in named.items()
        for check in checks
    ],
)
def test_a_policy_passes_the_checks_of_its_kind(policy: Any, check: Callable[..., None]) -> None:
    for seed in FIRST_STORIES:
        check(policy, seed)


@pytest.mark.ci
def test_policies_pass_on_further_stories() -> None:
    for seed in range(len(FIRST_STORIES), NUM_STORIES):
        for _, named, checks in KINDS:
            for policy in named.values():
                for check in checks:
                    check(policy, seed)


@pytest.mark.parametrize(
    ("of", "name", "argument"),
    [
        pytest.param(of, name, argument, id=f"{_label(of)}-{name}-{argument}")
        for of, named, _ in KINDS
        for name, policy in named.items()
        for argument, parameter in inspect.signature(policy).parameters.items()
        if parameter.annotation in ("int", "float")
    ],
)
def test_a_constructor_refuses_bad_numbers(of: Any, name: str, argument: str) -> None:
    for value in BAD_NUMBERS:
        with pytest.raises(HeadwayError, match=f"{name}: {argument}: "):
            of({"name": name, argument: value})
            pytest.fail(f"{value!r} was taken")


@pytest.mark.parametrize("policy", [policy for _, named, _ in KINDS for policy in named.values()], ids=_label)
def test_every_argument_has_a_default(policy: Any) -> None:
    policy()
