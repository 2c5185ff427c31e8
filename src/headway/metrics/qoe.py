"""Phases of reasoning models as experienced by a user: the time to the answer, and whether it keeps reading pace.

Quality of experience (QoE) as in PASCAL's Fig. 3, after Andes. A reader reads one token every `tpot_s` and expects
token k = 0, 1, ... of the answer at `e_k = start + k*tpot_s`; `core.pacer` defines `start`. Token k arrives at `a_k`
and is read at `r_k = max(a_k, r_(k-1) + tpot_s)`, the first at `r_0 = a_0`. The two curves are the numbers of tokens
expected and read by time t; the horizon is the end of the second curve, `H = r_last + tpot_s`, when the last token has
been read. So with n tokens

    QoE = area digested / area expected = sum(H - r_k) / sum(H - e_k),

which is above 0, and 1 exactly if no token was late. Lateness `r_k - e_k` is `a_0 - start` plus the largest of `a_j -
a_0 - j*tpot_s`, j = 0..k. Lateness can grow only at a token that comes more than `tpot_s` after the previous one, so
other tokens are only counted. All tokens of an iteration with accepted drafts arrive at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headway.core.pacer import Pacer
from headway.core.record import Columns, Records
from headway.metrics.columns import Floats, Ints, Mask, Rows, floats, ints, ranges, rows_by_code
from headway.metrics.tokens import AcceptedTokens, TickClock, TokenSegments, clocks

VIOLATED = 0.95
"""Minimum QoE: a lower QoE violates the SLO of the answering phase (PASCAL, section III-B)."""
CHUNK_TOKENS = 2_000_000
"""Tokens processed together; bounds memory."""

TicksAfterGaps = Mapping[int, tuple[TickClock, Ints]]
"""Maps each replica to its clock, and the ticks after a gap of more than the pacer's `tpot_s`."""


@dataclass(frozen=True, slots=True)
class Phases:
    """One element per request; NaN if undefined or unknown. `blocking_s` and `qoe` need token times."""

    reasoning_s: Floats
    """Seconds from arrival to the last reasoning token, for reasoning requests."""
    ttfat_s: Floats
    """Seconds from the last reasoning token to the first answering token."""
    blocking_s: Floats
    """Seconds from the last reasoning token to the start of the iteration (or prefill) that generated the first
    answering token."""
    qoe: Floats
    """Quality of experience of requests whose answer began. Without reasoning, the reasoning counts as ended at
    arrival."""

    def __getitem__(self, rows: Rows | slice) -> Phases:
        return Phases(*(getattr(self, name)[rows] for name in Phases.__slots__))

    @property
    def violations(self) -> float | None:
        """Share of answers with a QoE below `VIOLATED`; None without answers."""
        known = self.qoe[~np.isnan(self.qoe)]
        return float((known < VIOLATED).mean()) if len(known) else None


def phases(records: Records, ended: Columns, pacer: Pacer) -> Phases | None:
    """Phases of these rows of `records.requests`; None if no request of the workload reasons."""
    return computed_phases(records, ended, pacer) if _reasoning_tokens(records).any() else None


def computed_phases(records: Records, ended: Columns, pacer: Pacer) -> Phases:
    """Phases of these rows of `records.requests`, whether or not any request reasons."""
    workload, reasoning_tokens = records.workload, _reasoning_tokens(records)
    ids = ints(ended, "request")
    arrival_s = floats(workload, "arrival_s", ids)
    answer_s, reasoning_end_s = floats(ended, "answer_s"), floats(ended, "reasoning_end_s")
    qoe, blocking_s = np.full(len(ids), np.nan), np.full(len(ids), np.nan)
    end_s = np.where(reasoning_tokens[ids] > 0, reasoning_end_s, arrival_s)
    ticks = {replica: (clock, clock.ticks_after_gaps(pacer.tpot_s)) for replica, clock in clocks(records.stretches)}
    known = ~np.isnan(answer_s) & _has_token_times(records)[ids]
    for rows in _chunks(ints(ended, "generated_tokens"), np.flatnonzero(known)):
        found = _answers(records, ids[rows], ticks, pacer.tpot_s)
        # The client receives a token some time after its iteration. The delay is equal for all tokens of a request.
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
    workload = records.workload
    if "reasoning_tokens" not in workload:
        return np.zeros(len(workload["arrival_s"]), dtype=np.int64)
    return ints(workload, "reasoning_tokens")


def _has_token_times(records: Records) -> Mask:
    """Maps each request id to whether its token times are recorded. A gateway's records have no iterations of the
    engines."""
    found: Mask = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    segments = TokenSegments(records.segments, ~found)
    found[segments.request(segments.rows)] = True
    return found


def _chunks(tokens: Ints, rows: Rows) -> Iterator[Rows]:
    """Yield the rows in parts of about `CHUNK_TOKENS` tokens at most."""
    part = np.cumsum(tokens[rows]) // CHUNK_TOKENS
    if len(rows):
        yield from np.split(rows, np.flatnonzero(np.diff(part)) + 1)


@dataclass(frozen=True, slots=True)
class AnswerTiming:
    """Start of each request's answer, and its lateness for a reader who starts with the first token."""

    num_tokens: Ints
    first_s: Floats
    begun_s: Floats
    """Start of the iteration, or prefill, that generated the first answering token."""
    late_token_s: Floats
    """Sum of the lateness of the answer's tokens."""
    last_late_s: Floats
    """Lateness of the answer's last token."""


def _qoe(found: AnswerTiming, reasoning_end_s: Floats, pacer: Pacer) -> Floats:
    n = found.num_tokens
    wait_s = np.zeros(len(n))
    if pacer.ttfat_s is not None:
        wait_s = np.maximum(found.first_s - (reasoning_end_s + pacer.ttfat_s), 0.0)
    late = found.late_token_s + n * wait_s
    expected = n * (found.last_late_s + wait_s) + pacer.tpot_s * n * (n + 1) / 2
    return np.asarray(1.0 - late / expected)


def _answers(records: Records, ids: Ints, ticks: TicksAfterGaps, tpot_s: float) -> AnswerTiming:
    """Timing of requests with at least one answering token, in the order of `ids`."""
    wanted: Mask = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    wanted[ids] = True
    accepted = AcceptedTokens(records.drafts)
    parts = AnswerParts(TokenSegments(records.segments, wanted), _reasoning_tokens(records), accepted)
    token, time_s, begun_s = parts.late_candidates(ticks)
    starts = np.flatnonzero(token == 0)  # one row per request
    sizes = np.diff(starts, append=len(token))
    num_tokens = parts.num_tokens()
    late_s = time_s - token * tpot_s
    late_s = _running_max(late_s - np.repeat(late_s[starts], sizes), starts, sizes)
    until = np.append(token[1:], 0)
    until[starts + sizes - 1] = num_tokens
    place = np.searchsorted(parts.request[parts.token == 0], ids)
    return AnswerTiming(
        num_tokens=num_tokens[place],
        first_s=time_s[starts][place],
        begun_s=begun_s[place],
        late_token_s=np.add.reduceat(late_s * (until - token), starts)[place],
        last_late_s=late_s[starts + sizes - 1][place],
    )


class AnswerParts:
    """The parts of answers, one per segment, ordered by request and then by time."""

    def __init__(self, segments: TokenSegments, reasoning_tokens: Ints, accepted: AcceptedTokens) -> None:
        rows = segments.rows[np.lexsort((segments.table["end_s"][segments.rows], segments.request(segments.rows)))]
        request, joined, begun = segments.request(rows), segments.joined(rows), ~np.isnan(segments.prefill_end_s(rows))
        left, replica = segments.left(rows), ints(segments.table, "replica", rows)
        count = left - joined + begun + accepted.between(request, replica, joined, left)
        so_far = np.cumsum(count) - count
        new = np.flatnonzero(np.diff(request, prepend=-1))
        so_far -= np.repeat(so_far[new], np.diff(new, append=len(rows)))
        reasoned = np.clip(reasoning_tokens[request] - so_far, 0, count)
        answering = np.flatnonzero(reasoned < count)
        self.request = request[answering]
        self.token: Ints = np.maximum(so_far - reasoning_tokens[request], 0)[answering]
        """Position of the part's first token in the answer."""
        self.count: Ints = (count - reasoned)[answering]
        self.prefilled: Mask = (begun & (reasoned == 0))[answering]
        """Whether a prefill generated the first token; ticks generate all other tokens."""
        self.prefill_s = segments.prefill_end_s(rows[answering])
        self.admitted_s = floats(segments.table, "admitted_s", rows[answering])
        self.left = left[answering]
        self._accepted, self._replica, self._joined = accepted, replica[answering], joined[answering]
        self._before: Ints = (reasoned - begun)[answering]
        """Reasoning tokens among the ticks of the part; -1 if the prefill's token is the answer's first."""
        self.first_tick: Ints = self._tick_of(np.maximum(self._before, 0) + 1)
        self.by_replica = rows_by_code(segments.table["replica"][rows[answering]])

    def _generated(self, part: Rows, tick: Ints) -> Ints:
        """Tokens that the ticks of these parts have generated by the end of `tick`."""
        joined = self._joined[part]
        given = self._accepted.between(self.request[part], self._replica[part], joined, tick)
        return np.asarray(tick - joined + given)

    def _tick_of(self, tokens: Ints) -> Ints:
        """For each part: the first tick at whose end the part has generated `tokens`. If it never does: the tick after
        its last one."""
        every = np.arange(len(self.request))
        low, high = self._joined + 1, self.left + 1
        while (low < high).any():
            middle = (low + high) // 2
            enough = self._generated(every, middle) >= tokens
            low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
        return np.asarray(low)

    def num_tokens(self) -> Ints:
        return np.add.reduceat(self.count, np.flatnonzero(self.token == 0))

    def late_candidates(self, ticks: TicksAfterGaps) -> tuple[Ints, Floats, Floats]:
        """(position in the answer, time) of tokens that may be later than all earlier tokens, and the start of each
        answer.

        The tokens are the first of each segment, the next one after a prefill, and those after a gap above `tpot_s`.
        """
        first = np.flatnonzero(self.prefilled)
        parts: list[Rows] = [first]
        tokens, times_s = [self.token[first]], [self.prefill_s[first]]
        begun_s = np.where(self.prefilled, self.admitted_s, np.nan)
        for replica, here in self.by_replica.items():
            if replica not in ticks:
                continue
            clock, after_gaps = ticks[replica]
            here = here[self.first_tick[here] <= self.left[here]]
            tick = self.first_tick[here]
            begun_s[here] = np.where(self.prefilled[here], begun_s[here], clock.begun_s(tick))
            low, high = np.searchsorted(after_gaps, (tick, self.left[here]), side="right")
            tick = np.concatenate((tick, after_gaps[ranges(low, high - low)]))
            part = np.concatenate((here, np.repeat(here, high - low)))
            parts.append(part)
            answered = self._generated(part, tick - 1) - self._before[part]
            tokens.append(self.token[part] + np.maximum(answered, 0))
            times_s.append(clock.at_s(tick))
        part, token, time_s = np.concatenate(parts), np.concatenate(tokens), np.concatenate(times_s)
        order = np.argsort((np.cumsum(self.count) - self.count - self.token)[part] + token, kind="stable")
        return token[order], time_s[order], begun_s[self.token == 0]


def _running_max(values: Floats, starts: Ints, sizes: Ints) -> Floats:
    """Running maximum within each run of `sizes` values from `starts` on."""
    result = values.copy()
    width = np.ceil(np.log2(sizes)).astype(np.int64)
    for one in np.unique(width):  # runs of similar length are processed together
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
