"""Reads files of measurements of any known kind, recognised by their content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from msgspec import Struct

from headway.calibration import operators, serving
from headway.calibration.operators import OperatorSamples
from headway.calibration.peaks import plausible
from headway.calibration.runs import read as runs_read
from headway.calibration.runs import served
from headway.calibration.serving import ServingExperiment
from headway.calibration.steps import read as steps_read
from headway.calibration.steps.read import StepLog
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.workload.readers.csv_table import header_of
from headway.workload.readers.shared import first_line

SERVING_MARKS = ("exp_id", "stage", "rate_rps", "ttft_mean_ms", "e2e_mean_ms")
KNOWN = (
    "logs of iterations (scheduled_s, done_s, decode_context_tokens, ...),"
    " operator tables (gemm_dtype, m, n, k, latency_ms; isl, step, num_heads, ...; moe_dtype, ...; op_name,"
    " message_size, ...), files of headway measure, serving results (exp_id, stage, rate_rps, ...),"
    " results of load generators"
)


class FileSummary(Struct, frozen=True):
    """The number of used rows of one file, and why other rows were not used."""

    file: str
    format: str
    num_rows: int
    """Number of rows, stages or runs. For serving results: readable stages plus unreadable rows."""
    num_used: int
    left_out: dict[str, int] = {}
    """Number of unused rows by reason."""
    notes: tuple[str, ...] = ()


class Measurements(Struct, frozen=True):
    files: tuple[FileSummary, ...]
    samples: tuple[OperatorSamples, ...]
    """One entry per operator and dtype, each shape once."""
    experiments: tuple[ServingExperiment, ...]
    """Served runs, each once."""
    steps: tuple[StepLog, ...] = ()
    """Logs of an engine's iterations."""


Runs = Callable[[Path], tuple[Sequence[ServingExperiment], Sequence[str]]]
"""Reads a file's runs on the fleet on which they were measured, and returns them with the reasons for skipped runs."""


def read(paths: Sequence[Path], gpu: Gpu, runs: Runs | None = None) -> Measurements:
    """Read the measurements of `gpu`. `runs` reads results of load generators and records.

    Raises HeadwayError if a file is not recognised, or no file has usable measurements.
    """
    files: list[FileSummary] = []
    samples: list[OperatorSamples] = []
    found: list[ServingExperiment] = []
    steps: list[StepLog] = []
    for path in paths:
        if steps_read.is_steps(path):
            steps.append(log := steps_read.read(path))
            files.append(FileSummary(str(path), "iterations", log.num_rows, log.num_used, log.left_out))
        elif runs is not None and (served.is_records(path) or runs_read.is_runs(path)):
            more, skipped = runs(path)
            own = [e for e in more if e.gpu.name == gpu.name]
            skipped = [*skipped, *(f"{e.id}: on {e.gpu.name}" for e in more if e.gpu.name != gpu.name)]
            found += own
            files.append(FileSummary(str(path), "runs", len(own) + len(skipped), len(own), notes=tuple(skipped)))
        elif sum(mark in header_of(first_line(path)) for mark in SERVING_MARKS) >= 2:
            file, more = _serving(path, gpu)
            files.append(file)
            found += more
        else:
            file, file_samples = _operators(path, gpu)
            files.append(file)
            samples += file_samples
    merged, again = _merged(samples)
    if again:
        files.append(FileSummary("all files together", "operators", 0, 0, again))
    if not samples and not found and not steps:
        raise HeadwayError(f"nothing that can be used for {gpu.name}: {'; '.join(map(_reasons, files))}")
    once: dict[tuple[object, ...], ServingExperiment] = {}  # Equal numbers in several files count once.
    for each in found:
        latencies = (round(each.measured.ttft_mean_ms, 3), round(each.measured.itl_mean_ms, 3))
        once.setdefault((each.model.name, each.tp, each.question_tokens, each.output_tokens, *latencies), each)
    return Measurements(tuple(files), tuple(merged), tuple(once.values()), tuple(steps))


def _reasons(file: FileSummary) -> str:
    why = (*(f"{num:,} {why}" for why, num in file.left_out.items()), *file.notes)
    return f"{file.file}: {', '.join(why) or 'no rows'}"


def _operators(path: Path, gpu: Gpu) -> tuple[FileSummary, list[OperatorSamples]]:
    if operators.recognise(header_of(first_line(path))) is None:
        raise HeadwayError(f"{path}: line 1: not recognised; expected {KNOWN}")
    reading = operators.read(path, gpu)
    left_out = dict(reading.left_out)
    samples = [plausible(each, gpu, left_out, str(path)) for each in reading.samples]
    used = sum(len(each.seconds) for each in samples)
    return FileSummary(str(path), reading.format, reading.num_rows, used, left_out, reading.notes), samples


def _serving(path: Path, gpu: Gpu) -> tuple[FileSummary, list[ServingExperiment]]:
    experiments, problems = serving.read(path, skip_bad=True)
    why = {e.id: f"on {e.gpu.name}" if e.gpu.name != gpu.name else e.contradiction for e in experiments}
    used = [e for e in experiments if not why[e.id] and e.output_tokens > 1]
    num_rows = sum(len(each.stages) for each in experiments) + len(problems)
    skipped = [f"experiment {id}: {reason}" for id, reason in why.items() if reason]
    notes = tuple(f"left out: {each}" for each in (*problems, *skipped))
    return FileSummary(str(path), "serving", num_rows, sum(len(e.stages) for e in used), notes=notes), used


def _merged(samples: Sequence[OperatorSamples]) -> tuple[list[OperatorSamples], dict[str, int]]:
    """Merge the samples of the same operator from several files."""
    again: dict[str, int] = {}
    merged = []
    for _, group in groupby(sorted(samples, key=lambda each: each.key), key=lambda each: each.key):
        parts = list(group)
        one = parts[0]
        if len(parts) > 1:
            shape = {name: np.concatenate([part.shape[name] for part in parts]) for name in one.shape}
            seconds = np.concatenate([part.seconds for part in parts])
            software = ", ".join(dict.fromkeys(part.software for part in parts if part.software))
            one = operators.deduplicated(OperatorSamples(one.kind, one.dtype, shape, seconds, software), again)
        merged.append(one)
    return merged, again
