"""The nearest name in an error."""

from __future__ import annotations

import pytest

from headway.core.errors import unknown

GPUS = ("a100-80gb", "h100-80gb-sxm", "l40s")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100-80g", "did you mean 'h100-80gb-sxm'?"),
        ("h100=8", "did you mean 'h100-80gb-sxm'?"),
        ("a100-80g", "did you mean 'a100-80gb'?"),
        ("l40", "did you mean 'l40s'?"),
        ("tpu-v5e", "one of: a100-80gb, h100-80gb-sxm, l40s"),
    ],
)
def test_the_nearest_name_begins_alike(name: str, hint: str) -> None:
    assert str(unknown("GPU", name, GPUS)) == f"unknown GPU {name!r}; {hint}"


def test_without_names_none_is_proposed() -> None:
    assert str(unknown("pool", "a", ())) == "unknown pool 'a'; one of: "
