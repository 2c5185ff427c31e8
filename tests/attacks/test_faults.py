"""Engines that fail in every way, under load: what clients see (the short form of `bench/faults.py`)."""

from __future__ import annotations

import pytest

pytest.importorskip("httptools")

from attacking import SCALE
from faulty import faults

SHORT = ("killed", "hang", "garbage", "401", "poison", "worker", "scheduler", "all")
"""Each of the others is a variant of one of these, or has a test of its own."""
LONG_S, SHORT_S = 8.0, 2.0
MAX_ATTEMPTS = 3
FOUND_S = {"killed": 2.0, "hang": 8.0, "garbage": 5.0, "401": 5.0}
"""Limits for a busy machine, judged by `make attack`; docs/reliability.md has the times of an idle one."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", list(faults.CASES) if SCALE > 1 else SHORT)
def test_answers_are_right_or_say_that_they_are_not(case: str) -> None:
    seen = faults.run(case, LONG_S if SCALE > 1 else SHORT_S)
    assert seen.num_wrong == 0 and seen.num_whole > 0
    assert seen.most_executions <= MAX_ATTEMPTS
    if case == "poison":
        assert dict(seen.errors) == {"request_quarantined": 3} and seen.num_dead == 2
    else:
        assert not seen.errors
    if case in FOUND_S:
        assert seen.found_s is not None
        assert SCALE == 1 or seen.found_s < FOUND_S[case]


def test_the_page_shows_every_case() -> None:
    page = faults.PAGE.read_text()
    assert all(f"| {name} |" in page for name, _ in faults.CASES.values())
