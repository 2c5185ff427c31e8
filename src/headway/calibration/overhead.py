"""Fit an engine's overhead to served loads: the part of the time per output token that kernels do not explain.

A load is modelled by its means: a number of decoding sequences, and prompts that arrive at a rate and share iterations
with them. Only the coefficients of `Overhead` are fitted, over all loads together, with zero as lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.calibration.operators import Floats
from headway.calibration.serving import ServingExperiment
from headway.calibration.solve import Coefficient, FitResult, solve
from headway.catalog.coefficients import Coefficients
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu, Model, Parallel
from headway.perf.speculation import step_model

STEP = Coefficient("step_s", 0.3, 0, 30, 1e-3)
LAYER = Coefficient("layer_s", 8, 0, 500, 1e-6)
SEQUENCE = Coefficient("sequence_s", 5, 0, 500, 1e-6)
MIN_LOADS = 4
ROUNDS = 20
LAST_BLOCK_TOKENS = 16
"""The last block of a cached prompt is computed anyway."""


class ServedLoad(Struct, frozen=True):
    """One engine under a steady load, and its mean time per output token."""

    name: str
    model: Model
    tp: int
    rate_rps: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    output_tokens: int
    tpot_s: float
    """Mean time per output token after the first."""
    max_num_batched_tokens: int

    @property
    def num_decode(self) -> int:
        """Mean number of decoding sequences, by Little's law."""
        return max(1, round(self.rate_rps * self.tpot_s * (self.output_tokens - 1)))


def loads(experiments: Iterable[ServingExperiment], gpu: Gpu) -> tuple[list[ServedLoad], list[str]]:
    """Return a load per stage on `gpu`, with prompts cached except their last block, and the skipped experiments."""
    loads_found, skipped = [], []
    for e in experiments:
        if e.gpu.name != gpu.name:
            skipped.append(f"experiment {e.id}: on {e.gpu.name}")
        elif e.contradiction:
            skipped.append(f"experiment {e.id}: {e.contradiction}")
        else:
            prompt = e.sys_prompt_tokens + e.question_tokens
            cached = max(0, prompt - LAST_BLOCK_TOKENS)
            loads_found += [
                ServedLoad(
                    f"{e.model.name} tp{e.tp} {stage.rate_rps:g}/s {e.workload}".rstrip(), e.model, e.tp,
                    stage.rate_rps / e.dp, prompt, cached, e.output_tokens,
                    stage.measured.tpot_ms(e.output_tokens) / 1e3, e.max_num_batched_tokens,
                )
                for stage in e.stages if e.output_tokens > 1
            ]  # fmt: skip
    return loads_found, skipped


def tpot_s(load: ServedLoad, gpu: Gpu, engine: str, coefficients: Coefficients) -> float:
    """Predicted mean time per output token: some iterations include a chunk of a prompt, the others only decode."""
    step = step_model(load.model, gpu, catalog.engine(engine), Parallel(tp=load.tp), coefficients)
    num = load.num_decode
    context = num * (load.prompt_tokens + load.output_tokens // 2)
    new = max(1, load.prompt_tokens - load.cached_tokens)
    chunks = -(-new // max(1, load.max_num_batched_tokens - num))
    chunk = -(-new // chunks)
    decode_s = step.line(num, context, window_tokens=context)[0]
    before = load.cached_tokens + (new - chunk) // 2
    mixed_s = step.line(num, context, [(chunk, before)], context)[0]
    per_s = load.rate_rps * chunks
    step_s = decode_s
    for _ in range(ROUNDS):
        share = min(1.0, per_s * step_s)
        step_s = (1 - share) * decode_s + share * mixed_s
    return step_s


def fit_overhead(
    all_loads: Sequence[ServedLoad], gpu: Gpu, engine: str, catalogued: Coefficients
) -> tuple[FitResult, list[str]]:
    """Fit the engine's overhead by least relative error over all loads, on the kernels of `catalogued`.

    Coefficients that the loads do not determine keep the values of `catalogued`. HeadwayError for too few loads, for
    loads that are faster than the kernels alone, and if `solve` fails.
    """
    if len(all_loads) < MIN_LOADS:
        raise HeadwayError(f"{len(all_loads)} served loads; expected at least {MIN_LOADS}, at different rates")
    ordered = sorted(all_loads, key=lambda load: (load.model.name, load.tp, load.rate_rps, load.name))
    seconds = np.array([load.tpot_s for load in ordered])
    bare = replace(catalogued.overhead, step_s=0.0, layer_s=0.0, sequence_s=0.0)
    _check_possible(ordered, seconds, predicted_tpot_s(ordered, gpu, engine, replace(catalogued, overhead=bare)), gpu)
    chosen, notes = _distinguishable(ordered)

    def model(p: Floats) -> Floats:
        fitted = {c.name: float(value) for c, value in zip(chosen, p, strict=True)}
        overhead = replace(catalogued.overhead, **fitted)
        return predicted_tpot_s(ordered, gpu, engine, replace(catalogued, overhead=overhead))

    fixed = {c.name: getattr(catalogued.overhead, c.name) for c in (STEP, LAYER, SEQUENCE) if c not in chosen}
    return solve(f"overhead.{engine}", chosen, model, seconds, fixed), notes


def predicted_tpot_s(all_loads: Sequence[ServedLoad], gpu: Gpu, engine: str, coefficients: Coefficients) -> Floats:
    return np.array([tpot_s(load, gpu, engine, coefficients) for load in all_loads])


def _distinguishable(all_loads: Sequence[ServedLoad]) -> tuple[tuple[Coefficient, ...], list[str]]:
    """The coefficients that these loads determine, and notes on the others."""
    chosen, notes = [STEP], []
    if len({load.model.num_layers for load in all_loads}) > 1:
        chosen.append(LAYER)
    else:
        notes.append("all models have the same number of layers: the time per layer is kept, not fitted")
    nums = [load.num_decode for load in all_loads]
    if max(nums) >= 4 * min(nums):
        chosen.append(SEQUENCE)
    else:
        notes.append("the numbers of decoding sequences are too similar: the time per sequence is kept, not fitted")
    return tuple(chosen), notes


def _check_possible(all_loads: Sequence[ServedLoad], seconds: Floats, bare_s: Floats, gpu: Gpu) -> None:
    ratios = seconds / bare_s
    usual = float(np.median(ratios))
    if not 0.5 <= usual <= 50:
        times = (
            f"{usual:.2g} of what the kernels alone take" if usual < 0.5 else f"{usual:.0f} times what the kernels take"
        )
        raise HeadwayError(f"times per token are {times} on {gpu.name} (median); are units, GPU, model and tp right?")
    odd = [load.name for load, ratio in zip(all_loads, ratios, strict=True) if not usual / 50 < ratio < usual * 50]
    if odd:
        raise HeadwayError(
            f"{len(odd)} of {len(all_loads)} loads are far from the rest (mixed units?): {'; '.join(odd[:5])}"
        )
