"""A plan for forecast demand. Values only, fit for JSON."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.planning.capacity.problem import CapacityPlan

DEFAULT_CHANCE = 0.8


class DemandPrices(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prices of one GPU-hour. None: unknown."""

    reserved_usd_per_gpu_hour: float | None = None
    spot_usd_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            price = getattr(self, name)
            if price is not None and not 0 <= price < float("inf"):
                raise HeadwayError(f"{name}: {price}; expected dollars from 0")


class WeekPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The replicas of one week, sized for its busiest hour."""

    begins: str
    num_hours: int
    """Hours of the week; the last week may be shorter."""
    busiest_begins: str
    p50_requests_per_s: float
    """Demand of the busiest hour, as for the next two fields."""
    p90_requests_per_s: float
    planned_requests_per_s: float
    """Demand at the planned quantile."""
    replicas: int | None
    """The needed replicas; None: more than allowed."""
    num_gpus: int | None
    chance: float | None
    """Lower bound of the probability that the busiest hour meets its targets."""
    chance_with_one_less: float | None
    usd: float | None
    """Cost of these replicas for the whole week, on demand."""


class DueReplicas(Struct, frozen=True, forbid_unknown_fields=True):
    """The number of replicas needed from a day on."""

    from_day: str
    replicas: int


class ScheduledNumber(Struct, frozen=True, forbid_unknown_fields=True):
    """Additional replicas at the same time of each day: a scheduled minimum of a pool."""

    cron: str
    duration_s: float
    replicas: int
    time_zone: str


class ReservePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas to reserve, and replicas to rent by the hour, from the need of each hour."""

    reserved_replicas: int
    num_reserved_gpus: int
    most_rented_gpus: int
    rented_gpu_hours: float
    rented: Literal["on demand", "spot"]
    on_demand_usd_per_gpu_hour: float
    reserved_usd_per_gpu_hour: float | None
    spot_usd_per_gpu_hour: float | None
    break_even_utilisation: float | None
    """Share of hours above which a reserved GPU is cheaper than a rented one. None: no reserved price is known, and the
    base is the need of every hour."""
    used_share: tuple[float, ...]
    """Holds, for each replica from the first one, the share of the hours that need it."""
    usd_per_month: float
    usd_per_month_all_on_demand: float
    """Cost with the busiest week's replicas always on and rented."""
    schedule: tuple[ScheduledNumber, ...]


class DemandPlan(Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["met", "short", "infeasible"]
    """`short`: a week needs more replicas than allowed. `infeasible`: no number of replicas reaches the probability."""
    chance: float
    """The requested probability."""
    demand_quantile: float | None
    """The planned quantile of each hour's demand."""
    model_chance: float | None
    """Lower bound of the probability that the step times are good enough; times the planned quantile, it is `chance`.
    None: the errors of these predictions are unknown, and ignored."""
    replica: str
    """The kind of replica, such as "h100-80gb-sxm tp 1, least-loaded"."""
    gpus_per_replica: int
    usd_per_replica_hour: float
    at_recorded: CapacityPlan
    """The plan for the busiest recorded hour, which determined the kind of replica."""
    weeks: tuple[WeekPlan, ...] = ()
    due: tuple[DueReplicas, ...] = ()
    """The days from which more replicas are needed than ever before; the first entry is the start of the forecast."""
    reserve: ReservePlan | None = None
    served: tuple[tuple[int, float], ...] = ()
    """(replicas, highest requests per second that they serve with `model_chance`), by rehearsal."""
    num_rehearsals: int = 0
    notes: tuple[str, ...] = ()
