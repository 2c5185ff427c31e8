"""The pacer's closed forms, against a reader who takes in a token at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.core.pacer import Pacer

NAN = float("nan")


@pytest.mark.parametrize(
    ("ttfat_s", "reasoning_end_s", "answer_s", "start_s"),
    [
        (0.25, 10.0, 10.125, 10.125),  # sooner than wanted: reading starts at once
        (0.25, 10.0, 12.0, 10.25),
        (0.25, 10.0, NAN, 10.25),  # not there yet, but wanted
        (0.0, 10.0, 10.125, 10.0),
        (None, 10.0, 12.0, 12.0),
        (None, 10.0, NAN, None),
        (0.25, NAN, 12.0, 12.0),
        (0.25, NAN, NAN, None),
    ],
)
def test_when_reading_starts(
    ttfat_s: float | None, reasoning_end_s: float, answer_s: float, start_s: float | None
) -> None:
    assert Pacer(ttfat_s).start_s(reasoning_end_s, answer_s) == start_s


@given(st.lists(st.floats(0, 0.5), max_size=30), st.sampled_from([0.0625, 0.125, 0.25]))
def test_a_reader_is_dry_when_more_tokens_are_wanted_than_came(gaps: list[float], tpot_s: float) -> None:
    pacer = Pacer(None, tpot_s)
    start_s = pacer.start_s(NAN, 1.0)
    assert start_s == 1.0
    now = 1.0
    for came, gap in enumerate(gaps, start=1):
        now += gap  # just before the next token comes
        wanted = sum(start_s + k * tpot_s < now for k in range(300))
        assert (wanted > came) == (pacer.run_dry_s(start_s, came) < now)


@pytest.mark.parametrize("given", [{"ttfat_s": -1.0}, {"ttfat_s": NAN}, {"tpot_s": 0.0}, {"tpot_s": NAN}])
def test_what_makes_no_sense(given: dict[str, float]) -> None:
    with pytest.raises(HeadwayError, match=r"pacer: .* expected seconds"):
        Pacer(**given)
