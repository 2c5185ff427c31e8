"""What a reactive source has issued: rows of its plan, with the times at which they really arrived."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.workload.rows import FIELDS
from headway.workload.table import Workload

DEADLINE = FIELDS.index("deadline_s")


class Issued:
    """A table that grows by a row at a time, 16 bytes each: `plan` holds what does not change."""

    def __init__(self, plan: Workload) -> None:
        self.plan = plan
        self.rows = array("q")
        """Of the plan, by request id."""
        self.arrivals = array("d")

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: int, at_s: float, fields: Sequence[Any]) -> list[Any]:
        """The fields of `Request` for this row of the plan, arriving now: a deadline moves along."""
        made = [len(self.rows), at_s, *fields[2:]]
        if len(made) > DEADLINE and made[DEADLINE] is not None:
            made[DEADLINE] += at_s - fields[1]
        self.rows.append(row)
        self.arrivals.append(at_s)
        return made

    def table(self) -> Workload:
        """The rows so far, in the order of request ids."""
        rows, arrival_s = np.array(self.rows, "i8"), np.array(self.arrivals, "f8")
        table = self.plan.take(rows)
        deadline_s = table.columns.get("deadline_s")
        if deadline_s is not None:
            deadline_s = deadline_s + (arrival_s - table.arrival_s)
        return table.with_columns({"arrival_s": arrival_s} | ({} if deadline_s is None else {"deadline_s": deadline_s}))
