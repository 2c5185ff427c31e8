"""The shape of a model (layers, experts, latent attention, windows), and how tokens are sampled."""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace


class Moe(Struct, frozen=True, forbid_unknown_fields=True):
    """Mixture-of-experts feed-forward: `num_experts` routed, `experts_per_token` of them chosen per token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    """Width of the shared experts, which are always active; 0: there are none."""
    num_dense_layers: int = 0
    """Leading layers with a dense feed-forward, of the model's `intermediate_size`."""
    moe_layer_every: int = 1
    """1: every layer after the dense layers is MoE; 2: every second layer is MoE."""
    hidden_size: int = 0
    """Input and output width of a routed expert that works on a projection of the hidden state; 0: the model's
    width."""


class Mla(Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2/V3): the cache holds one latent vector per token and layer."""

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """The sampling parameters of requests."""

    temperature: float = 1.0
    """0: greedy decoding, regardless of the other parameters."""
    top_p: float = 1.0
    """Probability mass of the candidate tokens; 1: all tokens are candidates."""
    top_k: int = 0
    """Maximum number of candidate tokens; 0: no limit."""
    repetition_penalty: float = 1.0
    share: float = 1.0
    """Share of requests with these parameters. Other requests decode greedily."""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature: {self.temperature}; expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p}; expected above 0, at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k}; expected 1 or more, or 0 for no limit")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty: {self.repetition_penalty}; expected above 0")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: {self.share}; expected 0 to 1")

    @property
    def is_cut(self) -> bool:
        """Whether only some tokens are candidates."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1


GREEDY = Sampling(temperature=0.0)


class Layers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers of one shape, in a model with several shapes."""

    num: int
    num_heads: int = 0
    """Query heads of the attention; 0: no attention (a state, a convolution, or only a feed-forward)."""
    num_kv_heads: int = 0
    head_dim: int = 0
    """Head width of queries and keys."""
    v_head_dim: int = 0
    is_windowed: bool = False
    """Whether the attention is limited to the model's `sliding_window_tokens`."""
    has_cache: bool = True
    """False: the attention reads an earlier layer's keys and values."""
    index_bytes: int = 0
    """Bytes per token that a sparse-attention indexer keeps besides the KV cache, on every GPU."""
    state_bytes: float = 0.0
    """Bytes per sequence independent of its length: the states of linear attention, state-space layers and
    convolutions."""
    mixer_params: float = 0.0
    """Parameters of one layer's attention or state: all matrices applied to a token before the feed-forward."""
    mixer_dtype: str = ""
    """Weight type of attention or state; empty: the model's."""
    mlp_width: int = 0
    """Width of the dense feed-forward; 0: none."""
    mlp_dtype: str = ""
    """Weight type of the dense feed-forward and the shared experts; empty: the model's."""
    has_experts: bool = False
    """Whether the layers have the model's mixture of experts, besides or instead of the dense feed-forward."""
    expert_dtype: str = ""
    """Weight type of the routed experts; empty: the model's."""


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a transformer: sizes of its layers, heads, experts and vocabulary."""

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
    """Weight type: bf16, fp16, fp8, int8, w8a16, int4 (MXFP4), w4a16, nvfp4, nf4; the suffix `-g32` means one scale per
    32 weights; `q4.5` means 4.5 bits a weight in the mean, scales included. Activations and KV cache have 16 bits,
    unless the engine sets another type."""
    embedding_dtype: str = "bf16"
    """Weight type of the embeddings and the output matrix."""
    moe: Moe | None = None
    mla: Mla | None = None
    sliding_window_tokens: int | None = None
    sliding_window_every: int = 1
    """With a window: 1 = every layer is windowed, 2 = every second layer, 4 = three of four layers."""
    layers: tuple[Layers, ...] = ()
    """All layers by shape, if they differ by more than `moe` and `sliding_window_every`. The numbers of heads above
    then describe the full-attention layers."""
    other_params: float = 0.0
    """Parameters that are not applied to text tokens: per-layer embeddings, image experts. They have the
    embeddings' type."""
    unmodelled: tuple[str, ...] = ()
    """Properties included in sizes but not in step times, such as sparse attention."""
    sampling: Sampling | None = None
    """Default sampling of requests: the published `generation_config.json`, which engines apply, or the workload's
    setting. None: unknown, treated as greedy."""
    aliases: tuple[str, ...] = ()
    source: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may use for the model."""
        return (self.name, self.hf_id, *self.aliases)

    @property
    def all_layers(self) -> tuple[Layers, ...]:
        """The layers by shape: `layers`, or the shapes described by the model's other fields."""
        return self.layers or _alike(self)

    @property
    def memory_varies_with_length(self) -> bool:
        """Whether memory per token shrinks in long sequences, because of windows or states."""
        return self.sliding_window_tokens is not None or any(each.state_bytes for each in self.layers)


@lru_cache(maxsize=1024)  # planners ask for the same few models thousands of times
def _alike(model: Model) -> tuple[Layers, ...]:
    """The layers of a model without `layers`: at most four shapes, by window and by experts.

    No sum over the layers depends on how windows and experts combine, so they are counted separately where possible.
    """
    num, moe = model.num_layers, model.moe
    sparse = (num - moe.num_dense_layers) // moe.moe_layer_every if moe is not None else 0
    windowed = 0
    if model.sliding_window_tokens is not None:
        windowed = num if model.sliding_window_every == 1 else num - num // model.sliding_window_every
    base = Layers(
        num=num,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.head_dim,
        mixer_params=attention_params(model),
    )
    both = max(sparse + windowed - num, 0)
    parts = (
        (both, True, True),
        (windowed - both, True, False),
        (sparse - both, False, True),
        (num - windowed - sparse + both, False, False),
    )
    return tuple(
        replace(
            base,
            num=count,
            is_windowed=window,
            has_experts=experts,
            mlp_width=0 if experts else model.intermediate_size,
        )
        for count, window, experts in parts
        if count
    )


def attention_params(model: Model) -> float:
    """Parameters of one layer's query, key, value and output projections, if all layers are alike."""
    h, heads = model.hidden_size, model.num_heads
    if model.mla is None:
        return h * model.head_dim * (2.0 * heads + 2 * model.num_kv_heads)
    mla = model.mla
    q_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    query = mla.q_lora_rank * (h + q_dim) if mla.q_lora_rank else h * q_dim
    latent = h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return float(query + latent + up + heads * mla.v_head_dim * h)
