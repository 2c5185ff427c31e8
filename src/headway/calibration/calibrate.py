"""Fits all measurements of a GPU and writes a coefficient file in the catalog's format, with residuals and sources."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headway import catalog
from headway.calibration.fit import fit_all
from headway.calibration.measurements import Measurements
from headway.calibration.served_fit import Progress, fit_served
from headway.calibration.solve import FitResult
from headway.calibration.steps.fit import StepFit, fit_steps
from headway.catalog.coefficients import CoefficientFile, Coefficients, Kernels, Overhead
from headway.catalog.load import has_measured_kernels
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Pool
from headway.workload.atomic_file import write_text

CORE = ("gemm.bf16", "prefill_attention", "decode_attention")
"""Required fits for a GPU to count as measured."""
REPORT_ONLY = ("host_copy",)
"""Fits for the report only; step times do not use them."""
SAMPLER = {
    "top_p_sort": "sort_bytes_per_logit",
    "top_p": "cut_bytes_per_logit",
    "penalties": "penalty_bytes_per_logit",
}
"""Maps each fit of the sampler to the coefficients of the engine's overhead that it determines."""
DIGITS = 4


PYTORCH = "torch "
"""Prefix of the software name of PyTorch's own kernels in files of `headway measure`."""
ALL = "all"
COMPARED = ("memory_efficiency", "compute_efficiency", "link_efficiency", "efficiency", "bytes_per_logit")
DIFFERS = 0.1
"""Smallest relative difference from the catalog's value that is reported."""
IDENTIFIED = 0.5
"""Kernels count as measured by served runs if at most this share of the prior's width is left."""


class Calibration(msgspec.Struct, frozen=True):
    file: CoefficientFile
    fits: tuple[FitResult, ...]
    notes: tuple[str, ...]
    """Coefficients that were not fitted, and where they come from."""
    steps: StepFit | None = None
    """Fit to logs of iterations, with the errors by region of batches."""


def calibrate(
    measured: Measurements,
    gpu: Gpu,
    profile: Engine,
    source: str,
    version: str = "",
    known: Coefficients | None = None,
    progress: Progress | None = None,
    replaced: Collection[str] = (),
    pool: Pool | None = None,
) -> Calibration:
    """Fit all coefficients that the measurements determine and take the others from the catalog.

    `version` is the engine's version. `known` replaces the catalog's step times. `replaced` names fits of PyTorch's
    kernels that replace the catalog's fits of an engine's kernels on this GPU; `all`: all of them. `pool` is the pool
    on which logs of iterations were measured. Raises HeadwayError if a fit fails (see `solve`), nothing can be fitted,
    or a name is not that of a fit.
    """
    engine = profile.name
    known = catalog.coefficients(gpu.name, engine) if known is None else known
    fits, notes = fit_all(measured.samples, gpu)
    if not fits and not measured.experiments and not measured.steps:
        raise HeadwayError(f"nothing could be fitted for {gpu.name}: {'; '.join(notes)}")
    fits, more_notes = _without_substitutes(fits, measured, known, gpu, replaced)
    notes += more_notes
    kernels, from_catalog = _kernels(known.kernels, fits, source)
    complete = has_measured_kernels(gpu.name) or {fit.key for fit in fits} >= set(CORE)
    if from_catalog:
        origin = "measured on it" if has_measured_kernels(gpu.name) else "not measured on it"
        scaled = "" if complete or not measured.experiments else ", then scaled to the runs"
        notes.append(f"taken from the catalog for {gpu.name} ({origin}){scaled}: {', '.join(from_catalog)}")
    overheads = {}
    known = replace(known, overhead=replace(known.overhead, **_sampler(fits)))
    combined = replace(known, kernels=kernels, experts=known.experts if kernels.expert_table else None)
    step_fit = None
    if measured.steps and pool is not None:
        step_fit = fit_steps([span for log in measured.steps for span in log.spans], pool, combined)
        combined, width = step_fit.coefficients, step_fit.result.width
        fits.append(step_fit.result)
        notes += step_fit.notes
        version = version or next((str(log.about["version"]) for log in measured.steps if "version" in log.about), "")
        residuals = {"median_absolute": _rounded(step_fit.result.residual)}
        overheads[engine] = _rounded_overhead(combined.overhead, version, residuals, source)
        kernels = _rounded_kernels(combined.kernels, complete, source)
        complete = complete or all(width[name] < IDENTIFIED for name in ("memory", "decode_attention"))
    if measured.experiments:
        overhead, fitted, more_notes = fit_served(
            measured.experiments, gpu, profile, combined, complete, progress, step_fit is not None
        )
        fits.append(overhead)
        notes += more_notes
        residuals = {"median_absolute": _rounded(overhead.residual)}
        residuals |= {key: _rounded(value / 100) for key, value in overhead.held_out.items()}
        overheads[engine] = _rounded_overhead(fitted.overhead, version, residuals, source)
        kernels = _rounded_kernels(fitted.kernels, complete, source)
        complete = complete or all(overhead.width[name] < IDENTIFIED for name in ("memory", "compute"))
    elif step_fit is None:
        notes.append(f"no served loads: the overhead of {engine} is the catalog's")
        if known.calibrated:
            overheads[engine] = known.overhead
        elif _sampler(fits):
            notes.append(f"the sampler was measured, but no overhead of {engine} on {gpu.name}: give served runs, too")
    measured_gpus, like = ((gpu.name,), ()) if complete else ((), (gpu.name,))
    if not complete:
        notes.append(f"{', '.join(CORE)} are not all measured: results with this file count as uncalibrated")
    notes += [f"{fit.key}: {', '.join(fit.at_bounds)} at its bound" for fit in fits if fit.at_bounds]
    file = CoefficientFile(measured_gpus, kernels, overheads, like)
    return Calibration(file, tuple(fits), tuple(notes), step_fit)


def _without_substitutes(
    fits: list[FitResult], measured: Measurements, known: Coefficients, gpu: Gpu, replaced: Collection[str]
) -> tuple[list[FitResult], list[str]]:
    """The fits except those in whose place the catalog's values stay, and notes on values that change or stay.

    Raises HeadwayError if `replaced` names no fit.
    """
    if unknown := set(replaced) - {ALL, *(fit.key for fit in fits)}:
        names = ", ".join([ALL, *(fit.key for fit in fits)])
        raise HeadwayError(f"--replace {min(unknown)}: no such fit; expected one of: {names}")
    if not has_measured_kernels(gpu.name):
        return fits, []
    stays = set() if ALL in replaced else _substitutes(fits, measured, known) - set(replaced)
    return [fit for fit in fits if fit.key not in stays], list(_changes(known, fits, stays))


def _sampler(fits: Sequence[FitResult]) -> dict[str, float]:
    """The overhead values that were measured with the sampler's operators."""
    found = {SAMPLER[fit.key]: _rounded(fit.values["bytes_per_logit"]) for fit in fits if fit.key in SAMPLER}
    cuts = [fit.values["latency_s"] for fit in fits if fit.key in SAMPLER and fit.key != "penalties"]
    return {**found, "sampler_latency_s": _rounded(cuts[0])} if cuts else found


def _substitutes(fits: Sequence[FitResult], measured: Measurements, known: Coefficients) -> set[str]:
    """Keys of fits of PyTorch's kernels for which the catalog has an engine's kernel, measured on this GPU.

    PyTorch's attention, experts and all-reduces are other kernels than an engine's. NCCL's times in place of an
    engine's own all-reduce add 6 to 20 points to the error of E2E.
    """
    kinds = {each.key for each in measured.samples if PYTORCH in each.software}
    found = {fit.key for fit in fits if fit.key in kinds or (fit.key.partition(".")[0] in kinds)}
    return {key for key in found if _catalog_values(known, key)}


def _catalog_values(known: Coefficients, key: str) -> dict[str, float]:
    """The catalog's measured values of a fit's coefficients; empty if it has none."""
    if key in SAMPLER:
        value = getattr(known.overhead, SAMPLER[key])
        return {"bytes_per_logit": value} if value else {}
    group, _, entry = key.partition(".")
    values: Any = msgspec.to_builtins(known.kernels)
    if key == "device_copy":
        return {"efficiency": values["elementwise_efficiency"]}
    found = values.get(group) or {}
    found = found.get(entry, {}) if entry else found
    return dict(found) if key not in REPORT_ONLY else {}


def _changes(known: Coefficients, fits: Sequence[FitResult], stays: Collection[str]) -> Iterator[str]:
    """Large differences from the catalog's values for the same GPU, and which value is used."""
    for fit in fits:
        before = _catalog_values(known, fit.key)
        changed = [
            f"{name} {before[name]:.3g} -> {value:.3g}"
            for name, value in fit.values.items()
            if name in COMPARED and before.get(name) and abs(value / before[name] - 1) > DIFFERS
        ]
        own = known.kernels.residuals.get(fit.key)
        errors = f"median error {fit.residual:.1%}" + ("" if own is None else f", the catalog's {own:.1%}")
        line = f"{', '.join(changed) or 'much as in the catalog'} ({errors})"
        if fit.key in stays:
            yield f"{fit.key}: {line}: PyTorch's kernel; kept: the catalog's, an engine's; --replace {fit.key} takes it"
        elif changed:
            yield f"{fit.key}: {line}: replaces what the catalog has measured on this GPU"


def write(path: Path, file: CoefficientFile) -> None:
    write_text(path, msgspec.json.format(msgspec.json.encode(file), indent=1).decode() + "\n")


def _kernels(known: Kernels, fits: Sequence[FitResult], source: str) -> tuple[Kernels, list[str]]:
    """The catalog's kernels with the fitted values, and the names of kernels without a fit."""
    merged: dict[str, Any] = msgspec.to_builtins(known)
    residuals: dict[str, float] = merged["residuals"]
    before = _keys(merged)
    done = [fit for fit in fits if fit.key not in (*REPORT_ONLY, *SAMPLER)]
    for fit in done:
        values = {name: _rounded(value) for name, value in fit.values.items()}
        group, _, entry = fit.key.partition(".")
        residuals[fit.key] = _rounded(fit.residual)
        if fit.key == "device_copy":
            merged["elementwise_efficiency"] = values["efficiency"]
        elif entry:
            merged[group][entry] = {**merged[group].get(entry, {}), **values}
        else:
            merged[group] = {**(merged[group] or {}), **values}
    fitted = {fit.key for fit in done}
    if any(key.startswith("moe.") for key in fitted):
        merged["expert_table"] = ""  # these measurements take precedence over the catalog's table
    from_catalog = [
        key for key in before if key not in fitted and not (key == "elementwise" and "device_copy" in fitted)
    ]
    if done:
        merged["source"] = f"{source}: {', '.join(sorted(fitted))}" + (
            f"; the rest: {known.source}" if from_catalog else ""
        )
    return msgspec.convert(merged, Kernels), from_catalog


def _rounded_overhead(fitted: Overhead, version: str, residuals: dict[str, float], source: str) -> Overhead:
    numbers = {
        name: _rounded(value) for name, value in msgspec.structs.asdict(fitted).items() if isinstance(value, float)
    }
    return replace(fitted, **numbers, version=version, residuals=residuals, source=source)


def _rounded_kernels(fitted: Kernels, is_measured: bool, source: str) -> Kernels:
    """The kernels with the factors of a fit to served runs. Kernels with own measurements count as measured."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(each) for key, each in value.items()}
        return _rounded(value) if isinstance(value, float) else value

    numbers = rounded(msgspec.to_builtins(fitted))
    if not is_measured:
        numbers["source"] = f"{source}: efficiencies scaled to served runs; before: {fitted.source}"
        numbers["expert_table"] = ""
    return msgspec.convert(numbers, Kernels)


def _keys(kernels: dict[str, Any]) -> list[str]:
    nested = ("gemm", "moe", "all_reduce")
    return [f"{group}.{entry}" for group in nested for entry in kernels[group]] + [
        "prefill_attention",
        "decode_attention",
        "elementwise",
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if abs(value) > 1e-15 else 0.0
