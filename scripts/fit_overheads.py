# ruff: noqa: T201 (a script prints)
"""Fit the overheads of older engines to measured runs and write them into catalog/data/coefficients/<gpu>.json.

    HEADWAY_DATA=... python scripts/fit_overheads.py

The step-time model gives the kernels' times; the remainder is fitted as step, layer and sequence overhead, each at
least zero. Run scripts/fit_kernels.py first. scripts/fit_serving.py is for vLLM V1. Needs SciPy. Reads
- measured/Llama-3.*-tp-*.csv: decoding alone, one sequence, with vLLM of 2024 on A100;
- measured/distserve_profile_a100_*.json: DistServe's fits of decoding steps with OPT models on A100, of its
  own C++ engine, of FasterTransformer's kind, and of an early vLLM, of which the time per sequence is taken.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from scipy.optimize import least_squares

from headway import catalog
from headway.catalog.coefficients import Overhead
from headway.core.fleet import Model, Parallel
from headway.perf.step import StepModel

DATA = Path(os.environ["HEADWAY_DATA"]) / "measured"
OUT = Path(__file__).parent.parent / "src/headway/catalog/data/coefficients"
ALONE_SOURCE = ("fitted on decoding times of Llama-3.1-8B and -3.2-3B with vLLM of 2024, version not "
                "recorded, on A100 (shashwatj07/SageServe, MIT); time per sequence from DistServe's profile "
                "of an early vLLM (LLMServe/DistServe, Apache-2.0)")  # fmt: skip
PROFILE_SOURCE = ("fitted on DistServe's profile of its own C++ engine with OPT models on A100 "
                  "(LLMServe/DistServe, Apache-2.0)")  # fmt: skip
OPT = {"facebook/opt-13b": (40, 5120, 40), "facebook/opt-66b": (64, 9216, 72)}
"""Layers, hidden size, heads."""
Row = dict[str, str]
Errors = Callable[[Overhead], dict[str, float]]


def opt(name: str) -> Model:
    layers, hidden, heads = OPT[name]
    return Model(name=name, hf_id=name, num_layers=layers, hidden_size=hidden, intermediate_size=4 * hidden,
                 num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, vocab_size=50272,
                 max_context_tokens=2048, gated_mlp=False, tie_embeddings=True)  # fmt: skip


def profile_errors(file: str, overhead: Overhead) -> dict[str, float]:
    """Relative error by model, tp and batch of 512-token contexts; opt-66b only where it fits well."""
    profile = json.loads((DATA / file).read_text())
    left = {}
    for name in OPT:
        for tp, fits in profile[name].items():
            if name == "facebook/opt-66b" and int(tp) < 4:
                continue
            step = step_model(opt(name), "a100-80gb", "vllm-v0", int(tp), overhead)
            for batch in (1, 8, 32, 64):
                p = fits["decoding_smallbs"]
                measured_s = (p[0] + p[1] * 512 * batch + p[2] * batch) / 1e3
                left[f"{name} tp{tp} batch {batch}"] = step.line(batch, 512 * batch)[0] / measured_s - 1
    return left


def step_model(model: Model, gpu: str, engine: str, tp: int, overhead: Overhead) -> StepModel:
    found = replace(catalog.coefficients(gpu, engine), overhead=overhead)
    return StepModel(model, catalog.gpu(gpu), catalog.engine(engine), Parallel(tp=tp), found)


def alone_errors(overhead: Overhead) -> dict[str, float]:
    """Relative error of the time per token of a sequence that decodes alone, by model, tp and context."""
    left = {}
    for name in ("Llama-3.1-8B", "Llama-3.2-3B"):
        for tp in (2, 4):
            with open(DATA / f"{name}-tp-{tp}.csv", newline="") as file:
                rows = [r for r in csv.DictReader(file) if r["batch_size"] == "1" and int(r["prompt_size"]) <= 2048]
            step = step_model(catalog.model(name), "a100-80gb", "vllm-v0", tp, overhead)
            for row in rows:
                prompt, tokens = int(row["prompt_size"]), int(row["token_size"])
                measured_s = float(row["token_time"]) / (tokens - 1)
                key = f"{name} tp{tp} prompt {prompt} tokens {tokens}"
                left[key] = step.line(1, prompt + tokens // 2)[0] / measured_s - 1
    return left


def fit(errors: Errors, sequence_s: float | None = None) -> Overhead:
    """The overhead with the least relative error (robust loss). The time per sequence may be fixed."""

    def overhead(p: np.ndarray) -> Overhead:
        per_sequence_s = p[2] * 1e-6 if sequence_s is None else sequence_s
        return Overhead(step_s=p[0] * 1e-3, layer_s=p[1] * 1e-6, sequence_s=per_sequence_s)

    found = least_squares(lambda p: np.array(list(errors(overhead(p)).values())), [0.3, 8, 5], loss="soft_l1",
                          f_scale=0.05, bounds=([0, 0, 0], [30, 500, 500]), x_scale=[0.3, 8, 5])  # fmt: skip
    return overhead(found.x)


def write(gpu: str, engine: str, version: str, source: str, best: Overhead, errors: Errors) -> None:
    left = errors(best)
    for name, error in left.items():
        print(f"{error:+.1%}  {name}")
    mean = sum(map(abs, left.values())) / len(left)
    print(f"{engine} on {gpu}: mean absolute error {mean:.1%}, {best}\n")
    path = OUT / f"{gpu}.json"
    data = json.loads(path.read_text())
    numbers = {key: float(f"{getattr(best, key):.3g}") for key in ("step_s", "layer_s", "sequence_s")}
    data["engines"][engine] = {
        **{key: value if value > 1e-9 else 0.0 for key, value in numbers.items()}, "version": version,
        "residuals": {"mean_absolute": float(f"{mean:.3g}")}, "source": source,
    }  # fmt: skip
    path.write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    early = fit(lambda overhead: profile_errors("distserve_profile_a100_vllm.json", overhead))
    write("a100-80gb", "vllm-v0", "", ALONE_SOURCE, fit(alone_errors, early.sequence_s), alone_errors)

    def own_errors(overhead: Overhead) -> dict[str, float]:
        return profile_errors("distserve_profile_a100_distserve.json", overhead)

    write("a100-80gb", "fastertransformer", "", PROFILE_SOURCE, fit(own_errors), own_errors)


if __name__ == "__main__":
    main()
