"""GPUs, models, engines, and pools of replicas, as data."""

from __future__ import annotations

import re
from itertools import accumulate
from math import inf
from operator import mul
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from headway.core.model import GREEDY as GREEDY
from headway.core.model import Layers as Layers
from headway.core.model import Mla as Mla
from headway.core.model import Model as Model
from headway.core.model import Moe as Moe
from headway.core.model import Sampling as Sampling

Batching = Literal["chunked", "prefill-first", "whole-prompt", "request-level"]
Preemption = Literal["recompute", "swap"]
Role = Literal["mixed", "prefill", "decode"]
"""The request phases that a replica serves: `mixed` serves both, `prefill` and `decode` serve only one."""
DraftMethod = Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]
"""What drafts tokens: a text match of the last tokens, a smaller model, or a head on the model's own layers."""
DraftSchedule = tuple[tuple[int, int, int], ...]
"""(least batch size, largest batch size, drafted tokens); the first entry that covers the batch size applies."""


def pool_name(text: str, taken: set[str]) -> str:
    """A new name for a pool or combo, with which it can be deployed; it is added to `taken`.

    Small letters, digits and dashes, a letter first, 50 at most; a number follows where the name was taken.
    """
    base = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    base = (base if base[:1].isalpha() else f"pool-{base}")[:50].rstrip("-")
    name, num = base, 2
    while name in taken:
        name, num = f"{base}-{num}", num + 1
    taken.add(name)
    return name


class Gpu(Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator. Peaks are dense (no sparsity); links are per direction and per GPU."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    peak_flops: dict[str, float]
    """FLOP/s by dtype: bf16, fp8, int8, fp16. The hardware does not support a missing dtype."""
    link_bytes_per_s: float
    """Bandwidth between GPUs of a node (NVLink, Infinity Fabric, or PCIe)."""
    host_link_bytes_per_s: float
    usd_per_hour: float
    watts: float
    gpus_per_node: int = 8
    num_sms: int | None = None
    """Streaming multiprocessors, to which a kernel's tiles are assigned; None: unknown, or not an NVIDIA GPU."""
    l2_bytes: float | None = None
    """Size of the L2 cache; None: unknown."""
    aliases: tuple[str, ...] = ()
    source: str = ""


class Speculative(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speculative decoding: how an engine drafts tokens, and how many it accepts.

    In one iteration a decoding sequence verifies k drafted tokens, and gains the accepted tokens plus one: 1 to k + 1
    tokens. Let S_i be the probability that the first i drafted tokens are accepted. The mean gain is 1 + S_1 + ... +
    S_k tokens; with the same acceptance rate a at each position, the mean gain is (1 - a**(k + 1)) / (1 - a)
    (Leviathan et al., arXiv 2211.17192, equation 1). Fields are named as in vLLM's `SpeculativeConfig`.
    """

    method: DraftMethod
    num_speculative_tokens: int
    """Drafted tokens per sequence and iteration."""
    acceptance: tuple[float, ...]
    """S_i for i = 1..k: the probability that the first i drafted tokens are accepted, as vLLM logs it by position."""
    num_speculative_tokens_per_batch_size: DraftSchedule = ()
    """Drafted tokens by batch size; above the last entry, no tokens. Empty: always `num_speculative_tokens`."""
    match_share: float = 1.0
    """`ngram`: share of iterations in which the last tokens have a match. Other iterations have no draft."""
    model: str = ""
    """The draft model or head that engines load."""
    draft: Model | None = None
    """Shape of the draft model, or of the head as a one-layer model; None: no model drafts."""
    draft_shares_embeddings: bool = False
    """Whether the head shares the target model's embeddings."""
    draft_tensor_parallel_size: int | None = None
    """GPUs that share the draft model; None: the target's whole tensor parallel group."""
    prompt_lookup_max: int | None = None
    """`ngram`: longest match to look for, in tokens; None: the engine's default."""
    prompt_lookup_min: int | None = None

    def num_drafted(self, batch_size: int) -> int:
        """Drafted tokens per sequence in a batch of this many decoding sequences."""
        if not self.num_speculative_tokens_per_batch_size:
            return self.num_speculative_tokens
        for least, largest, num in self.num_speculative_tokens_per_batch_size:
            if least <= batch_size <= largest:
                return num
        return 0

    @property
    def most_tokens(self) -> int:
        """Most tokens that a sequence can gain in an iteration."""
        return self.num_speculative_tokens + 1

    @property
    def num_slots(self) -> int:
        """KV slots that a speculating sequence needs beyond a normal one.

        The drafted tokens occupy slots while they are verified. A draft model also writes the KV of the next draft in
        the same iteration; vLLM reserves the same number of slots again for that KV (`num_lookahead_tokens` of its
        scheduler).
        """
        return self.num_speculative_tokens * (1 if self.draft is None else 2)

    def survival(self, rate: float | None = None) -> tuple[float, ...]:
        """S_i with the iterations without a draft included; `rate` replaces the setting with one rate for all
        positions."""
        kept = self.acceptance if rate is None else by_rate(rate, self.num_speculative_tokens)
        return kept if self.match_share == 1.0 else tuple(self.match_share * each for each in kept)

    def tokens_per_iteration(self, batch_size: int = 1) -> float:
        """Mean tokens that a sequence gains per iteration of a batch of this size."""
        return 1.0 + sum(self.survival()[: self.num_drafted(batch_size)])


def by_rate(rate: float, num_tokens: int) -> tuple[float, ...]:
    """S_i if each drafted token is accepted with probability `rate` given that all previous drafted tokens are
    accepted."""
    return tuple(accumulate([rate] * num_tokens, mul))


class Engine(Struct, frozen=True, forbid_unknown_fields=True):
    """How a replica batches, and its settings: a catalog profile with the user's changes."""

    name: str
    batching: Batching = "chunked"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size_tokens: int = 16
    gpu_memory_utilization: float = 0.9
    sampler_bytes_per_logit: float = 38.0
    """GPU memory for the sampler's copies of the logits, which may be the peak. vLLM's own memory profiles on H100
    (eight models) give 38: it sorts all logits to select the candidates."""
    graph_bytes_per_expert_layer: float = 0.0
    """GPU memory that an engine reserves for its CUDA graphs before it sizes the KV cache, for each layer with experts.
    Since 0.21 vLLM's older model runner, which mixtures of experts use in 0.25, reserves an estimate of it."""
    watermark: float = 0.0
    """Share of KV blocks that admission leaves free."""
    prefix_caching: bool = False
    preemption: Preemption = "recompute"
    host_memory_bytes: float = 0.0
    """Host memory for swapped KV. Without free host memory, preemption recomputes instead of swapping."""
    kv_offload_bytes: float = 0.0
    """Host memory of one replica for prefix cache blocks evicted from the GPU."""
    max_num_waiting: int | None = None
    """Maximum queue length of a replica; further requests go to other replicas or are rejected."""
    schedule_lag: int = 0
    """1: the engine schedules one iteration ahead of execution, so a request waits one iteration longer."""
    launch_overhead_s: float = 0.0
    """Time of the host to schedule and launch an iteration without prompts, as one graph. It delays an iteration only
    if the one before it ended as soon as it was launched."""
    request_overhead_s: float = 0.0
    """Time from a request's arrival until the scheduler sees it: HTTP, validation, queues between processes."""
    tokenize_s_per_token: float = 0.0
    """Further delay per prompt token until the scheduler sees a request."""
    response_overhead_s: float = 0.0
    """Time from the end of an iteration until the client has its tokens: sampling, detokenizing, HTTP."""
    token_overhead_s: float = 0.0
    """Time per output token in the process that sends tokens to clients. The process sends an iteration's tokens one
    by one; if iterations produce tokens faster, the tokens queue up."""
    kv_dtype_bytes: float = 2.0
    passes_by_slot: bool = False
    """Each slot has its own KV cache, and only neighbouring slots share a pass: llama.cpp with `--parallel` and without
    `--kv-unified`."""
    kv_keep_s: float | UnsetType = UNSET
    """Seconds for which the prefix cache blocks of a request are kept if a later request will continue it (a turn, a
    call before a tool). Until this time or their next use, all other blocks are evicted first. An agent's client can
    send engines such a hint. Unset: blocks are evicted in order of use."""
    kv_keep_share: float | UnsetType = UNSET
    """Maximum share of KV blocks kept by `kv_keep_s`; unset: 0.5. Beyond this share, the oldest of these blocks are no
    longer kept."""
    speculative: Speculative | UnsetType = UNSET
    """Set by pools; engine profiles do not set it."""
    orderings: tuple[str, ...] | None = None
    """Orderings that this engine can apply in its queue; None = any (a simulated engine)."""
    version: str = ""
    source: str = ""

    @property
    def kv_keep(self) -> tuple[float, float]:
        """`kv_keep_s` and `kv_keep_share`, with their defaults."""
        return self.kv_keep_s or 0.0, 0.5 if self.kv_keep_share is UNSET else self.kv_keep_share

    @property
    def drafts(self) -> Speculative | None:
        """The speculative decoding setting; None: each iteration gives a decoding sequence one token."""
        return self.speculative or None


class Parallel(Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one replica: `tp * pp * dp` GPUs. With `ep`, whole experts are distributed over `tp * dp` ranks."""

    tp: int = 1
    pp: int = 1
    ep: bool = False
    dp: int = 1
    """Data parallel ranks that step together, for mixtures of experts with `ep`. Dense models use replicas instead."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp


class LoraAdapter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A LoRA adapter of a pool's model."""

    name: str
    """The model name under which requests ask for the adapter."""
    rank: Annotated[int, Meta(ge=1)] = 16
    num_bytes: Annotated[float, Meta(gt=0)] | None = None
    """Size of the adapter's weights. Unset: computed from the rank, for all linear layers in 16 bits."""
    load_s: Annotated[float, Meta(ge=0)] | None = None
    """Time of the adapter's first load at a replica. Unset: the time to read the adapter's bytes from the node's disk
    cache."""


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The LoRA adapters of a pool, and the slots of each replica. The defaults are vLLM's."""

    adapters: tuple[LoraAdapter, ...] = ()
    max_loras: Annotated[int, Meta(ge=1)] = 1
    """Number of adapter slots on the GPU: the maximum number of adapters in one batch. Each slot takes the memory of
    the largest adapter."""
    max_cpu_loras: Annotated[int, Meta(ge=1)] | None = None
    """Adapters kept in host memory, from which they load faster. Without it: as many as slots."""

    def __post_init__(self) -> None:
        names = [adapter.name for adapter in self.adapters]
        if "" in names or len(set(names)) < len(names):
            raise ValueError("adapters: expected names, each another one")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras: {self.max_cpu_loras}; expected max_loras ({self.max_loras}) or more")


class Handover(Struct, frozen=True, forbid_unknown_fields=True):
    """How a prefill replica sends a KV cache to a decode replica (Cauchy, sections 3.6 and 4.7).

    `bulk` sends the cache once the prompt is computed. `layerwise` sends each layer as soon as it is computed, over
    `degree` concurrent streams, so only the last layer's transfer does not overlap the computation.
    """

    mode: Literal["bulk", "layerwise"] = "bulk"
    degree: int = 1
    """Concurrent streams."""
    stream_bytes_per_s: float | None = None
    """Rate limit of one stream; None: the network's bandwidth."""
    stream_overhead_s: float = 0.0
    """Time that each stream adds to a transfer."""
    landing: Literal["gpu", "host"] = "gpu"
    """Where the KV cache is stored before its first decode step. `gpu`: in GPU blocks if enough are free, else in host
    memory. `host`: always in host memory; the cache is later copied to the GPU."""
    first_token: Literal["prefill", "decode", "sent"] = "prefill"
    """The replica that produces the client's first token. `decode`, as in vLLM: the prefill replica's token is dropped,
    and the decode replica computes the prompt's last token again. `sent`, as in SGLang: the prefill replica's token,
    which arrives with the KV cache."""


class Hosted(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An external service that answers with the model and charges per token. Its speed does not depend on its load."""

    ttft_s: Annotated[float, Meta(gt=0)] | None = None
    """Time to first token. `headway serve` does not need it."""
    tokens_per_s: Annotated[float, Meta(gt=0)] | None = None
    """Output tokens per second of one request. `headway serve` does not need it."""
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    """Maximum concurrent requests at each endpoint; further requests wait. Unset: no limit."""
    max_context_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Maximum prompt plus answer tokens. Unset: no known limit."""
    prompt_cache_block_tokens: Annotated[int, Meta(ge=1)] | None = None
    """In simulations: tokens of a block of the prompt cache (OpenAI documents 128). The cache keeps all blocks forever,
    and does not change the speed. Without it: no prompt is cached."""


class ScheduledMinimum(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A minimum number of replicas at scheduled times."""

    cron: str
    """Start: minute, hour, day of the month, month, weekday, as in `0 8 * * 1-5`."""
    duration_s: float
    """Length, as in `10h`."""
    replicas: int
    """Minimum number of replicas during `duration_s`. If entries overlap, the largest minimum applies."""
    time_zone: str = "UTC"
    """Time zone of `cron`: a name of the IANA database, as in Europe/Berlin."""

    def __post_init__(self) -> None:
        if not 0 < self.duration_s < float("inf") or self.replicas < 1:
            raise ValueError("duration_s, replicas: expected more than 0, and 1 or more")


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas of one model, GPU type and shape."""

    name: str
    model: Model
    gpu: Gpu
    engine: Engine
    parallel: Parallel = field(default_factory=Parallel)
    replicas: int = 1
    region: str = ""
    usd_per_gpu_hour: float | None = None
    """GPU price; None: the catalog's price."""
    kv_capacity_tokens: int | None = None
    """Upper limit of the KV cache, for experiments under memory pressure; None: what the GPU memory allows."""
    network_bytes_per_s: float = 12.5e9
    """Network bandwidth of one replica to all other replicas, in each direction. The default is 100 Gbit/s."""
    min_replicas: int = 1
    scheduled_min_replicas: tuple[ScheduledMinimum, ...] = ()
    """Lower limits of scaling at scheduled times, in addition to `min_replicas`."""
    max_replicas: int | None = None
    """Upper limit of scaling; None: no limit."""
    start_s: float | None = None
    """Seconds from requesting a replica until it serves; None: computed from the times to load and start an engine."""
    mean_sequence_tokens: float | None = None
    """Mean KV cache tokens of a request. Windowed layers keep only a part of them. None: windowed layers count as if
    they kept all tokens."""
    role: Role = "mixed"
    handover: Handover = field(default_factory=Handover)
    """How KV caches leave the pool's replicas."""
    lora: LoraConfig | None = None
    """LoRA adapters; None: the pool has none."""
    hosted: Hosted | None = None
    """Settings of a hosted pool; None: the replicas run on GPUs of the fleet."""
    usd_per_million_input_tokens: float = 0.0
    """Price charged by a hosted pool; for other pools, the price charged to API keys."""
    usd_per_million_output_tokens: float = 0.0
    usd_per_million_cached_tokens: float | None = None
    """Price of prompt tokens found in a prefix cache; None: the normal input price."""
    fallback: tuple[str, ...] = ()
    """Pools whose models answer when no pool of this model can."""
    is_standby: bool = False
    """Whether the pool is a fallback for another pool of the same model, and serves only in that pool's place. The
    pool's model is named `MODEL@POOL`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may use for the pool's model."""
        return (self.model.name,) if self.is_standby else self.model.names

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica; 0 for a hosted replica."""
        return 0 if self.hosted is not None else self.parallel.num_gpus

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the pool's LoRA adapters."""
        return () if self.lora is None else tuple(adapter.name for adapter in self.lora.adapters)

    @property
    def usd_per_hour(self) -> float:
        price = self.gpu.usd_per_hour if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour
        return price * self.num_gpus


class Combo(Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas for prefill and replicas for decode that serve requests together, and start and stop together.

    Each part states its number of replicas per combo. Requests are handed over within a combo.
    """

    name: str
    parts: tuple[Pool, ...]
    replicas: int = 1
    """Number of combos."""
    min_replicas: int = 1
    max_replicas: int | None = None
    goodput_rps: float | None = None
    """Requests per second that one combo serves within the SLOs, as profiled."""
    fallback: tuple[str, ...] = ()
    """Fallbacks, as in a pool."""
    scheduled_min_replicas: tuple[ScheduledMinimum, ...] = ()
    """Minimums at certain times, as in a pool."""


def unit_of(deployment: Pool | Combo) -> list[Pool]:
    """The pools of the replicas that start and stop together, one entry per replica: a single entry for a pool, all
    parts of a combo."""
    if isinstance(deployment, Pool):
        return [deployment]
    return [part for part in deployment.parts for _ in range(part.replicas)]


NORMAL_P90 = 1.2816
"""90th percentile of the standard normal distribution."""


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    """Latencies of requests and transfers between regions."""

    inter_region_s: float = 0.05
    """Latency between two regions, each way. The default is from SageServe, section 7.1."""
    pairs: tuple[tuple[str, str, float], ...] = ()
    """(region, other region, seconds each way) where the latency is not `inter_region_s`."""
    p90_to_median: float = 1.0
    """Ratio of a latency's 90th percentile to its median. Latencies are lognormal, and the latencies above are medians.
    SageServe's ratio is 10 (section 7.1: 90% below 500 ms, which implies 1.5% above 2.5 s). 1: constant latencies."""
    longest_s: float = 2.5
    """Upper limit of a variable latency."""

    def __post_init__(self) -> None:
        if not 1 <= self.p90_to_median < inf or not 0 < self.longest_s < inf:
            raise ValueError("p90_to_median, longest_s: expected 1 or more, and seconds above 0")

    def latency_s(self, region: str, other: str) -> float:
        """The median latency, each way; 0 within a region, or if a region is unknown."""
        if region == other or not region or not other:
            return 0.0
        for a, b, seconds in self.pairs:
            if {a, b} == {region, other}:
                return seconds
        return self.inter_region_s

    def varied_s(self, median_s: float, normal: float) -> float:
        """The latency of one request, from a standard normal draw."""
        return float(min(median_s * self.p90_to_median ** (normal / NORMAL_P90), max(self.longest_s, median_s)))


class Provisioning(Struct, frozen=True, forbid_unknown_fields=True):
    """Sources of additional replicas, and their start times (SageServe, sections 2.3 and 7.1).

    A released replica becomes a spot instance of its model in its region. An additional replica is taken from a spot
    instance of the same model if there is one, else from a spot instance of another model on as many of the same GPUs,
    else it is new.
    """

    reclaim_s: float = 60.0
    """Time to reclaim a spot instance of the same model."""
    redeploy_s: float = 600.0
    """Time to reuse a spot instance of another model, which must load the weights."""
    acquire_s: float | None = None
    """Time to start a new instance; None: the pool's own `start_s`."""
    reclaim_max_s: float | None = None
    """99.9th percentile and upper limit of the reclaim times, which are lognormal with the median `reclaim_s`.
    SageServe's values are 60 and 300. None: all times are equal."""
    remote_s: float | None = None
    """Time to copy a model's weights to a region that has had no replica of it; the region's first replicas wait for
    the copy. SageServe's value is 7200. None: every region has the weights."""

    def __post_init__(self) -> None:
        if self.reclaim_max_s is not None and not 0 < self.reclaim_s <= self.reclaim_max_s < inf:
            raise ValueError("reclaim_max_s: expected reclaim_s, above 0, or more")
        if self.remote_s is not None and not 0 <= self.remote_s < inf:
            raise ValueError("remote_s: expected seconds, 0 or more")


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica crashes at `at_s` and recovers, without requests, `down_s` later (None: never).

    With `streams` there is no crash: this many hand-overs from or to the replica lose their streams, the oldest first
    (Cauchy, section 3.6). The transfers resume after `down_s`: `layerwise` ones skip the layers that arrived
    completely, `bulk` ones start again. Without `down_s`, the prefill replica decodes.

    With `slowdown` there is no crash either: the replica's iteration times are multiplied by `slowdown` for `down_s`
    (None: permanently), as on a throttled GPU. Policies do not see the slowdown.
    """

    at_s: float
    replica: int
    down_s: float | None = None
    streams: int | None = None
    """Maximum hand-overs that lose their streams; None: the replica crashes."""
    slowdown: float | None = None
    """Factor on iteration times; None: the replica crashes."""


class RoleChange(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica of a combo changes its role at `at_s` (Cauchy, section 3.6). Requests that have started there stay.

    If the change leaves a phase of the combo without replicas, all its replicas serve both phases.
    """

    at_s: float
    replica: int
    role: Role
    """The new role; `mixed` = both phases."""
    switch_s: float = 0.0
    """Time during which the replica takes no new requests."""


class Fallbacks(Struct, frozen=True):
    """The models that may answer instead of other models, by name."""

    models: dict[str, tuple[str, ...]] = {}
    """Maps each model to its fallback models, in order."""
    standby_of: dict[str, str] = {}
    """Maps each name of a standby model to the model that it stands by for."""
    hosted: frozenset[str] = frozenset()
    """Models served only by hosted pools."""

    def are_same(self, name: str, other: str) -> bool:
        """Whether two names belong to the same model."""
        return self.standby_of.get(name, name) == self.standby_of.get(other, other)


class KvStoreConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """In simulations: a KV store that replicas share over the network, such as LMCache's or Mooncake's.

    It extends the prefix caches of replicas with `prefix_caching`. A prompt's blocks are written while the prompt's
    later blocks are computed. A block that the replica lacks is read when the request is admitted, before the replica's
    next iteration.
    """

    capacity_bytes: Annotated[float, Meta(gt=0)]
    """Bytes of KV. The least recently used blocks are evicted."""
    bytes_per_s: Annotated[float, Meta(gt=0)] = 12.5e9
    """Bandwidth of the store in each direction, shared by all replicas; 12.5e9 is 100 Gbit/s. A replica gets at most
    its own `network_bytes_per_s`."""
    latency_s: Annotated[float, Meta(ge=0)] = 0.002
    """Time from a request for blocks to the first byte."""
    pools: tuple[str, ...] = ()
    """The pools that use the store. Empty: all pools with `prefix_caching`."""


class Fleet(Struct, frozen=True, forbid_unknown_fields=True):
    """All pools and combos. Replicas are numbered from 0 through the pools in order, then through the combos."""

    pools: tuple[Pool, ...] = ()
    combos: tuple[Combo, ...] = ()
    network: Network = field(default_factory=Network)
    provisioning: Provisioning | None = None
    """Sources of additional replicas; None: every additional replica is new."""
    gpu_limits: tuple[tuple[str, str, int], ...] = ()
    """(region, GPU type, number of GPUs) limits of scaling."""
    kv_store: KvStoreConfig | None = None
    """The shared KV store; None: replicas share no KV."""

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        """The pools, and the parts of the combos."""
        return (*self.pools, *[part for combo in self.combos for part in combo.parts])

    @property
    def fallbacks(self) -> Fallbacks:
        """The models that may answer instead of other models."""
        model_of = {pool.name: pool.model.name for pool in self.pools}
        named = [(pool.model.name, pool.fallback) for pool in self.pools]
        named += [(combo.parts[0].model.name, combo.fallback) for combo in self.combos]
        own = {pool.model.name for pool in self.all_pools if pool.hosted is None}
        return Fallbacks(
            {model: tuple(dict.fromkeys(model_of[name] for name in names)) for model, names in named if names},
            {name: name.removesuffix(f"@{pool.name}") for pool in self.pools if pool.is_standby for name in pool.names},
            frozenset(model_of.values()) - own,
        )
