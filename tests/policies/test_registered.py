"""Every registered policy passes the conformance checks of its kind, and its constructor refuses bad arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.policies import ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS, resolve
from headway.testing import kinds, orderings

KINDS: tuple[tuple[Any, dict[str, Any], tuple[Callable[..., None], ...]], ...] = (
    (resolve.router, ROUTERS, kinds.ROUTERS.checks),
    (resolve.ordering, ORDERINGS, orderings.ORDERINGS.checks),
    (resolve.migration, MIGRATIONS, kinds.MIGRATIONS.checks),
    (resolve.scaler, SCALERS, kinds.SCALERS.checks),
    (resolve.admission, ADMISSIONS, kinds.ADMISSIONS.checks),
    (resolve.cascade, CASCADES, kinds.CASCADES.checks),
)
"""Of each kind: the function that resolves a name, the policies by name, and their checks."""


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
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_policy_passes_the_checks_of_its_kind(policy: Any, check: Callable[..., None], seed: int) -> None:
    check(policy, seed)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "many", None, True, [3]], ids=repr)
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
def test_a_constructor_refuses_bad_numbers(of: Any, name: str, argument: str, value: object) -> None:
    with pytest.raises(HeadwayError, match=f"{name}: {argument}: "):
        of({"name": name, argument: value})


@pytest.mark.parametrize("policy", [policy for _, named, _ in KINDS for policy in named.values()], ids=_label)
def test_every_argument_has_a_default(policy: Any) -> None:
    policy()
