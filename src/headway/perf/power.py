"""The power of a replica's GPUs: idle power, and power in an iteration by the work that the step-time model counts.

While an iteration runs, power rises linearly with its share of peak bandwidth and with the root of its share of peak
FLOP/s. Work consists of matrix products and reads of decoding sequences' KV cache. Attention among prompt tokens counts
only as active time, because measurements show less power than for products. Clocks fall at the power limit; the step
times were measured at that limit and include the effect.
"""

from __future__ import annotations

from headway.catalog.power import power_shares
from headway.core.fleet import Model, Pool
from headway.core.record import ReplicaPower
from headway.perf.experts import expert_chances
from headway.perf.params import (
    active_params,
    embedding_bytes,
    expert_bytes,
    expert_dtype,
    expert_params,
    kv_bytes,
    layer_bytes,
    linear_dtype,
    num_moe_layers,
    routed_bytes,
)
from headway.perf.roofline import compute_dtype, peak_flops


def replica_power(pool: Pool) -> ReplicaPower | None:
    """Power of one replica of a pool; None for a hosted pool, and for a GPU without watts."""
    gpu, parallel, model = pool.gpu, pool.parallel, pool.model
    if pool.hosted is not None or not gpu.watts > 0:
        return None
    shares, _ = power_shares(gpu)
    limit_w = gpu.watts * parallel.num_gpus
    bytes_per_s = gpu.bandwidth_bytes_per_s * parallel.num_gpus
    drafts, window = pool.engine.drafts, model.sliding_window_tokens
    num_drafted = 0 if drafts is None else drafts.num_speculative_tokens
    weights = parallel.dp * parallel.pp * _read_bytes(model)
    token_s, sequence_s = _token_s(pool, model), _head_s(pool, model)
    if drafts is not None and drafts.draft is not None:
        weights += parallel.dp * num_drafted * _read_bytes(drafts.draft)
        sequence_s += _token_s(pool, drafts.draft) + _head_s(pool, drafts.draft)

    expert_s = _expert_layers_bytes(model) / bytes_per_s

    def kv_s(windowed: bool) -> float:
        return parallel.tp * kv_bytes(model, pool.engine.kv_dtype_bytes, parallel.tp, windowed) / bytes_per_s

    return ReplicaPower(
        limit_w=limit_w,
        idle_w=shares.idle * limit_w,
        active_w=shares.active * limit_w,
        memory_w=shares.memory * limit_w,
        compute_w=shares.compute * limit_w,
        weights_s=weights / bytes_per_s,
        experts=tuple((num * expert_s, chance) for num, chance in expert_chances(model)),
        micro_batches=parallel.pp,
        context_s=kv_s(windowed=False),
        window_s=kv_s(windowed=True),
        window_tokens=window or 0,
        token_s=token_s,
        sequence_s=sequence_s,
        tokens_per_sequence=1 + num_drafted,
    )


def _read_bytes(model: Model) -> float:
    """Bytes of the weights that every iteration reads: all except the routed experts and the embeddings other than the
    head."""
    layers = sum(each.num * layer_bytes(model, each) for each in model.all_layers)
    return layers - routed_bytes(model) + embedding_bytes(model) * model.vocab_size * model.hidden_size


def _expert_layers_bytes(model: Model) -> float:
    """Bytes of one routed expert in each layer that has experts."""
    layers = [each for each in model.all_layers if each.has_experts]
    return sum(each.num * expert_params(model) * expert_bytes(model, each) for each in layers)


def _token_s(pool: Pool, model: Model) -> float:
    """Seconds of a token's matrix products, without the head, at the peak of all GPUs of the replica."""
    routed = 0.0
    if model.moe is not None:
        routed = model.moe.experts_per_token * expert_params(model) * num_moe_layers(model)
    dense = active_params(model) - routed - model.vocab_size * model.hidden_size
    return sum(
        2.0 * params / (peak_flops(pool.gpu, compute_dtype(dtype, pool.gpu)) * pool.parallel.num_gpus)
        for params, dtype in ((dense, linear_dtype(model)), (routed, expert_dtype(model)))
    )


def _head_s(pool: Pool, model: Model) -> float:
    """Seconds of the output head's products for one sequence, at peak FLOP/s."""
    return 2.0 * model.vocab_size * model.hidden_size / (peak_flops(pool.gpu, "bf16") * pool.parallel.num_gpus)
