"""No row whose rule cannot fail: every claim of every paper, on recorded measurements in which no policy has an effect,
or each label one of its own."""

from __future__ import annotations

from functools import cache

import pytest

from headway_papers.reproduce import SYSTEMS
from headway_papers.reproduce.claims import HOLDS, Between, Claim, EverySeed, Value
from headway_papers.reproduce.findings import Findings
from headway_papers.reproduce.reproduction import load
from recorded import ALIKE, APART, NEAR, NUM_DRAWS, Replayed, plans_kept
from rules import bounds_of

pytestmark = pytest.mark.ci
STATED = ("fig1-", "example-residual", "example-candidates", "eq18-")
"""How claims on formulas and printed numbers begin: no run has a part in them."""
OF_ONE = ("answers-rr", "in-time-", "batch-done")
"""How claims begin that ask a share of one system, whatever the others have."""
OF_SEVERAL = ("fig8-", "strategy-effect")
"""How claims begin that are on several pairs of systems, each with labels of its own: their mean ratio, or that of the
best system to the worst."""
SHARES = ("%", "x", " points")
"""Units of ratios and differences of two systems."""
RECORDED = [name for name in SYSTEMS if name != "headway"]


@cache
def found(paper: str, apart: float, draw: int) -> Findings:
    with plans_kept():
        return load(paper).run(Replayed.of(paper, apart, draw))


def words(paper: str, claim: Claim, apart: float) -> list[str]:
    """The verdict of each draw."""
    values = (found(paper, apart, draw).outcomes[claim.id].values for draw in range(NUM_DRAWS[abs(apart)]))
    return [claim.rule.judge(each).word for each in values]


def is_of_a_difference(claim: Claim) -> bool:
    """Whether two equal systems do not meet the rule."""
    if isinstance(claim.rule, EverySeed) or claim.id.startswith(OF_ONE):
        return False
    bounds, equal = bounds_of(claim.rule)
    is_likeness = isinstance(claim.rule, Between) and bounds.right == 0
    return not (bounds.low <= equal <= bounds.high or is_likeness)


@pytest.mark.parametrize(
    ("paper", "claim"),
    [(paper, claim) for paper in RECORDED for claim in load(paper).CLAIMS],
    ids=lambda each: getattr(each, "id", each),
)
def test_a_rule_fails_where_labels_mean_nothing(paper: str, claim: Claim) -> None:
    """A difference is not seen between equal systems; and nothing is said whatever the measurements are."""
    alike, apart = words(paper, claim, ALIKE), words(paper, claim, APART)
    if claim.id.startswith(STATED):
        assert len({*alike, *apart}) == 1
        return
    if is_of_a_difference(claim):
        assert HOLDS not in alike
    assert {*alike, *apart} != {HOLDS}


def is_of_two(claim: Claim) -> bool:
    """Whether the rule is on an order, or on the ratio or the difference of two systems."""
    rule = claim.rule
    is_share = is_of_a_difference(claim) and getattr(rule, "unit", "") in SHARES
    return (isinstance(rule, EverySeed) or is_share) and not claim.id.startswith((*STATED, *OF_SEVERAL))


@pytest.mark.parametrize(
    ("paper", "claim"),
    [(paper, claim) for paper in RECORDED for claim in load(paper).CLAIMS if is_of_two(claim)],
    ids=lambda each: getattr(each, "id", each),
)
def test_a_rule_fails_where_labels_are_swapped(paper: str, claim: Claim) -> None:
    """A claim that holds for two systems does not hold where each has the other's name."""
    both = zip(words(paper, claim, NEAR), words(paper, claim, -NEAR), strict=True)
    assert (HOLDS, HOLDS) not in both


@pytest.mark.parametrize("paper", RECORDED)
def test_every_claim_has_a_value_a_seed_and_a_reason(paper: str) -> None:
    claims, outcomes = load(paper).CLAIMS, found(paper, ALIKE, draw=0).outcomes
    assert set(outcomes) == {claim.id for claim in claims}
    missing: list[Value] = [None]
    assert not [claim.id for claim in claims if not outcomes[claim.id].values or missing == outcomes[claim.id].values]
