"""Times of the week, as users write them."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from headway.core.errors import HeadwayError
from headway.limits.calendar import weekly

MONDAY = datetime(2026, 3, 2)


def inside(text: str) -> list[str]:
    """The half hours of a week that are in the window, joined where they touch."""
    window, spans = weekly(text), list[list[datetime]]()
    for i in range(7 * 48):
        at = MONDAY + timedelta(minutes=30 * i)
        if window.contains(at):
            if spans and spans[-1][1] == at:
                spans[-1][1] = at + timedelta(minutes=30)
            else:
                spans.append([at, at + timedelta(minutes=30)])
    return [f"{start:%a %H:%M} {end:%a %H:%M}" for start, end in spans]


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("Mon 08:00-10:00", ["Mon 08:00 Mon 10:00"]),
        ("fri 22:00-06:30", ["Fri 22:00 Sat 06:30"]),
        ("Sun 23:00-01:00", ["Mon 00:00 Mon 01:00", "Sun 23:00 Mon 00:00"]),
        ("Sat-Mon 12:00-12:30", ["Mon 12:00 Mon 12:30", "Sat 12:00 Sat 12:30", "Sun 12:00 Sun 12:30"]),
        ("Tue 00:00-24:00", ["Tue 00:00 Wed 00:00"]),
    ],
)
def test_a_window_is_the_times_that_it_says(text: str, spans: list[str]) -> None:
    assert inside(text) == spans


def test_without_a_day_it_is_every_day() -> None:
    assert len(inside("08:00-10:00")) == 7


@pytest.mark.parametrize(
    "text", ["Monday 08:00-10:00", "Mon 8-10", "Mon 25:00-26:00", "Mon 08:60-09:00", "Xyz 08:00-09:00", ""]
)
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(HeadwayError, match="expected a time of the week"):
        weekly(text)
