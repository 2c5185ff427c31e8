"""Times of the calendar and time zones, as users write them."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from headway.core.errors import HeadwayError


def zone(name: str) -> ZoneInfo:
    """A time zone by its name in the IANA database. HeadwayError for another name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise HeadwayError(f"time zone {name!r}; expected a name such as UTC or Europe/Berlin") from None


def moment(text: str, where: ZoneInfo) -> datetime:
    """A date, or a date and time; without an offset, of this time zone. HeadwayError for another text."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise HeadwayError(f"{text!r}; expected a date and time, as in 2026-03-02T00:00") from None
    return found.replace(tzinfo=where) if found.tzinfo is None else found.astimezone(where)
