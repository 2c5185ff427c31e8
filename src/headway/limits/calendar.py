"""Calendar times and time zones in the notation of users."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from headway.core.errors import HeadwayError


def zone(name: str) -> ZoneInfo:
    """The time zone with this name in the IANA database. Raises HeadwayError for an unknown name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise HeadwayError(f"time zone {name!r}; expected a name such as UTC or Europe/Berlin") from None


def moment(text: str, where: ZoneInfo) -> datetime:
    """Parse a date, or a date and time. Without an offset, it is in the time zone `where`. Raises HeadwayError for
    another text."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise HeadwayError(f"{text!r}; expected a date and time, as in 2026-03-02T00:00") from None
    return found.replace(tzinfo=where) if found.tzinfo is None else found.astimezone(where)


class Today:
    """The day of a wall clock. It stays the same when the clock is set back by less than a day."""

    def __init__(self, read: Callable[[], date]) -> None:
        self._read, self._last = read, date.min

    def __call__(self) -> date:
        found = self._read()
        if self._last != found + timedelta(days=1):
            self._last = found
        return self._last


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_WINDOW = re.compile(r"(?:([A-Za-z]{3})(?:-([A-Za-z]{3}))? +)?(\d\d):(\d\d) *- *(\d\d):(\d\d)")


@dataclass(frozen=True)
class WeeklyWindow:
    """A time window on some days of each week. A window that ends before it begins continues after midnight."""

    days: frozenset[int]
    """Days on which the window begins; 0 is Monday."""
    start_min: int
    """Minutes since midnight."""
    end_min: int

    def contains(self, when: datetime) -> bool:
        """Whether a local time lies in the window."""
        minute, day = 60 * when.hour + when.minute, when.weekday()
        if self.start_min < self.end_min:
            return day in self.days and self.start_min <= minute < self.end_min
        return (day in self.days and minute >= self.start_min) or ((day - 1) % 7 in self.days and minute < self.end_min)


def weekly(text: str) -> WeeklyWindow:
    """Parse a window such as `Mon 08:00-10:00`, `Mon-Fri 22:00-06:00` or `08:00-10:00`. Raises HeadwayError for another
    text."""
    found = _WINDOW.fullmatch(text.strip())
    if found is None:
        raise _no_window(text)
    first, last, *numbers = found.groups()
    names = [each.capitalize() for each in (first, last) if each is not None]
    from_hour, from_min, to_hour, to_min = map(int, numbers)
    start_min, end_min = 60 * from_hour + from_min, 60 * to_hour + to_min
    if any(name not in _DAYS for name in names) or max(from_min, to_min) > 59 or start_min >= 1440 or end_min > 1440:
        raise _no_window(text)
    at = [_DAYS.index(name) for name in names]
    num = 7 if not at else (at[-1] - at[0]) % 7 + 1
    return WeeklyWindow(frozenset((at[0] + i) % 7 if at else i for i in range(num)), start_min, end_min)


def _no_window(text: str) -> HeadwayError:
    return HeadwayError(
        f"{text!r}; expected a time of the week, as in Mon 08:00-10:00, Mon-Fri 22:00-06:00 or 08:00-10:00"
    )
