"""When tokens came: recovered from stretches and segments, without a row per token.

A request's tokens share their times with the other requests of its batch. So the gaps between tokens are the
gaps between a replica's ticks, each weighted by the number of requests that were there for both of its ends.
To these come the gap from a request's first token to its first tick, and those over preemptions and crashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headway.core.record import Columns, Records
from headway.metrics.columns import Floats, Ints, Mask, Rows, floats, ints, rows_by_code
from headway.metrics.gaps import Gaps, Part, Window, gap_runs, single

Near = tuple[Rows, Rows]
"""Of a clock's stretches, by position: see `Clock.near`."""


class Clock:
    """One replica's ticks."""

    def __init__(self, stretches: Columns, rows: Rows) -> None:
        tick = ints(stretches, "tick", rows)
        if len(tick) > 1 and (np.diff(tick) < 0).any():
            order = np.argsort(tick, kind="stable")
            tick, rows = tick[order], rows[order]
        self.tick: Ints = tick
        self.start_s: Floats = floats(stretches, "start_s", rows)
        self.a_s: Floats = floats(stretches, "a_s", rows)
        self.b_s: Floats = floats(stretches, "b_s", rows)
        self.iterations: Ints = ints(stretches, "iterations", rows)

    def at_s(self, ticks: Ints) -> Floats:
        """When these ticks ended."""
        index = np.searchsorted(self.tick, ticks) - 1
        return self._boundary_s(index, ticks - self.tick[index])

    def begun_s(self, ticks: Ints) -> Floats:
        """When the iterations of these ticks began."""
        index = np.searchsorted(self.tick, ticks) - 1
        return self._boundary_s(index, ticks - self.tick[index] - 1)

    def ticks_after_gaps(self, longer_than_s: float) -> Ints:
        """Ticks that came so long after the one before, and perhaps others of the same stretches; in order."""
        n = self.iterations
        inside = np.maximum(self.a_s + self.b_s, self.a_s + self.b_s * (n - 1)) > longer_than_s
        with np.errstate(invalid="ignore"):
            entry = self.entry_gaps_s > longer_than_s
        skipped = 1 - entry.astype(np.int64)
        count = np.where(inside & (n > 1), n, 1) - skipped
        return counted(self.tick + 1 + skipped, count)

    def _boundary_s(self, index: npt.NDArray[np.intp], k: Ints) -> Floats:
        # Term by term as `core.record.boundary_s`, so that both round alike.
        return self.start_s[index] + k * self.a_s[index] + self.b_s[index] * (k * (k - 1) // 2)

    @cached_property
    def entry_gaps_s(self) -> Floats:
        """From the tick before each stretch to the first one in it; NaN for the first stretch."""
        n = self.iterations
        end_s = self.start_s + n * self.a_s + self.b_s * (n * (n - 1) // 2)
        gaps = self.start_s + self.a_s
        gaps[1:] -= end_s[:-1]
        gaps[:1] = np.nan
        return gaps

    def near(self, windows: Sequence[Window]) -> Near:
        """The stretches whose entry gaps, and those whose other gaps, reach into windows that do not overlap."""
        if not windows:
            return _NO_ROWS, _NO_ROWS
        low_s, high_s = (np.array(ends) for ends in zip(*sorted(windows), strict=True))
        entry = self.entry_gaps_s
        at_entry = np.searchsorted(low_s, entry, side="right") > np.searchsorted(high_s, entry, side="right")
        one, other = self.a_s + self.b_s, self.a_s + self.b_s * (self.iterations - 1)
        # A little more on either side than that says, so that rounding loses none.
        least, most = np.minimum(one, other) * (1 - 1e-9), np.maximum(one, other) * (1 + 1e-9)
        inside = np.searchsorted(low_s, most, side="right") > np.searchsorted(high_s, least, side="right")
        return np.flatnonzero(at_entry), np.flatnonzero(inside & (self.iterations > 1))

    def parts(self, joined: Ints, left: Ints, near: Near | None = None) -> Iterator[Part]:
        """Gaps between ticks seen by the stays that began at tick `joined` and ended with tick `left`.

        Of all stretches, or of those `near` what is looked for.
        """
        joined, left = np.sort(joined), np.sort(left)
        at_entry, inside = near or (slice(None), slice(None))
        tick = self.tick[at_entry]
        at_both = np.searchsorted(joined, tick) - np.searchsorted(left, tick, side="right")
        yield single(self.entry_gaps_s[at_entry], at_both)
        tick = self.tick[inside]
        seen = np.searchsorted(joined, tick, side="right") - np.searchsorted(left, tick, side="right")
        a_s, b_s = self.a_s[inside], self.b_s[inside]
        yield gap_runs(a_s + b_s, b_s, self.iterations[inside] - 1, seen)


class Stays:
    """The segments in which at least one token came, of the requests asked for."""

    def __init__(self, segments: Columns, wanted: Mask) -> None:
        self.segments = segments
        self._some: Mask = segments["left_tick"] != segments["joined_tick"]
        self._some |= ~np.isnan(floats(segments, "prefill_end_s"))
        self._some &= wanted[segments["request"]]
        self.by_replica = rows_by_code(segments["replica"], self._some)

    @property
    def rows(self) -> Rows:
        """All of them."""
        return np.flatnonzero(self._some)

    def request(self, rows: Rows) -> Ints:
        """Whose they are."""
        return ints(self.segments, "request", rows)

    def joined(self, rows: Rows) -> Ints:
        """The tick after which ticks gave it tokens."""
        return ints(self.segments, "joined_tick", rows)

    def left(self, rows: Rows) -> Ints:
        """The last tick that gave it a token."""
        return ints(self.segments, "left_tick", rows)

    def prefill_end_s(self, rows: Rows) -> Floats:
        """When its first token came, if the prefill gave one."""
        return floats(self.segments, "prefill_end_s", rows)

    def ticking(self, rows: Rows) -> Rows:
        """Those to which a tick gave a token."""
        return rows[self.left(rows) > self.joined(rows)]

    def begun(self, rows: Rows) -> Rows:
        """Those to which a prefill gave a token."""
        return rows[~np.isnan(self.prefill_end_s(rows))]

    def repeated(self) -> Rows:
        """Rows of requests with more than one stay, by request and then by time."""
        request = self.segments["request"]
        stays = np.zeros(int(request.max(initial=-1)) + 1, dtype=np.int32)
        np.add.at(stays, ints(self.segments, "request", self._some), 1)
        rows = np.flatnonzero((stays > 1)[request] & self._some)
        order = np.lexsort((self.segments["end_s"][rows], request[rows]))
        return np.asarray(rows[order])


def clocks(stretches: Columns) -> Iterator[tuple[int, Clock]]:
    """Each replica's clock, one at a time."""
    ticking = (stretches["advances"] != 0) & (stretches["iterations"] != 0)
    for replica, rows in rows_by_code(stretches["replica"], ticking).items():
        yield replica, Clock(stretches, rows)


def inter_token_gaps(records: Records, group: npt.NDArray[np.integer]) -> dict[int, Gaps]:
    """Inter-token latencies by group; `group` is a code per request id, negative = left out."""
    stays = Stays(records.segments, group >= 0)
    parts: dict[int, list[Part]] = {}
    ends = Ends(stays)
    for replica, clock in clocks(records.stretches):
        rows = stays.by_replica.get(replica, _NO_ROWS)
        code = group[stays.request(rows)]
        for one in np.unique(code):
            parts.setdefault(int(one), []).extend(stay_parts(clock, stays, rows[code == one]))
        ends.note(clock, replica)
    gaps_s, requests = ends.resumptions()
    code = group[requests]
    for one in np.unique(code):
        parts.setdefault(int(one), []).append(single(gaps_s[code == one]))
    return {one: Gaps(found) for one, found in parts.items()}


def stay_parts(clock: Clock, stays: Stays, rows: Rows, near: Near | None = None) -> list[Part]:
    """Gaps within stays: from a prefill's token to the first tick, and between ticks (or some, see `Clock.parts`)."""
    rows = stays.ticking(rows)
    begun = stays.begun(rows)
    to_first_tick_s = clock.at_s(stays.joined(begun) + 1) - stays.prefill_end_s(begun)
    return [*clock.parts(stays.joined(rows), stays.left(rows), near), single(to_first_tick_s)]


class Ends:
    """First and last token of each stay of the requests with several."""

    def __init__(self, stays: Stays) -> None:
        self.stays = stays
        self.rows = stays.repeated()
        # Until a clock says better: NaN where the prefill gave no token.
        self.first_s, self.last_s = stays.prefill_end_s(self.rows), stays.prefill_end_s(self.rows)
        self.here = rows_by_code(stays.segments["replica"][self.rows])

    def note(self, clock: Clock, replica: int) -> None:
        """Fill in what this replica's clock tells."""
        index = self.here.get(replica, _NO_ROWS)
        joined, left = self.stays.joined(self.rows[index]), self.stays.left(self.rows[index])
        ticked = left > joined
        index, joined, left = index[ticked], joined[ticked], left[ticked]
        self.last_s[index] = clock.at_s(left)
        first_s = self.first_s[index]
        self.first_s[index] = np.where(np.isnan(first_s), clock.at_s(joined + 1), first_s)

    def resumptions(self) -> tuple[Floats, Ints]:
        """From the last token of a stay to the first of the next, and whose they are."""
        request = self.stays.request(self.rows)
        same = request[1:] == request[:-1]
        return (self.first_s[1:] - self.last_s[:-1])[same], request[1:][same]


_NO_ROWS: Rows = np.empty(0, dtype=np.intp)


def token_times(records: Records, request_ids: Sequence[int]) -> dict[int, Floats]:
    """When each output token of these requests came, in seconds, in order."""
    wanted = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    wanted[np.asarray(request_ids, dtype=np.int64)] = True
    stays = Stays(records.segments, wanted)
    begun = stays.begun(stays.rows)
    of_request, times_s = [stays.request(begun)], [stays.prefill_end_s(begun)]
    for replica, clock in clocks(records.stretches):
        rows = stays.by_replica.get(replica, _NO_ROWS)
        joined = stays.joined(rows)
        count = stays.left(rows) - joined
        times_s.append(clock.at_s(counted(joined + 1, count)))
        of_request.append(np.repeat(stays.request(rows), count))
    request, time_s = np.concatenate(of_request), np.concatenate(times_s)
    order = np.lexsort((time_s, request))
    request, time_s = request[order], time_s[order]
    low = np.searchsorted(request, request_ids)
    high = np.searchsorted(request, request_ids, side="right")
    return {int(i): time_s[a:b] for i, a, b in zip(request_ids, low, high, strict=True)}


def counted(first: Ints, count: Ints) -> Ints:
    """first, first + 1, ..., `count` numbers for each pair, one after the other."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(first - (ends - count), count))
