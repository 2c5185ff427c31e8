"""What exists: GPUs, models, engines, pools of replicas. Data, not a class per GPU."""

from __future__ import annotations

from math import inf
from typing import Literal

from msgspec import Struct, field

Batching = Literal["chunked", "prefill-first", "whole-prompt", "request-level"]
Preemption = Literal["recompute", "swap"]
Role = Literal["mixed", "prefill", "decode"]
"""What a replica is for: both phases of a request, or one of them."""


class Gpu(Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator. Peaks are dense (no sparsity); links are per direction and per GPU."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    peak_flops: dict[str, float]
    """FLOP/s by dtype: bf16, fp8, int8, fp16. A dtype that is absent is not supported in hardware."""
    link_bytes_per_s: float
    """GPU to GPU within a node (NVLink, Infinity Fabric, or PCIe)."""
    host_link_bytes_per_s: float
    usd_per_hour: float
    watts: float
    gpus_per_node: int = 8
    num_sms: int | None = None
    """Streaming multiprocessors, among which a kernel's tiles are dealt out; None: unknown, or another maker's."""
    l2_bytes: float | None = None
    """Of the L2 cache; None: unknown."""
    aliases: tuple[str, ...] = ()
    source: str = ""


class Moe(Struct, frozen=True, forbid_unknown_fields=True):
    """Mixture-of-experts feed-forward: `num_experts` routed, `experts_per_token` of them chosen per token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    """Width of the always-on shared expert(s), 0 if none."""
    num_dense_layers: int = 0
    """Leading layers with an ordinary feed-forward (width `intermediate_size` of the model)."""
    moe_layer_every: int = 1
    """1: every layer past the dense ones is MoE; 2: every second."""


class Mla(Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2/V3): the cache holds one latent vector per token and layer."""

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """One transformer's shape."""

    name: str
    hf_id: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    gated_mlp: bool = True
    tie_embeddings: bool = False
    dtype: str = "bf16"
    """Of the weights: bf16, fp16, fp8, int4. Activations and KV cache are 16 bit unless an engine says otherwise."""
    moe: Moe | None = None
    mla: Mla | None = None
    sliding_window_tokens: int | None = None
    sliding_window_every: int = 1
    """With a window: 1 = every layer is windowed, 2 = every second, 4 = three of four."""
    aliases: tuple[str, ...] = ()
    source: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may use for the model."""
        return (self.name, self.hf_id, *self.aliases)


class Engine(Struct, frozen=True, forbid_unknown_fields=True):
    """How a replica batches, and what it can be told. A profile from the catalog, with the user's changes."""

    name: str
    batching: Batching = "chunked"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size_tokens: int = 16
    gpu_memory_utilization: float = 0.9
    watermark: float = 0.0
    """Fraction of KV blocks that admission leaves free."""
    prefix_caching: bool = False
    preemption: Preemption = "recompute"
    host_memory_bytes: float = 0.0
    """Host memory for swapped KV; with swap and no room left, preemption falls back to recompute."""
    kv_offload_bytes: float = 0.0
    """Host memory of one replica that keeps the prefix cache's blocks after the GPU has let them go."""
    max_num_waiting: int | None = None
    """Longest queue a replica accepts; beyond it requests go elsewhere or are rejected."""
    schedule_lag: int = 0
    """1: scheduling runs one iteration ahead of execution, so what arrives waits one iteration more."""
    request_overhead_s: float = 0.0
    """From a request's coming in to the scheduler's seeing it: HTTP, validation, queues between processes."""
    tokenize_s_per_token: float = 0.0
    """The same, per prompt token."""
    response_overhead_s: float = 0.0
    """From the end of an iteration to the client's having its tokens: sampling results, detokenising, HTTP."""
    kv_dtype_bytes: float = 2.0
    orderings: tuple[str, ...] | None = None
    """Orderings that this engine can act out at the replica; None = any (a simulated engine)."""
    version: str = ""
    source: str = ""


class Parallel(Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of one replica: `tp * pp * dp` GPUs. With `ep`, whole experts are spread over the `tp * dp` ranks."""

    tp: int = 1
    pp: int = 1
    ep: bool = False
    dp: int = 1
    """Data parallel ranks that step together, as mixtures of experts with `ep` do. Dense ranks are replicas."""

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp * self.dp


class Handover(Struct, frozen=True, forbid_unknown_fields=True):
    """How a prefill replica gives a KV cache to a decode replica (Cauchy, sections 3.6 and 4.7).

    `bulk` sends it once the prompt is computed. `layerwise` sends each layer as soon as it is computed, over `degree`
    streams at a time, so that the last layer is all that cannot be hidden behind the computation.
    """

    mode: Literal["bulk", "layerwise"] = "bulk"
    degree: int = 1
    """Streams at a time."""
    stream_bytes_per_s: float | None = None
    """Most that one stream carries; None: as much as the network."""
    stream_overhead_s: float = 0.0
    """What minding one more stream adds to a transfer."""
    landing: Literal["gpu", "host"] = "gpu"
    """Where the cache waits for its first decode step: in GPU blocks if there are any free, or always in host
    memory, from where it is copied then."""
    first_token: Literal["prefill", "decode", "sent"] = "prefill"
    """Whose first token the client gets. `decode`, as vLLM does it: the prefill replica's is dropped, and the decode
    replica computes the prompt's last token anew, to have one of its own. `sent`, as SGLang does it: the prefill
    replica's, which comes with the KV cache."""


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas that are alike."""

    name: str
    model: Model
    gpu: Gpu
    engine: Engine
    parallel: Parallel = field(default_factory=Parallel)
    replicas: int = 1
    region: str = ""
    usd_per_gpu_hour: float | None = None
    """None: the catalog's price."""
    kv_capacity_tokens: int | None = None
    """None: from memory; a number caps it (for experiments under memory pressure)."""
    network_bytes_per_s: float = 12.5e9
    """Of one replica, each way, to other replicas: 100 Gbit/s."""
    min_replicas: int = 1
    max_replicas: int | None = None
    """Limits of scaling; None: as many as a scaler wants."""
    start_s: float | None = None
    """From asking for one more replica to its first request; None: from what loading and starting an engine take."""
    role: Role = "mixed"
    handover: Handover = field(default_factory=Handover)
    """Of caches that come from here."""

    @property
    def usd_per_hour(self) -> float:
        """Price of one replica."""
        price = self.gpu.usd_per_hour if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour
        return price * self.parallel.num_gpus


class Combo(Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas for prefill and replicas for decode that work together, and come and go together.

    Each part says how many replicas of it one combo has. Requests are handed over within a combo.
    """

    name: str
    parts: tuple[Pool, ...]
    replicas: int = 1
    """How many such combos."""
    min_replicas: int = 1
    max_replicas: int | None = None
    goodput_rps: float | None = None
    """Requests per second that one combo serves within the SLOs, as profiled."""


def unit_of(deployment: Pool | Combo) -> list[Pool]:
    """The pools of all replicas that come and go together: one, or those of a combo."""
    if isinstance(deployment, Pool):
        return [deployment]
    return [part for part in deployment.parts for _ in range(part.replicas)]


NORMAL_P90 = 1.2816
"""Of the standard normal distribution."""


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    """What lies between regions."""

    inter_region_s: float = 0.05
    """From a region to another one, each way. SageServe, section 7.1."""
    pairs: tuple[tuple[str, str, float], ...] = ()
    """(region, other region, seconds each way), where it is not `inter_region_s`."""
    p90_to_median: float = 1.0
    """Latencies between regions are lognormal: those above are medians, and nine in ten requests need no longer than so
    many times them. SageServe's are 10 (7.1: 90% below 500 ms, and with that 1.5% above 2.5 s). 1: all are alike."""
    longest_s: float = 2.5
    """No latency that varies is longer."""

    def __post_init__(self) -> None:
        if not 1 <= self.p90_to_median < inf or not 0 < self.longest_s < inf:
            raise ValueError("p90_to_median, longest_s: expected 1 or more, and seconds above 0")

    def latency_s(self, region: str, other: str) -> float:
        """Each way, the median; nothing within a region, or where one of them is not said."""
        if region == other or not region or not other:
            return 0.0
        for a, b, seconds in self.pairs:
            if {a, b} == {region, other}:
                return seconds
        return self.inter_region_s

    def varied_s(self, median_s: float, normal: float) -> float:
        """What a latency is for one request, by its standard normal draw."""
        return float(min(median_s * self.p90_to_median ** (normal / NORMAL_P90), max(self.longest_s, median_s)))


class Provisioning(Struct, frozen=True, forbid_unknown_fields=True):
    """Where one more replica comes from, and how long that takes (SageServe, sections 2.3 and 7.1).

    A replica that is given back goes to the region's spot instances, of its model. One more is a spot instance of
    the same model if there is one, else one of another model on as many of the same GPUs, else new.
    """

    reclaim_s: float = 60.0
    """A spot instance of the same model."""
    redeploy_s: float = 600.0
    """A spot instance of another model: the weights are loaded."""
    acquire_s: float | None = None
    """A new one; None: the pool's own `start_s`."""
    reclaim_max_s: float | None = None
    """Times to reclaim are lognormal: `reclaim_s` is the median, and the one in a thousand that is longer than this is
    cut off here. SageServe's are 60 and 300. None: all are alike."""
    remote_s: float | None = None
    """The first replica of a model in a region that began without one: its weights come from another region. Others
    wait for them, too. SageServe's is 7200. None: as in any region."""

    def __post_init__(self) -> None:
        if self.reclaim_max_s is not None and not 0 < self.reclaim_s <= self.reclaim_max_s < inf:
            raise ValueError("reclaim_max_s: expected reclaim_s, above 0, or more")
        if self.remote_s is not None and not 0 <= self.remote_s < inf:
            raise ValueError("remote_s: expected seconds, 0 or more")


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica crashes at `at_s` and is back, empty, `down_s` later (None: never).

    With `streams`, it does not crash: so many of the hand-overs that are on the way from it or to it lose their
    streams, the oldest first (Cauchy, section 3.6). They are taken up again `down_s` later, `layerwise` ones without
    the layers that have arrived whole, `bulk` ones from the start; without `down_s` the prefill replica decodes.
    """

    at_s: float
    replica: int
    down_s: float | None = None
    streams: int | None = None
    """In place of a crash: how many hand-overs are hit, at most."""


class RoleChange(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica of a combo is for something else from `at_s` on (Cauchy, section 3.6); what it has begun, it ends.

    A combo in which then nobody would prefill, or nobody decode, is covered for: all of it does both.
    """

    at_s: float
    replica: int
    role: Role
    """`mixed` is back to both phases."""
    switch_s: float = 0.0
    """For so long it takes nothing new."""


class Fleet(Struct, frozen=True, forbid_unknown_fields=True):
    """Every pool. Replicas are numbered from 0 through the pools in order, then through the combos, one by one."""

    pools: tuple[Pool, ...] = ()
    combos: tuple[Combo, ...] = ()
    network: Network = field(default_factory=Network)
    provisioning: Provisioning | None = None
    """None: one more replica is always new."""
    gpu_limits: tuple[tuple[str, str, int], ...] = ()
    """(region, GPU, how many there are), where scaling has a limit."""

    @property
    def all_pools(self) -> tuple[Pool, ...]:
        """Pools, and parts of combos."""
        return (*self.pools, *(part for combo in self.combos for part in combo.parts))
