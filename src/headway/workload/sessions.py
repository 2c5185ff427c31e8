"""Conversations of several turns: each prompt contains all earlier prompts and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.request import Segment
from headway.core.view import RequestView
from headway.workload.sources import IssuedRows
from headway.workload.table import FIELDS, Floats, Ints, Longs, Prefix, Workload

R = TypeVar("R")
PREFIX = FIELDS.index("prefix")


@dataclass(frozen=True, eq=False)
class SessionTurns:
    """A plan of sessions, turn by turn.

    Row i of `rows` is one turn; session s owns rows `offsets[s]:offsets[s + 1]`, in order. `prompt_tokens` counts the
    *new* tokens of a turn, `arrival_s` is the start of its session, and `think_s` the pause before the turn (ignored
    for a first turn). `group` maps a session to the shared opening, such as a system prompt of `group_tokens` tokens,
    that precedes its first turn; -1 = none.
    """

    rows: Workload
    offsets: Longs
    think_s: Floats
    group: Ints | None = None
    group_tokens: Ints | None = None

    def __post_init__(self) -> None:
        counts = np.diff(self.offsets)
        if len(self.offsets) < 1 or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.rows):
            raise HeadwayError("sessions: offsets must run from 0 to the number of turns")
        if bool((counts < 1).any()):
            raise HeadwayError(f"sessions: session {int(np.argmin(counts))} has no turn; expected 1 or more")
        if len(self.think_s) != len(self.rows):
            raise HeadwayError("sessions: think_s must have one value per turn")
        if not bool((self.think_s >= 0).all()):
            raise HeadwayError("sessions: think_s must be 0 or more seconds")

    def session_of_row(self) -> Longs:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def shared_tokens(self) -> Longs:
        if self.group is None or self.group_tokens is None:
            return np.zeros(len(self.offsets) - 1, "i8")
        tokens = self.group_tokens.astype("i8")[self.group]
        return np.where(self.group >= 0, tokens, 0)

    def num_groups(self) -> int:
        """Number of shared openings. Segment ids below it identify them."""
        return 0 if self.group_tokens is None else len(self.group_tokens)

    def segment_tokens(self) -> Longs:
        """Tokens of each turn's new prompt, at index 2 * row, and of its answer, at 2 * row + 1."""
        pairs = np.stack([self.rows.prompt_tokens, self.rows.output_tokens], axis=1)
        return pairs.astype("i8").reshape(-1)

    def requests(self) -> Workload:
        """The turns as requests with whole prompts, session ids and output ids, but without prefixes."""
        new, out = self.rows.prompt_tokens.astype("i8"), self.rows.output_tokens.astype("i8")
        before = np.concatenate(([0], np.cumsum(new + out)))
        session = self.session_of_row()
        prompt = before[:-1] - before[self.offsets[session]] + new + self.shared_tokens()[session]
        output_id = self.num_groups() + 2 * np.arange(len(new)) + 1
        columns = {
            "prompt_tokens": np.minimum(prompt, 2**31 - 1),
            "session_id": session,
            "output_id": output_id,
        }
        return self.rows.with_columns(columns)

    def prefixes(self, rows: Longs) -> Prefix:
        """The segments of these turns' prompts: the shared opening, then prompt, answer, ..., prompt.

        The new prompt of row r has the id `num_groups + 2r` and its answer the next id. Ids are unique, and a session
        runs through its rows in order, so an id also identifies all content before it.
        """
        session = self.session_of_row()[rows]
        first, last = 2 * self.offsets[session], 2 * rows
        shared = self.shared_tokens()[session]
        has_shared = (shared > 0).astype("i8")
        counts = last - first + 1 + has_shared
        offsets = np.concatenate(([0], np.cumsum(counts)))
        step = np.arange(offsets[-1]) - np.repeat(offsets[:-1] + has_shared, counts)
        opening = step < 0
        at = np.maximum(np.repeat(first, counts) + step, 0)
        ids = at + self.num_groups()
        tokens = self.segment_tokens()[at] if len(at) else np.zeros(0, "i8")
        if self.group is not None:
            ids[opening] = self.group[session[has_shared > 0]]
            tokens[opening] = shared[has_shared > 0]
        return Prefix(offsets.astype("i8"), ids, tokens.astype("i4"))


class Sessions:
    """A source in which turn k + 1 arrives its think time after turn k ended, with the conversation as its prompt.

    A session stops at a turn that did not finish (cancelled, timed out or rejected), because there is no answer to
    continue from. `num_requests` is reduced by the turns that will not come.
    """

    reactive = True

    def __init__(self, turns: SessionTurns) -> None:
        self.num_requests: int | None = len(turns.rows)
        self._turns = turns
        self._plan = turns.requests()
        self._issued = IssuedRows(self._plan)
        self._offsets = turns.offsets.tolist()
        self._session = self._plan.columns["session_id"]
        self._segments = turns.segment_tokens()
        self._shared = turns.shared_tokens()
        starts: npt.NDArray[np.float64] = self._plan.arrival_s[turns.offsets[:-1]]
        order = np.argsort(starts, kind="stable")
        self._firsts = zip(starts[order].tolist(), turns.offsets[:-1][order].tolist(), strict=True)
        self._first = next(self._firsts, None)
        self._follow: list[tuple[float, int]] = []
        self._live: dict[int, tuple[list[tuple[Any, ...]], tuple[Segment, ...]]] = {}

    def peek_s(self) -> float | None:
        """The next start of a session, or the next turn whose think time has passed."""
        if self._follow and (self._first is None or self._follow[0] < self._first):
            return self._follow[0][0]
        return None if self._first is None else self._first[0]

    def pop(self, make: Callable[..., R]) -> R:
        if self._follow and (self._first is None or self._follow[0] < self._first):
            at_s, row = heappop(self._follow)
        elif self._first is not None:
            at_s, row = self._first
            self._first = next(self._firsts, None)
        else:
            raise IndexError("pop from a source with no request ready")
        fields = self._issued.add(row, at_s, self._fields(row))
        return make(*fields)

    def ended(self, request: RequestView, now_s: float, outcome: Outcome) -> None:
        """Schedule the next turn of the session if this one finished; otherwise end the session."""
        row = self._issued.rows[request.id]
        stop = self._offsets[int(self._session[row]) + 1]
        if outcome is Outcome.FINISHED:
            if row + 1 < stop:
                heappush(self._follow, (now_s + float(self._turns.think_s[row + 1]), row + 1))
        else:
            self._live.pop(int(self._session[row]), None)
            if self.num_requests is not None and outcome is not Outcome.UNFINISHED:
                self.num_requests -= stop - row - 1

    def table(self) -> Workload:
        """The turns issued so far, as they arrived, with their prefixes."""
        rows = np.array(self._issued.rows, "i8")
        return replace(self._issued.table(), prefix=self._turns.prefixes(rows))

    def _fields(self, row: int) -> list[Any]:
        """The fields of one turn. All turns of a session are unpacked at its first one and kept until its last."""
        session = int(self._session[row])
        start, stop = self._offsets[session], self._offsets[session + 1]
        if row == start:
            self._live[session] = list(self._plan.tuples(start, stop)), self._session_segments(session, start, stop)
        turns, segments = self._live[session]
        if row + 1 == stop:
            del self._live[session]
        fields = list(turns[row - start])
        fields[PREFIX] = segments[: len(segments) - 2 * (stop - row - 1)]
        return fields

    def _session_segments(self, session: int, start: int, stop: int) -> tuple[Segment, ...]:
        """All segments of a session except its last answer."""
        ids = range(self._turns.num_groups() + 2 * start, self._turns.num_groups() + 2 * stop - 1)
        segments = tuple(map(Segment, ids, self._segments[2 * start : 2 * stop - 1].tolist()))
        if self._turns.group is None or not self._shared[session]:
            return segments
        return (Segment(int(self._turns.group[session]), int(self._shared[session])), *segments)


def flattened(turns: SessionTurns) -> Workload:
    """The turns as a table of fixed arrivals, spaced by their think times as if answers took no time."""
    pauses = turns.think_s.copy()
    pauses[turns.offsets[:-1]] = 0.0
    sums = np.cumsum(pauses)
    session = turns.session_of_row()
    waited_s = sums - sums[turns.offsets[session]]
    rows = turns.requests()
    columns: dict[str, npt.ArrayLike] = {"arrival_s": rows.arrival_s + waited_s}
    if "deadline_s" in rows.columns:
        columns["deadline_s"] = rows.columns["deadline_s"] + waited_s
    order = np.argsort(np.asarray(columns["arrival_s"]), kind="stable")
    table = rows.with_columns(columns).take(order)
    note = "turns of a session stand their think time apart, as if answers took no time"
    return replace(table, prefix=turns.prefixes(order)).with_notes(note)
