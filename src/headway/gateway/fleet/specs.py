"""The parts of a fleet file for the gateway: pools, how replicas start, policies and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from headway.catalog.coefficients import Coefficients
from headway.control.policies import Policies
from headway.control.shadow import ShadowPlan
from headway.core.fleet import Combo, Fallbacks, Network, Pool, RoleChange
from headway.core.pacer import Pacer
from headway.core.past_demand import PastDemand
from headway.gateway.kv_events.address import KvEvents
from headway.gateway.settings import Api, Judge, Settings
from headway.limits.budgets import TokenPrices

_Seconds = Annotated[float, Meta(gt=0)]
_Port = Annotated[int, Meta(ge=1, le=65535)]


class Processes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: replicas are processes on the gateway's machine. They end when the gateway ends."""

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """The command that starts one replica, word by word, without a shell. Placeholders: `{port}` is the replica's port,
    `{index}` its number (0 for the first port), `{gpus}` the numbers of its GPUs (`0,1` for the first of two), `{tp}`
    and `{pp}` its parallelism, which a `replan` may choose, `{role}` its side of a combo (`prefill`, `decode`), and
    `{bootstrap_port}` another free port."""
    ports: tuple[_Port, _Port]
    """The first and the last port that replicas may listen on, at 127.0.0.1. They limit the number of replicas."""
    env: dict[str, str] = {}
    """Environment variables, with the same placeholders."""
    keep_env: tuple[str, ...] = ()
    """Additional variables of the gateway's own environment that replicas get. Replicas always get PATH, HOME and
    similar variables."""
    ready_s: _Seconds = 600.0
    """A replica that is not healthy after this time is stopped and restarted."""
    tries: Annotated[int, Meta(ge=1)] = 3
    """Number of failed starts in a row after which a replica counts as failed. A failed replica is restarted at growing
    intervals, up to a minute, and scaling does not wait for it."""
    stop_s: _Seconds = 30.0
    """Time from SIGTERM to SIGKILL."""
    log: str = ""
    """A folder for the replicas' output, one file for each port. Unset: output goes to the gateway's log."""


class Kubernetes(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: replicas are the pods of a workload, and scaling sets their number."""

    name: str
    """Name of the workload."""
    kind: Literal["Deployment", "StatefulSet"] = "Deployment"
    namespace: str = "default"
    port: _Port = 8000
    """The port that engines listen on."""
    context: str = ""
    """A context of the kubeconfig. Unset: the cluster that the gateway runs in, else the current context."""
    poll_s: _Seconds = 2.0
    """Time between two reads of the pods."""
    ready_s: _Seconds = 600.0
    """Time after which a pod that is not healthy, or does not exist, counts as failed. Its workload goes on trying, but
    scaling does not wait for the pod."""
    tries: Annotated[int, Meta(ge=1)] = 3
    """A pod also counts as failed after this many restarts of its containers before it was healthy."""


class InferencePool(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway epp`: the replicas are the ready pods that an InferencePool selects, at the pool's target ports.
    The gateway does not set the number of pods."""

    name: str
    namespace: str = "default"
    context: str = ""
    """A context of the kubeconfig. Unset: the cluster that the picker runs in, else the current context."""
    poll_s: _Seconds = 60.0
    """Longest time between two reads of the pool and its pods. They are read at once when a pod changes."""


class ServedPool(Struct, frozen=True):
    """One pool, or one part of a combo, with the data that the gateway needs to serve it."""

    pool: Pool
    endpoints: tuple[str, ...]
    api: Api
    kv_blocks: int
    """KV blocks of one replica."""
    start: Processes | Kubernetes | InferencePool | None = None
    """How replicas are started. None: the replicas are at `endpoints`."""
    slots: Path | None = None
    """Folder through which llama.cpp servers hand over KV caches."""
    combo: Combo | None = None
    api_key: str = ""
    """The key that the engines require. Empty: each client's own key is sent."""
    prices: TokenPrices = TokenPrices()
    coefficients: Coefficients | None = None
    """Step times of the fleet file, else of the catalog; None if the file names no GPU."""
    engine_model: str = ""
    """The engines' name of the model. Empty: the name that the engines list."""
    kv_events: KvEvents | None = None
    """The addresses at which the engines publish the contents of their prefix caches."""

    @property
    def deployment(self) -> Pool | Combo:
        """The combo if the pool is part of one, else the pool."""
        return self.pool if self.combo is None else self.combo

    @property
    def unit(self) -> dict[str, int]:
        """Replicas by pool in one unit: an instance of the combo, or one replica."""
        return {self.pool.name: 1} if self.combo is None else {part.name: part.replicas for part in self.combo.parts}

    @property
    def num_initial(self) -> int:
        """Replicas at the start, in all instances of a combo."""
        return self.pool.replicas * (1 if self.combo is None else self.combo.replicas)


Corrections = Callable[[], Mapping[str, tuple[float, float]]]


class ServingPlan(Struct, frozen=True):
    """The parts of a fleet file that a gateway needs."""

    pools: tuple[ServedPool, ...]
    names: dict[str, tuple[str, ...]]
    """The names that requests may use, by model."""
    listed: tuple[str, ...]
    """The names of the list of models: of each model the names that its pools are given, then its own."""
    policies: Policies
    pacer: Pacer
    seed: int
    settings: Settings
    sends_priority: bool
    """Whether requests to engines carry their tier as `priority`."""
    engine_ordering: str = ""
    """The ordering that engines must report, with its arguments. Empty: fcfs or priority, which every engine has."""
    has_window: bool = False
    """Whether the file sets the policies' `window`. Otherwise a llama.cpp server gets as many requests as it has
    slots."""
    fallbacks: Fallbacks = Fallbacks()
    """The models that may answer in place of other models."""
    judge: Judge | None = None
    """Scores the cascade's answers; None without a cascade."""
    gpu_limits: tuple[tuple[str, str, int], ...] = ()
    """Limits (region, GPU, number of GPUs) of scaling."""
    network: Network = Network()
    """Latencies between regions."""
    roles: tuple[RoleChange, ...] = ()
    """Scheduled changes of replicas' roles, in seconds from the start."""
    planned_gpus: int | None = None
    """GPUs of this machine shared by the cascade's replicas, if a planner chooses the replicas."""
    planner_messages: Callable[[], Sequence[str]] = tuple
    """Returns all messages of the planner so far, for the log."""
    use_corrections: Callable[[Corrections], None] = lambda corrections: None
    """Gives the planner, by pool, the factors by which prefill and decode are slower than expected."""
    past_demand: PastDemand | None = None
    """Demand from before the start, for a scaler with memory."""
    shadow: ShadowPlan | None = None
    """A shadow candidate, whose decisions have no effect."""
    stop_planners: Callable[[], None] = lambda: None
    """Ends the processes that compute plans."""
