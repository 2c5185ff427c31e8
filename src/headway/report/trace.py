"""A run as a trace for Perfetto or chrome://tracing: the activity of replicas, and the stages of requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.core.record import Cause, Outcome, Records
from headway.metrics.columns import Rows, floats, ints
from headway.metrics.usage import integrals
from headway.report.run import Provenance, Run
from headway.workload.atomic_file import open_atomic

MAX_EVENTS = 500_000
"""About the most events that a browser opens easily."""

Event = dict[str, Any]
CHUNK_EVENTS = 10_000


def write(run: Run, provenance: Provenance, path: Path, *, max_events: int = MAX_EVENTS) -> str | None:
    """Write the trace to `path` atomically. Returns a note if the run was truncated.

    A run with more than about `max_events` events is truncated at a time that the note, also contained in the file,
    gives. Raises HeadwayError if the file cannot be written.
    """
    until_s = _until_s(run.records, max_events)
    note = None
    if until_s < run.records.end_s:
        note = f"trace cut off at {until_s:.3f} s of {run.records.end_s:.3f} s: at most {max_events:,} events"
    about = {"run": run.name, "seed": provenance.seed, "version": provenance.version}
    about |= {"scenario": provenance.scenario_yaml} | ({"note": note} if note else {})
    with open_atomic(path) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(about))
        file.write(b',"traceEvents":[')
        remaining = events(run.records, until_s)
        separator = b"\n"
        while chunk := list(islice(remaining, CHUNK_EVENTS)):
            file.write(separator + msgspec.json.encode(chunk)[1:-1])
            separator = b",\n"
        file.write(b"\n]}\n")
    return note


def events(records: Records, until_s: float = float("inf")) -> Iterator[Event]:
    """Yield trace events that begin before `until_s`. Process 0 holds the requests, process i + 1 replica i."""
    yield _process(0, "requests", 0)
    for order, replica in enumerate(records.replicas):
        name = f"replica {replica.id}: {replica.model} on {replica.num_gpus} x {replica.gpu}"
        yield _process(replica.id + 1, name, order + 1)
    for replica in records.replicas:
        for since_s, to_s in replica.down:
            yield _slice(replica.id, "down", since_s, to_s - since_s, {})
    yield from _stretches(records, until_s)
    yield from _requests(records, until_s)


def _until_s(records: Records, max_events: int) -> float:
    """The time before which about `max_events` events begin; infinite if there are fewer."""
    begins_s = [
        floats(records.stretches, "start_s"),
        np.repeat(floats(records.workload, "arrival_s")[records.requests["request"]], 2),
        np.repeat(floats(records.segments, "enqueued_s"), 6),
    ]
    every_s = np.concatenate(begins_s)
    if len(every_s) <= max_events:
        return float("inf")
    return float(np.partition(every_s, max_events)[max_events])


def _process(pid: int, name: str, order: int) -> Event:
    args = {"name": name, "sort_index": order}
    return {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": args}


def _us(time_s: float) -> float:
    return round(1e6 * time_s, 3)


def _slice(replica: int, name: str, start_s: float, duration_s: float, args: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "pid": replica + 1,
        "tid": 0,
        "name": name,
        "ts": _us(start_s),
        "dur": _us(duration_s),
        "args": args,
    }


def _stretches(records: Records, until_s: float) -> Iterator[Event]:
    table = records.stretches
    rows = np.flatnonzero(floats(table, "start_s") < until_s)
    names = ("replica", "start_s", "iterations", "num_decode", "prefill_tokens", "context_tokens", "num_waiting")
    chosen = {name: column[rows] for name, column in table.items()}
    duration_s = integrals(chosen)[0].tolist()
    columns = [chosen[name].tolist() for name in names]
    for row, lasted_s in zip(zip(*columns, strict=True), duration_s, strict=True):
        replica, start_s, iterations, num_decode, prefill_tokens, context_tokens, num_waiting = row
        parts = [f"prefill {prefill_tokens}"] if prefill_tokens else []
        parts += [f"decode {num_decode}"] if num_decode else []
        args = {"iterations": iterations, "context_tokens": context_tokens, "waiting": num_waiting}
        yield _slice(replica, " + ".join(parts) or "idle step", start_s, lasted_s, args)


def _requests(records: Records, until_s: float) -> Iterator[Event]:
    table, segments = records.requests, records.segments
    arrival_s = floats(records.workload, "arrival_s")
    order: Rows = np.lexsort((segments["end_s"], segments["request"]))
    owner = ints(segments, "request", order)
    names = ("replica", "enqueued_s", "admitted_s", "prefill_end_s", "end_s", "cause")
    columns = [segments[name][order] for name in names]
    begins = np.searchsorted(owner, table["request"])
    ends = np.searchsorted(owner, table["request"], side="right")
    for i in np.flatnonzero(arrival_s[table["request"]] < until_s).tolist():
        request = int(table["request"][i])
        end_s = float(table["end_s"][i])
        args = {
            "outcome": Outcome(int(table["outcome"][i])).name.lower(),
            "prompt_tokens": int(records.workload["prompt_tokens"][request]),
            "output_tokens": int(table["generated_tokens"][i]),
        }
        segment_rows = [tuple(column[k].item() for column in columns) for k in range(begins[i], ends[i])]
        # Stages are written between begin and end, because viewers nest events with equal times in file order.
        begin, end = _async(request, f"request {request}", float(arrival_s[request]), end_s, args)
        yield begin
        yield from chain.from_iterable(_stages(request, float(arrival_s[request]), end_s, segment_rows))
        yield end


def _stages(
    request: int, arrival_s: float, end_s: float, segment_rows: list[tuple[Any, ...]]
) -> Iterator[tuple[Event, Event]]:
    """Queueing, prefill and decoding, in order, for each segment of a request."""
    reached_s = arrival_s
    for replica, _, admitted_s, prefill_end_s, left_s, cause in segment_rows:
        yield _async(request, "queue", reached_s, admitted_s, {})
        where = {"replica": replica}
        decode_from_s = admitted_s
        if prefill_end_s == prefill_end_s:
            yield _async(request, "prefill", admitted_s, prefill_end_s, where)
            decode_from_s = prefill_end_s
        ended = where | {"ended": Cause(cause).name.lower()}
        yield _async(request, "decode", decode_from_s, left_s, ended)
        reached_s = left_s
    if end_s > reached_s:
        yield _async(request, "queue", reached_s, end_s, {})


def _async(request: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> tuple[Event, Event]:
    common = {"cat": "request", "id": request, "pid": 0, "tid": 0, "name": name}
    begin = common | {"ph": "b", "ts": _us(start_s), "args": args}
    return begin, common | {"ph": "e", "ts": _us(end_s)}
