"""Accuracy of step times (Fig. 9), and duration of the hourly work (5, 7.1)."""

from __future__ import annotations

import csv
import gzip
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from headway import catalog
from headway.core.fleet import Parallel
from headway.forecast.methods import make
from headway.perf.speculation import step_model
from headway.perf.step import launched_s
from headway.planning.regions.problem import InstanceKind, PresentInstances, RegionProblem
from headway.planning.regions.search import plan
from headway_papers.reproduce.tasks import Measurement

Floats = npt.NDArray[np.float64]
PROFILES = "splitwise_perf_model.csv.gz"
"""Splitwise's profiles, in the data folder: milliseconds by model, GPU, prompt, batch and answer."""
MODELS = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
GPUS = ("a100-80gb", "h100-80gb")
GPUS_OF_INSTANCE = "8"
TESTED = 5
"""Every fifth profile is for the test (7.1: 80:20)."""
SIZES: Mapping[str, tuple[int, int, int]] = {"small": (4, 3, 1), "large": (20, 20, 5)}
"""Numbers of models, regions and GPU types."""
HOURS, DAY_HOURS, SERIES = 72, 24, 12
FORECASTS = 6
"""Hours whose forecasts are timed. Earlier hours are excluded, because models are fitted in the first one."""


def step_times(path: str) -> Measurement:
    """Measured and predicted seconds: R2 of prompts and iterations; the error on a fifth after a fit to the rest.

    The prediction is the catalog's for the engine nearest to the profiles' (vLLM V0). The fit is a factor and a
    constant for each model, GPU and kind, by least squares of relative errors.
    """
    groups = _profiles(Path(path))
    found: Measurement = {}
    for kind in ("prefill", "decode"):
        pairs = [groups[key] for key in sorted(groups) if key[2] == kind]
        measured, predicted = (np.concatenate([pair[i] for pair in pairs]) for i in range(2))
        found[f"{kind}_r2"] = _r2(measured, predicted)
        found[f"{kind}_error"] = float(np.abs(predicted / measured - 1).mean())
        fitted = [_fitted(*pair) for pair in pairs]
        tests, fits = (np.concatenate([pair[i] for pair in fitted]) for i in range(2))
        found[f"{kind}_r2_fitted"] = _r2(tests, fits)
        found[f"{kind}_error_fitted"] = float(np.abs(fits / tests - 1).mean())
        found[f"num_{kind}"] = len(measured)
    found["error_fitted"] = (found["prefill_error_fitted"] + found["decode_error_fitted"]) / 2
    return found


def _profiles(path: Path) -> dict[tuple[str, str, str], tuple[Floats, Floats]]:
    """Measured and predicted seconds of all shapes, in the order of the file, by model, GPU and kind."""
    with gzip.open(path, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["tensor_parallel"] == GPUS_OF_INSTANCE]
    shapes: dict[tuple[str, str], dict[tuple[int, int, int], list[tuple[float, float]]]] = {}
    for row in rows:
        if row["model"] in MODELS and row["hardware"] in GPUS:
            shape = int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
            times = float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3
            shapes.setdefault((MODELS[row["model"]], row["hardware"]), {}).setdefault(shape, []).append(times)
    found: dict[tuple[str, str, str], tuple[Floats, Floats]] = {}
    for (model, gpu), by_shape in shapes.items():
        steps = step_model(
            catalog.model(model), catalog.gpu(gpu), catalog.engine("vllm-v0"), Parallel(tp=int(GPUS_OF_INSTANCE))
        )
        measured = np.array([[median(column) for column in zip(*times, strict=True)] for times in by_shape.values()])
        prefill = [launched_s(steps.line(0, 0, [(prompt, 0)] * batch)) for prompt, batch, _ in by_shape]
        decode = [steps.line(batch, batch * (prompt + answer // 2))[0] for prompt, batch, answer in by_shape]
        found[model, gpu, "prefill"] = measured[:, 0], np.array(prefill)
        found[model, gpu, "decode"] = measured[:, 1], np.array(decode)
    return found


def _fitted(measured: Floats, predicted: Floats) -> tuple[Floats, Floats]:
    """The measured time of every fifth shape, and the prediction with a factor and a constant fitted to the others."""
    is_test = np.arange(len(measured)) % TESTED == TESTED - 1
    columns = np.stack([predicted, np.ones_like(predicted)], axis=1)
    relative = columns[~is_test] / measured[~is_test, None]
    weights = np.linalg.lstsq(relative, np.ones(len(relative)), rcond=None)[0]
    return measured[is_test], columns[is_test] @ weights


def _r2(measured: Floats, predicted: Floats) -> float:
    return float(1 - ((measured - predicted) ** 2).sum() / ((measured - measured.mean()) ** 2).sum())


def program_s(models: int, regions: int, gpus: int, seed: int) -> Measurement:
    """CPU seconds to solve one hour's program, within 1% of the optimum."""
    problem = program(models, regions, gpus, seed)
    began_s = time.process_time()
    found = plan(problem)
    return {"seconds": time.process_time() - began_s, "gap": found.gap}


def program(models: int, regions: int, gpus: int, seed: int) -> RegionProblem:
    """An hour's problem with four windows and random demand, throughputs and prices."""
    rng = np.random.default_rng(seed)
    kinds = tuple(
        InstanceKind(f"m{i}", f"g{k}", float(rng.uniform(500, 5000)), float(rng.uniform(5, 40)), 60.0, 8)
        for i in range(models)
        for k in range(gpus)
    )
    names = tuple(f"r{j}" for j in range(regions))
    demand = {f"m{i}": {name: _windows(rng) for name in names} for i in range(models)}
    have = tuple(
        PresentInstances(kind.model, name, kind.gpu, int(rng.integers(0, 20))) for kind in kinds for name in names
    )
    return RegionProblem(kinds, names, (demand,), have, epsilon=0.8, least=2)


def _windows(rng: np.random.Generator) -> tuple[float, ...]:
    return tuple(map(float, rng.uniform(1e3, 6e4) * rng.uniform(0.7, 1.0, 4)))


def forecasts_s(seed: int) -> Measurement:
    """CPU seconds of ARIMA for the next hour of twelve series, and of the hour in which models are fitted."""
    t = np.arange(HOURS + FORECASTS)
    noise = np.random.default_rng(seed).normal(0.0, 60.0, (SERIES, len(t)))
    series = np.maximum(1000 + 600 * np.sin(2 * np.pi * t / DAY_HOURS) + noise, 0.0)
    models = [make("arima", DAY_HOURS) for _ in series]
    took_s = []
    for hour in range(HOURS, HOURS + FORECASTS):
        began_s = time.process_time()
        for model, known in zip(models, series, strict=True):
            model.forecast(known[:hour], 1, (0.5,))
        took_s.append(time.process_time() - began_s)
    return {"fitting_s": took_s[0], "seconds": float(np.mean(took_s[1:]))}
