"""Token times, recovered from stretches and segments without a row per token.

The tokens of a request share their times with the other requests of its batch. The gaps between tokens are therefore
the gaps between a replica's ticks, each weighted by the number of requests present at both ends. In addition there are
the gap from a request's first token to its first tick, and the gaps over preemptions and crashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headway.core.record import Columns, Records
from headway.metrics.columns import BLOCK_ROWS, Floats, Ints, Mask, Rows, floats, ints, ranges, rows_by_code
from headway.metrics.gaps import Codes, GapRuns, Gaps, Window, gap_runs, single_gaps

NearRows = tuple[Rows, Rows]
"""Positions of stretches, as returned by `TickClock.near`."""


class TickClock:
    """Times of the ticks of one replica, or of several with a `span` (see `tick_span`)."""

    low, high = -1, np.iinfo(np.int64).max
    """The clock has the ticks `low` + 1 to `high`: all ticks, or those of a window (`windows`)."""

    def __init__(self, stretches: Columns, rows: Rows, span: int = 0) -> None:
        tick = ints(stretches, "tick", rows)
        if span:
            tick = tick + span * ints(stretches, "replica", rows)
        if len(tick) > 1 and (np.diff(tick) < 0).any():
            order = np.argsort(tick, kind="stable")
            tick, rows = tick[order], rows[order]
        self.tick: Ints = tick
        self.start_s: Floats = floats(stretches, "start_s", rows)
        self.a_s: Floats = floats(stretches, "a_s", rows)
        self.b_s: Floats = floats(stretches, "b_s", rows)
        self.iterations: Ints = ints(stretches, "iterations", rows)
        self.replica = stretches["replica"][rows]

    @classmethod
    def windows(cls, stretches: Columns, rows: Rows, span: int) -> Iterator[TickClock]:
        """Clocks of consecutive parts of one replica's ticks, to bound memory. The rows are in order of ticks."""
        for first in range(0, len(rows), _WINDOW_ROWS):
            clock = cls(stretches, rows[max(first - 1, 0) : first + _WINDOW_ROWS], span)
            if first:
                clock._drop_first()
            if first + _WINDOW_ROWS < len(rows):
                clock.high = int(clock.tick[-1] + clock.iterations[-1])
            yield clock

    def _drop_first(self) -> None:
        """Drop the first stretch, which only tells the gap before the second one."""
        self.entry_gaps_s = self.entry_gaps_s[1:]
        self.tick, self.iterations, self.replica = self.tick[1:], self.iterations[1:], self.replica[1:]
        self.start_s, self.a_s, self.b_s = self.start_s[1:], self.a_s[1:], self.b_s[1:]
        self.low = int(self.tick[0])

    @property
    def is_whole(self) -> bool:
        """Whether the clock has all ticks of its replicas."""
        return self.low == TickClock.low and self.high == TickClock.high

    def at_s(self, ticks: Ints) -> Floats:
        index = np.searchsorted(self.tick, ticks) - 1
        return self._boundary_s(index, ticks - self.tick[index])

    def begun_s(self, ticks: Ints) -> Floats:
        index = np.searchsorted(self.tick, ticks) - 1
        return self._boundary_s(index, ticks - self.tick[index] - 1)

    def ticks_after_gaps(self, longer_than_s: float) -> Ints:
        """Ticks that came more than `longer_than_s` after the previous one, in order. Other ticks of the same stretches
        may be included."""
        n = self.iterations
        inside = np.maximum(self.a_s + self.b_s, self.a_s + self.b_s * (n - 1)) > longer_than_s
        with np.errstate(invalid="ignore"):
            entry = self.entry_gaps_s > longer_than_s
        skipped = 1 - entry.astype(np.int64)
        count = np.where(inside & (n > 1), n, 1) - skipped
        return ranges(self.tick + 1 + skipped, count)

    def _boundary_s(self, index: npt.NDArray[np.intp], k: Ints) -> Floats:
        # The same order of terms as in `sim.timeline.boundary_s`, so that both round equally.
        return self.start_s[index] + k * self.a_s[index] + self.b_s[index] * (k * (k - 1) // 2)

    @cached_property
    def entry_gaps_s(self) -> Floats:
        """Gap between the last tick before each stretch and its first tick; NaN for a replica's first stretch."""
        n = self.iterations
        end_s = self.start_s + n * self.a_s + self.b_s * (n * (n - 1) // 2)
        gaps = self.start_s + self.a_s
        gaps[1:] -= end_s[:-1]
        gaps[:1] = np.nan
        gaps[1:][self.replica[1:] != self.replica[:-1]] = np.nan
        return gaps

    def near(self, windows: Sequence[Window]) -> NearRows:
        """Positions of stretches whose entry gaps overlap the (disjoint) windows, and positions of stretches whose
        other gaps overlap the windows."""
        if not windows:
            return _NO_ROWS, _NO_ROWS
        low_s, high_s = (np.array(ends) for ends in zip(*sorted(windows), strict=True))
        entry = self.entry_gaps_s
        at_entry = np.searchsorted(low_s, entry, side="right") > np.searchsorted(high_s, entry, side="right")
        one, other = self.a_s + self.b_s, self.a_s + self.b_s * (self.iterations - 1)
        # slightly wider on either side, so that rounding loses none
        least, most = np.minimum(one, other) * (1 - 1e-9), np.maximum(one, other) * (1 + 1e-9)
        inside = np.searchsorted(low_s, most, side="right") > np.searchsorted(high_s, least, side="right")
        return np.flatnonzero(at_entry), np.flatnonzero(inside & (self.iterations > 1))

    def parts(self, joined: Ints, left: Ints, near: NearRows | None = None) -> Iterator[tuple[GapRuns, Codes]]:
        """Gaps between ticks for segments that began at tick `joined` and ended with tick `left`, and the replica of
        each run of gaps.

        `near` restricts the stretches to those returned by `near()`.
        """
        joined, left = np.sort(joined), np.sort(left)
        at_entry, inside = near or (slice(None), slice(None))
        tick = self.tick[at_entry]
        at_both = np.searchsorted(joined, tick) - np.searchsorted(left, tick, side="right")
        yield single_gaps(self.entry_gaps_s[at_entry], at_both), self.replica[at_entry][at_both > 0]
        tick = self.tick[inside]
        seen = np.searchsorted(joined, tick, side="right") - np.searchsorted(left, tick, side="right")
        a_s, b_s, count = self.a_s[inside], self.b_s[inside], self.iterations[inside] - 1
        yield gap_runs(a_s + b_s, b_s, count, seen), self.replica[inside][(seen > 0) & (count > 0)]


class AcceptedTokens:
    """Additional tokens of iterations beyond one per request, by request, replica and tick."""

    def __init__(self, drafts: Columns) -> None:
        self._num_ticks = 1 + int(drafts["tick"].max(initial=0)) if drafts else 1
        self._num_replicas = 1 + int(drafts["replica"].max(initial=0)) if drafts else 1
        if drafts:
            keys = self._keys(ints(drafts, "request"), ints(drafts, "replica"), ints(drafts, "tick"))
            order = np.argsort(keys)
            self._sorted, self._total = keys[order], np.append(0, np.cumsum(ints(drafts, "tokens")[order]))
        else:
            self._sorted, self._total = np.empty(0, np.int64), np.zeros(1, np.int64)

    def _keys(self, request: Ints, replica: Ints, tick: Ints) -> Ints:
        of_stay = request * self._num_replicas + np.minimum(replica, self._num_replicas - 1)
        return np.asarray(of_stay * self._num_ticks + np.minimum(tick, self._num_ticks - 1))

    def between(self, request: Ints, replica: Ints, after: Ints, until: Ints) -> Ints:
        """Tokens accepted at the replica's ticks `after` + 1 to `until`."""
        if not len(self._sorted):
            return np.zeros(len(request), np.int64)
        known = replica < self._num_replicas
        ends = (
            np.searchsorted(self._sorted, self._keys(request, replica, tick), side="right") for tick in (after, until)
        )
        before, so_far = (self._total[index] for index in ends)
        return np.where(known, so_far - before, 0)


class TokenSegments:
    """The segments with at least one token, of the requests in the mask `wanted`.

    With a `span`, ticks are numbered on a clock of several replicas.
    """

    def __init__(self, segments: Columns, wanted: Mask, span: int = 0) -> None:
        self.table = segments
        self._span = span
        self._some: Mask = segments["left_tick"] != segments["joined_tick"]
        self._some |= ~np.isnan(floats(segments, "prefill_end_s"))
        self._some &= wanted[segments["request"]]
        self.by_replica = rows_by_code(segments["replica"], self._some)
        self._spans: dict[int, _BlockSpans] = {}
        """Of replicas that are read in windows."""

    @property
    def rows(self) -> Rows:
        return np.flatnonzero(self._some)

    def request(self, rows: Rows) -> Ints:
        return ints(self.table, "request", rows)

    def joined(self, rows: Rows) -> Ints:
        """The tick before the first one that generated a token of the segment."""
        return self._ticks("joined_tick", rows)

    def left(self, rows: Rows) -> Ints:
        """The last tick that generated a token of the segment."""
        return self._ticks("left_tick", rows)

    def _ticks(self, name: str, rows: Rows) -> Ints:
        ticks = ints(self.table, name, rows)
        return ticks + self._span * ints(self.table, "replica", rows) if self._span else ticks

    def prefill_end_s(self, rows: Rows) -> Floats:
        """Time of the token that the prefill generated, NaN if there is none."""
        return floats(self.table, "prefill_end_s", rows)

    def decoded(self, rows: Rows) -> Rows:
        """The rows for which a tick generated a token."""
        return rows[self.left(rows) > self.joined(rows)]

    def prefilled(self, rows: Rows) -> Rows:
        """The rows for which the prefill generated a token."""
        return rows[~np.isnan(self.prefill_end_s(rows))]

    def during(self, replicas: Sequence[int], clock: TickClock) -> Rows:
        """The rows of these replicas that overlap the ticks of the clock; of one replica if these are a window."""
        if clock.is_whole:
            return rows_of(self.by_replica, replicas)
        found = [self._near(replica, clock) for replica in replicas if replica in self.by_replica]
        rows = np.concatenate(found) if found else _NO_ROWS
        return rows[(self.left(rows) > clock.low) & (self.joined(rows) < clock.high)]

    def _near(self, replica: int, clock: TickClock) -> Rows:
        if replica not in self._spans:
            self._spans[replica] = _BlockSpans(self, self.by_replica[replica])
        return self.by_replica[replica][self._spans[replica].near(clock)]

    def repeated(self) -> Rows:
        """Rows of requests with several segments, by request and then by time."""
        request = self.table["request"]
        once, again = (np.zeros(int(request.max(initial=-1)) + 1, dtype=np.bool_) for _ in range(2))
        for low in range(0, len(request), BLOCK_ROWS):
            block = slice(low, low + BLOCK_ROWS)
            ids, counts = np.unique(request[block][self._some[block]], return_counts=True)
            again[ids] |= once[ids] | (counts > 1)
            once[ids] = True
        rows = np.flatnonzero(again[request] & self._some)
        order = np.lexsort((self.table["end_s"][rows], request[rows]))
        return np.asarray(rows[order])


def clocks(stretches: Columns) -> Iterator[tuple[int, TickClock]]:
    """Yield the id and the clock of each replica."""
    for replica, rows in rows_by_code(stretches["replica"], _ticking(stretches)).items():
        yield replica, TickClock(stretches, rows)


def tick_span(records: Records) -> int:
    """A number above every tick number. Adding `span * replica` makes tick numbers unique among replicas, so that many
    small replicas are read at once."""
    stretches = records.stretches
    last = int(stretches["tick"].max(initial=0)) + int(stretches["iterations"].max(initial=0))
    return 2 + max(last, int(records.segments["left_tick"].max(initial=0)))


def joint_clocks(stretches: Columns, span: int) -> Iterator[tuple[list[int], TickClock]]:
    """Yield groups of replicas that are read at once: their ids, and one clock for all of them. A group ends at
    `_JOINT_ROWS` stretches. A replica with more than `_WINDOW_ROWS` is yielded several times, with its windows."""
    by_replica = rows_by_code(stretches["replica"], _ticking(stretches))
    replicas: list[int] = []
    num = 0
    for replica, rows in by_replica.items():
        if len(rows) > _WINDOW_ROWS and (np.diff(stretches["tick"][rows]) >= 0).all():
            yield from (([replica], clock) for clock in TickClock.windows(stretches, rows, span))
            continue
        if replicas and num + len(rows) > _JOINT_ROWS:
            yield replicas, TickClock(stretches, np.concatenate([by_replica[each] for each in replicas]), span)
            replicas, num = [], 0
        replicas.append(replica)
        num += len(rows)
    if replicas:
        yield replicas, TickClock(stretches, np.concatenate([by_replica[each] for each in replicas]), span)


def _ticking(stretches: Columns) -> Mask:
    return np.asarray((stretches["advances"] != 0) & (stretches["iterations"] != 0))


_JOINT_ROWS = 1 << 16
"""Stretches of several replicas that are read at once."""
_WINDOW_ROWS = 1 << 18
"""Stretches of one replica that are read at once."""
_SPAN_ROWS = 1 << 14
"""Segments of one replica whose span of ticks is kept."""


def inter_token_gaps(records: Records, group: npt.NDArray[np.integer]) -> dict[int, Gaps]:
    """Inter-token latencies by group. `group` is a code per request id; negative = excluded."""
    segments = TokenSegments(records.segments, group >= 0)
    parts: dict[int, list[GapRuns]] = {}
    ends = SegmentEnds(segments)
    for replica, clock in clocks(records.stretches):
        rows = segments.by_replica.get(replica, _NO_ROWS)
        for one, positions in rows_by_code(group[segments.request(rows)]).items():
            parts.setdefault(one, []).extend(runs for runs, _ in segment_parts(clock, segments, rows[positions]))
        ends.add(clock, [replica])
    gaps_s, requests = ends.resumptions()
    for one, positions in rows_by_code(group[requests]).items():
        parts.setdefault(one, []).append(single_gaps(gaps_s[positions]))
    return {one: Gaps(group_parts) for one, group_parts in parts.items()}


def segment_parts(
    clock: TickClock, segments: TokenSegments, rows: Rows, near: NearRows | None = None
) -> list[tuple[GapRuns, Codes]]:
    """Gaps within segments: from a prefill's token to the first tick, and between ticks (see `TickClock.parts`).

    Each run comes with its replica. The runs of a replica are consecutive if its `rows` are.
    """
    rows = segments.decoded(rows)
    begun = segments.prefilled(rows)
    if not clock.is_whole:
        begun = begun[segments.joined(begun) >= clock.low]
    to_first_tick_s = clock.at_s(segments.joined(begun) + 1) - segments.prefill_end_s(begun)
    to_first = single_gaps(to_first_tick_s), segments.table["replica"][begun]
    return [*clock.parts(segments.joined(rows), segments.left(rows), near), to_first]


class _BlockSpans:
    """The span of ticks of each block of segments, by which the segments near a window are found without reading all.
    Segments of a replica are recorded in order of their ends."""

    def __init__(self, segments: TokenSegments, rows: Rows) -> None:
        blocks = [rows[first : first + _SPAN_ROWS] for first in range(0, len(rows), _SPAN_ROWS)]
        self._num_rows = len(rows)
        self._first = np.array([segments.joined(each).min() for each in blocks])
        self._last = np.array([segments.left(each).max() for each in blocks])

    def near(self, clock: TickClock) -> Ints:
        """Positions of the rows of all blocks that overlap the ticks of the clock."""
        first = _SPAN_ROWS * np.flatnonzero((self._last > clock.low) & (self._first < clock.high))
        return ranges(first, np.minimum(_SPAN_ROWS, self._num_rows - first))


class SegmentEnds:
    """Times of the first and last token of each segment, for requests with several segments."""

    def __init__(self, segments: TokenSegments) -> None:
        self.segments = segments
        self.rows = segments.repeated()
        # until `add`: the time of the prefill's token, or NaN
        self.first_s, self.last_s = segments.prefill_end_s(self.rows), segments.prefill_end_s(self.rows)
        self.by_replica = rows_by_code(segments.table["replica"][self.rows])
        self._spans: dict[int, _BlockSpans] = {}

    def add(self, clock: TickClock, replicas: Sequence[int]) -> None:
        """Fill in the times of segments on these replicas."""
        index = rows_of(self.by_replica, replicas)
        if not clock.is_whole and len(index):
            (replica,) = replicas
            if replica not in self._spans:
                self._spans[replica] = _BlockSpans(self.segments, self.rows[index])
            index = index[self._spans[replica].near(clock)]
        joined, left = self.segments.joined(self.rows[index]), self.segments.left(self.rows[index])
        ticked = left > joined
        ends = ticked & (left > clock.low) & (left <= clock.high)
        self.last_s[index[ends]] = clock.at_s(left[ends])
        begins = ticked & (joined >= clock.low) & (joined < clock.high) & np.isnan(self.first_s[index])
        self.first_s[index[begins]] = clock.at_s(joined[begins] + 1)

    def resumptions(self) -> tuple[Floats, Ints]:
        """Gaps from the last token of a segment to the first token of the next one, and their request ids."""
        request = self.segments.request(self.rows)
        same = request[1:] == request[:-1]
        return (self.first_s[1:] - self.last_s[:-1])[same], request[1:][same]


_NO_ROWS: Rows = np.empty(0, dtype=np.intp)


def rows_of(by_code: Mapping[int, Rows], codes: Sequence[int]) -> Rows:
    """The rows of several codes, in the order of the codes."""
    found = [by_code[code] for code in codes if code in by_code]
    return np.concatenate(found) if found else _NO_ROWS


def token_times(records: Records, request_ids: Sequence[int]) -> dict[int, Floats]:
    """Times of all output tokens of these requests, in order, by request id."""
    wanted = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    wanted[np.asarray(request_ids, dtype=np.int64)] = True
    segments, accepted = TokenSegments(records.segments, wanted), AcceptedTokens(records.drafts)
    begun = segments.prefilled(segments.rows)
    of_request, times_s = [segments.request(begun)], [segments.prefill_end_s(begun)]
    for replica, clock in clocks(records.stretches):
        rows = segments.by_replica.get(replica, _NO_ROWS)
        joined = segments.joined(rows)
        count = segments.left(rows) - joined
        ticks, ids = ranges(joined + 1, count), np.repeat(segments.request(rows), count)
        tokens = 1 + accepted.between(ids, np.full(len(ids), replica), ticks - 1, ticks)
        times_s.append(np.repeat(clock.at_s(ticks), tokens))
        of_request.append(np.repeat(ids, tokens))
    request, time_s = np.concatenate(of_request), np.concatenate(times_s)
    order = np.lexsort((time_s, request))
    request, time_s = request[order], time_s[order]
    low = np.searchsorted(request, request_ids)
    high = np.searchsorted(request, request_ids, side="right")
    return {int(i): time_s[a:b] for i, a, b in zip(request_ids, low, high, strict=True)}
