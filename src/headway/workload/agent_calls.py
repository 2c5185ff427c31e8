"""Agent traces in Mooncake's form, JSON lines: the calls of programs, with tools and pauses between them.

Beside `timestamp`, `input_length`, `output_length` and `hash_ids` (see `mooncake`), a line has

- `session_id`: lines with one id are calls one after the other; `delay` is the time from the end of the call before, in
  milliseconds; without it, the difference of their timestamps;
- or `request_id` and `wait_for`, the ids of the calls that have to end before: then the call follows after `delay` plus
  `tool_wait_ms`. A call without `wait_for` starts at its `timestamp`.

Sources: the schema of NVIDIA Dynamo's `dynamo-data-gen` (`MooncakeRow`, `AgenticMooncakeRow`), and AIPerf's "Trace
Replay with Mooncake Traces".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import HeadwayError
from headway.workload.programs import TracedCalls, flattened_programs
from headway.workload.readers.mooncake import fitting_block, hash_prefix
from headway.workload.readers.shared import ReadOptions, blocks
from headway.workload.table import MAX_TOKENS, Workload


class _Call(msgspec.Struct, gc=False):
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    timestamp: float | None = None
    created_time: float | None = None
    delay: float | None = None
    delay_ms: float | None = None
    tool_wait_ms: float | None = None
    session_id: str | int | None = None
    request_id: str | None = None
    wait_for: list[str] = []
    hash_ids: list[int] | None = None

    @property
    def prompt(self) -> int:
        return self.input_length or self.input_tokens or 0

    @property
    def output(self) -> int:
        return self.output_length or self.output_tokens or 0

    @property
    def start_ms(self) -> float | None:
        return self.created_time if self.timestamp is None else self.timestamp

    @property
    def gap_ms(self) -> float | None:
        """Time after the earlier calls; None if the line does not give it."""
        delay = self.delay_ms if self.delay is None else self.delay
        return delay if self.tool_wait_ms is None else (delay or 0.0) + self.tool_wait_ms


def matches(line: str) -> bool:
    has_lengths = '"input_length"' in line or '"input_tokens"' in line
    is_timed = '"timestamp"' in line or '"created_time"' in line or '"wait_for"' in line
    return line.startswith("{") and has_lengths and ('"session_id"' in line or ('"request_id"' in line and is_timed))


def read(path: Path, options: ReadOptions) -> Workload:
    """The calls as a table of fixed arrivals. Simulations read the programs instead (`read_calls`)."""
    return flattened_programs(read_calls(path, options)).validate(str(path))


def read_calls(path: Path, options: ReadOptions) -> TracedCalls:
    """Read the programs, in order of their starts. Lines of different programs may be mixed.

    HeadwayError names the line of a call that waits for an unknown call, or for itself through a loop.
    """
    bad: list[str] = []
    numbered = list(_lines(path, options, bad))
    if not numbered:
        raise HeadwayError(f"{path}: no requests in the file")
    calls, numbers = [call for _, call in numbered], [number for number, _ in numbered]
    after, delay_s = _order(calls, numbers, path)
    program, starts_s = _programs(calls, numbers, after, path)
    order = _sorted(program, after, numbers, path)
    place = {old: new for new, old in enumerate(order)}
    chosen = [calls[i] for i in order]
    of_program = [program[i] for i in order]
    prompt = np.array([call.prompt for call in chosen], "i8")
    counts = np.array([len(call.hash_ids or ()) for call in chosen], "i8")
    ids = np.array([id for call in chosen for id in call.hash_ids or ()], "i8")
    block, block_notes = options.block_tokens, list[str]()
    if block is None:
        block, block_notes = fitting_block(counts, prompt, str(path), [numbers[i] for i in order])
    columns = {
        "arrival_s": np.array([starts_s[each] for each in of_program]),
        "prompt_tokens": prompt,
        "output_tokens": np.array([call.output for call in chosen]),
    }
    notes = (*([f"{len(bad)} bad lines skipped; the first: {bad[0]}"] if bad else []), *block_notes)
    rows = Workload(columns, prefix=hash_prefix(ids, counts, prompt, block), notes=notes)
    first = np.flatnonzero(np.diff(of_program, prepend=-1))
    return TracedCalls(
        rows.with_columns({"arrival_s": rows.arrival_s - rows.arrival_s.min()}),
        np.append(first, len(of_program)).astype("i8"),
        [tuple(sorted(place[other] for other in after[i])) for i in order],
        np.array([delay_s[i] for i in order]),
    )


def _lines(path: Path, options: ReadOptions, bad: list[str]) -> Iterator[tuple[int, _Call]]:
    decode, num_left = msgspec.json.Decoder(_Call).decode, math.inf if options.limit is None else options.limit
    for first, block in blocks(path):
        for number, text in enumerate(block.split(b"\n"), first):
            if num_left <= 0:
                return
            if not text.strip():
                continue
            try:
                call = decode(text)
                problem = _problem(call)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = f"{error}; expected input_length, output_length, session_id or request_id"
            if problem:
                if not options.skip_bad:
                    raise HeadwayError(f"{path}: line {number}: {problem}; --skip-bad leaves bad lines out")
                bad.append(f"line {number}: {problem}")
                continue
            num_left -= 1
            yield number, call


def _problem(call: _Call) -> str:
    for name, tokens in (("input_length", call.prompt), ("output_length", call.output)):
        if not 1 <= tokens <= MAX_TOKENS:
            return f"{name}: {tokens}; expected 1 to {MAX_TOKENS:,}"
    for name, ms in (("timestamp", call.start_ms), ("delay and tool_wait_ms", call.gap_ms)):
        if ms is not None and not 0 <= ms < math.inf:
            return f"{name}: {ms}; expected milliseconds, 0 or more"
    if any(not 0 <= id < 2**63 for id in call.hash_ids or ()):
        return "hash_ids: expected ids from 0 to 2^63"
    if call.wait_for and call.request_id is None:
        return "wait_for: expected a request_id, too"
    return ""


def _order(calls: Sequence[_Call], numbers: Sequence[int], path: Path) -> tuple[list[tuple[int, ...]], list[float]]:
    """Returns, for each call, the calls before it, and the seconds from their end."""
    names: dict[str, int] = {}
    for i, call in enumerate(calls):
        if call.request_id is not None and names.setdefault(call.request_id, i) != i:
            raise HeadwayError(f"{path}: line {numbers[i]}: request_id: {call.request_id!r} is in a line above, too")
    has_graph = any(call.wait_for for call in calls)
    last: dict[str | int, int] = {}
    after: list[tuple[int, ...]] = []
    delay_s: list[float] = []
    for i, call in enumerate(calls):
        gap_ms = call.gap_ms
        before: tuple[int, ...] = ()
        if call.wait_for:
            unknown = next((name for name in call.wait_for if name not in names), None)
            if unknown is not None:
                raise HeadwayError(
                    f"{path}: line {numbers[i]}: wait_for: {unknown!r}; expected a request_id of the file"
                )
            before = tuple(dict.fromkeys(names[name] for name in call.wait_for))
        elif not has_graph and call.session_id is not None and call.session_id in last:
            previous = last[call.session_id]
            before, starts_ms = (previous,), (calls[previous].start_ms, call.start_ms)
            if gap_ms is None and starts_ms[0] is not None and starts_ms[1] is not None:
                gap_ms = max(0.0, starts_ms[1] - starts_ms[0])
        if not before and call.start_ms is None:
            raise HeadwayError(
                f"{path}: line {numbers[i]}: timestamp: missing; expected it for a call that starts a program"
            )
        if call.session_id is not None:
            last[call.session_id] = i
        after.append(before)
        delay_s.append((gap_ms or 0.0) / 1e3 if before else 0.0)
    return after, delay_s


def _programs(
    calls: Sequence[_Call], numbers: Sequence[int], after: Sequence[tuple[int, ...]], path: Path
) -> tuple[list[int], list[float]]:
    """The program number of each call, and the start of each program. Two calls belong to one program if they belong to
    one session, or if one waits for the other."""
    of: list[int] = list(range(len(calls)))

    def root(i: int) -> int:
        while of[i] != i:
            of[i] = of[of[i]]
            i = of[i]
        return i

    sessions: dict[str | int, int] = {}
    for i, call in enumerate(calls):
        joined = list(after[i])
        if call.session_id is not None:
            joined.append(sessions.setdefault(call.session_id, i))
        for other in joined:
            of[root(i)] = root(other)
    start_ms: dict[int, float] = {}
    for i, call in enumerate(calls):
        if not after[i] and call.start_ms is not None:
            start_ms[root(i)] = min(call.start_ms, start_ms.get(root(i), math.inf))
    for i in range(len(calls)):
        if root(i) not in start_ms:
            raise HeadwayError(f"{path}: line {numbers[i]}: wait_for: a loop; expected a call that waits for none")
    ranked = {each: number for number, each in enumerate(sorted(start_ms, key=lambda each: (start_ms[each], each)))}
    return [ranked[root(i)] for i in range(len(calls))], [start_ms[each] / 1e3 for each in ranked]


def _sorted(
    program: Sequence[int],
    after: Sequence[tuple[int, ...]],
    numbers: Sequence[int],
    path: Path,
) -> list[int]:
    """All calls by program, each after the calls that it waits for, otherwise in file order. Raises HeadwayError for a
    loop."""
    depth = [0] * len(after)
    waits = [len(each) for each in after]
    followers: dict[int, list[int]] = {}
    for i, others in enumerate(after):
        for other in others:
            followers.setdefault(other, []).append(i)
    ready = [i for i, num in enumerate(waits) if not num]
    for i in ready:  # `ready` grows during the loop
        for follower in followers.get(i, ()):
            depth[follower] = max(depth[follower], depth[i] + 1)
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    if len(ready) < len(after):
        first = next(i for i, num in enumerate(waits) if num)
        raise HeadwayError(f"{path}: line {numbers[first]}: wait_for: a loop; expected a call that waits for none")
    return sorted(range(len(after)), key=lambda i: (program[i], depth[i], i))
