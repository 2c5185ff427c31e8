"""The network bandwidth that hides a KV transfer behind prefill: Cauchy's Eq. 17 and 18, and the paper's figures."""

from __future__ import annotations

from msgspec import Struct

from headway import catalog
from headway.core.fleet import Gpu, Model
from headway.perf.roofline import peak_flops
from headway.planning.combos.cost_efficiency import PhaseCosts, of_shape, stated


def kv_network_bytes_per_s(
    costs: PhaseCosts, r_in: float, gpu_flops: float, num_gpus: int = 1, batch: float = 1.0
) -> float:
    """Bandwidth that keeps up with prefill (Eq. 17, 18).

    With a batch of 1 it is valid for any batch: the paper divides by B, and counts the KV cache of one request.
    """
    return costs.c4 * num_gpus * gpu_flops / (batch * (costs.c1 * r_in + costs.c2))


class NetworkClaim(Struct, frozen=True, forbid_unknown_fields=True):
    """The paper's figure for the network (5), and the result of its formula."""

    model: str
    gpu: str
    prompt_tokens: int
    claimed_bytes_per_s: float
    formula_bytes_per_s: float
    """Eq. 18 as stated, for one GPU and a batch of one prompt."""
    shape_bytes_per_s: float
    """`formula_bytes_per_s` with the costs of the real shape."""
    num_gpus_to_match: float
    """Number of GPUs prefilling together at which the formula gives the paper's figure."""


def network_claims() -> tuple[NetworkClaim, ...]:
    """The paper's two figures, 10 GB/s (8B) and 5 GB/s (70B) for 2,048 tokens on an A100, and the formula's results.

    The formula gives 2.5 and 0.63 GB/s for one GPU, and the paper's figures for 4 and 8 GPUs.
    """
    return tuple(
        _network_claim(catalog.model(name), catalog.gpu("a100-80gb"), 2048, claimed)
        for name, claimed in (("llama-3.1-8b", 10e9), ("llama-3.1-70b", 5e9))
    )


def _network_claim(model: Model, gpu: Gpu, prompt_tokens: int, claimed: float) -> NetworkClaim:
    flops = peak_flops(gpu, "bf16")
    formula = kv_network_bytes_per_s(stated(model), prompt_tokens, flops)
    shape = kv_network_bytes_per_s(of_shape(model), prompt_tokens, flops)
    return NetworkClaim(model.name, gpu.name, prompt_tokens, claimed, formula, shape, claimed / formula)
