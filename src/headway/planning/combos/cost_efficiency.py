"""Cauchy's cost-efficiency model: tokens per dollar from a model's shape and a GPU's peaks (3.2, Eq. 1 to 15).

The model assumes FLOP-bound prefill and byte-bound decode. `stated` counts FLOPs and bytes as the paper does: as many
KV heads as heads in the weights, no causal mask, dense feed-forward, both embeddings read in every step. `of_shape`
counts them from the model's real shape: grouped heads, latent attention, experts touched by a batch, KV heads
replicated by tensor parallelism. Both give `PhaseCosts`; all other values follow from those.

Prices are per hour. The paper's "Tokens/USD" follows from its equations with 3,600 seconds to an hour, as its Table 1
does. Eq. 14 adds the tokens per dollar of two phases, as if every dollar were spent on both. It ranks combos, but is
not the number of tokens that a combo serves. Counts cancel (Eq. 15): 1:1 and 1:6 of the same types have one value. The
tokens that a combo serves per dollar are its goodput over its price: `served_tokens_per_usd`.
"""

from __future__ import annotations

from msgspec import Struct

from headway.core.fleet import Model
from headway.perf.attention import pair_flops
from headway.perf.experts import expert_chances
from headway.perf.params import (
    active_params,
    embedding_bytes,
    kv_bytes,
    routed_bytes,
    weight_dtype_bytes,
    weights_bytes,
)

HOUR_S = 3600.0


class PhaseCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """Work of a model in each phase: the paper's C1 to C4."""

    c1: float
    """FLOPs of prefill per squared prompt token."""
    c2: float
    """FLOPs of prefill per prompt token."""
    c3: float
    """Bytes of weights that a decode step reads."""
    c4: float
    """Bytes of KV cache per token."""


def stated(model: Model) -> PhaseCosts:
    """C1 to C4 as stated in the paper (Eq. 1, 2, 6, 7)."""
    layers, h, i = float(model.num_layers), float(model.hidden_size), float(model.intermediate_size)
    d = weight_dtype_bytes(model)
    return PhaseCosts(
        c1=4 * layers * h,
        c2=8 * layers * h**2 + 6 * layers * h * i,
        c3=d * (2 * model.vocab_size * h + (4 * h**2 + 3 * h * i + 2 * h) * layers),
        c4=2 * d * layers * model.num_kv_heads * model.head_dim,
    )


def of_shape(model: Model, tp: int = 1, batch: int = 1, kv_dtype_bytes: float = 2.0) -> PhaseCosts:
    """C1 to C4 of the real shape, for `tp` GPUs together and decode batches of `batch` sequences.

    Attention is causal (half the pairs); the embedding is looked up, not read; of a mixture of experts, prefill
    computes the chosen experts and decode reads the experts that the batch touches. Sliding windows count as full
    attention.
    """
    h = model.hidden_size
    in_layers = active_params(model) - model.vocab_size * h - 2.0 * h * model.num_layers
    embedding = 0.0 if model.tie_embeddings else embedding_bytes(model) * model.vocab_size * h
    untouched = 0.0
    if model.moe is not None:
        touched = sum(count * (1.0 - (1.0 - chance) ** batch) for count, chance in expert_chances(model))
        untouched = routed_bytes(model) * (1.0 - touched / model.moe.num_experts)
    return PhaseCosts(
        c1=sum(each.num * pair_flops(model, each) for each in model.all_layers) / 2,
        c2=2.0 * in_layers,
        c3=weights_bytes(model) - embedding - untouched,
        c4=tp * kv_bytes(model, kv_dtype_bytes, tp),
    )


def a1(costs: PhaseCosts, r_in: float) -> float:
    """The prefill workload pattern: prompt tokens per FLOP (Eq. 12)."""
    return 1.0 / (costs.c1 * r_in + costs.c2)


def a2(costs: PhaseCosts, batch: float, r_in: float, r_out: float) -> float:
    """The decode workload pattern: output tokens per byte (Eq. 13)."""
    return 1.0 / (costs.c4 * r_out / 2 + costs.c4 * r_in + costs.c3 / batch)


def tokens_per_usd(tokens_per_s: float, usd_per_hour: float) -> float | None:
    """Tokens per dollar; None if the price is 0."""
    return None if usd_per_hour == 0 else HOUR_S * tokens_per_s / usd_per_hour


def summed_tokens_per_usd(
    prefill_tokens_s: float, prefill_usd_per_hour: float, decode_tokens_s: float, decode_usd_per_hour: float
) -> float | None:
    """CE from the throughput and price of each phase's GPUs (Eq. 14); None, meaning infinite, if a phase is free."""
    prefill = tokens_per_usd(prefill_tokens_s, prefill_usd_per_hour)
    decode = tokens_per_usd(decode_tokens_s, decode_usd_per_hour)
    return None if prefill is None or decode is None else prefill + decode


def closed_form(
    a_1: float,
    a_2: float,
    prefill_flops: float,
    prefill_usd_per_hour: float,
    decode_bytes_per_s: float,
    decode_usd_per_hour: float,
) -> float | None:
    """CE from one GPU's peaks and price in each phase (Eq. 15); None as in Eq. 14."""
    return summed_tokens_per_usd(
        a_1 * prefill_flops, prefill_usd_per_hour, a_2 * decode_bytes_per_s, decode_usd_per_hour
    )


def served_tokens_per_usd(goodput_rps: float, r_in: float, r_out: float, usd_per_hour: float) -> float | None:
    """Prompt and output tokens that a combo serves per dollar; None if it is free.

    This is the paper's measured CE: its Table 3 follows from goodput, the prices of Table 1 and 819 to 831 tokens per
    request; its example of 3.3.2 follows from 390 to 395.
    """
    return tokens_per_usd(goodput_rps * (r_in + r_out), usd_per_hour)
