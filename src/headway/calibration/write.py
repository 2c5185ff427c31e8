"""Fitted coefficients as a file of the catalog's kind, with residuals and where they are from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headway import catalog
from headway.calibration.fit import fit_all
from headway.calibration.measurements import Measurements
from headway.calibration.overhead import fit_overhead
from headway.calibration.solve import Fitted
from headway.catalog.coefficients import CoefficientFile, Coefficients, Kernels
from headway.catalog.load import has_measured_kernels
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.workload.atomic_file import write_text

CORE = ("gemm.bf16", "prefill_attention", "decode_attention")
"""Without these, a GPU's kernels are not measured."""
NOT_KEPT = ("host_copy",)
"""Fitted to be looked at; no coefficient of step times."""
DIGITS = 4


class Calibration(msgspec.Struct, frozen=True):
    """What was fitted, and the file that says so."""

    file: CoefficientFile
    fits: tuple[Fitted, ...]
    notes: tuple[str, ...]
    """What was not fitted, and where it is from instead."""


def calibrate(measured: Measurements, gpu: Gpu, engine: str, source: str, version: str = "") -> Calibration:
    """Fit all that the measurements tell; what they do not is taken from the catalog. `version` is the engine's.

    Raises HeadwayError where one fit fails (see `solve`), or nothing is there to fit on.
    """
    known = catalog.coefficients(gpu.name, engine)
    fits, notes = fit_all(measured.samples, gpu)
    if not fits and not measured.loads:
        raise HeadwayError(f"nothing could be fitted for {gpu.name}: {'; '.join(notes)}")
    kernels, kept = _kernels(known.kernels, fits, source)
    if kept:
        origin = "measured on it" if has_measured_kernels(gpu.name) else "not measured on it"
        notes.append(f"taken from the catalog for {gpu.name} ({origin}): {', '.join(kept)}")
    overheads = {}
    found = Coefficients(kernels, known.overhead, known.calibrated)
    if measured.loads:
        overhead, left = fit_overhead(measured.loads, gpu, engine, found)
        fits.append(overhead)
        notes += left
        residuals = {"median_absolute": _rounded(overhead.residual)}
        numbers = {name: _rounded(value) for name, value in overhead.values.items()}
        overheads[engine] = replace(known.overhead, **numbers, version=version, residuals=residuals, source=source)
    else:
        notes.append(f"no served loads: the overhead of {engine} is the catalog's")
        if known.calibrated:
            overheads[engine] = known.overhead
    complete = has_measured_kernels(gpu.name) or {fit.key for fit in fits} >= set(CORE)
    ours, like = ((gpu.name,), ()) if complete else ((), (gpu.name,))
    if not complete:
        notes.append(f"{', '.join(CORE)} are not all measured: results with this file count as uncalibrated")
    notes += [f"{fit.key}: {', '.join(fit.at_bounds)} at its bound" for fit in fits if fit.at_bounds]
    return Calibration(CoefficientFile(ours, kernels, overheads, like), tuple(fits), tuple(notes))


def write(path: Path, file: CoefficientFile) -> None:
    """As JSON, whole or not at all."""
    write_text(path, msgspec.json.format(msgspec.json.encode(file), indent=1).decode() + "\n")


def _kernels(known: Kernels, fits: Sequence[Fitted], source: str) -> tuple[Kernels, list[str]]:
    """The catalog's kernels with what was fitted in their place, and what was kept."""
    found: dict[str, Any] = msgspec.to_builtins(known)
    residuals: dict[str, float] = found["residuals"]
    before = _keys(found)
    done = [fit for fit in fits if fit.key not in NOT_KEPT]
    for fit in done:
        values = {name: _rounded(value) for name, value in fit.values.items()}
        group, _, entry = fit.key.partition(".")
        residuals[fit.key] = _rounded(fit.residual)
        if fit.key == "device_copy":
            found["elementwise_efficiency"] = values["efficiency"]
        elif entry:
            found[group][entry] = {**found[group].get(entry, {}), **values}
        else:
            found[group] = {**found[group], **values}
    fitted = {fit.key for fit in done}
    kept = [key for key in before if key not in fitted and not (key == "elementwise" and "device_copy" in fitted)]
    if done:
        found["source"] = f"{source}: {', '.join(sorted(fitted))}" + (f"; the rest: {known.source}" if kept else "")
    return msgspec.convert(found, Kernels), kept


def _keys(kernels: dict[str, Any]) -> list[str]:
    nested = ("gemm", "moe", "all_reduce")
    return [f"{group}.{entry}" for group in nested for entry in kernels[group]] + [
        "prefill_attention", "decode_attention", "elementwise",
    ]  # fmt: skip


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if abs(value) > 1e-15 else 0.0
