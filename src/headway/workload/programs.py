"""Agent programs: calls that depend on each other, with tool times between them and growing contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.request import Segment
from headway.core.view import RequestView
from headway.workload.sessions import PREFIX
from headway.workload.sources import IssuedRows
from headway.workload.table import Floats, Ints, Longs, Prefix, Workload

R = TypeVar("R")
_FIRST_OUTPUT_ID = 1 << 62
"""First id given to the answers of traces, which have no ids for answers. Hash ids of traces are smaller."""


@dataclass(frozen=True, eq=False)
class ProgramCalls:
    """Planned programs: directed acyclic graphs of calls.

    Row i of `rows` is one call. Program p owns rows `offsets[p]:offsets[p + 1]`, where each call comes after all calls
    that it depends on. `prompt_tokens` counts a call's *new* tokens, which follow the prompt and the answer of call
    `context[i]`, or the program's shared opening if `context[i]` is -1. Call i arrives `delay_s[i]` after the last of
    the calls `after[i]` has ended. Without such calls it arrives at `arrival_s`, the start of the program. `group` maps
    a program to its shared opening, such as a system prompt of `group_tokens` tokens; -1 = none.
    """

    rows: Workload
    offsets: Longs
    context: Longs
    after: Sequence[tuple[int, ...]]
    delay_s: Floats
    group: Ints | None = None
    group_tokens: Ints | None = None

    def __post_init__(self) -> None:
        num = len(self.rows)
        if not len(self.context) == len(self.after) == len(self.delay_s) == num or int(self.offsets[-1]) != num:
            raise HeadwayError("programs: expected context, after and delay_s of each call, and offsets up to it")
        first = np.repeat(self.offsets[:-1], np.diff(self.offsets)).tolist()
        for row, (context, after) in enumerate(zip(self.context.tolist(), self.after, strict=True)):
            if not all(first[row] <= other < row for other in (*after, *([context] * (context >= 0)))):
                raise HeadwayError(f"programs: call {row} depends on one that is not before it in its program")

    def program_of_row(self) -> Longs:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def num_groups(self) -> int:
        """Number of shared openings. Segment ids below it identify them."""
        return 0 if self.group_tokens is None else len(self.group_tokens)

    def opening(self, program: int) -> tuple[Segment, ...]:
        """The segment that a program's calls begin with, if it has one."""
        if self.group is None or self.group_tokens is None or (group := int(self.group[program])) < 0:
            return ()
        return (Segment(group, int(self.group_tokens[group])),)

    def requests(self) -> Workload:
        """The calls as requests with whole prompts, the program as session, and output ids, but without prefixes."""
        new, out = self.rows.prompt_tokens.tolist(), self.rows.output_tokens.tolist()
        program = self.program_of_row()
        shared = [sum(segment.tokens for segment in self.opening(p)) for p in range(len(self.offsets) - 1)]
        prompt: list[int] = []
        for row, context in enumerate(self.context.tolist()):
            prompt.append(new[row] + (prompt[context] + out[context] if context >= 0 else shared[program[row]]))
        continued = np.isin(np.arange(len(new)), self.context)
        output_id = np.where(continued, self.num_groups() + 2 * np.arange(len(new)) + 1, -1)
        columns = {"prompt_tokens": np.minimum(prompt, 2**31 - 1), "session_id": program, "output_id": output_id}
        return self.rows.with_columns(columns)

    def segments(self, program: int) -> list[tuple[Segment, ...]]:
        """The segments of each prompt of a program.

        The new prompt of row r has the id `num_groups + 2r` and its answer the next id. The context of a call is fixed,
        so an id also identifies all content before it.
        """
        first, stop = int(self.offsets[program]), int(self.offsets[program + 1])
        new, out = self.rows.prompt_tokens[first:stop].tolist(), self.rows.output_tokens[first:stop].tolist()
        opening, id = self.opening(program), self.num_groups() + 2 * first
        prompts: list[tuple[Segment, ...]] = []
        for call, context in enumerate((self.context[first:stop] - first).tolist()):
            before = opening
            if context >= 0:
                before = (*prompts[context], Segment(id + 2 * context + 1, out[context]))
            prompts.append((*before, Segment(id + 2 * call, new[call])))
        return prompts

    def prefixes(self, rows: Sequence[int]) -> Prefix:
        """The prompt segments of these calls."""
        program, kept = self.program_of_row(), dict[int, list[tuple[Segment, ...]]]()
        of_row = []
        for row in rows:
            owner = int(program[row])
            if owner not in kept:
                kept[owner] = self.segments(owner)
            of_row.append(kept[owner][row - int(self.offsets[owner])])
        offsets = np.concatenate(([0], np.cumsum([len(segments) for segments in of_row]))).astype("i8")
        ids = np.array([segment.id for segments in of_row for segment in segments], "i8")
        tokens = np.array([segment.tokens for segments in of_row for segment in segments], "i4")
        return Prefix(offsets, ids, tokens)


@dataclass(frozen=True, eq=False)
class TracedCalls:
    """A trace's programs, whose prompts are known. Rows, `offsets`, `after` and `delay_s` are as in `ProgramCalls`.

    `rows` have whole prompts with their prefixes; `arrival_s` is the start of the program. In later prompts an answer
    has an id of its own, so its KV is computed again.
    """

    rows: Workload
    offsets: Longs
    after: Sequence[tuple[int, ...]]
    delay_s: Floats

    def program_of_row(self) -> Longs:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def requests(self) -> Workload:
        """The calls, with each program as a session. An answer has an id if another call waits for it, because its
        program goes on."""
        rows = np.arange(len(self.rows))
        waited_for = np.isin(rows, [other for others in self.after for other in others])
        output_id = np.where(waited_for, _FIRST_OUTPUT_ID + rows, -1)
        return self.rows.with_columns({"session_id": self.program_of_row(), "output_id": output_id})

    def segments(self, program: int) -> list[tuple[Segment, ...]]:
        """The segments of each prompt of a program."""
        prefix = self.rows.prefix
        assert prefix is not None
        first, stop = int(self.offsets[program]), int(self.offsets[program + 1])
        part = prefix[first:stop]
        segments = list(map(Segment, part.ids.tolist(), part.tokens.tolist()))
        bounds = part.offsets.tolist()
        return [tuple(segments[low:high]) for low, high in pairwise(bounds)]

    def prefixes(self, rows: Sequence[int]) -> Prefix:
        """The prompt segments of these calls."""
        assert self.rows.prefix is not None
        return self.rows.prefix.take(np.array(rows, "i8"))

    def take(self, programs: Longs) -> TracedCalls:
        """Some of the programs, in this order."""
        sizes = np.diff(self.offsets)[programs]
        first = np.cumsum(sizes) - sizes
        moved = np.repeat(first - self.offsets[programs], sizes)
        rows = np.arange(int(sizes.sum())) - moved
        after = [
            tuple(other + shift for other in self.after[row])
            for row, shift in zip(rows.tolist(), moved.tolist(), strict=True)
        ]
        offsets = np.append(first, int(sizes.sum())).astype("i8")
        return TracedCalls(self.rows.take(rows), offsets, after, self.delay_s[rows])


class _Progress:
    """The state of one program between its calls."""

    __slots__ = ("fields", "num_left", "segments", "waits")

    def __init__(self, fields: list[tuple[Any, ...]], segments: list[tuple[Segment, ...]], waits: list[int]) -> None:
        self.fields, self.segments = fields, segments
        self.waits = waits
        """Number of calls for which each call still waits."""
        self.num_left = len(fields)
        """Number of calls that have not ended."""


class Programs:
    """A source in which a call arrives some time after the calls that it depends on have ended.

    If a call does not finish (cancelled, timed out or rejected), its dependent calls never arrive, and `num_requests`
    is reduced by their number.
    """

    reactive = True

    def __init__(self, calls: ProgramCalls | TracedCalls) -> None:
        self.num_requests: int | None = len(calls.rows)
        self._calls = calls
        self._plan = calls.requests()
        self._issued = IssuedRows(self._plan)
        self._offsets = calls.offsets.tolist()
        self._program = calls.program_of_row().tolist()
        self._next: dict[int, list[int]] = {}
        """Maps each call to the calls that wait for it."""
        for row, after in enumerate(calls.after):
            for other in after:
                self._next.setdefault(other, []).append(row)
        self._due = [(float(calls.rows.arrival_s[row]), row) for row, after in enumerate(calls.after) if not after]
        self._due.sort()
        """Heap of (arrival, row)."""
        self._running: dict[int, _Progress] = {}

    def peek_s(self) -> float | None:
        """The next start of a program, or the next call for which others have ended."""
        return self._due[0][0] if self._due else None

    def pop(self, make: Callable[..., R]) -> R:
        if not self._due:
            raise IndexError("pop from a source with no request ready")
        at_s, row = heappop(self._due)
        program = self._program[row]
        running = self._running.get(program)
        if running is None:
            start, stop = self._offsets[program], self._offsets[program + 1]
            waits = [len(after) for after in self._calls.after[start:stop]]
            fields = list(self._plan.tuples(start, stop))
            running = self._running[program] = _Progress(fields, self._calls.segments(program), waits)
        call = row - self._offsets[program]
        fields = list(running.fields[call])
        fields[PREFIX] = running.segments[call]
        return make(*self._issued.add(row, at_s, fields))

    def ended(self, request: RequestView, now_s: float, outcome: Outcome) -> None:
        """Schedule the calls that waited only for `request`. If the request has no answer, drop its dependent calls."""
        row = self._issued.rows[request.id]
        program = self._program[row]
        running = self._running[program]
        start = self._offsets[program]
        if outcome is Outcome.FINISHED:
            for follower in self._next.get(row, ()):
                running.waits[follower - start] -= 1
                if not running.waits[follower - start]:
                    heappush(self._due, (now_s + float(self._calls.delay_s[follower]), follower))
        elif outcome is not Outcome.UNFINISHED:
            self._drop_after(row, running, start)
        running.num_left -= 1
        if not running.num_left:
            del self._running[program]

    def _drop_after(self, row: int, running: _Progress, start: int) -> None:
        """Never issue the calls that depend on this one."""
        lost = [row]
        while lost:
            for follower in self._next.get(lost.pop(), ()):
                if running.waits[follower - start] >= 0:
                    # so low that it never reaches 0, whatever else ends
                    running.waits[follower - start] = -len(self._program)
                    running.num_left -= 1
                    if self.num_requests is not None:
                        self.num_requests -= 1
                    lost.append(follower)

    def table(self) -> Workload:
        """The calls issued so far, as they arrived, with their prefixes."""
        return replace(self._issued.table(), prefix=self._calls.prefixes(list(self._issued.rows)))


def flattened_programs(calls: ProgramCalls | TracedCalls) -> Workload:
    """The calls as a table of fixed arrivals, spaced by their delays as if answers took no time."""
    start_s = calls.rows.arrival_s.tolist()
    arrival_s: list[float] = []
    for row, after in enumerate(calls.after):
        begin_s = max((arrival_s[other] for other in after), default=start_s[row])
        arrival_s.append(begin_s + (float(calls.delay_s[row]) if after else 0.0))
    columns: dict[str, Any] = {"arrival_s": np.array(arrival_s)}
    if "deadline_s" in calls.rows.columns:
        columns["deadline_s"] = calls.rows.columns["deadline_s"] + (columns["arrival_s"] - calls.rows.arrival_s)
    order = np.argsort(columns["arrival_s"], kind="stable")
    table = calls.requests().with_columns(columns).take(order)
    note = "calls of a program stand their delays apart, as if answers took no time"
    return replace(table, prefix=calls.prefixes(order.tolist())).with_notes(note)
