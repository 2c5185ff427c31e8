"""The terms that served runs can determine, with the catalog's values as prior."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from headway.calibration.serving import ServingExperiment
from headway.catalog.coefficients import Coefficients, Kernels, Overhead, scaled
from headway.core.fleet import Engine, Pool
from headway.perf.params import num_dense_layers, num_moe_layers
from headway.perf.roofline import compute_dtype

Floats = npt.NDArray[np.float64]
MEASURED_SPREAD, OTHER_SPREAD = 0.05, 1.0
"""Standard deviation of the logarithm of kernel efficiencies: measured on this GPU, or taken from another one."""
UNKNOWN_HARDWARE = 100.0
"""Factor on the prior's width of iteration times if the kernels were not measured: a processor without a GPU takes
milliseconds where a GPU takes microseconds."""
LAUNCH_PART_S, LAUNCH_S = 3.4e-4, 8e-4
"""Host time to launch a layer. vLLM 0.25.1 on an H100 with 16 host cores takes 10 to 12 ms for 32 layers up to 512
tokens, and 17 to 39 ms above. A lower bound that never binds has no slope, so a fit starts from a value that binds."""
STEP_SPREAD = 0.2
"""Standard deviation of the prior of kernel efficiencies, if the engine's own iterations determine each kernel's
time."""
LEAST_EFFICIENCY = 0.005
SAMPLER = ("sampler_latency_s", "sort_bytes_per_logit", "cut_bytes_per_logit", "penalty_bytes_per_logit")


class Term(Struct, frozen=True):
    """One number, or a factor on several numbers of the catalog, with a normal prior.

    A fit uses the distance from the prior in standard deviations; for a factor, the distance of its logarithm.
    """

    name: str
    prior: float
    spread: float
    """Standard deviation of the prior; for a factor, of its logarithm."""
    low: float
    high: float
    is_factor: bool = False

    def value(self, x: float) -> float:
        """The value in SI units, or a factor."""
        value = math.exp(self.spread * x) if self.is_factor else self.prior + self.spread * x
        return min(max(value, self.low), self.high)

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the distance from the prior."""
        if self.is_factor:
            return math.log(self.low) / self.spread, math.log(self.high) / self.spread
        return (self.low - self.prior) / self.spread, (self.high - self.prior) / self.spread


def terms_of(
    experiments: Sequence[ServingExperiment],
    known: Coefficients,
    engine: Engine,
    is_measured: bool,
    has_iterations: bool = False,
) -> tuple[Term, ...]:
    """The terms that can matter for these experiments.

    `is_measured`: the kernels were measured on this GPU. `has_iterations`: the engine's own iterations were measured,
    and only terms outside of iterations are left.
    """
    overhead = known.overhead
    models = [e.model for e in experiments]
    wide = 1.0 if is_measured else UNKNOWN_HARDWARE
    outside = [Term("request_s", engine.request_overhead_s + engine.response_overhead_s, 5e-3, 0.0, 1.0)]
    if not all(e.sends_token_ids for e in experiments):
        outside.append(Term("tokenize_s_per_token", engine.tokenize_s_per_token, 1e-5 * wide, 0.0, 1e-2))
    if has_iterations:
        return tuple(outside)
    found = [
        Term("step_s", overhead.step_s, 1e-3 * wide, 0.0, 1.0),
        Term("layer_s", overhead.layer_s, 15e-6 * wide, min(-15e-6, overhead.layer_s), 0.1),
        Term("sequence_s", overhead.sequence_s, 2e-5 * wide, 0.0, 0.1),
        *outside,
    ]
    if any(num_dense_layers(model) for model in models):
        found.append(Term("launch_layer_s", overhead.launch_layer_s, 2e-4, 0.0, 0.1))
    if any(num_moe_layers(model) for model in models):
        found.append(Term("launch_expert_layer_s", overhead.launch_expert_layer_s, 3e-4, 0.0, 0.1))
    cuts = [m.sampling is not None and (m.sampling.is_cut or m.sampling.is_penalised) for m in models]
    if any(cuts) and any(getattr(overhead, name) for name in SAMPLER):
        found.append(Term("sampler", 1.0, 0.5, 0.01, 100.0, True))
    spread = MEASURED_SPREAD if is_measured else OTHER_SPREAD
    for name, efficiencies in _efficiencies(known.kernels).items():
        if is_measured and name != "memory":
            continue  # measured better than memory-bound served runs could determine
        low, high = LEAST_EFFICIENCY / min(efficiencies), 1 / max(efficiencies)
        found.append(Term(name, 1.0, spread, min(low, 1.0), max(high, 1.0), True))
    return tuple(found)


def step_terms(pool: Pool, known: Coefficients) -> tuple[Term, ...]:
    """The terms that an engine's own iterations can determine. They distinguish kernels and host."""
    overhead, model = known.overhead, pool.model
    found = [
        Term("step_s", overhead.step_s, 1e-3, 0.0, 1.0),
        Term("sequence_s", overhead.sequence_s, 2e-5, 0.0, 0.1),
        Term("launch_part_layer_s", overhead.launch_part_layer_s or LAUNCH_PART_S, 1e-4, 0.0, 0.1),
    ]
    if num_dense_layers(model):
        found.append(Term("launch_layer_s", max(overhead.launch_layer_s, LAUNCH_S), 3e-4, 0.0, 0.1))
    if num_moe_layers(model):
        found.append(Term("launch_expert_layer_s", max(overhead.launch_expert_layer_s, LAUNCH_S), 6e-4, 0.0, 0.1))
    if model.sampling is not None and (model.sampling.is_cut or model.sampling.is_penalised):
        found.append(Term("sampler", 1.0, 0.5, 0.01, 100.0, True))
    for name, efficiencies in step_efficiencies(known.kernels, compute_dtype(model.dtype, pool.gpu)).items():
        low, high = LEAST_EFFICIENCY / min(efficiencies), 1 / max(efficiencies)
        found.append(Term(name, 1.0, STEP_SPREAD, min(low, 1.0), max(high, 1.0), True))
    product = known.kernels.gemm[compute_dtype(model.dtype, pool.gpu)]
    if product.wave_share:
        found.append(Term("wave_share", product.wave_share, 0.3, 1e-3, 1.0))
    if product.cast_efficiency and product.cast_share:
        found.append(Term("cast", 1.0, 1.0, 0.1, 100.0, True))
    return tuple(found)


def step_efficiencies(kernels: Kernels, dtype: str) -> dict[str, list[float]]:
    """Maps each factor to the efficiencies that it multiplies, for a model that computes in `dtype`."""
    products = [kernels.gemm[name] for name in {dtype, "bf16"}]
    return {
        "memory": [*(one.memory_efficiency for one in products), kernels.elementwise_efficiency],
        "compute": [one.compute_efficiency for one in products],
        "decode_attention": [kernels.decode_attention.memory_efficiency],
        "prompt_attention": [kernels.prefill_attention.compute_efficiency],
    }


def _efficiencies(kernels: Kernels) -> dict[str, list[float]]:
    """Maps each factor to the efficiencies that it multiplies."""
    products = [*kernels.gemm.values()]
    decode, prefill = kernels.decode_attention, kernels.prefill_attention
    return {
        "memory": [*(one.memory_efficiency for one in products), kernels.elementwise_efficiency],
        "compute": [one.compute_efficiency for one in products],
        "attention": [decode.memory_efficiency, decode.compute_efficiency, prefill.compute_efficiency],
    }


def applied(values: dict[str, float], known: Coefficients, engine: Engine) -> Coefficients:
    """The catalog's step times with these term values."""
    plain = {name: value for name, value in values.items() if name in Overhead.__struct_fields__}
    overhead = replace(known.overhead, **plain)
    if "sampler" in values:
        overhead = replace(overhead, **{name: getattr(overhead, name) * values["sampler"] for name in SAMPLER})
    if "request_s" in values:
        before, after = engine.request_overhead_s, engine.response_overhead_s
        share = before / (before + after) if before + after else 0.5
        request_s = values["request_s"]
        overhead = replace(overhead, request_overhead_s=share * request_s, response_overhead_s=(1 - share) * request_s)
    return replace(known, overhead=overhead, kernels=scaled(known.kernels, values))


def values_at(terms: Iterable[Term], x: Floats) -> dict[str, float]:
    return {term.name: term.value(float(each)) for term, each in zip(terms, x, strict=True)}
