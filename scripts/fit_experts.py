# ruff: noqa: T201 (a script prints)
"""Fit the latencies of mixture-of-experts layers by shape, and write src/headway/catalog/data/experts/<gpu>.json.

    HEADWAY_DATA=... python scripts/fit_experts.py [gpu ...]
    HEADWAY_DATA=... python scripts/fit_experts.py --held-out [gpu ...]

Reads measured/aic_moe_vllm.csv.gz (AIConfigurator's operator tables, Apache-2.0): balanced routing, or the least
skewed one where no balanced one was measured. For each shape,
a piecewise linear curve of log latency over log tokens that never falls is fitted, with knots of its own; so the files
hold no measured value. With --held-out it prints the median error on a fifth of the numbers of tokens that the fit has
not seen. Needs SciPy.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import lsq_linear

DATA = Path(os.environ["HEADWAY_DATA"]) / "measured" / "aic_moe_vllm.csv.gz"
OUT = Path(__file__).parent.parent / "src/headway/catalog/data/experts"
POWER_LAW = "power_law_1.01"
SYSTEMS = {"a100-80gb": "a100_sxm", "h100-80gb-sxm": "h100_sxm", "h200-141gb-sxm": "h200_sxm"}
DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8", "w4a16_mxfp4": "int4", "int4_wo": "int4"}
"""Rows of FP8 with one scale a tensor are left out: another kernel, several times slower for wide experts."""
KNOTS = (1, 3, 6, 12, 20, 36, 56, 88, 144, 224, 352, 640, 1280, 2560, 5120, 10240, 16384)
MOST_TP, MOST_EP = 8, 32
HOLD_OUT = 5
SOURCE = "fitted on AIConfigurator's operator tables (ai-dynamo/aiconfigurator, Apache-2.0), {software} kernels"
Floats = npt.NDArray[np.float64]
Shape = tuple[str, int, int, int, int, int, int]
NAMES = ("dtype", "hidden_size", "intermediate_size", "experts_per_token", "num_experts", "tp", "ep")


def measured(system: str, routing: str) -> tuple[dict[Shape, dict[int, float]], str]:
    """Milliseconds by number of tokens, by shape; and the versions of vLLM."""
    curves: dict[Shape, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    versions = set()
    with gzip.open(DATA, "rt", newline="") as file:
        for row in csv.DictReader(file):
            dtype = DTYPES.get(row["moe_dtype"])
            if row["system"] != system or row["distribution"] != routing or dtype is None:
                continue
            columns = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
            hidden, inter, topk, experts, tp, ep = (int(row[name]) for name in columns)
            if tp <= MOST_TP and ep <= MOST_EP:
                latency_ms = float(row["latency_ms"])
                curves[dtype, hidden, inter, topk, experts, tp, ep][int(row["num_tokens"])].append(latency_ms)
                versions.add(f"vLLM {row['vllm']}")
    medians = {shape: {t: float(np.median(ms)) for t, ms in curve.items()} for shape, curve in curves.items()}
    return medians, ", ".join(sorted(versions))


def basis(tokens: Floats) -> Floats:
    """Weights of the knots' values for each number of tokens, linear in its logarithm."""
    return np.stack([np.interp(np.log(tokens), np.log(KNOTS), row) for row in np.eye(len(KNOTS))], axis=1)


def fit(curve: dict[int, float]) -> Floats:
    """Milliseconds at the knots: relative least squares, never falling, with a weak pull towards a straight line."""
    tokens = np.array(sorted(curve), float)
    log_ms = np.log([curve[int(t)] for t in tokens])
    cumulative = np.tril(np.ones((len(KNOTS), len(KNOTS))))  # values = first value + increments
    bend = 0.03 * np.diff(np.eye(len(KNOTS)), n=2, axis=0)
    design = np.vstack([basis(tokens), bend]) @ cumulative
    target = np.concatenate([log_ms, np.zeros(len(bend))])
    low = np.r_[-np.inf, np.zeros(len(KNOTS) - 1)]
    return np.exp(cumulative @ lsq_linear(design, target, bounds=(low, np.full(len(KNOTS), np.inf))).x)


def errors(curves: dict[Shape, dict[int, float]], held_out: bool) -> dict[str, float]:
    """Median absolute relative error by dtype, on the numbers of tokens that were fitted or on those held out."""
    found = defaultdict(list)
    for shape, curve in curves.items():
        unseen = [t for i, t in enumerate(sorted(curve)) if i % HOLD_OUT == 2]
        values = fit({t: ms for t, ms in curve.items() if not held_out or t not in unseen})
        for t in unseen if held_out else curve:
            predicted = np.exp(basis(np.array([t], float)) @ np.log(values))[0]
            found[shape[0]].append(abs(predicted / curve[t] - 1))
    return {dtype: float(f"{np.median(each):.3g}") for dtype, each in sorted(found.items())}


def write(name: str, curves: dict[Shape, dict[int, float]], software: str, routing: str) -> None:
    lines = []
    for shape in sorted(curves):
        latency_us = [float(f"{1e3 * ms:.3g}") for ms in fit(curves[shape])]
        short = [int(us) if us == int(us) else us for us in latency_us]
        lines.append(json.dumps({**dict(zip(NAMES, shape, strict=True)), "latency_us": short}))
    found = {"source": SOURCE.format(software=software), "residuals": errors(curves, True)}
    head = json.dumps({**found, "balanced": routing == "balanced", "tokens": KNOTS})[:-1]
    OUT.mkdir(exist_ok=True)
    text = head + ', "curves": [\n' + ",\n".join(lines) + "\n]}\n"
    (OUT / f"{name}.json").write_text(text, encoding="utf-8")
    print(f"{name}: {len(lines)} shapes, {len(text):,} bytes")


def main() -> None:
    for name in [given for given in sys.argv[1:] if given != "--held-out"] or SYSTEMS:
        routing = "balanced"
        curves, software = measured(SYSTEMS[name], routing)
        if not curves:
            routing = POWER_LAW
            curves, software = measured(SYSTEMS[name], routing)
        if "--held-out" in sys.argv:
            print(name, "fitted", errors(curves, False), "held out", errors(curves, True))
        else:
            write(name, curves, software, routing)


if __name__ == "__main__":
    main()
