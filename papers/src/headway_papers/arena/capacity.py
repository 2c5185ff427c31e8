"""The capacity of a fleet for a workload: the rate of completed requests while more arrive than it can serve.

A run at 1.3 times the capacity has a queue at every replica. The rate of completions after the first third of the
arrivals is then the capacity under the fleet's reference router, including caches. It is found in a few runs, each with
several times the requests of the previous one, until two agree.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.record import Outcome, Records
from headway.metrics.columns import floats, ints
from headway.scenario import Simulator, assemble
from headway_papers.arena.grid import at_load
from headway_papers.arena.metrics import Measurement, begin_s

OVERLOAD = 1.3
SATURATED = 0.9
"""A fleet that completes a larger share of its arrivals is not saturated."""
PRECISION = 0.03
MOST_RUNS = 12
LENGTHEN = 4
FIRST_REQUESTS, MOST_REQUESTS = 500, 12_000


def capacity(document: dict[str, Any], base_dir: str) -> Measurement:
    """The load at capacity: `load`, the factor on the workload's own rate, and `requests_per_s`.

    Raises HeadwayError if the scenario cannot be run, or if no rate saturates the fleet.
    """
    load, estimate = 1.0, 0.0
    num = FIRST_REQUESTS if "num_requests" in document["workload"] else None
    for _ in range(MOST_RUNS):
        scenario = assemble(copy.deepcopy(at_load(document, Path(base_dir), load, num)), Places(), Path(base_dir))
        offered_rps, served_rps = rates(Simulator().records(scenario))
        if served_rps >= SATURATED * offered_rps:
            load *= 2
            continue
        before, estimate = estimate, load * served_rps / offered_rps
        if not estimate:
            break
        if abs(estimate / before - 1) <= PRECISION if before else False:
            return {"load": estimate, "requests_per_s": served_rps}
        load = OVERLOAD * estimate
        num = None if num is None else min(LENGTHEN * num, MOST_REQUESTS)
    if estimate:
        return {"load": estimate, "requests_per_s": served_rps}
    raise HeadwayError("no rate of this workload saturates the fleet; expected more num_requests, or a smaller fleet")


def rates(records: Records) -> tuple[float, float]:
    """Requests that arrive, and requests that finish, per second, after the first third of the arrivals' time.

    Calls and turns count as arriving with the first call or turn of their program or session.
    """
    request = ints(records.requests, "request")
    last_s = float(begin_s(records.workload).max(initial=0.0))
    if last_s <= 0:
        return 0.0, 0.0
    end_s = floats(records.requests, "end_s")
    is_served = records.requests["outcome"] == Outcome.FINISHED
    num_served = int((is_served & (end_s >= last_s / 3) & (end_s < last_s)).sum())
    return len(request) / last_s, num_served / (last_s * 2 / 3)
