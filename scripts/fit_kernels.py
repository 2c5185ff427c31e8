# ruff: noqa: T201 (a script prints)
"""Refit the kernel coefficients of the GPUs in the catalog, as `headway calibrate` does.

    HEADWAY_DATA=... python scripts/fit_kernels.py [gpu ...]
    HEADWAY_DATA=... python scripts/fit_kernels.py --held-out [gpu ...]

Reads measured/aic_*.csv.gz (AIConfigurator's operator tables, Apache-2.0) and writes
catalog/data/coefficients/<gpu>.json. Overheads of engines in these files are kept. With --held-out it only prints the
median errors on held-out shapes. Needs SciPy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from headway import catalog
from headway.calibration.calibrate import calibrate
from headway.calibration.measurements import read

DATA = Path(os.environ["HEADWAY_DATA"]) / "measured"
TABLES = ("gemm_vllm", "moe_vllm", "attn_context_vllm_hd128_bf16", "attn_generation_vllm_hd128_bf16", "comm")
OUT = Path(__file__).parent.parent / "src/headway/catalog/data/coefficients"
LIKE = {
    "a100-80gb": ["a100-40gb", "a800-80gb-sxm", "a800-80gb-pcie", "a100-80gb-pcie"],
    "h100-80gb-sxm": [
        "h100-96gb-sxm", "h800-80gb-sxm", "h20-96gb", "b200-180gb-sxm", "h100-94gb-nvl", "h100-80gb-pcie",
        "gb200-186gb",
    ],
    "h200-141gb-sxm": [],
    "l40s": ["l4", "rtx-4090", "a10", "a10g", "rtx-pro-6000-96gb"],
}  # fmt: skip
SOURCE = "fitted on AIConfigurator's operator tables (ai-dynamo/aiconfigurator, Apache-2.0), {software} kernels"


def kernels(name: str) -> dict[str, Any]:
    """The kernels of one GPU in the format of the data file, without coefficients that no table determines."""
    gpu = catalog.gpu(name)
    measured = read([DATA / f"aic_{table}.csv.gz" for table in TABLES], gpu)
    software = sorted({each.software for each in measured.samples if each.software})
    found = calibrate(measured, gpu, catalog.engine("vllm-0.15"), SOURCE.format(software=", ".join(software)))
    for note in found.notes:
        print(f"{name}: {note}")
    fitted = {fit.key for fit in found.fits}
    values: dict[str, Any] = msgspec.to_builtins(found.file.kernels)
    for group in ("gemm", "moe", "all_reduce"):
        values[group] = {key: _short(one) for key, one in values[group].items() if f"{group}.{key}" in fitted}
    if (OUT.parent / "experts" / f"{name}.json").exists():
        values["expert_table"] = name
    del values["mla_attention"]  # no table has it
    values["residuals"] = {key: value for key, value in values["residuals"].items() if key in fitted}
    values["source"] = SOURCE.format(software=", ".join(software)) + "; elementwise efficiency taken, not fitted"
    return values


def _short(values: dict[str, float]) -> dict[str, float]:
    optional = ("tile_tokens", "cast_efficiency", "wave_share")
    return {key: value for key, value in values.items() if key != "cast_share" and (value or key not in optional)}


def main() -> None:
    for name in [given for given in sys.argv[1:] if given != "--held-out"] or LIKE:
        found = kernels(name)
        print(name, json.dumps(found["residuals"]))
        if "--held-out" in sys.argv:
            continue
        path = OUT / f"{name}.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        new = {"gpus": [name], "like": LIKE[name], "kernels": found, "engines": old.get("engines", {})}
        path.write_text(json.dumps(new, indent=1) + "\n")


if __name__ == "__main__":
    main()
