"""The allocation of GPUs to the stages of a cascade as a mixed-integer program, which `least_max` is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.errors import HeadwayError
from headway.planning.cascade.allocation import Allocation, Gpus
from headway.planning.cascade.problem import Floats
from headway.planning.solver import dot, integers, minimise, new_model, reals


def least_max_milp(tables: Sequence[Floats], num_gpus: Gpus, use_all: bool = False) -> Allocation | None:
    """As `least_max`, with a row for each type of GPU. HeadwayError without highspy."""
    places = [(i, f) for i, table in enumerate(tables) for f in np.flatnonzero(np.isfinite(table)).tolist()]
    if {i for i, _ in places} != set(range(len(tables))):
        return None
    scale = max(float(tables[i][f]) for i, f in places) or 1.0
    model = new_model()
    x = dict(zip(places, integers(model, np.ones(len(places))), strict=True))
    (latency,) = reals(model, np.ones(1))
    stages = [[(f, x[i, f]) for f in range(len(table)) if (i, f) in x] for i, table in enumerate(tables)]
    for chosen in stages:
        model.addConstr(dot([1.0] * len(chosen), [variable for _, variable in chosen]) == 1.0)
    for table, chosen in zip(tables, stages, strict=True):
        coefficients = [1.0, *(-table[f] / scale for f, _ in chosen)]
        model.addConstr(dot(coefficients, [latency, *(variable for _, variable in chosen)]) >= 0.0)
    available = [num_gpus] if isinstance(num_gpus, int) else num_gpus.left
    for t, most in enumerate(available):
        of_type = [f if isinstance(num_gpus, int) else num_gpus.vector(f)[t] for _, f in places]
        used = dot(of_type, x.values())
        model.addConstr(used == most if use_all else used <= most)
    solution = minimise(model, dot([1.0], [latency]))
    if solution.status == "infeasible":
        return None
    if solution.status != "optimal":
        raise HeadwayError("the time limit ended the search before an allocation was proved best")
    gpus = dict(place for place, value in zip(places, solution.of(list(x.values())), strict=True) if value > 0.5)
    taken = tuple(gpus[i] for i in range(len(tables)))
    return Allocation(taken, max(float(table[f]) for table, f in zip(tables, taken, strict=True)))
