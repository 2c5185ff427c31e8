"""The shape of a model: its layers, experts, latent attention and windows, and how tokens are sampled."""

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
    """Width of the always-on shared expert(s), 0 if none."""
    num_dense_layers: int = 0
    """Leading layers with an ordinary feed-forward (width `intermediate_size` of the model)."""
    moe_layer_every: int = 1
    """1: every layer past the dense ones is MoE; 2: every second."""
    hidden_size: int = 0
    """Inputs and outputs of a routed expert, where it works on a projection of the hidden state; 0: the model's."""


class Mla(Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2/V3): the cache holds one latent vector per token and layer."""

    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests ask for the next token to be chosen."""

    temperature: float = 1.0
    """0: greedy, whatever the rest says."""
    top_p: float = 1.0
    """Least probability that the candidates have together; 1: all tokens are candidates."""
    top_k: int = 0
    """Most candidates; 0: no limit."""
    repetition_penalty: float = 1.0
    share: float = 1.0
    """Share of the requests that ask for it; the others decode greedily."""
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
        """Whether only some of the tokens are candidates."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def is_penalised(self) -> bool:
        """Whether the tokens so far change the logits."""
        return self.repetition_penalty != 1


GREEDY = Sampling(temperature=0.0)


class Layers(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers of one shape among those of a model whose layers differ."""

    num: int
    num_heads: int = 0
    """Query heads of the attention; 0: the layers have none (a state, a convolution, or only a feed-forward)."""
    num_kv_heads: int = 0
    head_dim: int = 0
    """Of queries and keys."""
    v_head_dim: int = 0
    is_windowed: bool = False
    """The attention sees the model's `sliding_window_tokens`."""
    has_cache: bool = True
    """False: the attention reads the keys and values of an earlier layer."""
    index_bytes: int = 0
    """Bytes a token that an indexer of sparse attention keeps beside the cache, on every GPU."""
    state_bytes: float = 0.0
    """Bytes of a sequence that do not grow with its length: the states of linear attention, state-space layers and
    convolutions."""
    mixer_params: float = 0.0
    """Parameters of one layer's attention or state: all matrices that a token goes through before the feed-forward."""
    mixer_dtype: str = ""
    """Type of those weights; empty: the model's."""
    mlp_width: int = 0
    """Of the dense feed-forward; 0: none."""
    mlp_dtype: str = ""
    """Type of the weights of the dense feed-forward and of shared experts; empty: the model's."""
    has_experts: bool = False
    """The model's mixture of experts, beside or instead of the dense feed-forward."""
    expert_dtype: str = ""
    """Type of the routed experts' weights; empty: the model's."""


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
    """Type of the weights: bf16, fp16, fp8, int8, w8a16, int4 (MXFP4), w4a16, nvfp4, nf4; with `-g32` after it, one
    scale for each 32 weights. Activations and KV cache have 16 bits, unless the engine differs."""
    moe: Moe | None = None
    mla: Mla | None = None
    sliding_window_tokens: int | None = None
    sliding_window_every: int = 1
    """With a window: 1 = every layer is windowed, 2 = every second, 4 = three of four."""
    layers: tuple[Layers, ...] = ()
    """Where layers differ otherwise than by `moe` and `sliding_window_every`: all of them. The numbers of heads above
    are then those of the layers with full attention."""
    other_params: float = 0.0
    """Parameters that a token does not go through: embeddings of each layer, experts of images. They have 16 bits."""
    unmodelled: tuple[str, ...] = ()
    """Properties that sizes have and step times lack, as sparse attention."""
    sampling: Sampling | None = None
    """What requests without sampling parameters get: the published `generation_config.json`, which engines apply, or
    what the workload sets. None: unknown, and counted as greedy."""
    aliases: tuple[str, ...] = ()
    source: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may use for the model."""
        return (self.name, self.hf_id, *self.aliases)

    @property
    def all_layers(self) -> tuple[Layers, ...]:
        """The layers by shape: `layers`, or those that the model's other fields describe."""
        return self.layers or _alike(self)

    @property
    def memory_varies_with_length(self) -> bool:
        """Whether a token of a long sequence needs less memory than one of a short sequence: windows and states."""
        return self.sliding_window_tokens is not None or any(each.state_bytes for each in self.layers)


@lru_cache(maxsize=1024)  # planners ask for the same few models, thousands of times
def _alike(model: Model) -> tuple[Layers, ...]:
    """The layers of a model without `layers`: at most four shapes, by window and by experts.

    Where both vary, their combinations do not matter to any sum over the layers, so they are counted separately as far
    as possible.
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
    """Parameters of one layer's query, key, value and output projections, all layers being alike."""
    h, heads = model.hidden_size, model.num_heads
    if model.mla is None:
        return h * model.head_dim * (2.0 * heads + 2 * model.num_kv_heads)
    mla = model.mla
    q_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    query = mla.q_lora_rank * (h + q_dim) if mla.q_lora_rank else h * q_dim
    latent = h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return float(query + latent + up + heads * mla.v_head_dim * h)
