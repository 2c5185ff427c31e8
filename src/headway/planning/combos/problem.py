"""A deployment problem of GPU combos: the demands, the possible deployments, and the plan. Values only, fit for JSON.

A combo is the unit of deployment (Cauchy 3.1, 3.3.1): GPUs of one type that prefill and GPUs of one type that decode,
or GPUs of one type that do both. The GPUs of a phase form instances with the highest tensor parallelism that a server
holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Literal, Protocol

from msgspec import Struct

from headway import catalog
from headway.catalog.coefficients import Coefficients
from headway.core.counts import MOST_GPUS, check_count
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Engine, Gpu, Model
from headway.planning.stability import Stability

Objective = Literal["co", "mc", "mce"]
Efficiency = Literal["served", "closed-form", "shape", "step"]
EFFICIENCIES: dict[Efficiency, str] = {
    "served": "tokens_per_usd",
    "closed-form": "closed_form_tokens_per_usd",
    "shape": "shape_tokens_per_usd",
    "step": "step_tokens_per_usd",
}
TOLERANCE = 1e-6
"""Share of a demand by which a plan may miss it: the solver's tolerance."""
DEFAULT_NETWORK_BYTES_PER_S = 12.5e9
"""Bandwidth of one instance in each direction; equals a pool's default."""
RESTART_S = 90.0
"""Time until a new instance serves (Cauchy 3.5.1)."""


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """GPUs of one type, as `instances` replicas of `tp` GPUs each."""

    gpu: str
    tp: int = 1
    instances: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp * self.instances

    @property
    def label(self) -> str:
        """A label such as "4 x h20-96gb (tp 2)"."""
        return f"{self.num_gpus} x {self.gpu}" + (f" (tp {self.tp})" if self.tp > 1 else "")


class GpuCombo(Struct, frozen=True, forbid_unknown_fields=True):
    """Either `prefill` and `decode`, or `aggregated`."""

    model: str
    usd_per_hour: float
    """Price of the whole combo per hour of service, including interruptions."""
    prefill: Group | None = None
    decode: Group | None = None
    aggregated: Group | None = None

    def __post_init__(self) -> None:
        if (self.prefill is None) != (self.decode is None) or (self.prefill is None) == (self.aggregated is None):
            raise ValueError("a combo has prefill and decode, or aggregated")
        _require_at_least(0, usd_per_hour=self.usd_per_hour)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Prefill and decode groups, or only the aggregated group."""
        return tuple(group for group in (self.prefill, self.decode, self.aggregated) if group is not None)

    @property
    def gpus(self) -> dict[str, int]:
        return add_gpus((group.gpu, group.num_gpus) for group in self.groups)

    @property
    def phases(self) -> tuple[Group, Group]:
        return self.groups[0], self.groups[-1]

    @property
    def label(self) -> str:
        """A label such as "<2 x h800-80gb-sxm (tp 2), 4 x h20-96gb (tp 2)>"."""
        return f"<{', '.join(group.label for group in self.groups)}>"


class Offer(Struct, frozen=True, forbid_unknown_fields=True):
    gpu: Gpu
    limit: int | None = None
    """Available GPUs; None: no limit."""
    usd_per_hour: float | None = None
    """Price of one GPU; None: the catalog's."""
    gpus_per_server: int | None = None
    """Maximum number of GPUs that one instance may span; None: the catalog's node."""
    interruptions_per_hour: float = 0.0
    """Interruptions of one instance by the provider, as for spot GPUs."""
    restart_s: float = RESTART_S
    """Paid time from an interruption until the combo serves again."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit > 0:
            check_count(f"GPUs ({self.gpu.name})", self.limit, MOST_GPUS)
        _require_at_least(0, limit=self.limit, usd_per_hour=self.price, restart_s=self.restart_s)
        _require_at_least(0, interruptions_per_hour=self.interruptions_per_hour)
        _require_at_least(1, gpus_per_server=self.gpus_per_server)

    @property
    def price(self) -> float:
        """Dollars per GPU and hour."""
        return self.gpu.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour

    @property
    def server(self) -> int:
        """Most GPUs that one instance may span."""
        return self.gpu.gpus_per_node if self.gpus_per_server is None else self.gpus_per_server


class Counts(Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of GPUs to try in each group: 1:1 to 2:6 as in 3.3.2."""

    prefill: tuple[int, ...] = (1, 2)
    decode: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    aggregated: tuple[int, ...] = (1, 2, 4)
    same_type: bool = True
    """Whether separate prefill and decode groups may have the same type."""

    def __post_init__(self) -> None:
        _require_at_least(1, counts=min((*self.prefill, *self.decode, *self.aggregated), default=1))


class WorkloadPattern(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of workload: the name by which a profiler finds its requests, and mean lengths (R_in, R_out)."""

    name: str | None
    """The profiler's name of the requests; None: every request has the mean lengths."""
    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        _require_at_least(1, prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)


class ServiceSlo(Struct, frozen=True, forbid_unknown_fields=True):
    """Latency limits of a service; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("ttft_s", "tpot_s"):
            if (value := getattr(self, field)) is not None and not 0 < value < inf:
                raise ValueError(f"{field}: {value}; expected more than 0")


class ComboService(Struct, frozen=True, forbid_unknown_fields=True):
    """A model with one kind of workload and its SLO."""

    name: str
    model: Model
    engine: Engine
    pattern: WorkloadPattern
    slo: ServiceSlo
    network_bytes_per_s: float = DEFAULT_NETWORK_BYTES_PER_S
    """Bandwidth of one instance in each direction. Split combos send KV caches over it."""
    coefficients: dict[str, Coefficients] = {}
    """Step times by GPU; missing ones come from the catalog."""

    def coefficients_on(self, gpu: str) -> Coefficients:
        return self.coefficients.get(gpu) or catalog.coefficients(gpu, self.engine.name, self.engine.version)

    def uncalibrated(self, combo: GpuCombo) -> tuple[str, ...]:
        """Unmeasured step times of a combo, such as "h20-96gb: kernels of h100-80gb-sxm"."""
        missing = {group.gpu: self.coefficients_on(group.gpu).estimated for group in combo.groups}
        return tuple(f"{gpu}: {', '.join(estimated)}" for gpu, estimated in missing.items() if estimated)


class Profiler(Protocol):
    """Measures the goodput of combos. The same arguments give the same result."""

    def goodput_rps(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> float:
        """Requests per second served within the SLO; 0 if no rate is possible."""
        ...


class ComboCandidate(Struct, frozen=True, forbid_unknown_fields=True):
    """A combo for a service. Tokens per dollar count prompts and outputs; None if the combo is free."""

    service: str
    combo: GpuCombo
    goodput_rps: float
    tokens_per_usd: float | None
    """Tokens per dollar at its goodput: the paper's measured CE."""
    closed_form_tokens_per_usd: float | None = None
    """Eq. 15 as stated in the paper."""
    shape_tokens_per_usd: float | None = None
    """Eq. 14 with FLOPs and bytes of the model's real shape."""
    step_tokens_per_usd: float | None = None
    """Eq. 14 with the step-time model's throughputs."""
    is_lasting: bool = False
    """Whether the goodput comes from a long profile. A short profile may be too high."""
    calibrated: bool = True
    """Whether step times of all its GPUs were measured with its engine."""
    uncalibrated: tuple[str, ...] = ()
    """Unmeasured step times, by GPU."""


class Rejected(Struct, frozen=True, forbid_unknown_fields=True):
    """A combo or group of GPUs that is not among the candidates."""

    what: str
    reason: str


class Selection(Struct, frozen=True, forbid_unknown_fields=True):
    """Candidates by service, highest CE first, and rejected combos."""

    candidates: tuple[ComboCandidate, ...]
    rejected: dict[str, tuple[Rejected, ...]]


class ServiceDemand(Struct, frozen=True, forbid_unknown_fields=True):
    """The rate that must be servable within the service's SLO."""

    service: str
    rps: float
    tokens_per_request: float | None = None
    """Prompt and output tokens, for the plan's tokens per dollar; None: unknown."""

    def __post_init__(self) -> None:
        _require_at_least(0, rps=self.rps)


class ComboProblem(Struct, frozen=True, forbid_unknown_fields=True):
    demands: tuple[ServiceDemand, ...]
    candidates: tuple[ComboCandidate, ...]
    limits: dict[str, int] = {}
    """GPUs by type; a missing type has no limit."""
    objective: Objective = "co"
    efficiency: Efficiency = "served"
    """The cost-efficiency used as C."""


class PlannedCombo(Struct, frozen=True, forbid_unknown_fields=True):
    service: str
    combo: GpuCombo
    count: int
    goodput_rps: float
    """Goodput of one combo."""
    usd_per_hour: float
    """Price of one combo."""
    tokens_per_usd: float | None
    calibrated: bool = True
    """Whether step times of all its GPUs were measured with its engine."""
    uncalibrated: tuple[str, ...] = ()
    """Unmeasured step times, by GPU."""


class ServiceGoodput(Struct, frozen=True, forbid_unknown_fields=True):
    service: str
    demand_rps: float
    goodput_rps: float
    shortfall_rps: float


class RouterResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a router on a service's part of the plan."""

    routing: str
    run: Stability
    is_met: bool
    """Whether enough requests were in time, and waits did not grow."""
    ties: bool
    """Whether this router's run is met, and its attainment lies within the interval of the best router's attainment."""


class ServiceRehearsal(Struct, frozen=True, forbid_unknown_fields=True):
    """A service's part of the plan, simulated as a whole at the service's demand."""

    service: str
    routing: str
    """The planned router."""
    runs: tuple[Stability, ...]
    """Runs with the planned router, each longer than the one before."""
    is_met: bool
    """Whether enough requests of the longest run were in time, and waits did not grow."""
    routers: tuple[RouterResult, ...] = ()
    """All compared routers, with as many requests as the longest run, the planned one first."""


class ComboBinding(Struct, frozen=True, forbid_unknown_fields=True):
    """A limit or demand without which the plan would be better."""

    kind: Literal["gpus", "demand"]
    name: str
    used: float
    limit: float
    objective_without: float | None
    """Objective of the same problem without this limit or demand. None under `mce`, where a limit binds if it is used
    up."""


class ComboPlan(Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["optimal", "feasible", "short"]
    """`feasible`: demands are met, but the time limit ended the proof of the optimum. `short`: demands cannot be met,
    or no plan was found in time; the plan serves as much as possible, and `why` names the shortage."""
    planner: str
    objective: float | None
    """The objective in the units of `planner`; for a short plan, the sum of the served shares of demand."""
    bound: float | None
    """Bound of the objective: no plan is better."""
    gap: float | None
    """Difference between `objective` and `bound`, as a share of the objective."""
    combos: tuple[PlannedCombo, ...]
    gpus: dict[str, int]
    usd_per_hour: float
    tokens_per_usd: float | None
    """Tokens of the served demands per dollar; None for unknown lengths or a free plan."""
    services: tuple[ServiceGoodput, ...]
    binding: tuple[ComboBinding, ...]
    why: str = ""
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Number of each combo, by service and label."""
        return {(each.service, each.combo.label): each.count for each in self.combos}


def add_gpus(numbers: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for gpu, number in numbers:
        total[gpu] = total.get(gpu, 0) + number
    return total


def check(problem: ComboProblem) -> None:
    """Raise HeadwayError if parts of the problem contradict each other."""
    names = [demand.service for demand in problem.demands]
    if len(set(names)) < len(names):
        raise HeadwayError("demands: a service is listed twice")
    if not names:
        raise HeadwayError("demands: expected at least one service")
    for each in problem.candidates:
        if each.service not in names:
            raise unknown("service", each.service, names, f"candidate {each.combo.label}")
        if not 0 <= each.goodput_rps < inf:
            raise HeadwayError(f"candidate {each.combo.label}: goodput_rps {each.goodput_rps}; expected 0 or more")
    for gpu, limit in problem.limits.items():
        if limit < 0:
            raise HeadwayError(f"limits: {gpu}: {limit}; expected 0 or more")
    for each in problem.candidates if problem.objective == "mce" else ():
        if each.combo.usd_per_hour == 0:
            raise HeadwayError(
                f"{each.combo.label} costs nothing, so its cost-efficiency is infinite and mce cannot weigh it; "
                "use co or mc"
            )
        if not any(gpu in problem.limits for gpu in each.combo.gpus):
            raise HeadwayError(
                f"mce may rent as many combos as there are GPUs, and {each.combo.label} has no limit; give one"
            )


def tokens_per_usd(
    demands: tuple[ServiceDemand, ...], services: tuple[ServiceGoodput, ...], usd_per_hour: float
) -> float | None:
    """Tokens of the served demands per dollar; None for unknown lengths or a price of 0."""
    total = 0.0
    for demand, service in zip(demands, services, strict=True):
        if demand.tokens_per_request is None:
            return None
        total += min(demand.rps, service.goodput_rps) * demand.tokens_per_request * 3600
    return total / usd_per_hour if usd_per_hour > 0 else None


def _require_at_least(least: int, /, **values: float | None) -> None:
    """Raise ValueError for numbers below `least` or infinite; None is ignored."""
    for name, value in values.items():
        if value is not None and not least <= value < inf:
            raise ValueError(f"{name}: {value}; expected {least} or more")
