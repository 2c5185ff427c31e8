"""A plan for forecast demand. Values only, fit for JSON."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.planning.capacity.problem import CapacityPlan

DEFAULT_CHANCE = 0.8


class DemandPrices(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prices of one GPU for an hour. None: not known."""

    reserved_usd_per_gpu_hour: float | None = None
    spot_usd_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            price = getattr(self, name)
            if price is not None and not 0 <= price < float("inf"):
                raise HeadwayError(f"{name}: {price}; expected dollars from 0")


class WeekPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The replicas of one week, for its busiest hour."""

    begins: str
    num_hours: int
    """A last week may be shorter."""
    busiest_begins: str
    p50_requests_per_s: float
    """Of the busiest hour, as the next two."""
    p90_requests_per_s: float
    planned_requests_per_s: float
    """At the quantile of the demand that is planned for."""
    replicas: int | None
    """None: more than may be tried."""
    num_gpus: int | None
    chance: float | None
    """Least chance that the busiest hour meets its targets."""
    chance_with_one_less: float | None
    usd: float | None
    """Of these replicas for the whole week, on demand."""


class DueReplicas(Struct, frozen=True, forbid_unknown_fields=True):
    """From a day on, so many replicas are needed."""

    from_day: str
    replicas: int


class ScheduledNumber(Struct, frozen=True, forbid_unknown_fields=True):
    """More replicas than always, at the same time of each day: a scheduled minimum of a pool."""

    cron: str
    duration_s: float
    replicas: int
    time_zone: str


class ReservePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """What to reserve, and what to rent by the hour, as the need of each hour has it."""

    reserved_replicas: int
    num_reserved_gpus: int
    most_rented_gpus: int
    rented_gpu_hours: float
    rented: Literal["on demand", "spot"]
    on_demand_usd_per_gpu_hour: float
    reserved_usd_per_gpu_hour: float | None
    spot_usd_per_gpu_hour: float | None
    break_even_utilisation: float | None
    """Share of the hours for which a GPU must be needed so that it is cheaper reserved than rented; None: no reserved
    price is known, and the base is what every hour needs."""
    used_share: tuple[float, ...]
    """By replica, the first one first: share of the hours that need it."""
    usd_per_month: float
    usd_per_month_all_on_demand: float
    """With the busiest week's replicas always on, rented."""
    schedule: tuple[ScheduledNumber, ...]


class DemandPlan(Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["met", "short", "infeasible"]
    """`short`: a week needs more replicas than may be tried. `infeasible`: no number of replicas has the chance."""
    chance: float
    """Asked for."""
    demand_quantile: float | None
    """Of each hour's demand that is planned for."""
    model_chance: float | None
    """Least chance that the step times are good enough; with the quantile it gives `chance`. None: the errors of these
    predictions are not known, and are left out."""
    replica: str
    """The kind of replica, as in "h100-80gb-sxm tp 1, least-loaded"."""
    gpus_per_replica: int
    usd_per_replica_hour: float
    at_recorded: CapacityPlan
    """The plan for the busiest recorded hour, which chose the kind of replica."""
    weeks: tuple[WeekPlan, ...] = ()
    due: tuple[DueReplicas, ...] = ()
    """The days from which more replicas are needed than on any day before; the first one is the beginning."""
    reserve: ReservePlan | None = None
    served: tuple[tuple[int, float], ...] = ()
    """(replicas, highest requests per second that they serve with `model_chance`), as rehearsed."""
    num_rehearsals: int = 0
    notes: tuple[str, ...] = ()
