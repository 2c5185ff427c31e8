"""The keys of a scenario file, and their defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from headway.control.observe import Scrape
from headway.control.policies import FallbackConfig, OrderingAt
from headway.core.counts import MOST_REPLICAS
from headway.core.fleet import (
    DraftMethod,
    Fault,
    Handover,
    Hosted,
    KvStoreConfig,
    LoraConfig,
    Network,
    Provisioning,
    RoleChange,
    ScheduledMinimum,
)
from headway.core.pacer import Pacer
from headway.gateway.fleet.specs import InferencePool, Kubernetes, Processes
from headway.gateway.kv_events.address import KvEvents
from headway.gateway.settings import Api, AutopilotSettings, Judge, Settings
from headway.limits.tenants import TenantLimits
from headway.metrics.latency import DefaultSlo
from headway.workload.spec import WorkloadSpec

Count = Annotated[int, Meta(ge=1)]
Replicas = Annotated[int, Meta(ge=1, le=MOST_REPLICAS)]
Seed = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
PolicySpec = str | dict[str, Any]
DEFAULT_ENGINE = "simulated"


class ModelFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is not in the catalog."""

    config: str
    """A Hugging Face `config.json`, a folder that has one, or a repository in the local cache of the hub."""
    assume: bool = False
    """Go on where the config has keys that look as if sizes depended on them, and that Headway does not understand."""


class SpeculativeSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speculative decoding of a pool's engines. The keys are those of vLLM's `--speculative-config`, where it has them.

    `acceptance` is the measured one: that of a workload on these weights. Of a running vLLM, it is
    `vllm:spec_decode_num_accepted_tokens_per_pos_total` by position, over `vllm:spec_decode_num_drafts_total`.
    """

    method: DraftMethod
    """`ngram`: matches in the text so far; `draft_model`: a smaller model; `eagle`, `eagle3`: a head of one layer;
    `mtp`: the model's own layer for multi-token prediction."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)]
    """Drafted tokens of each sequence in an iteration."""
    acceptance: Share | Annotated[tuple[Share, ...], Meta(min_length=1)]
    """A number: the probability that a drafted token is accepted if those before it are. A list: for each position, the
    share of drafts of which this token is accepted, so that it does not rise. The workload's `acceptance` goes before
    it."""
    model: str | ModelFile = ""
    """`draft_model`: a name that `headway catalog models` lists, or `config:` and the path of a `config.json`. Else the
    repository of the head's weights, for `headway export`."""
    hf_id: str = ""
    """For `headway export`: the draft model's repository. Without it: the catalog's."""
    draft_tensor_parallel_size: Count | None = None
    """GPUs that share the draft model: 1, or `tp`. Without it: `tp`."""
    draft_vocab_size: Count | None = None
    """Tokens among which a head chooses. Without it: 32000 for `eagle3`, else the model's."""
    num_speculative_tokens_per_batch_size: tuple[tuple[Count, Count, Annotated[int, Meta(ge=0)]], ...] = ()
    """Drafted tokens by the number of decoding sequences, as `[first, last, tokens]`; above the last entry, none. 0
    disables drafts. Without it: always `num_speculative_tokens`. Not for SGLang."""
    match_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """`ngram`: share of the iterations in which the last tokens have a match. `acceptance` is then that of drafts."""
    prompt_lookup_max: Count | None = None
    """`ngram`: longest match that is looked for, in tokens."""
    prompt_lookup_min: Count | None = None
    """`ngram`: shortest match that is looked for, in tokens."""


class PoolSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replicas of one model, GPU and shape: one entry of `fleet`."""

    model: str | ModelFile
    """A name that `headway catalog models` lists, or `config:` and the path of a `config.json`."""
    gpu: str = ""
    """A name that `headway catalog gpus` lists. `headway serve` needs none for `endpoints`, and then the model may have
    any name; simulations and plans need it."""
    replicas: Replicas = 1
    """Number of replicas."""
    tp: Count = 1
    """Tensor parallel ranks of one replica."""
    pp: Count = 1
    """Pipeline stages of one replica, which takes `tp * pp * dp` GPUs."""
    ep: bool = False
    """Spread the experts of a mixture-of-experts model over the `tp * dp` ranks."""
    dp: Count = 1
    """Data parallel ranks of one replica, which step together; above 1 only with `ep`. The engine's limits are those
    of all ranks together. For dense models, use `replicas`."""
    quantization: Literal["none", "fp8", "fp8_block", "awq", "gptq", "int4", "mxfp4"] | None = None
    """Type of the weights. `awq`, `gptq` and `int4`: 4 bits with a scale for each group of 128; `mxfp4`: 4 bits with a
    scale for each 32, of experts only. Without one: as published, `none` for 16 bits. It changes memory and step times;
    the weights to deploy are those of `hf_id`."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache: 16 bits, or what the engine's `kv_dtype_bytes` says; or 8 bits."""
    speculative: SpeculativeSpec | None = None
    """Speculative decoding. Without it: an iteration gives a sequence one token."""
    engine: str | dict[str, Any] = DEFAULT_ENGINE
    """A name that `headway catalog engines` lists, or `name:` and changes to the engine's settings. `vllm` is the
    newest version that was measured, or the one nearest to `version: "0.20"`; `vllm-0.20` says the same. `simulated`
    batches and takes as long as the newest vLLM, has no prefix cache, and applies every ordering."""
    name: str = ""
    """The pool's name in reports. Without one: `pool-0`, `pool-1`, ..."""
    region: str = ""
    """The region of the replicas."""
    usd_per_gpu_hour: Annotated[float, Meta(ge=0)] | None = None
    """Price of a GPU. Without one: the catalog's."""
    usd_per_million_input_tokens: Annotated[float, Meta(ge=0)] = 0.0
    """For `headway serve`: what a key is charged for the tokens of its prompts. Of a `hosted` pool, also its cost."""
    usd_per_million_output_tokens: Annotated[float, Meta(ge=0)] = 0.0
    """The same for the tokens of answers."""
    usd_per_million_cached_tokens: Annotated[float, Meta(ge=0)] | None = None
    """The same for tokens of prompts that were in a prefix cache, by the engine's own count
    (`usage.prompt_tokens_details.cached_tokens`). Without it: as for other tokens of prompts."""
    kv_capacity_tokens: Count | None = None
    """Limit of the KV cache of a replica, for experiments under memory pressure."""
    mean_sequence_tokens: Positive | None = None
    """Mean tokens of a request in the KV cache, of which layers with a sliding window keep a window. Without it: that
    of the workload in simulations; elsewhere such layers count as if they kept all tokens."""
    coefficients: str | None = None
    """A file of step-time coefficients that `headway calibrate` wrote. Without one: the catalog's."""
    network_bytes_per_s: Annotated[float, Meta(gt=0)] = 12.5e9
    """Network bandwidth of a replica in each direction; 12.5e9 is 100 Gbit/s."""
    min_replicas: Replicas = 1
    """Fewest replicas that scaling leaves."""
    scheduled_min_replicas: tuple[ScheduledMinimum, ...] = ()
    """More than `min_replicas` at certain times, for any scaler: entries of `cron`, `duration_s`, `replicas` and
    `time_zone`."""
    max_replicas: Replicas | None = None
    """Most replicas that scaling starts. Without one: as many as its policy asks for."""
    start_s: Annotated[float, Meta(ge=0)] | None = None
    """Seconds from asking for a replica to its first request. Without one: the measured time to load the weights from
    the node's disk cache and to start the engine."""
    endpoints: tuple[str, ...] = ()
    """For `headway serve`: the address of each replica, `http://host:port`. Sets the number of replicas."""
    endpoints_file: str = ""
    """In place of `endpoints`: a file that lists them, and is read again when it changes: a list of addresses in YAML
    or JSON, or the target groups of Prometheus. Simulations have `replicas` of them."""
    api_key: str = ""
    """For `headway serve`: the key that the endpoints ask for, in place of the client's. `${NAME}` stands for a
    variable of the environment, `${file:PATH}` for the text of a file."""
    kv_events: KvEvents | None = None
    """For `headway serve`: where the engines publish what their prefix caches hold. Without it, policies see a guess
    from the requests that were placed."""
    api: Api | None = None
    """For `headway serve`: the API dialect of the endpoints. Without one: the engine's, else OpenAI's."""
    processes: Processes | None = None
    """In place of `endpoints`: `headway serve` starts and stops the replicas as local processes."""
    kubernetes: Kubernetes | None = None
    """In place of `endpoints`: the replicas are pods, whose number `headway serve` sets in a cluster."""
    inference_pool: InferencePool | None = None
    """In place of `endpoints`: the replicas are the pods of an InferencePool, whose number others set."""
    hf_id: str = ""
    """For `headway export`: what engines load, a Hugging Face repository or a path in the image. Without it: the name
    in `model` if that is a repository's, else the catalog's."""
    served_name: str = ""
    """A name under which clients ask for the model, and the first one of exported engines. Without it: `hf_id`."""
    image: str = ""
    """For `headway export`: the engines' image, before that of `--image`."""
    engine_args: tuple[str, ...] = ()
    """For `headway export`: further words of the engines' command line; they replace options that Headway would set."""
    lora: LoraConfig | None = None
    """The LoRA adapters that the replicas serve, and their slots for them. `headway serve` needs it only for engines
    that do not list their adapters at /v1/models."""
    slots: str = ""
    """For `headway serve`: the folder that llama.cpp's servers share (`--slot-save-path`), by which requests that
    migrate keep their KV cache."""
    hosted: Hosted | None = None
    """In place of `gpu`: the endpoints belong to a service that is paid by the token. `served_name` is its name for the
    model. It gets the pool's `api_key`, and no client's."""
    fallback: tuple[str, ...] = ()
    """Names of pools that answer in place of the pool's model where it cannot, in order; `policies.fallback` says when.
    One of the same model serves nothing else."""


class ComboSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prefill and decode replicas that work together, or replicas that do both: one entry of `combos`."""

    name: str
    """The combo's name in reports."""
    prefill: PoolSpec | None = None
    """The prefill replicas of one combo."""
    decode: PoolSpec | None = None
    """The decode replicas of one combo."""
    aggregated: PoolSpec | None = None
    """In place of these two: replicas that do both phases."""
    replicas: Annotated[int, Meta(ge=0, le=MOST_REPLICAS)] = 1
    """Number of combos. 0: none until scaling asks for some."""
    min_replicas: Annotated[int, Meta(ge=0, le=MOST_REPLICAS)] = 1
    """Fewest replicas that scaling leaves."""
    scheduled_min_replicas: tuple[ScheduledMinimum, ...] = ()
    """As of a pool."""
    max_replicas: Replicas | None = None
    """Most replicas that scaling starts. Without one: as many as its policy asks for."""
    goodput_rps: Annotated[float, Meta(ge=0)] | None = None
    """Requests per second that one combo serves within the SLOs, as `headway plan combos` writes it."""
    handover: Handover = field(default_factory=Handover)
    """How KV caches are sent from prefill to decode."""
    fallback: tuple[str, ...] = ()
    """Names of pools that answer in place of the combo's model where it cannot, as in `fleet`."""

    @property
    def parts(self) -> dict[str, PoolSpec]:
        """The pools by key, in the order of the combo's parts."""
        pools = {"prefill": self.prefill, "decode": self.decode, "aggregated": self.aggregated}
        return {key: pool for key, pool in pools.items() if pool is not None}


class GpuLimit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The number of GPUs of a type that scaling may use."""

    gpu: str
    """A name that `headway catalog gpus` lists."""
    count: Annotated[int, Meta(ge=0)]
    """Number of GPUs."""
    region: str = ""
    """The region of the GPUs."""


PolicyPreset = Literal["headway"]


class PolicySpecs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The policies. Each is a name, or `name:` and arguments, or `module:Class` of your own."""

    preset: PolicyPreset | None = None
    """`headway`: Headway's own set, the same for every fleet, as far as its engines and limits allow (docs/headway.md).
    Keys set beside it replace its parts; `migration`, `admission` or `scaling` of null leaves that part out."""
    routing: PolicySpec | list[PolicySpec] = "least-loaded"
    """Chooses the replica of a request. A list is for `headway compare`."""
    ordering: PolicySpec | list[PolicySpec] = "fcfs"
    """Orders waiting requests. A list is for `headway compare`."""
    migration: PolicySpec | None = None
    """Chooses requests to migrate, their target and the time. Without one: none migrate."""
    admission: PolicySpec | None = None
    """Chooses requests to hold, and when to release them. Without one: none are held."""
    scaling: PolicySpec | None = None
    """Sets the number of replicas of each pool. Without one: as in `fleet`. The long-term ones take a `forecaster`
    (`name`, `past_hours`) and a `planner` (`ilp` or `greedy`)."""
    ordering_at: OrderingAt = "replica"
    """Where the ordering applies: in the replicas' queues, in the gateway's queue, or both."""
    window: Count | None = None
    """Most requests that the gateway sends to a replica at a time; it holds the others. Without one, it holds none,
    unless the ordering applies at the gateway; then a replica gets as many as it can run."""
    fallback: FallbackConfig = field(default_factory=FallbackConfig)
    """When the pools that `fleet` names as fallbacks answer."""
    preempt_every_s: Positive | None = None
    """Time between two looks at whether requests that run rank behind requests that the gateway holds. Such a request
    is paused: it is held, and continues from its tokens, whose KV cache is computed anew. With orderings that share
    service (`fair`, `vtc`, `drr`), requests of tenants that have their share are paused before a KV cache is full.
    Without one: what was sent stays. Goes with `ordering_at: gateway`."""
    max_hold_s: Positive | None = None
    """Longest time for which a request waits in the hold queue before it is first sent to a replica. Then a fallback of
    its model answers, or it is rejected: at a gateway with 503 and `Retry-After`. Without one: any time."""
    shed_ttft_share: Positive | None = None
    """A request is shed when the time expected until its first token is more than this share of its TTFT SLO: then a
    fallback of its model answers, or it is rejected: at a gateway with 429 and `Retry-After`. 1: when it is expected to
    miss its SLO. Without one: none is shed."""


class Replan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replanning of the cascade while it serves (Cascadia, section 4.4 and appendix G), for `quality` or
    `latency_s`."""

    quality: Annotated[float, Meta(ge=0, le=100)] | None = None
    """The mean score that plans have to reach; their p95 latency is the least with it."""
    latency_s: Positive | None = None
    """In place of `quality`: the p95 latency that plans have to keep; their quality is the best with it."""
    every_s: Positive = 300.0
    """Length of a period, after which the observed requests are compared with those planned for."""
    sample: Count = 50
    """Requests of a period whose prompt lengths are compared."""
    audit_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """The share of requests that all models answer, so that the scores of each are known."""
    least_audited: Annotated[int, Meta(ge=2)] = 40
    """A period with fewer such requests goes on."""
    rate_change: Positive = 0.2
    """Least relative change of the rate that counts as a shift."""
    margin: Annotated[float, Meta(ge=0)] = 1.0
    """Points of quality that plans aim for beyond `quality`, as plans are not rehearsed while serving."""
    planning_s: Annotated[float, Meta(ge=0)] = 20.0
    """Seconds from a shift to the new plan in a simulation; the paper's are 10 to 20. `headway serve` plans in real
    time."""
    interval_s: Positive = 2.0
    """Seconds between changes of replicas."""
    num_gpus: Count | None = None
    """GPUs that plans may use. Without it: as many as the cascade's models have in `fleet`."""
    gpus_per_server: Count | None = None
    """GPUs of a server, within which tensor parallelism stays. Without it: as many as the catalog's node has."""

    def __post_init__(self) -> None:
        if (self.quality is None) == (self.latency_s is None):
            raise ValueError("expected `quality` or `latency_s`, and not both")


class CascadeSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Models that answer a request one after the other until an answer is accepted."""

    models: Annotated[tuple[str, ...], Meta(min_length=2)]
    """The models, the smallest first; the fleet serves all of them."""
    policy: PolicySpec = "thresholds"
    """Decides whether an answer is accepted."""
    name: str = "cascade"
    """The model name of requests for the cascade; requests without a model get it, too."""
    judge_s: Annotated[float, Meta(ge=0)] = 0.27
    """Seconds to judge an answer."""
    judge_usd: Annotated[float, Meta(ge=0)] = 0.0
    """Price of judging an answer."""
    judge_bias: float = 0.0
    """Mean error of the judge's scores, of 0 to 100."""
    judge_noise: Annotated[float, Meta(ge=0)] = 0.0
    """Standard deviation of the error of the judge's scores."""
    judge: Judge | None = None
    """Scores answers in `headway serve`. A simulation takes the workload's scores."""
    replan: Replan | None = None
    """Plans thresholds and replicas anew when the requests have shifted. Without it: they stay."""


class Variant(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named set of policies. Keys that are missing are as in `policies`."""

    name: str
    """The variant's name in tables."""
    preset: PolicyPreset | None = None
    """As in `policies`."""
    routing: PolicySpec | None = None
    """As in `policies`."""
    ordering: PolicySpec | None = None
    """As in `policies`."""
    migration: PolicySpec | UnsetType | None = UNSET
    """As in `policies`. null: none."""
    admission: PolicySpec | UnsetType | None = UNSET
    """As in `policies`. null: none."""
    scaling: PolicySpec | UnsetType | None = UNSET
    """As in `policies`. null: none."""
    ordering_at: OrderingAt | None = None
    """As in `policies`."""
    window: Count | UnsetType | None = UNSET
    """As in `policies`. null: none."""
    fallback: FallbackConfig | None = None
    """As in `policies`. `{when: []}`: no fallback answers."""
    preempt_every_s: Positive | UnsetType | None = UNSET
    """As in `policies`. null: none."""
    max_hold_s: Positive | UnsetType | None = UNSET
    """As in `policies`. null: none."""
    shed_ttft_share: Positive | UnsetType | None = UNSET
    """As in `policies`. null: none."""


class Simulation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a run is simulated: its steps, its end, its warm-up and its limits."""

    step: Literal["stretch", "exact"] = "stretch"
    """`exact` simulates every iteration on its own: the same results, many times slower."""
    until_s: Annotated[float, Meta(gt=0)] | None = None
    """Stop at this virtual time. Without one: when every request has ended."""
    warmup_s: Annotated[float, Meta(ge=0)] = 0.0
    """Metrics leave out requests that arrived before this time."""
    begins: str | None = None
    """The date and time at the run's second 0, with an offset, as in `2026-03-02T00:00:00+01:00`, for
    `scheduled_min_replicas`. Without it: when the gateway's records began that are the workload's trace."""
    step_time_factor: Positive = 1.0
    """Every iteration takes so many times as long as the step-time model says: what the plan is worth if it is wrong by
    so much. Hosted pools keep their speed."""
    limits: dict[str, TenantLimits] = {}
    """By tenant of the workload, what it may use. A tenant without an entry has the rates of the `gateway: api_keys` of
    its name, added up, and no budget."""


class Spec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scenario file's sections, as they are written."""

    workload: WorkloadSpec
    fleet: tuple[PoolSpec, ...] = ()
    """Pools of replicas."""
    combos: tuple[ComboSpec, ...] = ()
    """Combos of replicas for prefill and for decode."""
    gpus: tuple[dict[str, Any], ...] = ()
    """GPUs of your own: the keys that `headway catalog gpus NAME` lists, or `name`, `like` (a GPU of the catalog) and
    what differs."""
    models: tuple[dict[str, Any], ...] = ()
    """Models of your own, in the same way: the keys that `headway catalog models NAME` lists."""
    engines: tuple[dict[str, Any], ...] = ()
    """Engine profiles of your own, in the same way."""
    name: str = ""
    """The scenario's name in reports. Without one: the file's name."""
    seed: Seed = 0
    """Seed of all random numbers. Runs that are compared get the same arrivals and lengths."""
    policies: PolicySpecs = field(default_factory=PolicySpecs)
    network: Network = field(default_factory=Network)
    """Latency and bandwidth between regions."""
    kv_store: KvStoreConfig | None = None
    """A store of KV that replicas share. Without it: each has its own prefix cache only."""
    provisioning: Provisioning | None = None
    """How replicas that scaling asks for are provided. Without it: each is new, and takes `start_s`."""
    gpu_limits: tuple[GpuLimit, ...] = ()
    """The GPUs that scaling may use."""
    cascade: CascadeSpec | None = None
    """A cascade of models. Without it, a request gets the model that it asks for."""
    variants: tuple[Variant, ...] = ()
    """Named sets of policies for `headway compare`, in place of a list for each kind."""
    pacer: Pacer = field(default_factory=Pacer)
    """The pace at which clients read streamed answers. QoE is computed from it, and views show the replicas that fall
    behind it."""
    slo: DefaultSlo = field(default_factory=DefaultSlo)
    """SLOs of requests without their own, for metrics and for policies. To policies, a request with a deadline has
    that alone."""
    faults: tuple[Fault, ...] = ()
    """Crashes of replicas, and broken hand-overs."""
    roles: tuple[RoleChange, ...] = ()
    """Role changes of combo replicas."""
    observe: Scrape = field(default_factory=Scrape)
    """How recent the loads are that policies see."""
    gateway: Settings = field(default_factory=Settings)
    """Settings of `headway serve`."""
    autopilot: AutopilotSettings | None = None
    """What `headway serve --autopilot` may change by itself. Without the option it has no effect."""
    simulation: Simulation = field(default_factory=Simulation)
