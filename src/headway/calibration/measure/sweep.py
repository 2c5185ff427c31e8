"""Times operators one after the other, and keeps a CSV file of the results that is complete at any time.

The clock and the kernels are arguments; nothing here depends on a device. An interrupted sweep continues from its file.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from headway.calibration.measure.plan import OperatorCase
from headway.calibration.operators import COLUMNS, FIRST_COLUMNS, SHAPES
from headway.core.errors import HeadwayError
from headway.workload.atomic_file import write_text

ROUND_S = 0.02
"""A round repeats the kernel for about this long, so that the overhead of clock and launch is negligible."""
NUM_ROUNDS = 5
MOST_REPEATS = 2000
SAVE_S = 2.0
"""Seconds between writes of the file."""


class KernelError(Exception):
    """A kernel cannot run: out of memory, or not supported."""


class SweepResult(Struct, frozen=True):
    """Numbers of timed, known, remaining and failed operators in a sweep."""

    num_timed: int
    num_known: int
    """Operators that were already in the file."""
    num_left: int
    """Operators that were not reached within the time limit."""
    failures: dict[str, int]
    """Number of failures by reason."""


class TimedKernel(Struct, frozen=True):
    """One kernel as two callables, which may be asynchronous."""

    run: Callable[[], object]
    """Starts the kernel; may return before the device is done."""
    wait: Callable[[], object]
    """Returns when the device is done."""
    calls: int = 1
    """Calls of the operator in one `run`."""
    release: Callable[[], object] = lambda: None
    """Returns the operands' memory to the device, once nothing refers to it."""
    software: str = ""
    """Library of the kernel, if it differs from the sweep's."""


class TimedOperator(Struct, frozen=True):
    operation: OperatorCase
    latency_s: float
    gpu: str
    software: str


def run(
    operations: Sequence[OperatorCase],
    kernels: Callable[[OperatorCase], TimedKernel],
    clock: Callable[[], float],
    path: Path,
    gpu: str,
    software: str,
    limit_s: float | None = None,
    progress: Callable[[float], None] | None = None,
    warm_up_s: Callable[[OperatorCase], float] = lambda _: 0.0,
) -> SweepResult:
    """Time the operators that are not yet in `path`, for at most `limit_s`. Each is first warmed up for `warm_up_s`
    seconds.

    The file is complete at any time, also after an interruption. `kernels` returns the kernel of an operator and raises
    `KernelError` if the device cannot run it.
    """
    rows = read_file(path, gpu)
    already = {row.operation for row in rows}
    waiting = [operation for operation in operations if operation not in already]
    failures: dict[str, int] = {}
    start_s = saved_s = clock()
    done = 0
    try:
        for operation in waiting:
            if limit_s is not None and clock() - start_s >= limit_s:
                break
            try:
                latency_s, used = _timed(kernels, operation, clock, warm_up_s(operation))
                rows.append(TimedOperator(operation, latency_s, gpu, used or software))
            except KernelError as failure:
                why = f"{operation.kind}{f' {operation.dtype}' if operation.dtype else ''}: {failure}"
                failures[why] = failures.get(why, 0) + 1
            done += 1
            if progress is not None:
                progress(done / len(waiting))
            if clock() - saved_s >= SAVE_S:
                write_file(path, rows)
                saved_s = clock()
    finally:
        if len(rows) > len(already):
            write_file(path, rows)
    return SweepResult(len(rows) - len(already), len(operations) - len(waiting), len(waiting) - done, failures)


def _timed(
    kernels: Callable[[OperatorCase], TimedKernel],
    operation: OperatorCase,
    clock: Callable[[], float],
    warm_up_s: float,
) -> tuple[float, str]:
    """The seconds of an operator (see `time_s`), and the kernel's software.

    The operands are freed before it returns, so that the next ones have all of the device's memory.
    """
    kernel = kernels(operation)
    release, software = kernel.release, kernel.software
    try:
        return time_s(kernel, clock, warm_up_s), software
    finally:
        del kernel
        release()


def time_s(kernel: TimedKernel, clock: Callable[[], float], warm_up_s: float = 0.0) -> float:
    """Median seconds of one call of the operator over several rounds, after a warm-up of at least `warm_up_s`."""
    start_s = clock()
    for _ in range(2):
        kernel.run()
    kernel.wait()
    once_s = _round_s(kernel, 1, clock)
    left_s = warm_up_s - (clock() - start_s)
    if once_s > 0 and left_s > 0:
        _round_s(kernel, min(MOST_REPEATS, round(left_s / once_s)), clock)
    repeats = max(1, min(MOST_REPEATS, round(ROUND_S / once_s))) if once_s > 0 else MOST_REPEATS
    rounds = [_round_s(kernel, repeats, clock) for _ in range(NUM_ROUNDS)]
    return median(rounds) / repeats / kernel.calls


def _round_s(kernel: TimedKernel, repeats: int, clock: Callable[[], float]) -> float:
    start_s = clock()
    for _ in range(repeats):
        kernel.run()
    kernel.wait()
    return clock() - start_s


def read_file(path: Path, gpu: str) -> list[TimedOperator]:
    """The rows of an existing file; empty if there is no file.

    Raises HeadwayError if the file has another format or measurements of another GPU.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) not in (COLUMNS, FIRST_COLUMNS):
                raise HeadwayError(f"{path}: exists and is not a file of headway measure; give another --out")
            rows = [_row(values, path, reader.line_num) for values in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: cannot be read as text: {error}") from None
    for row in rows:
        if row.gpu != gpu:
            raise HeadwayError(f"{path}: has measurements of {row.gpu}; expected {gpu}; give another --out")
    return rows


def write_file(path: Path, rows: Iterable[TimedOperator]) -> None:
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        shape = {name: f"{value:.0f}" for name, value in row.operation.columns().items()}
        writer.writerow(
            {
                "operator": row.operation.kind,
                "dtype": row.operation.dtype,
                **shape,
                "latency_s": f"{row.latency_s:.6g}",
                "gpu": row.gpu,
                "software": row.software,
            }
        )
    write_text(path, text.getvalue())


def _row(values: dict[str, str], path: Path, line: int) -> TimedOperator:
    kind: Any = values["operator"]
    if kind not in SHAPES:
        raise HeadwayError(f"{path}:{line}: unknown operator {kind!r}; give another --out")
    try:
        operation = OperatorCase(kind, values["dtype"], tuple(float(values[name]) for name in SHAPES[kind]))
        return TimedOperator(operation, float(values["latency_s"]), values["gpu"], values["software"])
    except (ValueError, TypeError, KeyError):
        raise HeadwayError(f"{path}:{line}: not as headway measure writes it; give another --out") from None
