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
    """A Hugging Face `config.json`, a folder that contains one, a repository in the local hub cache, or a GGUF file."""
    assume: bool = False
    """Continue although the config has keys that Headway does not know and that may affect sizes."""


class SpeculativeSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speculative decoding of a pool's engines. Keys are those of vLLM's `--speculative-config`, where they exist
    there.

    `acceptance` is measured with a workload on these weights. In a running vLLM it is
    `vllm:spec_decode_num_accepted_tokens_per_pos_total` by position, divided by `vllm:spec_decode_num_drafts_total`.
    """

    method: DraftMethod
    """`ngram`: matches in the text so far; `draft_model`: a smaller model; `eagle`, `eagle3`: a head of one layer;
    `mtp`: the model's own layer for multi-token prediction."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)]
    """Drafted tokens per sequence and iteration."""
    acceptance: Share | Annotated[tuple[Share, ...], Meta(min_length=1)]
    """A number: the probability that a drafted token is accepted if the tokens before it are. A list: for each
    position, the share of drafts whose token there is accepted, so it never rises. The workload's `acceptance` takes
    precedence."""
    model: str | ModelFile = ""
    """`draft_model`: a name listed by `headway catalog models`, or `config:` and the path of a `config.json`. Other
    methods: the repository of the head's weights, for `headway export`."""
    hf_id: str = ""
    """For `headway export`: the draft model's repository. Without it: the catalog's."""
    draft_tensor_parallel_size: Count | None = None
    """GPUs that share the draft model: 1, or `tp`. Without it: `tp`."""
    draft_vocab_size: Count | None = None
    """Vocabulary size of a head. Without it: 32000 for `eagle3`, else the model's."""
    num_speculative_tokens_per_batch_size: tuple[tuple[Count, Count, Annotated[int, Meta(ge=0)]], ...] = ()
    """Drafted tokens by number of decoding sequences, as `[first, last, tokens]`; above the last entry, none. 0
    disables drafts. Without it: always `num_speculative_tokens`. Not for SGLang."""
    match_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """`ngram`: share of iterations in which the last tokens have a match. `acceptance` then describes these drafts
    only."""
    prompt_lookup_max: Count | None = None
    """`ngram`: longest match to look for, in tokens."""
    prompt_lookup_min: Count | None = None
    """`ngram`: shortest match to look for, in tokens."""


class PoolSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replicas of one model, GPU and shape: one entry of `fleet`."""

    model: str | ModelFile
    """A name listed by `headway catalog models`, or `config:` and the path of a `config.json` or GGUF file."""
    gpu: str = ""
    """A name listed by `headway catalog gpus`. `headway serve` with `endpoints` needs none, and then accepts any model
    name; simulations and plans need it."""
    replicas: Replicas = 1
    """Number of replicas."""
    tp: Count = 1
    """Tensor parallel ranks of one replica."""
    pp: Count = 1
    """Pipeline stages of one replica, which takes `tp * pp * dp` GPUs."""
    ep: bool = False
    """Spread the experts of a mixture-of-experts model over the `tp * dp` ranks."""
    dp: Count = 1
    """Data parallel ranks of one replica, which step together; above 1 only with `ep`. The engine's limits apply to all
    ranks together. For dense models, use `replicas`."""
    quantization: Literal["none", "fp8", "fp8_block", "awq", "gptq", "int4", "mxfp4"] | None = None
    """Weight type. `awq`, `gptq` and `int4`: 4 bits with one scale per group of 128; `mxfp4`: 4 bits with one scale per
    32, for experts only. Without it: as published; `none` for 16 bits. It changes memory and step times; `hf_id` names
    the weights to deploy."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache: `auto` for 16 bits or the engine's `kv_dtype_bytes`, `fp8` for 8 bits."""
    speculative: SpeculativeSpec | None = None
    """Speculative decoding. Without it: an iteration gives a sequence one token."""
    engine: str | dict[str, Any] = DEFAULT_ENGINE
    """A name listed by `headway catalog engines`, or `name:` and changes to the engine's settings. `vllm` is the newest
    measured version, or the closest one to `version: "0.20"`; `vllm-0.20` means the same. `simulated` has the batching
    and step times of the newest vLLM, no prefix cache, and supports every ordering."""
    name: str = ""
    """The pool's name in reports. Without one: `pool-0`, `pool-1`, ..."""
    region: str = ""
    """The region of the replicas."""
    usd_per_gpu_hour: Annotated[float, Meta(ge=0)] | None = None
    """Price of a GPU. Without it: the catalog's."""
    usd_per_million_input_tokens: Annotated[float, Meta(ge=0)] = 0.0
    """For `headway serve`: price of prompt tokens charged to a key. In a `hosted` pool, also its cost."""
    usd_per_million_output_tokens: Annotated[float, Meta(ge=0)] = 0.0
    """Price of answer tokens, with the meaning of `usd_per_million_input_tokens`."""
    usd_per_million_cached_tokens: Annotated[float, Meta(ge=0)] | None = None
    """Price of prompt tokens in a prefix cache, by the engine's own count
    (`usage.prompt_tokens_details.cached_tokens`). Without it: the price of other prompt tokens."""
    kv_capacity_tokens: Count | None = None
    """Upper limit of a replica's KV cache, for experiments under memory pressure."""
    mean_sequence_tokens: Positive | None = None
    """Mean KV cache tokens of a request, of which sliding-window layers keep one window. Without it: the workload's
    mean in simulations; elsewhere such layers count as keeping all tokens."""
    coefficients: str | None = None
    """A file of step-time coefficients written by `headway calibrate`. Without it: the catalog's."""
    network_bytes_per_s: Annotated[float, Meta(gt=0)] = 12.5e9
    """Network bandwidth of a replica in each direction; 12.5e9 is 100 Gbit/s."""
    min_replicas: Replicas = 1
    """Minimum number of replicas in scaling."""
    scheduled_min_replicas: tuple[ScheduledMinimum, ...] = ()
    """Minimums above `min_replicas` at certain times, for any scaler: entries of `cron`, `duration_s`, `replicas` and
    `time_zone`."""
    max_replicas: Replicas | None = None
    """Maximum number of replicas in scaling. Without it: no limit."""
    start_s: Annotated[float, Meta(ge=0)] | None = None
    """Seconds from requesting a replica to its first request. Without it: the measured time to load the weights from
    the node's disk cache and to start the engine."""
    endpoints: tuple[str, ...] = ()
    """For `headway serve`: the address of each replica, `http://host:port`. Sets the number of replicas."""
    endpoints_file: str = ""
    """Instead of `endpoints`: a file that lists them and is read again when it changes: a YAML or JSON list of
    addresses, or Prometheus target groups. Simulations use `replicas`."""
    api_key: str = ""
    """For `headway serve`: the key that the endpoints require, sent instead of the client's. `${NAME}` stands for an
    environment variable, `${file:PATH}` for the text of a file."""
    kv_events: KvEvents | None = None
    """For `headway serve`: where the engines publish their prefix cache events. Without it, policies use an estimate
    from the placed requests."""
    api: Api | None = None
    """For `headway serve`: the API dialect of the endpoints. Without it: the engine's, else OpenAI's."""
    processes: Processes | None = None
    """Instead of `endpoints`: `headway serve` starts and stops the replicas as local processes."""
    kubernetes: Kubernetes | None = None
    """Instead of `endpoints`: the replicas are pods in a cluster, whose number `headway serve` sets."""
    inference_pool: InferencePool | None = None
    """Instead of `endpoints`: the replicas are the pods of an InferencePool, whose number others set."""
    hf_id: str = ""
    """For `headway export`: the model that engines load, a Hugging Face repository or a path in the image. Without it:
    the name in `model` if it is a repository, else the catalog's."""
    served_name: str = ""
    """A name under which clients request the model, and the first name of exported engines. Without it: `hf_id`."""
    image: str = ""
    """For `headway export`: the engines' image, which takes precedence over `--image`."""
    engine_args: tuple[str, ...] = ()
    """For `headway export`: additional arguments of the engines' command line; they replace options that Headway
    sets."""
    lora: LoraConfig | None = None
    """The LoRA adapters and the slots of each replica. `headway serve` needs it only for engines that do not list their
    adapters at /v1/models."""
    slots: str = ""
    """For `headway serve`: the folder shared by llama.cpp servers (`--slot-save-path`), through which migrating
    requests keep their KV cache."""
    hosted: Hosted | None = None
    """Instead of `gpu`: the endpoints belong to an external service that charges per token. `served_name` is its model
    name. The service gets the pool's `api_key`, never a client's."""
    fallback: tuple[str, ...] = ()
    """Names of pools that answer when this model cannot, in order; `policies.fallback` sets the conditions. A fallback
    with the same model serves nothing else."""


class ComboSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prefill and decode replicas that work together, or replicas that do both: one entry of `combos`."""

    name: str
    """The combo's name in reports."""
    prefill: PoolSpec | None = None
    """The prefill replicas of one combo."""
    decode: PoolSpec | None = None
    """The decode replicas of one combo."""
    aggregated: PoolSpec | None = None
    """Instead of `prefill` and `decode`: replicas that serve both phases."""
    replicas: Annotated[int, Meta(ge=0, le=MOST_REPLICAS)] = 1
    """Number of combos. 0: none until scaling starts some."""
    min_replicas: Annotated[int, Meta(ge=0, le=MOST_REPLICAS)] = 1
    """Minimum number of combos in scaling."""
    scheduled_min_replicas: tuple[ScheduledMinimum, ...] = ()
    """Minimums at certain times, as in a pool."""
    max_replicas: Replicas | None = None
    """Maximum number of combos in scaling. Without it: no limit."""
    goodput_rps: Annotated[float, Meta(ge=0)] | None = None
    """Requests per second that one combo serves within the SLOs, as written by `headway plan combos`."""
    handover: Handover = field(default_factory=Handover)
    """How KV caches are sent from prefill to decode."""
    fallback: tuple[str, ...] = ()
    """Names of pools that answer when the combo's model cannot, as in `fleet`."""

    @property
    def parts(self) -> dict[str, PoolSpec]:
        """The combo's pools by key, in order."""
        pools = {"prefill": self.prefill, "decode": self.decode, "aggregated": self.aggregated}
        return {key: pool for key, pool in pools.items() if pool is not None}


class GpuLimit(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The number of GPUs of one type that scaling may use."""

    gpu: str
    """A name listed by `headway catalog gpus`."""
    count: Annotated[int, Meta(ge=0)]
    """Number of GPUs."""
    region: str = ""
    """The region of the GPUs."""


PolicyPreset = Literal["headway"]


class PolicySpecs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The policies. Each is a name, or `name:` and arguments, or `module:Class` of your own."""

    preset: PolicyPreset | None = None
    """`headway`: Headway's own set, the same for every fleet, as far as its engines and limits allow (docs/headway.md).
    Keys set beside it replace its parts; null for `migration`, `admission` or `scaling` omits that part."""
    routing: PolicySpec | list[PolicySpec] = "least-loaded"
    """Chooses the replica of a request. A list is for `headway compare`."""
    ordering: PolicySpec | list[PolicySpec] = "fcfs"
    """Orders waiting requests. A list is for `headway compare`."""
    migration: PolicySpec | None = None
    """Chooses which requests migrate, when, and where to. Without it: none migrate."""
    admission: PolicySpec | None = None
    """Chooses requests to hold, and when to release them. Without it: none are held."""
    scaling: PolicySpec | None = None
    """Sets the number of replicas of each pool. Without it: as in `fleet`. Long-term policies take a `forecaster`
    (`name`, `past_hours`) and a `planner` (`ilp` or `greedy`)."""
    ordering_at: OrderingAt = "replica"
    """Where the ordering applies: in the replicas' queues, in the gateway's hold queue, or both."""
    window: Count | None = None
    """Maximum requests that the gateway sends to a replica at a time; it holds further ones. Without it: no limit, but
    with the ordering at the gateway, as many as a replica can run."""
    fallback: FallbackConfig = field(default_factory=FallbackConfig)
    """When the fallback pools in `fleet` answer."""
    preempt_every_s: Positive | None = None
    """Time between checks whether running requests rank behind held ones. If so, a running request is paused: it is
    held, and later continues from its tokens with its KV cache recomputed. With orderings that share service (`fair`,
    `vtc`, `drr`), requests of tenants above their share are paused before a KV cache is full. Without it: running
    requests are never paused. Needs `ordering_at: gateway`."""
    max_hold_s: Positive | None = None
    """Longest time for which a request is held before its first placement. Then a fallback of its model answers, or it
    is rejected: at a gateway with 503 and `Retry-After`. Without it: no limit."""
    shed_ttft_share: Positive | None = None
    """A request is shed when its expected TTFT exceeds this share of its TTFT SLO: then a fallback of its model
    answers, or it is rejected: at a gateway with 429 and `Retry-After`. 1: when it is expected to miss its SLO. Without
    it: none is shed."""


class Replan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replanning of the cascade while it serves (Cascadia, section 4.4 and appendix G). Set `quality` or
    `latency_s`."""

    quality: Annotated[float, Meta(ge=0, le=100)] | None = None
    """The mean score that plans must reach, with the least p95 latency."""
    latency_s: Positive | None = None
    """Instead of `quality`: the p95 latency that plans must keep, with the best quality."""
    every_s: Positive = 300.0
    """Length of a period, after which the observed requests are compared with the planned ones."""
    sample: Count = 50
    """Number of requests per period whose prompt lengths are compared."""
    audit_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """Share of requests that all models answer, to learn the scores of each."""
    least_audited: Annotated[int, Meta(ge=2)] = 40
    """Minimum number of audited requests in a period; with fewer, the period continues."""
    rate_change: Positive = 0.2
    """Smallest relative change of the request rate that triggers a new plan."""
    margin: Annotated[float, Meta(ge=0)] = 1.0
    """Points by which plans exceed `quality`, because plans are not rehearsed while serving."""
    planning_s: Annotated[float, Meta(ge=0)] = 20.0
    """Seconds from a shift to the new plan in a simulation; 10 to 20 in the paper. `headway serve` plans in real
    time."""
    interval_s: Positive = 2.0
    """Seconds between changes of replicas."""
    num_gpus: Count | None = None
    """GPUs that plans may use. Without it: the number that the cascade's models have in `fleet`."""
    gpus_per_server: Count | None = None
    """GPUs of a server, the limit of tensor parallelism. Without it: the catalog's node size."""

    def __post_init__(self) -> None:
        if (self.quality is None) == (self.latency_s is None):
            raise ValueError("expected `quality` or `latency_s`, and not both")


class CascadeSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Models that answer a request in turn until an answer is accepted."""

    models: Annotated[tuple[str, ...], Meta(min_length=2)]
    """The models, smallest first; the fleet serves all of them."""
    policy: PolicySpec = "thresholds"
    """Decides whether an answer is accepted."""
    name: str = "cascade"
    """The model name of the cascade; requests without a model also use it."""
    judge_s: Annotated[float, Meta(ge=0)] = 0.27
    """Seconds to judge an answer."""
    judge_usd: Annotated[float, Meta(ge=0)] = 0.0
    """Price of judging an answer."""
    judge_bias: float = 0.0
    """Mean error of the judge's scores, which are 0 to 100."""
    judge_noise: Annotated[float, Meta(ge=0)] = 0.0
    """Standard deviation of the judge's scores."""
    judge: Judge | None = None
    """Scores answers in `headway serve`. A simulation uses the workload's scores."""
    replan: Replan | None = None
    """Plans thresholds and replicas again when the requests have shifted. Without it: they stay."""


class Variant(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named set of policies. Missing keys are as in `policies`."""

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
    """Stop at this virtual time. Without it: when every request has ended."""
    warmup_s: Annotated[float, Meta(ge=0)] = 0.0
    """Metrics omit requests that arrived before this time."""
    begins: str | None = None
    """The date and time of the run's second 0, with an offset, as in `2026-03-02T00:00:00+01:00`, for
    `scheduled_min_replicas`. Without it: the start of the gateway's records that the workload's trace was made from."""
    step_time_factor: Positive = 1.0
    """Factor on the step-time model's iteration times, to test a plan against a model that is wrong by this factor.
    Hosted pools keep their speed."""
    limits: dict[str, TenantLimits] = {}
    """Limits by tenant of the workload. A tenant without an entry has the summed rates of the `gateway: api_keys` of
    its name, and no budget."""


class Spec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scenario file's sections, as written."""

    workload: WorkloadSpec
    fleet: tuple[PoolSpec, ...] = ()
    """Pools of replicas."""
    combos: tuple[ComboSpec, ...] = ()
    """Combos of replicas for prefill and for decode."""
    gpus: tuple[dict[str, Any], ...] = ()
    """Your own GPUs: the keys listed by `headway catalog gpus NAME`, or `name`, `like` (a GPU of the catalog) and the
    differences."""
    models: tuple[dict[str, Any], ...] = ()
    """Your own models, in the same way: the keys listed by `headway catalog models NAME`."""
    engines: tuple[dict[str, Any], ...] = ()
    """Your own engine profiles, in the same way."""
    name: str = ""
    """The scenario's name in reports. Without it: the file's name."""
    seed: Seed = 0
    """Seed of all random numbers. Compared runs get the same arrivals and lengths."""
    policies: PolicySpecs = field(default_factory=PolicySpecs)
    network: Network = field(default_factory=Network)
    """Latency and bandwidth between regions."""
    kv_store: KvStoreConfig | None = None
    """A KV store that replicas share. Without it: each has only its own prefix cache."""
    provisioning: Provisioning | None = None
    """The source of additional replicas. Without it: each is new, and takes `start_s`."""
    gpu_limits: tuple[GpuLimit, ...] = ()
    """The GPUs that scaling may use."""
    cascade: CascadeSpec | None = None
    """A cascade of models. Without it, each request is answered by the requested model."""
    variants: tuple[Variant, ...] = ()
    """Named sets of policies for `headway compare`, instead of a list for each kind."""
    pacer: Pacer = field(default_factory=Pacer)
    """The pace at which clients read streamed answers. QoE is computed from it, and views show replicas that fall
    behind it."""
    slo: DefaultSlo = field(default_factory=DefaultSlo)
    """SLOs of requests without their own, for metrics and policies. For policies, a request with a deadline has only
    the deadline."""
    faults: tuple[Fault, ...] = ()
    """Crashes of replicas, and broken hand-overs."""
    roles: tuple[RoleChange, ...] = ()
    """Role changes of combo replicas."""
    observe: Scrape = field(default_factory=Scrape)
    """How recent the loads seen by policies are."""
    gateway: Settings = field(default_factory=Settings)
    """Settings of `headway serve`."""
    autopilot: AutopilotSettings | None = None
    """Changes that `headway serve --autopilot` may make by itself. No effect without the option."""
    simulation: Simulation = field(default_factory=Simulation)
