# ruff: noqa: T201 (a script prints)
"""Fit the overhead of vLLM V1 to measured serving, and print its error for models that are left out.

    HEADWAY_DATA=... python scripts/fit_serving.py [--write]

Reads measured/vllm015_serving_train.csv (12 experiments, vLLM 0.15.1 on H100). Kernels are those of
scripts/fit_kernels.py and scripts/fit_experts.py. The launch times of layers with experts come from
measured/mlenergy_llm.csv.gz, which has several such models. Six numbers, the same for all models, are fitted to the
stages' simulated time per output token and mean TTFT; each has a prior and bounds. With --write, the numbers of an
iteration go into catalog/data/coefficients; those of a request are printed, for catalog/data/engines.json. Then each
model is left out in turn, the others are fitted, and its experiments are predicted. Needs SciPy.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from scipy.optimize import lsq_linear

from headway import catalog
from headway.calibration.replay import ReplayResult, replay
from headway.calibration.serving import ServingExperiment, read
from headway.calibration.validation import compare, validation
from headway.catalog.coefficients import Coefficients
from headway.core.fleet import Engine

MEASURED = Path(os.environ["HEADWAY_DATA"]) / "measured"
DATA = MEASURED / "vllm015_serving_train.csv"
OUT = Path(__file__).parent.parent / "src/headway/catalog/data/coefficients"
SOURCE = ("fitted on 12 serving experiments with vLLM 0.15.1 on H100 "
          "(inference-sim/sim-to-real-accuracy-validation); launching experts: 99th percentiles of ITL of "
          "Qwen3-30B-A3B, Qwen3-235B-A22B, GPT-OSS and Llama-4-Scout on H100 (ml-energy/leaderboard); sorting and "
          "cutting logits: tables in vLLM's pull requests 32558, 40376 and 42191; penalties: bytes counted; pipelines: "
          "vLLM's pull request 32618, 31.8% less time per token with Qwen3-30B-A3B in FP8 on 4 stages")  # fmt: skip
GPU, ENGINE = "h100-80gb-sxm", "vllm-0.15"

NAMES = ("step_s", "layer_s", "sequence_s", "launch_layer_s", "request_s", "tokenize_s")
UNIT_S = np.array([1e-3, 1e-6, 1e-6, 1e-3, 1e-3, 1e-6])
PRIOR = np.array([0.4, 0.0, 3.0, 0.25, 2.0, 8.0])
SPREAD = np.array([0.25, 6.0, 4.0, 0.1, 2.0, 4.0])
"""Step, layer and sequence: what graphs and asynchronous scheduling leave of an engine's overhead. A layer's time may
be negative: in a graph, a kernel starts while the one before it ends, so the latencies of kernels that were measured
alone add up to too much. Launching: 20 to 30 kernels of about 10 microseconds a layer."""
START = np.array([0.41, -4.0, 2.0, 0.25, 2.0, 9.0])
"""The prior, but for a bound that must act to be seen."""
LEAST = np.array([0.0, -15.0, 0.0, 0.0, 0.0, 0.0])
MOST = np.array([5.0, 50.0, 100.0, 1.0, 10.0, 20.0])
NUDGE = np.array([0.2, 4.0, 5.0, 0.1, 1.0, 2.0])
LAYERS = {
    "launch_expert_layer_s": {
        "Qwen3-30B-A3B": 48, "Qwen3-Coder-30B-A3B": 48, "gpt-oss-120b": 36, "gpt-oss-20b": 24,
        "Qwen3-235B-A22B-Instruct-2507": 94,
    },
    "launch_fp8_expert_s": {"Qwen3-235B-A22B-Instruct-2507-FP8": 94},
    "launch_shared_expert_s": {"Llama-4-Scout-17B-16E-Instruct": 48},
}  # fmt: skip
"""Layers of models whose experts are all alike: routed only; the same in FP8; with a shared expert besides."""
NOISE = 0.05
"""Unavoidable relative error of measurements and kernels; larger residuals are down-weighted."""
TTFT_WEIGHT = 0.5
ROUNDS = 2
SEEDS = (0,)


def launch_s() -> dict[str, float]:
    """Host time to launch a layer with experts, as ML.ENERGY's closed loops on H100 show it.

    In batches that hold many requests for their length, more than one iteration in a hundred takes in a prompt, and
    graphs were captured for twice the batch only. So the 99th percentile of ITL is such an iteration; of each model and
    number of GPUs the shortest one, as others have more to compute than the host has to launch. Median of these: for
    routed experts, and what 8 bits and a shared expert add to it.
    """
    shortest: dict[str, dict[tuple[str, str], float]] = {name: {} for name in LAYERS}
    with gzip.open(MEASURED / "mlenergy_llm.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            batch = float(row["avg_batch_size"])
            if row["gpu_model"] != "H100" or not (8 < batch < 128 and float(row["avg_output_len"]) / batch < 70):
                continue
            key, model = (row["model_id"], row["num_gpus"]), row["model_id"].split("/")[-1]
            for name, layers in LAYERS.items():
                known = next(
                    (num for part, num in layers.items() if model == part or model.startswith(f"{part}-Ins")), 0
                )
                if known:
                    found = float(row["p99_itl_ms"]) / 1e3 / known
                    if int(row["num_gpus"]) > 1:  # launched while the iteration before it ran, which was reported
                        found += float(row["median_itl_ms"]) / 1e3 / known
                    shortest[name][key] = min(found, shortest[name].get(key, found))
    medians = {name: float(np.median(list(each.values()))) for name, each in shortest.items()}
    routed = medians["launch_expert_layer_s"]
    return {name: float(f"{each - (0.0 if each == routed else routed):.2g}") for name, each in medians.items()}


def models(x: np.ndarray) -> tuple[Engine, Coefficients]:
    """The engine and step times for these numbers. A request has the same delay on entry and on exit."""
    s = dict(zip(NAMES, x * UNIT_S, strict=True))
    found = catalog.coefficients(GPU, ENGINE)
    overhead = replace(found.overhead, **LAUNCH_S, **{name: s[name] for name in NAMES[:4]})
    engine = replace(catalog.engine(ENGINE), request_overhead_s=s["request_s"] / 2,
                     response_overhead_s=s["request_s"] / 2, tokenize_s_per_token=s["tokenize_s"])  # fmt: skip
    return engine, replace(found, overhead=overhead)


LAUNCH_S = launch_s()


def simulated(x: np.ndarray, experiments: Sequence[ServingExperiment]) -> list[ReplayResult]:
    return [replay(experiment, SEEDS, *models(x)) for experiment in experiments]


def residuals(experiments: Sequence[ServingExperiment], found: Sequence[ReplayResult]) -> np.ndarray:
    """Log ratios of time per token and of TTFT, for each stage."""
    left = []
    for experiment, one in zip(experiments, found, strict=True):
        for stage, simulated in zip(experiment.stages, one.stages, strict=True):
            tpot_ms = stage.measured.tpot_ms(experiment.output_tokens)
            left += [np.log(simulated.tpot_ms.mean() / tpot_ms),
                     TTFT_WEIGHT * np.log(simulated.ttft_ms.mean() / stage.measured.ttft_mean_ms)]  # fmt: skip
    return np.array(left)


def solve(slope: np.ndarray, left: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """One step of robust, bounded least squares with the prior."""
    robust = weight
    step = np.zeros_like(x)
    for _ in range(10):
        a = np.vstack([slope * robust[:, None], np.diag(NOISE / SPREAD)])
        b = np.concatenate([-left * robust, NOISE * (PRIOR - x) / SPREAD])
        step = lsq_linear(a, b, bounds=(LEAST - x - 1e-9, MOST - x + 1e-9)).x
        robust = weight / np.sqrt(1 + np.abs(left + slope @ step) / NOISE)
    return np.clip(x + step, LEAST, MOST)


def linearised(x: np.ndarray, experiments: Sequence[ServingExperiment]) -> tuple[np.ndarray, np.ndarray]:
    left = residuals(experiments, simulated(x, experiments))
    columns = [
        (residuals(experiments, simulated(x + NUDGE * (np.arange(len(x)) == i), experiments)) - left) / NUDGE[i]
        for i in range(len(x))
    ]
    return np.stack(columns, 1), left


def report(title: str, experiments: Sequence[ServingExperiment], found: Sequence[ReplayResult]) -> dict[str, float]:
    simulated = validation([compare(e, r, True) for e, r in zip(experiments, found, strict=True)])
    for one in simulated.experiments:
        errors = " ".join(f"{key} {pair.error_pct:+.1f}%" for key, pair in one.errors.items())
        print(f"  {one.id} {one.model} tp{one.tp}: {errors}")
    for name, means in (("all", simulated.overall), ("without those that contradict themselves", simulated.consistent)):
        print(f"{title}, {name}:", {key: round(value, 2) for key, value in means.items()}, flush=True)
    return simulated.overall


def rounded(x: np.ndarray) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in zip(NAMES, x * UNIT_S, strict=True)}


def write(x: np.ndarray, error_pct: float) -> None:
    numbers = {name: value if abs(value) > 1e-9 else 0.0 for name, value in rounded(x).items() if name in NAMES[:4]}
    path = OUT / f"{GPU}.json"
    data = json.loads(path.read_text())
    residuals = {"e2e_mean": float(f"{error_pct / 100:.3g}")}
    known = {
        key: value
        for key, value in data["engines"][ENGINE].items()
        if key.endswith(("logit", "tokens", "before", "latency_s"))
    }
    known["pipeline_step_s"] = data["engines"][ENGINE]["pipeline_step_s"]
    data["engines"][ENGINE] = {
        **numbers, **LAUNCH_S, **known, "version": "0.15.1", "residuals": residuals, "source": SOURCE,
    }  # fmt: skip
    path.write_text(json.dumps(data, indent=1) + "\n")


def fit(experiments: Sequence[ServingExperiment]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The numbers from all experiments, and those without a model, by its name."""
    owner = np.concatenate([[e.model.name] * 2 * len(e.stages) for e in experiments])
    weight = np.concatenate([[len(e.stages) ** -0.5] * 2 * len(e.stages) for e in experiments])
    x = START
    for _ in range(ROUNDS):
        at = x
        slope, left = linearised(at, experiments)
        x = solve(slope, left, at, weight)
        print(rounded(x), flush=True)
    return x, {name: solve(slope, left, at, weight * (owner != name)) for name in dict.fromkeys(owner)}


def main() -> None:
    experiments, _ = read(DATA)
    x, without = fit(experiments)
    overall = report("in sample", experiments, simulated(x, experiments))
    if "--write" in sys.argv:
        write(x, overall["e2e_mean"])
    unseen: dict[str, ReplayResult] = {}
    for name, numbers in without.items():
        own = [e for e in experiments if e.model.name == name]
        unseen |= {e.id: r for e, r in zip(own, simulated(numbers, own), strict=True)}
        print(f"without {name}:", rounded(numbers))
    report("models left out", experiments, [unseen[e.id] for e in experiments])


if __name__ == "__main__":
    main()
