"""Upper limits of counts in user input. Work with larger counts would not finish, or not fit in memory."""

from __future__ import annotations

from headway.core.errors import HeadwayError

MOST_REPLICAS = 100_000
"""Maximum replicas of one pool or combo."""
MOST_GPUS = 1_000_000
"""Maximum GPUs of one type."""
MOST_SEEDS = 10_000
MOST_PROCESSES = 256
MOST_OTHER = 1_000_000_000
"""Maximum of every other count."""


def check_count(name: str, count: int, most: int = MOST_OTHER, least: int = 1) -> None:
    """Raise HeadwayError for a number outside of `least` to `most`."""
    if count < least:
        raise HeadwayError(f"{name}: {count}; expected a whole number of {least} or more")
    if count > most:
        raise HeadwayError(f"{name}: {count}; expected at most {most:,}")
