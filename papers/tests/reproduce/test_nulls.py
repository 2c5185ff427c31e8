"""No row whose rule cannot fail: every claim of every paper, on recorded measurements in which no policy has an effect,
or each label one of its own."""

from __future__ import annotations

from functools import cache

import pytest

from headway_papers.reproduce.claims import HOLDS, Between, Claim, EverySeed, Value
from headway_papers.reproduce.findings import Findings
from headway_papers.reproduce.reproduction import load
from recorded import FOLDER, NUM_DRAWS, Replayed, plans_kept
from rules import bounds_of

pytestmark = pytest.mark.ci
STATED = ("fig1-", "example-", "eq18-")
"""How claims on formulas and printed numbers begin: no run has a part in them."""
OF_ONE = ("answers-rr", "in-time-", "batch-done")
"""How claims begin that ask a share of one system, whatever the others have."""


RECORDED = sorted(file.name.partition(".")[0] for file in FOLDER.glob("*.json.gz"))


@cache
def found(paper: str, apart: bool, draw: int) -> Findings:
    with plans_kept():
        return load(paper).run(Replayed.of(paper, apart, draw))


def words(paper: str, claim: Claim, apart: bool) -> list[str]:
    """The verdict of each draw."""
    values = (found(paper, apart, draw).outcomes[claim.id].values for draw in range(NUM_DRAWS[apart]))
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
    alike, apart = words(paper, claim, apart=False), words(paper, claim, apart=True)
    if claim.id.startswith(STATED):
        assert len({*alike, *apart}) == 1
        return
    if is_of_a_difference(claim):
        assert HOLDS not in alike
    assert {*alike, *apart} != {HOLDS}


@pytest.mark.parametrize("paper", RECORDED)
def test_every_claim_has_a_value_a_seed_and_a_reason(paper: str) -> None:
    claims, outcomes = load(paper).CLAIMS, found(paper, apart=False, draw=0).outcomes
    assert set(outcomes) == {claim.id for claim in claims}
    missing: list[Value] = [None]
    assert not [claim.id for claim in claims if not outcomes[claim.id].values or missing == outcomes[claim.id].values]
