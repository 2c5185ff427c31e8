"""When tokens came: recovered from stretches and segments, without a row per token.

A request's tokens share their times with the other requests of its batch. So the gaps between tokens are the
gaps between a replica's ticks, each weighted by the number of requests that were there for both of its ends.
To these come the gap from a request's first token to its first tick, and the gaps over preemptions and crashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headway.core.record import Columns, Records
from headway.metrics.columns import Floats, Ints, Mask, Rows, floats, ints
from headway.metrics.gaps import Gaps, Part, part, single


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

    def _boundary_s(self, index: npt.NDArray[np.intp], k: Ints) -> Floats:
        # Term by term as `core.record.boundary_s`, so that both round alike.
        return self.start_s[index] + k * self.a_s[index] + self.b_s[index] * (k * (k - 1) // 2)

    def entry_gaps_s(self) -> Floats:
        """From the tick before each stretch to the first one in it; NaN for the first stretch."""
        n = self.iterations
        end_s = self.start_s + n * self.a_s + self.b_s * (n * (n - 1) // 2)
        gaps = self.start_s + self.a_s
        gaps[1:] -= end_s[:-1]
        gaps[:1] = np.nan
        return gaps

    def parts(self, joined: Ints, left: Ints) -> Iterator[Part]:
        """Gaps between ticks seen by the stays that began at tick `joined` and ended with tick `left`."""
        joined, left = np.sort(joined), np.sort(left)
        gone = np.searchsorted(left, self.tick, side="right")
        at_both = np.searchsorted(joined, self.tick) - gone
        yield part(self.entry_gaps_s(), np.zeros(len(gone)), np.ones_like(gone), at_both)
        inside = np.searchsorted(joined, self.tick, side="right") - gone
        yield part(self.a_s + self.b_s, self.b_s, self.iterations - 1, inside)


class Stays:
    """The segments in which at least one token came, of the requests asked for."""

    def __init__(self, segments: Columns, wanted: Mask) -> None:
        has_first = ~np.isnan(floats(segments, "prefill_end_s"))
        has_tick = ints(segments, "left_tick") > ints(segments, "joined_tick")
        has_token = (has_first | has_tick) & wanted[segments["request"]]
        rows = np.flatnonzero(has_token)
        self.request: Ints = ints(segments, "request", rows)
        self.replica: Ints = ints(segments, "replica", rows)
        self.joined: Ints = ints(segments, "joined_tick", rows)
        self.left: Ints = ints(segments, "left_tick", rows)
        self.prefill_end_s: Floats = floats(segments, "prefill_end_s", rows)
        self.end_s: Floats = floats(segments, "end_s", rows)

    def repeated(self) -> Rows:
        """Rows of requests with more than one stay, by request and then by time."""
        stays = np.bincount(self.request) if len(self.request) else np.empty(0, dtype=np.int64)
        rows = np.flatnonzero(stays[self.request] > 1)
        return rows[np.lexsort((self.end_s[rows], self.request[rows]))]


def rows_by_replica(replicas: npt.NDArray[np.generic], among: Rows | None = None) -> dict[int, Rows]:
    """Row numbers of each replica, in their order in the table."""
    column = replicas if among is None else replicas[among]
    if not len(column):
        return {}
    narrow = column.astype(np.int16) if column.min() >= -1 and column.max() < 2**15 else column
    order = np.argsort(narrow, kind="stable")
    codes, begins = np.unique(column[order], return_index=True)
    rows = order if among is None else among[order]
    return dict(zip(codes.tolist(), np.split(rows, begins[1:]), strict=True))


def clocks(stretches: Columns) -> Iterator[tuple[int, Clock]]:
    """Each replica's clock, one at a time."""
    ticking = np.flatnonzero((stretches["advances"] != 0) & (stretches["iterations"] != 0))
    for replica, rows in rows_by_replica(stretches["replica"], ticking).items():
        yield replica, Clock(stretches, rows)


def inter_token_gaps(records: Records, group: npt.NDArray[np.integer]) -> dict[int, Gaps]:
    """Inter-token latencies by group; `group` is a code per request id, negative = left out."""
    stays = Stays(records.segments, group >= 0)
    code = group[stays.request]
    here = rows_by_replica(stays.replica)
    repeated = stays.repeated()
    first_s, last_s = np.full(len(code), np.nan), np.full(len(code), np.nan)
    again = np.zeros(len(code), dtype=np.bool_)
    again[repeated] = True
    parts: dict[int, list[Part]] = {int(c): [] for c in np.unique(code)}
    for replica, clock in clocks(records.stretches):
        rows = here.get(replica)
        if rows is None:
            continue
        for one in np.unique(code[rows]):
            parts[int(one)] += _stay_parts(clock, stays, rows[code[rows] == one])
        _note_ends(clock, stays, rows[again[rows]], first_s, last_s)
    _note_prefills(stays, repeated, first_s, last_s)
    for one, gaps in _resumptions(stays, repeated, code, first_s, last_s):
        parts[one].append(gaps)
    return {one: Gaps(found) for one, found in parts.items()}


def inter_token_gaps_by_replica(records: Records, wanted: Mask) -> Iterator[tuple[int, Gaps]]:
    """Within the stays at each replica: gaps over preemptions and crashes are left out."""
    stays = Stays(records.segments, wanted)
    here = rows_by_replica(stays.replica)
    for replica, clock in clocks(records.stretches):
        if replica in here:
            yield replica, Gaps(_stay_parts(clock, stays, here[replica]))


def _stay_parts(clock: Clock, stays: Stays, rows: Rows) -> list[Part]:
    """Gaps within stays: from a prefill's token to the first tick, and between ticks."""
    rows = rows[stays.left[rows] > stays.joined[rows]]
    begun = rows[~np.isnan(stays.prefill_end_s[rows])]
    to_first_tick = clock.at_s(stays.joined[begun] + 1) - stays.prefill_end_s[begun]
    return [*clock.parts(stays.joined[rows], stays.left[rows]), single(to_first_tick)]


def _note_ends(clock: Clock, stays: Stays, rows: Rows, first_s: Floats, last_s: Floats) -> None:
    rows = rows[stays.left[rows] > stays.joined[rows]]
    first_s[rows] = clock.at_s(stays.joined[rows] + 1)
    last_s[rows] = clock.at_s(stays.left[rows])


def _note_prefills(stays: Stays, rows: Rows, first_s: Floats, last_s: Floats) -> None:
    begun = rows[~np.isnan(stays.prefill_end_s[rows])]
    first_s[begun] = stays.prefill_end_s[begun]
    alone = begun[stays.left[begun] == stays.joined[begun]]
    last_s[alone] = stays.prefill_end_s[alone]


def _resumptions(
    stays: Stays, rows: Rows, code: npt.NDArray[np.integer], first_s: Floats, last_s: Floats
) -> Iterator[tuple[int, Part]]:
    """From the last token of a stay to the first of the next."""
    same = stays.request[rows[1:]] == stays.request[rows[:-1]]
    before, after = rows[:-1][same], rows[1:][same]
    gaps = first_s[after] - last_s[before]
    for one in np.unique(code[after]):
        yield int(one), single(gaps[code[after] == one])


def token_times(records: Records, request_ids: Sequence[int]) -> dict[int, Floats]:
    """When each output token of these requests came, in seconds, in order."""
    wanted = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    wanted[np.asarray(request_ids, dtype=np.int64)] = True
    stays = Stays(records.segments, wanted)
    here = rows_by_replica(stays.replica)
    of_request: list[Ints] = [np.empty(0, dtype=np.int64)]
    times: list[Floats] = [np.empty(0)]
    for replica, clock in clocks(records.stretches):
        rows = here.get(replica, np.empty(0, dtype=np.intp))
        count = stays.left[rows] - stays.joined[rows]
        ticks = _counted(stays.joined[rows] + 1, count)
        times.append(clock.at_s(ticks))
        of_request.append(np.repeat(stays.request[rows], count))
    begun = ~np.isnan(stays.prefill_end_s)
    times.append(stays.prefill_end_s[begun])
    of_request.append(stays.request[begun])
    request, time_s = np.concatenate(of_request), np.concatenate(times)
    order = np.lexsort((time_s, request))
    request, time_s = request[order], time_s[order]
    low = np.searchsorted(request, request_ids)
    high = np.searchsorted(request, request_ids, side="right")
    return {int(i): time_s[a:b] for i, a, b in zip(request_ids, low, high, strict=True)}


def _counted(first: Ints, count: Ints) -> Ints:
    """first, first + 1, ..., `count` numbers for each pair, one after the other."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(first - (ends - count), count))
