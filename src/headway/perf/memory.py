"""GPU memory of a replica: weights, activations, and the KV tokens that fit in the rest."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from msgspec import Struct
from msgspec.structs import replace

from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model, Parallel, Speculative
from headway.perf.params import (
    embedding_bytes,
    kv_bytes,
    linear_bytes,
    mixer_bytes,
    num_moe_layers,
    routed_bytes,
    state_bytes,
    weights_bytes,
)

GIB = 2**30

# Hidden states of a batch that are held at once: fitted, like the engine's `sampler_bytes_per_logit`, to vLLM's own
# memory profiles on H100 (eight models). The tensor-parallel group does not divide the copies of the logits.
HIDDEN_STATES_HELD = 1.7
RUNTIME_BYTES = 0.13 * GIB
COLLECTIVES_BYTES = 0.41 * GIB


class MemoryPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of one replica. Per GPU means the fullest GPU of the replica."""

    weights_bytes: float
    """Bytes per GPU."""
    activation_bytes: float
    """Bytes per GPU: the peak of a step plus the runtime, collectives and reserved graphs."""
    kv_bytes_per_token: float
    """Bytes of the replica without replication: the size of a transfer."""
    kv_bytes_per_token_gpu: float
    """Bytes per GPU. Heads are replicated if the tensor-parallel group has more GPUs than KV heads. With MLA every GPU
    of the group holds the whole latent vector."""
    kv_bytes_per_token_replica: float
    """Bytes over all GPUs of the replica, including replicated heads."""
    kv_capacity_tokens: int
    """Tokens over all data-parallel ranks of the replica, as if any sequence could be on any rank."""
    kv_blocks: int


def plan(
    model: Model,
    gpu: Gpu,
    engine: Engine,
    parallel: Parallel,
    mean_sequence_tokens: float | None = None,
    adapter_bytes: float = 0.0,
) -> MemoryPlan:
    """Plan the memory of one replica.

    Layers with a sliding window keep a window of each sequence, which is `mean_sequence_tokens` long; None: they count
    as if they kept every token, as in engines that give all layers the same block table. States of linear attention are
    spread over the tokens of a sequence. `adapter_bytes` are reserved on each GPU. Raises HeadwayError if the shape is
    impossible or no memory is left for the cache.
    """
    needed = _needed(model, engine, parallel, mean_sequence_tokens)
    available = gpu.memory_bytes * engine.gpu_memory_utilization
    left = available - needed.weights_bytes - needed.activation_bytes - adapter_bytes
    blocks = int(left // (needed.kv_bytes_per_token_gpu * engine.block_size_tokens)) * parallel.dp
    if blocks < 1:
        raise _does_not_fit(model, gpu, engine, parallel)
    return replace(needed, kv_capacity_tokens=blocks * engine.block_size_tokens, kv_blocks=blocks)


@lru_cache(maxsize=1024)  # a run asks for the plan of a pool several times, and planners thousands of times
def _needed(model: Model, engine: Engine, parallel: Parallel, mean_sequence_tokens: float | None) -> MemoryPlan:
    """The plan of a replica without its KV blocks, whatever its GPU has room for."""
    check_shape(model, parallel)
    drafts = _draft_kv_bytes_gpu(engine, parallel)
    return MemoryPlan(
        weights_bytes=_weights_bytes_gpu(model, parallel) + _draft_weights_bytes_gpu(engine, parallel),
        activation_bytes=_activation_bytes_gpu(model, engine, parallel),
        kv_bytes_per_token=kv_bytes_per_token(model, engine.kv_dtype_bytes) + _draft_kv_bytes(engine),
        kv_bytes_per_token_gpu=_kept_bytes_gpu(model, engine, parallel, mean_sequence_tokens) + drafts,
        kv_bytes_per_token_replica=parallel.tp
        * (_kept_bytes(model, engine, parallel.tp, mean_sequence_tokens) + drafts),
        kv_capacity_tokens=0,
        kv_blocks=0,
    )


def kv_bytes_per_token(model: Model, kv_dtype_bytes: float = 2.0) -> float:
    """Bytes of KV cache of one token over all layers, unreplicated."""
    return kv_bytes(model, kv_dtype_bytes)


_STATE_SEQUENCE_TOKENS = 4096.0
"""Length of sequences over which states of linear attention are spread, if the length is unknown."""


def _kept_bytes(model: Model, engine: Engine, tp: int, mean_sequence_tokens: float | None) -> float:
    """Bytes per token and GPU of all layers, for sequences of this length: windowed layers keep a window, states have a
    fixed size."""
    full = kv_bytes(model, engine.kv_dtype_bytes, tp, windowed=False)
    windowed = kv_bytes(model, engine.kv_dtype_bytes, tp, windowed=True)
    if mean_sequence_tokens is not None and model.sliding_window_tokens is not None:
        windowed *= min(model.sliding_window_tokens, mean_sequence_tokens) / max(mean_sequence_tokens, 1.0)
    states = state_bytes(model) / tp
    per_token = full + windowed + states / max(mean_sequence_tokens or _STATE_SEQUENCE_TOKENS, 1.0)
    if not per_token:
        raise HeadwayError(f"{model.name}: no layer keeps keys, values or a state")
    return per_token


def _kept_bytes_gpu(model: Model, engine: Engine, parallel: Parallel, mean_sequence_tokens: float | None) -> float:
    """`_kept_bytes` for the layers of the fullest stage."""
    stage = ceil(model.num_layers / parallel.pp) / model.num_layers
    return stage * _kept_bytes(model, engine, parallel.tp, mean_sequence_tokens)


def check_shape(model: Model, parallel: Parallel) -> None:
    """Raise HeadwayError if no engine can split the model like this."""
    tp, pp, dp = parallel.tp, parallel.pp, parallel.dp
    if min(tp, pp, dp) < 1:
        raise HeadwayError(f"tp {tp}, pp {pp} and dp {dp} must be at least 1")
    if dp > 1 and model.moe is None:
        raise HeadwayError(f"dp {dp}: {model.name} is dense, so its ranks run on their own; use replicas: {dp}, dp: 1")
    if dp > 1 and not parallel.ep:
        raise HeadwayError(f"dp {dp}: ranks step together where they share experts; set ep: true")
    if not _heads_divide(model, tp):
        valid = ", ".join(str(n) for n in range(1, model.num_heads + 1) if _heads_divide(model, n))
        raise HeadwayError(
            f"tp {tp} does not divide the {model.num_heads} heads ({model.num_kv_heads} KV heads) of "
            f"{model.name}; possible: {valid}"
        )
    if pp > model.num_layers:
        raise HeadwayError(f"pp {pp} is more than the {model.num_layers} layers of {model.name}")


def _heads_divide(model: Model, tp: int) -> bool:
    if model.num_heads % tp:
        return False
    return model.mla is not None or all(
        each.num_kv_heads % tp == 0 or tp % each.num_kv_heads == 0 for each in model.all_layers if each.num_kv_heads
    )


def _weights_bytes_gpu(model: Model, parallel: Parallel) -> float:
    """Weights of the fullest stage: its layers, an embedding, and the replicated part of the KV projections.

    Each data-parallel rank holds all weights except routed experts, of which it holds its share.
    """
    embedding = embedding_bytes(model) * model.vocab_size * model.hidden_size
    num_embeddings = 1 if model.tie_embeddings or parallel.pp > 1 else 2
    in_layers = weights_bytes(model) - embedding * (1 if model.tie_embeddings else 2)
    in_layers -= routed_bytes(model) * (1.0 - 1.0 / parallel.dp)
    layers = ceil(model.num_layers / parallel.pp)
    sharded = (in_layers * layers / model.num_layers + embedding * num_embeddings) / parallel.tp
    return sharded + layers / model.num_layers * _replicated_bytes(model, parallel.tp)


def _replicated_bytes(model: Model, tp: int) -> float:
    """Bytes on each of `tp` GPUs in excess of an equal share: projections into the latent space, and copies of KV
    heads."""
    if model.mla is not None:
        unsharded = model.hidden_size * (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim + model.mla.q_lora_rank)
        num = sum(each.num for each in model.all_layers if each.num_heads)
        return num * unsharded * linear_bytes(model) * (1.0 - 1.0 / tp)
    total = 0.0
    for each in model.all_layers:
        if each.num_kv_heads and tp > each.num_kv_heads:
            projections = model.hidden_size * each.num_kv_heads * (each.head_dim + each.v_head_dim)
            total += each.num * projections * mixer_bytes(model, each) * (tp / each.num_kv_heads - 1.0) / tp
    return total


def _activation_bytes_gpu(model: Model, engine: Engine, parallel: Parallel) -> float:
    seqs = ceil(engine.max_num_seqs / parallel.dp)
    tokens = max(ceil(engine.max_num_batched_tokens / parallel.dp), seqs)
    sampler = engine.sampler_bytes_per_logit * seqs * model.vocab_size
    width = model.intermediate_size if model.moe is None else _expert_width(model)
    forward = 2.0 * tokens * (2 * model.hidden_size + 3.0 * width / parallel.tp)
    peak = max(sampler, forward) + 2.0 * HIDDEN_STATES_HELD * tokens * model.hidden_size
    graphs = engine.graph_bytes_per_expert_layer * ceil(num_moe_layers(model) / parallel.pp)
    return peak + graphs + RUNTIME_BYTES + (COLLECTIVES_BYTES if parallel.num_gpus > 1 else 0.0)


def draft_parallel(setting: Speculative, parallel: Parallel) -> Parallel:
    """The parallelism of the draft model: the tensor-parallel group, or one of its GPUs."""
    return Parallel(tp=setting.draft_tensor_parallel_size or parallel.tp)


def _draft_weights_bytes_gpu(engine: Engine, parallel: Parallel) -> float:
    """Weights of the draft model or head on the fullest GPU; 0 without one."""
    setting = engine.drafts
    if setting is None or setting.draft is None:
        return 0.0
    own = _weights_bytes_gpu(setting.draft, shape := draft_parallel(setting, parallel))
    if setting.draft_shares_embeddings:
        own -= _embedding_bytes(setting.draft) / shape.tp
    return own


def _embedding_bytes(model: Model) -> float:
    return embedding_bytes(model) * model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)


def _draft_kv_bytes(engine: Engine) -> float:
    """KV cache of one token in the draft model or head, unreplicated; 0 without one."""
    setting = engine.drafts
    if setting is None or setting.draft is None:
        return 0.0
    return kv_bytes_per_token(setting.draft, engine.kv_dtype_bytes)


def _draft_kv_bytes_gpu(engine: Engine, parallel: Parallel) -> float:
    setting = engine.drafts
    if setting is None or setting.draft is None:
        return 0.0
    return _kept_bytes_gpu(setting.draft, engine, draft_parallel(setting, parallel), None)


def _expert_width(model: Model) -> int:
    assert model.moe is not None
    return model.moe.intermediate_size * model.moe.experts_per_token + model.moe.shared_intermediate_size


def _does_not_fit(model: Model, gpu: Gpu, engine: Engine, parallel: Parallel) -> HeadwayError:
    need = _needed_bytes_gpu(model, engine, parallel)
    have = gpu.memory_bytes * engine.gpu_memory_utilization
    possible = [tp for tp in range(1, gpu.gpus_per_node + 1) if _heads_divide(model, tp)]
    fits = next((tp for tp in possible if _needed_bytes_gpu(model, engine, replace(parallel, tp=tp)) <= have), None)
    dp = f", dp {parallel.dp}" if parallel.dp > 1 else ""
    hint = f"smallest tp that fits: {fits}" if fits else f"no tp up to {gpu.gpus_per_node} fits; raise pp, too"
    return HeadwayError(
        f"{model.name} (tp {parallel.tp}, pp {parallel.pp}{dp}) needs {need / GIB:.1f} GiB a GPU, "
        f"{have / GIB:.1f} of {gpu.memory_bytes / GIB:.1f} available on {gpu.name}; {hint}"
    )


def _needed_bytes_gpu(model: Model, engine: Engine, parallel: Parallel) -> float:
    per_token = _kept_bytes_gpu(model, engine, parallel, None) + _draft_kv_bytes_gpu(engine, parallel)
    weights = _weights_bytes_gpu(model, parallel) + _draft_weights_bytes_gpu(engine, parallel)
    return weights + _activation_bytes_gpu(model, engine, parallel) + per_token * engine.block_size_tokens
