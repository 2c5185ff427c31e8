"""The deployment solver: GPUs and replica sets for a given routing, evaluating no more than the proof needs (3.2).

Every stage has a table of l_i(f) with lower bounds where nothing is evaluated. The allocation that is best by what is
expected is evaluated first, until all of it is known; then the one that is best by the lower bounds, until no
allocation can be better than the best known one. What the paper computes in full (every set of replicas for every
number of GPUs, then the program) has the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec import Struct, structs

from headway.planning.cascade.allocation import Allocation, Gpus, least_cost, least_max, less
from headway.planning.cascade.gpu_budget import Room
from headway.planning.cascade.latencies import Table
from headway.planning.cascade.problem import ReplicaSet

EPS = 1e-12


class Deployment(Struct, frozen=True):
    """The answer for one routing."""

    gpus: tuple[int, ...]
    sets: tuple[ReplicaSet | None, ...]
    """None: a stage without GPUs."""
    latencies_s: tuple[float, ...]
    latency_s: float
    """The largest of them."""
    bound_s: float | None
    """No deployment is faster; None: not known."""
    usd_per_hour: float | None = None
    """Where that is what was minimised."""

    @property
    def minimised(self) -> float:
        """The price of an hour, where that was to be least; else the latency."""
        return self.latency_s if self.usd_per_hour is None else self.usd_per_hour


def deploy(
    tables: Sequence[Table],
    num_gpus: Gpus,
    use_all: bool = False,
    limit_s: float = inf,
    gap: float = 0.0,
    asks: int | None = None,
) -> tuple[Deployment | None, float]:
    """The fastest deployment, and what none can be faster than.

    None where there is none, or none below `limit_s`: then the bound is at least that. `gap`: how far, as a share,
    the bound may stay below. `asks`: evaluations, after which the best known will do.
    """
    started = sum(table.num_asked for table in tables)
    while True:
        low = least_max([table.lower for table in tables], num_gpus, use_all)
        known = least_max([table.best for table in tables], num_gpus, use_all)
        if low is None or low.latency_s >= limit_s:
            return None, inf if low is None else low.latency_s
        spent = asks is not None and sum(table.num_asked for table in tables) - started >= asks
        if known is not None and (spent or low.latency_s >= known.latency_s * (1 - gap) - EPS):
            return _deployment(tables, known, min(low.latency_s, known.latency_s)), low.latency_s
        _narrow(tables, low, least_max([table.guess for table in tables], num_gpus, use_all))


def deploy_cheapest(
    tables: Sequence[Table], room: Room, latency_s: float, limit_usd: float = inf, gap: float = 0.0,
    asks: int | None = None,
) -> tuple[Deployment | None, float]:  # fmt: skip
    """The deployment that costs least with every stage within a latency, and what none costs less than, $/h.

    None where there is none, or none below `limit_usd`. `gap` and `asks` as of `deploy`.
    """
    started = sum(table.num_asked for table in tables)
    while True:
        low = least_cost([table.lower for table in tables], room, latency_s)
        known = least_cost([table.best for table in tables], room, latency_s)
        if low is None or low.usd_per_hour >= limit_usd:
            return None, inf if low is None else low.usd_per_hour
        spent = asks is not None and sum(table.num_asked for table in tables) - started >= asks
        if spent and known is None:
            return None, low.usd_per_hour
        if known is not None and (spent or low.usd_per_hour >= known.usd_per_hour * (1 - gap) - EPS):
            return _priced(tables, known), low.usd_per_hour
        guess = least_cost([table.guess for table in tables], room, latency_s)
        within = [None if each is None else structs.replace(each, latency_s=latency_s) for each in (low, guess)]
        _narrow(tables, *within)


def _priced(tables: Sequence[Table], found: Allocation) -> Deployment:
    made = _deployment(tables, found, 0.0)
    return structs.replace(made, bound_s=None, usd_per_hour=found.usd_per_hour)


def _narrow(tables: Sequence[Table], low: Allocation | None, guess: Allocation | None) -> None:
    """Evaluate what is expected to be best; where that is known, what the lower bounds still allow."""
    for wanted in (guess, low):
        if wanted is None:
            continue
        asked = False
        for table, f in zip(tables, wanted.gpus, strict=True):
            if table.best[f] > wanted.latency_s + EPS and table.open(f):
                table.ask(f)
                asked = True
        if asked:
            return


def _deployment(tables: Sequence[Table], found: Allocation, bound_s: float) -> Deployment:
    pairs = list(zip(tables, found.gpus, strict=True))
    return Deployment(
        found.gpus,
        tuple(table.chosen[f] for table, f in pairs),
        tuple(float(table.best[f]) for table, f in pairs),
        found.latency_s,
        bound_s,
    )


def spread(
    tables: Sequence[Table], num_gpus: Gpus, found: Deployment, use_all: bool = False, gap: float = 0.0,
    asks: int | None = None,
) -> Deployment:  # fmt: skip
    """The same largest latency, and the GPUs that it leaves over where they help the other stages most.

    The slowest stage keeps what it has; the rest is deployed anew, and so on. `gap` and `asks` as of `deploy`.
    """
    gpus, sets, latencies = list(found.gpus), list(found.sets), list(found.latencies_s)
    open_ = list(range(len(tables)))
    left = num_gpus
    while len(open_) > 1:
        slowest = max(open_, key=lambda i: (latencies[i], i))
        open_.remove(slowest)
        left = less(left, gpus[slowest])
        better, _ = deploy([tables[i] for i in open_], left, use_all, gap=gap, asks=asks)
        if better is None or better.latency_s > max(latencies[i] for i in open_):
            continue
        for at, i in enumerate(open_):
            gpus[i], sets[i], latencies[i] = better.gpus[at], better.sets[at], better.latencies_s[at]
    return Deployment(tuple(gpus), tuple(sets), tuple(latencies), max(latencies), found.bound_s)
