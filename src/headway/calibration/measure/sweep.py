"""Times operators one after the other and keeps a file of what was measured up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from headway.calibration.measure import file
from headway.calibration.measure.file import Row
from headway.calibration.measure.plan import Operation
from headway.calibration.measure.timing import Kernel, time_s

SAVE_S = 2.0
"""How often the file is written."""


class Failure(Exception):  # noqa: N818 (what a kernel says when it cannot run)
    """A kernel cannot run: out of memory, or not supported."""


class Swept(Struct, frozen=True):
    """What a sweep did."""

    num_timed: int
    num_known: int
    """In the file before."""
    num_left: int
    """Not reached in the time given."""
    failures: dict[str, int]
    """Why, and how many."""


def run(
    operations: Sequence[Operation],
    kernels: Callable[[Operation], Kernel],
    clock: Callable[[], float],
    path: Path,
    gpu: str,
    software: str,
    limit_s: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> Swept:
    """Time the operators that `path` does not hold yet, for `limit_s` at most. What is measured is never lost:
    the file is whole at any time, also when this is interrupted.

    `kernels` makes an operator's kernel, and raises `Failure` where it cannot be run.
    """
    rows = file.read(path, gpu)
    known = {row.operation for row in rows}
    waiting = [operation for operation in operations if operation not in known]
    failures: dict[str, int] = {}
    start_s = saved_s = clock()
    done = 0
    try:
        for operation in waiting:
            if limit_s is not None and clock() - start_s >= limit_s:
                break
            try:
                rows.append(Row(operation, time_s(kernels(operation), clock), gpu, software))
            except Failure as failure:
                why = f"{operation.kind}{f' {operation.dtype}' if operation.dtype else ''}: {failure}"
                failures[why] = failures.get(why, 0) + 1
            done += 1
            if progress is not None:
                progress(done / len(waiting))
            if clock() - saved_s >= SAVE_S:
                file.write(path, rows)
                saved_s = clock()
    finally:
        if len(rows) > len(known):
            file.write(path, rows)
    return Swept(len(rows) - len(known), len(operations) - len(waiting), len(waiting) - done, failures)
