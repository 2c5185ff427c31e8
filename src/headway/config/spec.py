"""What a scenario file says: the keys that there are, and their defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from headway.control.observe import Scrape
from headway.control.policies import OrderingAt
from headway.core.fleet import Fault, Handover, Network, Provisioning, RoleChange
from headway.core.pacer import Pacer
from headway.gateway.fleet.specs import Kubernetes, Processes
from headway.gateway.settings import Api, Judge, Settings
from headway.metrics.latency import DefaultSlo
from headway.workload.spec import WorkloadSpec

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
PolicySpec = str | dict[str, Any]
DEFAULT_ENGINE = "simulated"


class ModelFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is not in the catalog."""

    config: str
    """A Hugging Face `config.json`."""


class PoolSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replicas that are alike: one entry of `fleet`."""

    model: str | ModelFile
    """A name that `headway catalog models` lists, or `config:` and the path of a `config.json`."""
    gpu: str
    """A name that `headway catalog gpus` lists."""
    replicas: Count = 1
    """How many."""
    tp: Count = 1
    """Tensor parallel ranks of one replica."""
    pp: Count = 1
    """Pipeline stages of one replica; it takes `tp * pp * dp` GPUs."""
    ep: bool = False
    """Spread the experts of a mixture-of-experts model over the `tp * dp` ranks."""
    dp: Count = 1
    """Data parallel ranks of one replica, which step together; above 1 only with `ep`. The engine's limits are of
    all ranks together. Dense models: use `replicas`."""
    engine: str | dict[str, Any] = DEFAULT_ENGINE
    """A name that `headway catalog engines` lists, or `name:` with changes to the engine's settings."""
    name: str = ""
    """What reports call the pool. Without one: `pool-0`, `pool-1`, ..."""
    region: str = ""
    """Where it stands."""
    usd_per_gpu_hour: Annotated[float, Meta(ge=0)] | None = None
    """Price. Without one: the catalog's."""
    kv_capacity_tokens: Count | None = None
    """A cap on the KV cache of a replica, for experiments under memory pressure."""
    coefficients: str | None = None
    """A file of step-time coefficients that `headway calibrate` wrote. Without one: the catalog's."""
    network_bytes_per_s: Annotated[float, Meta(gt=0)] = 12.5e9
    """What a replica can send to others, and receive, at the same time; 12.5e9 is 100 Gbit/s."""
    min_replicas: Count = 1
    """Scaling goes no lower."""
    max_replicas: Count | None = None
    """Scaling goes no higher. Without one: as high as its policy wants."""
    start_s: Annotated[float, Meta(ge=0)] | None = None
    """From asking for one more replica to its first request. Without one: what loading the weights from the
    node's disk cache and starting the engine were measured to take."""
    endpoints: tuple[str, ...] = ()
    """For `headway serve`: where its replicas listen, `http://host:port` each. There are as many replicas."""
    api: Api | None = None
    """For `headway serve`: whose dialect they speak. Without one: the engine's, else OpenAI's."""
    processes: Processes | None = None
    """In place of `endpoints`: `headway serve` starts and stops the replicas, here."""
    kubernetes: Kubernetes | None = None
    """In place of `endpoints`: they are pods, as many as `headway serve` asks a cluster for."""
    slots: str = ""
    """For `headway serve`: the folder that llama.cpp's servers share (`--slot-save-path`). Requests that move take
    their KV cache along."""


class ComboSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replicas for prefill and replicas for decode that work together, or some that do both: one entry of `combos`."""

    name: str
    """What reports call it."""
    prefill: PoolSpec | None = None
    """The replicas that compute prompts, as many of them as one combo has."""
    decode: PoolSpec | None = None
    """The replicas that go on from there."""
    aggregated: PoolSpec | None = None
    """In place of these two: replicas that do both."""
    replicas: Annotated[int, Meta(ge=0)] = 1
    """How many such combos. 0: none, until scaling wants some."""
    min_replicas: Annotated[int, Meta(ge=0)] = 1
    """Scaling goes no lower."""
    max_replicas: Count | None = None
    """Scaling goes no higher. Without one: as high as its policy wants."""
    goodput_rps: Annotated[float, Meta(ge=0)] | None = None
    """Requests per second that one combo serves within the SLOs, as `headway plan combos` writes it."""
    handover: Handover = field(default_factory=Handover)
    """How KV caches get from prefill to decode."""

    @property
    def parts(self) -> dict[str, PoolSpec]:
        """The pools by key, in the order of the combo's parts."""
        pools = {"prefill": self.prefill, "decode": self.decode, "aggregated": self.aggregated}
        return {key: pool for key, pool in pools.items() if pool is not None}


class GpuLimit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many GPUs of a kind there are."""

    gpu: str
    """A name that `headway catalog gpus` lists."""
    count: Annotated[int, Meta(ge=0)]
    """How many."""
    region: str = ""
    """Where."""


class PolicySpecs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who decides. A policy is a name, or `name:` with arguments, or `module:Class` of your own."""

    routing: PolicySpec | list[PolicySpec] = "least-loaded"
    """Which replica gets a request. A list is for `headway compare`."""
    ordering: PolicySpec | list[PolicySpec] = "fcfs"
    """Who goes first. A list is for `headway compare`."""
    migration: PolicySpec | None = None
    """Who goes to another replica, and when. Without one: nobody."""
    admission: PolicySpec | None = None
    """Which requests are kept for later, and when they go. Without one: none."""
    scaling: PolicySpec | None = None
    """How many replicas each pool has. Without one: as many as `fleet` says. The long-term ones may be given a
    `forecaster` (`name`, `past_hours`) and a `planner` (`ilp` or `greedy`)."""
    ordering_at: OrderingAt = "replica"
    """Where the ordering acts: in the replicas' queues, in one that the gateway keeps, or both."""
    window: Count | None = None
    """The gateway gives a replica at most this many requests at a time and holds the others. Without one, it
    holds none back, unless the ordering acts at the gateway; then a replica gets as many as it can run."""


class Replan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When the cascade is planned anew while it serves, and for what (Cascadia, section 4.4 and appendix G): `quality`
    or `latency_s`."""

    quality: Annotated[float, Meta(ge=0, le=100)] | None = None
    """The mean score that plans are to keep; they have the least p95 latency with it."""
    latency_s: Positive | None = None
    """In place of it: the p95 latency that plans are to keep; they have the best quality with it."""
    every_s: Positive = 300.0
    """How often it is looked at what has come."""
    sample: Count = 50
    """So many requests of that time, whose prompt lengths are compared with those planned for."""
    audit_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """The share of the requests that all models answer, so that it is known what each would have scored."""
    least_audited: Annotated[int, Meta(ge=2)] = 40
    """With fewer of them, nothing is compared."""
    rate_change: Positive = 0.2
    """By this share the rate has to differ from the one planned for, to count as a shift."""
    margin: Annotated[float, Meta(ge=0)] = 1.0
    """Points of quality that a plan aims at beyond `quality`: while serving there is no time for rehearsals."""
    planning_s: Annotated[float, Meta(ge=0)] = 20.0
    """From a shift to the new plan, in a simulation; the paper's 10 to 20 s. `headway serve` takes what it takes."""
    interval_s: Positive = 2.0
    """How often replicas are seen to, which change one after the other."""
    num_gpus: Count | None = None
    """That plans may use. Without it: as many as the cascade's models have in `fleet`."""
    gpus_per_server: Count | None = None
    """Tensor parallelism stays within a server. Without it: as many as the catalog's node has."""

    def __post_init__(self) -> None:
        if (self.quality is None) == (self.latency_s is None):
            raise ValueError("expected `quality` or `latency_s`, and not both")


class CascadeSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Models that answer one after the other until an answer is good enough."""

    models: Annotated[tuple[str, ...], Meta(min_length=2)]
    """The smallest first; the fleet serves them all."""
    policy: PolicySpec = "thresholds"
    """Who decides whether an answer will do."""
    name: str = "cascade"
    """What requests ask for; those that ask for no model get it, too."""
    judge_s: Annotated[float, Meta(ge=0)] = 0.27
    """Seconds that judging an answer takes."""
    judge_usd: Annotated[float, Meta(ge=0)] = 0.0
    """What judging an answer costs."""
    judge_bias: float = 0.0
    """What the judge adds to every score, of 0 to 100."""
    judge_noise: Annotated[float, Meta(ge=0)] = 0.0
    """Standard deviation of the judge's scores."""
    judge: Judge | None = None
    """Who scores answers live. A simulation goes by the workload's scores."""
    replan: Replan | None = None
    """Plan thresholds and replicas anew when what comes has changed. Without it: they stay."""


class Variant(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Policies that go together, under a name of their own. What is not said here is as `policies` says."""

    name: str
    """What tables call it."""
    routing: PolicySpec | None = None
    """As in `policies`."""
    ordering: PolicySpec | None = None
    """As in `policies`."""
    migration: PolicySpec | None = None
    """As in `policies`."""
    admission: PolicySpec | None = None
    """As in `policies`."""
    scaling: PolicySpec | None = None
    """As in `policies`."""
    ordering_at: OrderingAt | None = None
    """As in `policies`."""
    window: Count | None = None
    """As in `policies`."""


class Simulation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to simulate, and what to count."""

    step: Literal["stretch", "exact"] = "stretch"
    """`exact` runs every iteration on its own: the same results, many times slower."""
    until_s: Annotated[float, Meta(gt=0)] | None = None
    """Stop at this virtual time. Without one: when every request has ended."""
    warmup_s: Annotated[float, Meta(ge=0)] = 0.0
    """Metrics leave out what arrived before."""


class Spec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a scenario file says."""

    workload: WorkloadSpec
    fleet: tuple[PoolSpec, ...] = ()
    """Pools of replicas."""
    combos: tuple[ComboSpec, ...] = ()
    """Pairs of pools, one for prefill and one for decode."""
    name: str = ""
    """What reports call it. Without one: the file's name."""
    seed: int = 0
    """Of everything random. Runs that are compared get the same arrivals and lengths."""
    policies: PolicySpecs = field(default_factory=PolicySpecs)
    network: Network = field(default_factory=Network)
    """What lies between regions."""
    provisioning: Provisioning | None = None
    """Where replicas that scaling asks for come from. Without it: each is new, and takes `start_s`."""
    gpu_limits: tuple[GpuLimit, ...] = ()
    """How many GPUs scaling may use."""
    cascade: CascadeSpec | None = None
    """Several models for one request. Without it, a request gets the model that it asks for."""
    variants: tuple[Variant, ...] = ()
    """Sets of policies for `headway compare`, in place of a list for each kind."""
    pacer: Pacer = field(default_factory=Pacer)
    """What readers of streamed answers expect: policies that mind it see by it which replicas fall behind, and QoE
    is counted by it."""
    slo: DefaultSlo = field(default_factory=DefaultSlo)
    """What metrics hold requests to that were promised nothing. Policies see only `workload`'s promises."""
    faults: tuple[Fault, ...] = ()
    """Replicas that crash, and hand-overs that break."""
    roles: tuple[RoleChange, ...] = ()
    """Replicas of combos that are for something else from a time on."""
    observe: Scrape = field(default_factory=Scrape)
    """How fresh the loads are that policies see."""
    gateway: Settings = field(default_factory=Settings)
    """How `headway serve` behaves."""
    simulation: Simulation = field(default_factory=Simulation)
