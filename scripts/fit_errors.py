# ruff: noqa: T201 (a script prints)
"""Predict measured runs with step times that were fitted without their models, and write the errors to the catalog.

    HEADWAY_DATA=... python scripts/fit_errors.py [--write]

Reads measured/vllm015_serving_train.csv (12 experiments, vLLM 0.15.1 on H100) and measured/vllm025_h100_*.csv.gz (vLLM
0.25.1 on H100: three models, a run for each phase of load). Every run is predicted three times.

GPU and version known: the overhead without the run. Of 0.15.1, scripts/fit_serving.py leaves a model out. Of 0.25.1,
Llama-3.1-8B's bursts are predicted by a fit on iterations of its Poisson phases, these by one on those of its bursts,
and the same model in 8 bits by one on both; for Qwen3-30B-A3B, the terms of layers with experts, which it gave, are
those of 0.15.1. Fits start from 0.15.1, with casts within the kernel before, which is no result of these runs: vLLM's
documentation of its fusions says it (norms and activations on NVIDIA GPUs are fused with the cast by the compiler).
GPU known: the overhead of the other version.
Neither: that, and kernels at generic shares of the GPU's peaks.

Left out: runs of fewer than 30 requests, and those in which a kernel was compiled at its first use.

With --write, src/headway/catalog/data/errors.json. `headway catalog errors` prints what follows from them.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from math import log
from pathlib import Path
from typing import NamedTuple

import fit_serving
import numpy as np
from msgspec.structs import replace

from headway import catalog
from headway.calibration.replay import Floats, ReplayResult, replay
from headway.calibration.serving import ServingExperiment
from headway.calibration.serving import read as read_serving
from headway.calibration.steps.fit import fit_steps
from headway.calibration.steps.read import read as read_steps
from headway.calibration.validation import compare
from headway.catalog.coefficients import Coefficients, scaled
from headway.catalog.errors import KNOWN, METRICS, PredictionErrors, RunErrors, coverage, weights_of
from headway.cli import measured_fleet
from headway.core.fleet import Engine, Pool

MEASURED = Path(os.environ["HEADWAY_DATA"]) / "measured"
REQUESTS, STEPS = MEASURED / "vllm025_h100_requests.csv.gz", MEASURED / "vllm025_h100_steps.csv.gz"
OUT = Path(__file__).parent.parent / "src/headway/catalog/data/errors.json"
GPU = "h100-80gb-sxm"
OLD, NEW = "vllm-0.15", "vllm-0.25"
MODELS = {"l8b": ("llama-3.1-8b", "bf16"), "fp8": ("llama-3.1-8b", "fp8"), "q30b": ("qwen3-30b-a3b", "bf16")}
"""Of the run of 0.25.1: model and weights by the file's names."""
SAMPLED = ("azure9sample",)
"""Phases that are drawn with the model's published parameters; `q30b` always is, without a cut."""
LEAST_REQUESTS = 30
SLO_QUANTILES = (0.25, 0.5, 0.75, 0.95)
SEEDS = (0, 1)
SOURCE = (
    "scripts/fit_errors.py on 12 serving experiments with vLLM 0.15.1 on H100 (inference-sim/"
    "sim-to-real-accuracy-validation) and on phases of vLLM 0.25.1 on H100 (measured by Headway, November 2026)"
)


def main() -> None:
    compared = [*_old_runs(), *_new_runs()]
    runs = [each.errors for each in compared]
    _print_attainment(compared)
    for left_out in ("model", "run"):
        for one in coverage(runs, left_out):
            covered, width = ({key: f"{v:.0%}" for key, v in each.items()} for each in (one.covered, one.width))
            print(left_out, one.of.label, one.num_runs, one.num_models, f"{one.covered_all:.0%}", covered, width)
    if "--write" in sys.argv:
        lines = ",\n".join("  " + json.dumps(_plain(run)) for run in runs)
        OUT.write_text(f'{{\n "source": {json.dumps(SOURCE)},\n "runs": [\n{lines}\n ]\n}}\n')


class Compared(NamedTuple):
    errors: RunErrors
    experiment: ServingExperiment
    replayed: ReplayResult


def _print_attainment(compared: Sequence[Compared]) -> None:
    """Of runs with their requests: how often the measured SLO attainment is between those of the predicted latencies at
    both ends of their bands, from runs of other models. SLOs are quantiles of what was measured."""
    inside, width, every = [], [], PredictionErrors([each.errors for each in compared])
    for of, one, replayed in compared:
        if one.requests is None or of.known != KNOWN[0]:
            continue
        others = PredictionErrors([each.errors for each in compared if each.errors.model != of.model], every)
        bands = [others.band(1.0, metric, of.own_class) for metric in ("ttft_mean", "tpot_mean")]
        measured, predicted = ([each.ttft_ms, np.nan_to_num(each.tpot_ms)] for each in (one.requests, replayed.overall))
        own = []
        for slos in product(*(np.quantile(each, SLO_QUANTILES) for each in measured)):
            met = _attained(measured, (1.0, 1.0), slos)
            low, high = (_attained(predicted, [getattr(b, end) for b in bands], slos) for end in ("high", "low"))
            own.append((low <= met <= high, high - low))
        inside.append(np.mean([each for each, _ in own]))
        width.append(np.mean([each for _, each in own]))
        print(f"attainment of {of.run}: {inside[-1]:.0%} within the band, whose width is {width[-1]:.2f}")
    print(f"attainment, {len(inside)} runs: {np.mean(inside):.0%} within the band, mean width {np.mean(width):.2f}")


def _attained(latencies_ms: Sequence[Floats], factors: Sequence[float], slos_ms: Sequence[float]) -> float:
    met = [each * factor <= slo for each, factor, slo in zip(latencies_ms, factors, slos_ms, strict=True)]
    return float(np.mean(np.logical_and(*met)))


def _plain(run: RunErrors) -> dict[str, object]:
    return {name: getattr(run, name) for name in run.__struct_fields__}


def _old_runs() -> Iterator[Compared]:
    experiments, _ = read_serving(fit_serving.DATA)
    _, without = fit_serving.fit(experiments)
    other = catalog.coefficients(GPU, NEW)
    for one in experiments:
        engine, held_out = fit_serving.models(without[one.model.name])
        others = (held_out, other, _generic(other))
        for known, used in zip(KNOWN, others, strict=True):
            yield _errors(one, f"{one.id} {one.workload}", "vLLM 0.15.1", known, used, engine)


def _new_runs() -> Iterator[Compared]:
    other, found = catalog.coefficients(GPU, OLD), {}
    for key, (name, dtype) in MODELS.items():
        model = replace(catalog.model(name), dtype=dtype)
        for greedy in (True, False):
            flags = {"model": name, "gpu": GPU, "engine": NEW, "greedy": greedy, "token_ids": True}
            runs, _ = measured_fleet.found_runs(REQUESTS, flags)
            for run in runs:
                its, _, phase = run.run.where.rpartition(": ")[2].partition(" ")
                if len(run.experiment.requests.e2e_ms) < LEAST_REQUESTS or any(
                    "once" in note for note in run.run.notes
                ):
                    continue
                if its == key and greedy == (key != "q30b" and phase not in SAMPLED):
                    found.setdefault(key, []).append((phase, replace(run.experiment, model=model), run.pool))
    pools = {key: replace(runs[0][2], model=runs[0][1].model) for key, runs in found.items()}
    held_out = _held_out(pools)
    for key, runs in found.items():
        for phase, one, pool in runs:
            own = next(used for start, used in held_out.items() if f"{key} {phase}".startswith(start))
            others = (own, other, _generic(other))
            for known, used in zip(KNOWN, others, strict=True):
                yield _errors(one, f"{key} {phase}", "vLLM 0.25.1", known, used, pool.engine)


def _held_out(pools: dict[str, Pool]) -> dict[str, Coefficients]:
    """The step times of 0.25.1 without a run, by the start of its name."""
    start, ours = catalog.coefficients(GPU, OLD), catalog.coefficients(GPU, NEW)
    start = replace(start, kernels=scaled(start.kernels, {"cast_share": 0.0}))
    given = {name: getattr(start.overhead, name) for name in ("launch_expert_layer_s", "expert_layer_s")}
    found = {"q30b ": replace(ours, overhead=replace(ours.overhead, **given))}
    for name, phases in (("l8b burst", ("azure4", "azure9")), ("l8b azure", ("burst",)), ("fp8 ", ("burst", "azure"))):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "steps.csv"
            with gzip.open(STEPS, "rt") as packed, path.open("w") as file:
                rows = csv.DictReader(packed)
                writer = csv.DictWriter(file, rows.fieldnames or ())
                writer.writeheader()
                writer.writerows(row for row in rows if row["model"] == "l8b" and row["phase"].startswith(phases))
            fit = fit_steps(read_steps(path).spans, pools["l8b"], start)
        found[name] = fit.coefficients
        print(f"0.25.1 for {name}: {fit.result.values}")
    return found


def _generic(used: Coefficients) -> Coefficients:
    """The same overhead with the kernels of a GPU without measurements."""
    generic = catalog.coefficients("", "")
    return replace(generic, overhead=used.overhead)


def _errors(
    one: ServingExperiment, name: str, engine: str, known: str, used: Coefficients, profile: Engine
) -> Compared:
    profile = replace(profile, max_num_seqs=one.max_num_seqs)
    replayed = replay(replace(one, profile=None), SEEDS, profile, used)
    pairs = compare(one, replayed, used.calibrated).errors
    errors = {key: log(pair.measured / pair.predicted) for key, pair in pairs.items() if key in METRICS}
    if one.contradiction is not None:
        errors.pop("itl_mean", None)
    if one.requests is not None:
        measured, predicted = (np.nanpercentile(each.tpot_ms, 99) for each in (one.requests, replayed.overall))
        errors["tpot_p99"] = log(measured / predicted)
    errors = {key: round(value, 4) for key, value in errors.items()}
    model, full, waiting = one.model.name, round(replayed.fullness, 3), round(replayed.waiting_share, 4)
    if one.model.dtype != "bf16" and one.model.dtype not in model:
        model = f"{model}-{one.model.dtype}"
    print(known, name, model, full, waiting, errors, flush=True)
    found = RunErrors(name, model, engine, GPU, known, weights_of(one.model), full, waiting, errors)
    return Compared(found, one, replayed)


if __name__ == "__main__":
    main()
