"""Every registered policy, of every kind, holds to what its kind must, and its constructor refuses nonsense."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.policies import ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS, resolve
from headway.testing.conformance import ORDERING_CHECKS, ROUTER_CHECKS
from headway.testing.conformance_admission import ADMISSION_CHECKS
from headway.testing.conformance_cascade import CASCADE_CHECKS
from headway.testing.conformance_migration import MIGRATION_CHECKS
from headway.testing.conformance_scaler import SCALER_CHECKS

KINDS: tuple[tuple[Any, dict[str, Any], tuple[Callable[..., None], ...]], ...] = (
    (resolve.router, ROUTERS, ROUTER_CHECKS),
    (resolve.ordering, ORDERINGS, ORDERING_CHECKS),
    (resolve.migration, MIGRATIONS, MIGRATION_CHECKS),
    (resolve.scaler, SCALERS, SCALER_CHECKS),
    (resolve.admission, ADMISSIONS, ADMISSION_CHECKS),
    (resolve.cascade, CASCADES, CASCADE_CHECKS),
)
"""How a kind is named in a scenario, its policies, and their checks."""


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
def test_it_holds_to_its_kind(policy: Any, check: Callable[..., None], seed: int) -> None:
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
def test_its_constructor_refuses_nonsense(of: Any, name: str, argument: str, value: object) -> None:
    with pytest.raises(HeadwayError, match=f"{name}: {argument}: "):
        of({"name": name, argument: value})


@pytest.mark.parametrize("policy", [policy for _, named, _ in KINDS for policy in named.values()], ids=_label)
def test_its_arguments_have_defaults(policy: Any) -> None:
    policy()
