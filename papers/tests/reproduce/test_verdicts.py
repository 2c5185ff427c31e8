"""Verdicts with four values, on intervals made by hand and under swapped labels; and what an abstract says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from math import isinf
from pathlib import Path

import pytest

from headway_papers.reproduce import SYSTEMS
from headway_papers.reproduce.claims import (
    EXCEEDS,
    HOLDS,
    REFUTED,
    UNDECIDED,
    AtLeast,
    AtMost,
    Between,
    EverySeed,
    Rule,
    Value,
)
from headway_papers.reproduce.kept import read_written
from headway_papers.reproduce.markdown import around_markers
from headway_papers.reproduce.page import CSS
from headway_papers.reproduce.reproduction import abstract_of, full_only, has_papers_number, load
from rules import bounds_of

PAPERS = [name for name in SYSTEMS if name != "headway"]
SEEDS = 6
PAGES = Path(__file__).parents[3] / "docs"


def spread(low: float, high: float) -> list[float]:
    """Two values whose interval is [low, high]: Student's t with one degree of freedom is 12.7."""
    middle, half = (low + high) / 2, (high - low) / 2
    apart = half / 12.7062047
    return [middle - apart, middle + apart]


@pytest.mark.parametrize(
    ("rule", "low", "high", "word"),
    [
        (AtLeast(0.4, limit=0.8), 0.2, 0.8, HOLDS),
        (AtLeast(0.4, limit=0.8), 0.0, 0.19, REFUTED),
        (AtLeast(0.4, limit=0.8), -0.9, -0.81, REFUTED),
        (AtLeast(0.4, limit=0.8), 0.81, 0.9, EXCEEDS),
        (AtLeast(0.4, limit=0.8), 0.1, 0.3, UNDECIDED),
        (AtLeast(0.4, limit=0.8), 0.7, 0.9, UNDECIDED),
        (AtLeast(0.4, limit=0.8), 0.1, 0.9, UNDECIDED),
        (AtLeast(0.4), 50.0, 60.0, HOLDS),
        (AtMost(0.5, neutral=1.0, limit=0.25), 0.3, 0.7, HOLDS),
        (AtMost(0.5, neutral=1.0, limit=0.25), 0.8, 0.9, REFUTED),
        (AtMost(0.5, neutral=1.0, limit=0.25), 0.1, 0.2, EXCEEDS),
        (AtMost(0.5, neutral=1.0, limit=0.25), 0.2, 0.3, UNDECIDED),
        (AtMost(0.05, share=1.0), -9.0, -8.0, HOLDS),
        (Between(0.1, 0.4, unit="%"), 0.5, 0.6, EXCEEDS),
        (Between(0.1, 0.4, unit="%"), 0.05, 0.06, REFUTED),
        (Between(0.1, 0.4, unit="%"), -0.6, -0.5, REFUTED),
        (Between(-0.4, -0.1, unit="%"), -0.6, -0.5, EXCEEDS),
        (Between(-0.4, -0.1, unit="%"), 0.5, 0.6, REFUTED),
        (Between(1.5, 4.0, unit="x"), 5.0, 6.0, EXCEEDS),
        (Between(0.25, 0.7, unit="x"), 0.1, 0.2, EXCEEDS),
        (Between(0.25, 0.7, unit="x"), 1.0, 1.1, REFUTED),
        (Between(-0.03, 0.03, unit="%"), 0.04, 0.05, REFUTED),
        (Between(-0.03, 0.03, unit="%"), -0.05, -0.04, REFUTED),
        (Between(0.8, 1.25, unit="x"), 1.3, 1.4, REFUTED),
        (Between(1.5, 6.0, unit=" s"), 7.0, 8.0, REFUTED),
        (Between(1.5, 6.0, unit=" s"), 0.5, 0.6, REFUTED),
        (Between(1.0, 2.0, unit=" points"), 3.0, 4.0, EXCEEDS),
    ],
)
def test_the_side_of_an_interval_decides(rule: AtLeast | AtMost | Between, low: float, high: float, word: str) -> None:
    inside = 1e-6 * (high - low)
    assert rule.bounds.word(low, high) == word
    verdict = rule.judge(spread(low + inside, high - inside))
    assert verdict.word == word
    assert verdict.holds is {HOLDS: True, UNDECIDED: None}.get(verdict.word, False)
    assert bool(verdict.reason) == (word != HOLDS)


def judged(rule: Rule, values: Sequence[Value]) -> str:
    return rule.judge(values[:1] if getattr(rule, "exact", False) else values).word


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_rule_fails_where_the_labels_of_two_systems_are_swapped(name: str) -> None:
    """All labellings of six seeds: no claim of a difference holds where half of the seeds or more are swapped."""
    assert not [claim.id for claim in load(name).CLAIMS if holds_anyway(claim.rule)]


@pytest.mark.parametrize("name", PAPERS)
def test_no_effect_and_one_far_beyond_the_papers_refute_a_size(name: str) -> None:
    for claim in load(name).CLAIMS:
        rule = claim.rule
        if isinstance(rule, AtLeast | AtMost) and not rule.bounds.low <= rule.neutral <= rule.bounds.high:
            far = [] if rule.limit is None else [rule.limit + 0.01 * (rule.limit - rule.neutral)]
            for value in (rule.neutral, 2 * rule.neutral - rule.effect, *far):
                assert rule.judge([value] if rule.exact else [value] * 3).holds is False, (claim.id, value)


def holds_anyway(rule: Rule) -> bool:
    """Whether swapped labels, or values beyond the bounds of a likeness, leave a rule unrefuted."""
    if isinstance(rule, EverySeed):
        labellings = product((True, False), repeat=SEEDS)
        return [labels for labels in labellings if rule.judge(labels).word != REFUTED] != [(True,) * SEEDS]
    bounds, equal = bounds_of(rule)
    if bounds.low <= equal <= bounds.high or (bounds.right == 0 and isinstance(rule, Between)):
        finite = [bound for bound in bounds[:2] if not isinf(bound)]
        room = 0.1 * max(abs(bound - equal) for bound in finite) or 0.1
        beyond = [bound + (room if bound == bounds.high else -room) for bound in finite]
        return {judged(rule, [value] * SEEDS) for value in beyond} != {REFUTED}
    near, far = sorted((bounds.low, bounds.high), key=lambda bound: abs(bound - equal))
    if isinf(far):  # a ratio is above 0
        far = max(2 * near - equal, 0.0) if equal == 1.0 else 2 * near - equal
    middle = (near + far) / 2
    values = [middle + 0.05 * (middle - near) * (i - 2.5) for i in range(SEEDS)]
    assert judged(rule, values) == HOLDS
    others = [swapped(value, equal) for value in values]
    most = [labels for labels in product((0, 1), repeat=SEEDS) if 2 * sum(labels) >= SEEDS]
    mixed = [
        [pair[label] for pair, label in zip(zip(values, others, strict=True), labels, strict=True)] for labels in most
    ]
    return (
        judged(rule, [equal] * SEEDS) != REFUTED
        or judged(rule, others) != REFUTED
        or (not getattr(rule, "exact", False) and any(judged(rule, each) == HOLDS for each in mixed))
    )


def swapped(value: float, equal: float) -> float:
    """A ratio or a difference of the same two systems, each named as the other."""
    return 1 / value if equal == 1.0 else 2 * equal - value


@pytest.mark.parametrize("name", PAPERS)
def test_an_abstract_names_claims_of_its_paper_once(name: str) -> None:
    system = load(name)
    sentences = abstract_of(system)
    claims = [each.claim for sentence in sentences for each in sentence.readings]
    assert sentences and all(sentence.readings for sentence in sentences)
    assert len(set(claims)) == len(claims) and set(claims) <= {claim.id for claim in system.CLAIMS}
    assert all(each.says.endswith(".") and each.experiment.endswith(".") for each in sentences)
    for sentence in sentences:
        texts = [each.reading for each in sentence.readings]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("paper", "headway", "contains"),
    [
        ("2.8x", "2.53x [2.18x, 2.88x], 3 seeds", True),
        ("4x", "5.04x [4.21x, 5.88x], 3 seeds", False),
        ("16.4-38.3%", "61.8% [52.8%, 70.8%], 3 seeds", False),
        ("16.4-38.3%", "39.6% [28.2%, 51.0%], 3 seeds", True),
        ("28.5-95.1%", "-9,887% [-15,522%, -4,252%], 3 seeds", False),
        ("-1.1%", "-2% [-3%, -1%], 3 seeds", True),
        ("+0.8%", "0.577% [-0.0615%, 1.22%], 3 seeds", True),
        ("27.39 s", "10.0 s [-16.4 s, 36.4 s], 3 seeds", True),
        (12, "12.1 [11.9, 12.3], 3 seeds", True),
        ("4", "3, exact", False),
        ("4 s", "4 s, exact", True),
        ("2.8x", "no value for 3 of 3 seeds", False),
        ("> 3 s", "3.1 s [2.9 s, 3.3 s], 3 seeds", None),
        ("no worse", "-1% [-2%, 0%], 3 seeds", None),
        ("4 x", "4.1x [3.9x, 4.3x], 3 seeds", None),
        ("4 s", "4% [3%, 5%], 3 seeds", None),
    ],
)
def test_an_interval_contains_the_papers_number_or_does_not(
    paper: str | float, headway: str, contains: bool | None
) -> None:
    assert has_papers_number(paper, headway) is contains


@pytest.mark.parametrize("name", PAPERS)
def test_a_quick_run_measures_half_of_the_abstract(name: str) -> None:
    system = load(name)
    left, sentences = full_only(system), abstract_of(system)
    assert left < {claim.id for claim in system.CLAIMS}
    measured = [any(each.claim not in left for each in sentence.readings) for sentence in sentences]
    assert 2 * sum(measured) >= len(measured)


@pytest.mark.parametrize("name", PAPERS)
def test_each_refuted_row_is_named_in_the_text_of_its_page(name: str) -> None:
    """Where the text says what was varied."""
    before, results, after = around_markers(PAGES / f"{name}.md")
    named = re.findall(r"`([*\w.-]+)`", before + after)
    patterns = [f"*{each}" if each.startswith("-") else each for each in named]
    rows = read_written(results, load(name).CLAIMS).rows
    refuted = [id for id, row in rows.items() if row.verdict == REFUTED]
    assert refuted
    assert not [id for id in refuted if not any(fnmatchcase(id, each) for each in patterns)]


@pytest.mark.parametrize(("scheme", "paper"), [("light", "#ffffff"), ("dark", "#14181d")])
def test_each_verdict_can_be_read_on_its_page(scheme: str, paper: str) -> None:
    """A contrast of at least 4.5 (WCAG 2.1, 1.4.3), of the words and of the white marks."""
    light, _, dark = CSS.partition("@media (prefers-color-scheme: dark)")
    for word in ("holds", "exceeds", "refuted", "undecided"):
        (text,) = re.findall(rf"\.{word} {{ color: (#\w{{6}})", light if scheme == "light" else dark)
        (mark,) = re.findall(rf"\.{word} \.mark {{ background: (#\w{{6}})", light)
        assert _contrast(text, paper) >= 4.5 and _contrast("#ffffff", mark) >= 4.5, word


def _contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminance, from 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
