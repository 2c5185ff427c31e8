"""The rules of claims, for tests of all of them."""

from __future__ import annotations

from headway_papers.reproduce.claims import AtLeast, AtMost, Between, Bounds, Rule

NEUTRAL = {"x": 1.0}
"""By unit: the value of two equal systems, where it is not 0."""


def bounds_of(rule: Rule) -> tuple[Bounds, float]:
    """The bounds of a rule on numbers, and the value of two equal systems."""
    assert isinstance(rule, AtLeast | AtMost | Between)
    return rule.bounds, NEUTRAL.get(rule.unit, 0.0 if isinstance(rule, Between) else rule.neutral)
