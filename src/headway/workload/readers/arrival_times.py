"""Converts arrival times that are epochs to seconds from the first request."""

from __future__ import annotations

from datetime import UTC, datetime

from headway.workload.table import Workload

_FIRST_EPOCH_S = 1e9
"""Larger arrival times are epochs (this one is in 2001): no trace begins 31 years after its time 0, and no trace is
older than 2001."""
_EPOCH_UNITS = ((1e17, "nanoseconds", 1e9), (1e14, "microseconds", 1e6), (1e11, "milliseconds", 1e3))
"""(least number, unit, units in a second) of epochs that are not seconds: 1e11 seconds would be the year 5138."""


def from_first_arrival(workload: Workload) -> Workload:
    """The rows with epochs of any unit replaced by seconds from the first arrival, and a note about it.

    `arrival_s` holds the numbers of the file. Times that are not epochs stay unchanged.
    """
    first = float(workload.arrival_s.min(initial=0.0 if not len(workload) else float("inf")))
    if first <= _FIRST_EPOCH_S:
        return workload
    unit, per_s = next(((name, units) for least, name, units in _EPOCH_UNITS if first >= least), ("seconds", 1.0))
    names = [name for name in ("arrival_s", "deadline_s") if name in workload.columns]
    seconds = {name: workload.columns[name] / per_s for name in names}
    date = datetime.fromtimestamp(first / per_s, UTC).isoformat(sep=" ", timespec="seconds")
    note = f"arrival times are {unit} since 1970: shifted to start at 0, which was {date}"
    start_s = seconds["arrival_s"].min()
    return workload.with_columns({name: column - start_s for name, column in seconds.items()}).with_notes(note)
