"""What a user of a reasoning model notices: how long it thinks, and whether the answer comes at reading pace.

Quality of experience (QoE) as in PASCAL's Fig. 3, after Andes. A reader takes in a token every `tpot_s` and wants
token k = 0, 1, ... of the answer at `e_k = start + k*tpot_s`; `start` is what `core.pacer` says. Token k comes at
`a_k` and is read at `r_k = max(a_k, r_(k-1) + tpot_s)`, the first at `r_0 = a_0`. The curves are the numbers of
tokens wanted, and read, by time t; the horizon is the end of the digested one, `H = r_last + tpot_s`, when the
last token has been read. So with n tokens

    QoE = area digested / area expected = sum(H - r_k) / sum(H - e_k),

which is above 0, and 1 exactly if no token was late. Lateness `r_k - e_k` is `a_0 - start` plus the largest of
`a_j - a_0 - j*tpot_s`, j = 0..k. It can grow only with a token that comes more than `tpot_s` after the one before,
so the other tokens are counted, not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headway.core.pacer import Pacer
from headway.core.record import Columns, Records
from headway.metrics.columns import Floats, Ints, Mask, Rows, floats, ints, rows_by_code
from headway.metrics.tokens import Clock, Stays, clocks, counted

VIOLATED = 0.95
"""A lower QoE violates the SLO of the answering phase (PASCAL, section III-B)."""
AT_ONCE = 2_000_000
"""Tokens whose requests are scored together: what limits the memory that it takes."""


@dataclass(frozen=True, slots=True)
class Phases:
    """One element per request; NaN where there is no such thing."""

    reasoning_s: Floats
    """Arrival to the last reasoning token, of requests that reason."""
    ttfat_s: Floats
    """From there to the first answering token."""
    blocking_s: Floats
    """From there to the start of the iteration (or prefill) that made the first answering token."""
    qoe: Floats
    """Of requests whose answer began. Those that do not reason are taken to have reasoned until they arrived."""

    def __getitem__(self, rows: Rows) -> Phases:
        """Some of them."""
        return Phases(*(getattr(self, name)[rows] for name in Phases.__slots__))

    @property
    def violations(self) -> float | None:
        """The share of answers whose QoE is below `VIOLATED`; None if there are none."""
        known = self.qoe[~np.isnan(self.qoe)]
        return float((known < VIOLATED).mean()) if len(known) else None


def phases(records: Records, ended: Columns, pacer: Pacer) -> Phases | None:
    """Of these rows of `records.requests`; None if no request of the workload reasons."""
    return scored(records, ended, pacer) if _reasoning_tokens(records).any() else None


def scored(records: Records, ended: Columns, pacer: Pacer) -> Phases:
    """The same, whether or not any request reasons."""
    workload, reasoning_tokens = records.workload, _reasoning_tokens(records)
    ids = ints(ended, "request")
    arrival_s = floats(workload, "arrival_s", ids)
    answer_s, reasoning_end_s = floats(ended, "answer_s"), floats(ended, "reasoning_end_s")
    qoe, blocking_s = np.full(len(ids), np.nan), np.full(len(ids), np.nan)
    end_s = np.where(reasoning_tokens[ids] > 0, reasoning_end_s, arrival_s)
    ticking = {replica: (clock, clock.ticks_after_gaps(pacer.tpot_s)) for replica, clock in clocks(records.stretches)}
    for rows in _chunks(ints(ended, "generated_tokens"), np.flatnonzero(~np.isnan(answer_s))):
        found = _answers(records, ids[rows], ticking, pacer.tpot_s)
        # The client hears of a token some time after its iteration; the same time for each token of a request.
        seen_s = answer_s[rows] - found.first_s
        ended_s = end_s[rows] - seen_s
        blocking_s[rows] = np.maximum(found.begun_s - ended_s, 0.0)
        qoe[rows] = _qoe(found, ended_s, pacer)
    reasons = ~np.isnan(reasoning_end_s)
    return Phases(
        reasoning_s=reasoning_end_s - arrival_s,
        ttfat_s=answer_s - reasoning_end_s,
        blocking_s=np.where(reasons, blocking_s, np.nan),
        qoe=qoe,
    )


def _reasoning_tokens(records: Records) -> Ints:
    """By request."""
    workload = records.workload
    if "reasoning_tokens" not in workload:
        return np.zeros(len(workload["arrival_s"]), dtype=np.int64)
    return ints(workload, "reasoning_tokens")


def _chunks(tokens: Ints, rows: Rows) -> Iterator[Rows]:
    """These rows in parts of at most about `AT_ONCE` tokens."""
    part = np.cumsum(tokens[rows]) // AT_ONCE
    if len(rows):
        yield from np.split(rows, np.flatnonzero(np.diff(part)) + 1)


@dataclass(frozen=True, slots=True)
class _Answers:
    """Of each request: when its answer began, and how late it got, against a reader who began with it."""

    num_tokens: Ints
    first_s: Floats
    begun_s: Floats
    """When the iteration of the first answering token began, or the prefill that ended with it."""
    late_token_s: Floats
    """Sum of the lateness of all its tokens."""
    last_late_s: Floats
    """Lateness of its last token."""


def _qoe(found: _Answers, reasoning_end_s: Floats, pacer: Pacer) -> Floats:
    n = found.num_tokens
    wait_s = np.zeros(len(n))
    if pacer.ttfat_s is not None:
        wait_s = np.maximum(found.first_s - (reasoning_end_s + pacer.ttfat_s), 0.0)
    late = found.late_token_s + n * wait_s
    expected = n * (found.last_late_s + wait_s) + pacer.tpot_s * n * (n + 1) / 2
    return np.asarray(1.0 - late / expected)


def _answers(records: Records, ids: Ints, ticking: Mapping[int, tuple[Clock, Ints]], tpot_s: float) -> _Answers:
    """Of requests with at least one answering token, in the order of `ids`."""
    wanted: Mask = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    wanted[ids] = True
    parts = _Parts(Stays(records.segments, wanted), _reasoning_tokens(records))
    token, time_s, begun_s = parts.late_candidates(ticking)
    starts = np.flatnonzero(token == 0)  # one per request
    sizes = np.diff(starts, append=len(token))
    num_tokens = parts.num_tokens()
    late_s = time_s - token * tpot_s
    late_s = _running_max(late_s - np.repeat(late_s[starts], sizes), starts, sizes)
    until = np.append(token[1:], 0)
    until[starts + sizes - 1] = num_tokens
    place = np.searchsorted(parts.request[parts.token == 0], ids)
    return _Answers(
        num_tokens=num_tokens[place],
        first_s=time_s[starts][place],
        begun_s=begun_s[place],
        late_token_s=np.add.reduceat(late_s * (until - token), starts)[place],
        last_late_s=late_s[starts + sizes - 1][place],
    )


class _Parts:
    """What of an answer came in one stay, by request and then by time."""

    def __init__(self, stays: Stays, reasoning_tokens: Ints) -> None:
        rows = stays.rows[np.lexsort((stays.segments["end_s"][stays.rows], stays.request(stays.rows)))]
        request, joined, begun = stays.request(rows), stays.joined(rows), ~np.isnan(stays.prefill_end_s(rows))
        count = stays.left(rows) - joined + begun
        so_far = np.cumsum(count) - count
        new = np.flatnonzero(np.diff(request, prepend=-1))
        so_far -= np.repeat(so_far[new], np.diff(new, append=len(rows)))
        reasoned = np.clip(reasoning_tokens[request] - so_far, 0, count)
        kept = np.flatnonzero(reasoned < count)
        self.request = request[kept]
        self.token: Ints = np.maximum(so_far - reasoning_tokens[request], 0)[kept]
        """The first one's place in the answer."""
        self.count: Ints = (count - reasoned)[kept]
        self.prefilled: Mask = (begun & (reasoned == 0))[kept]
        """Where the first is a prefill's; all others are ticks'."""
        self.prefill_s = stays.prefill_end_s(rows[kept])
        self.admitted_s = floats(stays.segments, "admitted_s", rows[kept])
        self.left = stays.left(rows[kept])
        self.first_tick: Ints = self.left - self.count + self.prefilled + 1
        self.by_replica = rows_by_code(stays.segments["replica"][rows[kept]])

    def num_tokens(self) -> Ints:
        """By request."""
        return np.add.reduceat(self.count, np.flatnonzero(self.token == 0))

    def late_candidates(self, ticking: Mapping[int, tuple[Clock, Ints]]) -> tuple[Ints, Floats, Floats]:
        """(place in the answer, time) of the tokens that may be later than all before; when each answer's work began.

        These are the first of each stay, a prefill's next one, and those after a gap of more than `tpot_s`.
        """
        first = np.flatnonzero(self.prefilled)
        stays: list[Rows] = [first]
        tokens, times_s = [self.token[first]], [self.prefill_s[first]]
        begun_s = np.where(self.prefilled, self.admitted_s, np.nan)
        for replica, here in self.by_replica.items():
            if replica not in ticking:
                continue
            clock, after_gaps = ticking[replica]
            here = here[self.first_tick[here] <= self.left[here]]
            tick = self.first_tick[here]
            begun_s[here] = np.where(self.prefilled[here], begun_s[here], clock.begun_s(tick))
            low, high = np.searchsorted(after_gaps, (tick, self.left[here]), side="right")
            tick = np.concatenate((tick, after_gaps[counted(low, high - low)]))
            stay = np.concatenate((here, np.repeat(here, high - low)))
            stays.append(stay)
            tokens.append(self.token[stay] + self.prefilled[stay] + tick - self.first_tick[stay])
            times_s.append(clock.at_s(tick))
        stay, token, time_s = np.concatenate(stays), np.concatenate(tokens), np.concatenate(times_s)
        order = np.argsort((np.cumsum(self.count) - self.count - self.token)[stay] + token, kind="stable")
        return token[order], time_s[order], begun_s[self.token == 0]


def _running_max(values: Floats, starts: Ints, sizes: Ints) -> Floats:
    """The largest value so far within each run of `sizes` values from `starts` on."""
    result = values.copy()
    width = np.ceil(np.log2(sizes)).astype(np.int64)
    for one in np.unique(width):  # runs of alike lengths, side by side
        if one == 0:
            continue
        runs = np.flatnonzero(width == one)
        column = np.arange(int(sizes[runs].max()))
        inside = column < sizes[runs][:, None]
        index = (starts[runs][:, None] + column)[inside]
        padded = np.full(inside.shape, -np.inf)
        padded[inside] = values[index]
        result[index] = np.maximum.accumulate(padded, axis=1)[inside]
    return result
