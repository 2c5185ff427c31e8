"""The last steps that readers of other people's traces share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway.core.errors import HeadwayError
from headway.workload.readers.options import Options
from headway.workload.table import Workload

NO_ARRIVALS = "the file has no arrival times: without `arrivals` beside the trace, all requests arrive at 0"


def without_failures(workload: Workload) -> Workload:
    """Without the rows of no prompt or no output tokens: failed requests. The notes count them."""
    failed = (workload.prompt_tokens == 0) | (workload.output_tokens == 0)
    num_failed = int(np.count_nonzero(failed))
    if not num_failed:
        return workload
    return workload.take(~failed).with_notes(f"{num_failed} rows with zero tokens (failed requests) skipped")


def from_zero(workload: Workload, path: Path, options: Options) -> Workload:
    """Sorted if asked for, the first arrival moved to 0, and checked."""
    if not len(workload):
        raise HeadwayError(f"{path}: no requests left to read")
    ordered = workload.sorted() if options.sort else workload
    shifted = ordered.with_columns({"arrival_s": ordered.arrival_s - ordered.arrival_s[0]})
    return shifted.validate(str(path))
