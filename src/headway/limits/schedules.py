"""Minimum numbers of replicas by the clock: cron expressions, each with a duration and a time zone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from headway.core.errors import HeadwayError
from headway.core.fleet import ScheduledMinimum
from headway.limits.calendar import zone


def check(minimum: ScheduledMinimum) -> None:
    """Raises HeadwayError for an invalid cron expression or time zone, or an expression that never matches."""
    where = zone(minimum.time_zone)
    if len(minimum.cron.split()) != 5:
        raise HeadwayError(
            f"cron: {minimum.cron!r}; expected five fields (minute, hour, day, month, weekday), as in 0 8 * * 1-5"
        )
    try:
        next(CronSim(minimum.cron, datetime(2026, 1, 1, tzinfo=where)))
    except CronSimError as error:
        raise HeadwayError(f"cron: {minimum.cron!r}: {error}; expected five fields, as in 0 8 * * 1-5") from None
    except StopIteration:
        raise HeadwayError(f"cron: {minimum.cron!r} never comes true") from None


@dataclass(frozen=True)
class LeastReplicas:
    """The minimum number of replicas of one pool at any time. Implements `control.scaling.Least`."""

    always: int
    minimums: tuple[ScheduledMinimum, ...]

    def at(self, wall_s: float) -> tuple[int, float]:
        """The number at a time since the epoch, and the time until which it holds, in the same seconds."""
        least, until_s = self.always, inf
        for each in self.minimums:
            now = datetime.fromtimestamp(wall_s, ZoneInfo(each.time_zone))
            until_s = min(until_s, next(CronSim(each.cron, now), now + timedelta(days=366)).timestamp())
            # The latest start that is not after the time: the last match before the next minute.
            starts = CronSim(each.cron, now + timedelta(minutes=1), reverse=True)
            began_s = next((s for start in starts if (s := start.timestamp()) <= wall_s), -inf)
            if wall_s < began_s + each.duration_s:
                least = max(least, each.replicas)
                until_s = min(until_s, began_s + each.duration_s)
        return least, until_s
