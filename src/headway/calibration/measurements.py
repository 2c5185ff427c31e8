"""Files of measurements of any kind that Headway knows, told apart by what is in them."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from msgspec import Struct

from headway.calibration import benchmarks, operators, serving
from headway.calibration.benchmarks import Told
from headway.calibration.operators import Samples
from headway.calibration.overhead import Load, loads
from headway.calibration.peaks import physical
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu

SERVING_MARKS = ("exp_id", "stage", "rate_rps", "ttft_mean_ms", "e2e_mean_ms")
KNOWN = (
    "operator tables (gemm_dtype, m, n, k, latency_ms; isl, step, num_heads, ...; moe_dtype, ...; op_name,"
    " message_size, ...), files of headway measure, serving results (exp_id, stage, rate_rps, ...),"
    " JSON of vLLM bench serve or guidellm"
)


class File(Struct, frozen=True):
    """What became of one file."""

    file: str
    format: str
    num_rows: int
    """Rows, stages or runs; of serving results, those that could be read and each that could not."""
    num_used: int
    left_out: dict[str, int] = {}
    """Why, and how many."""
    notes: tuple[str, ...] = ()


class Measurements(Struct, frozen=True):
    """All that several files say of one GPU."""

    files: tuple[File, ...]
    samples: tuple[Samples, ...]
    """One of each operator and dtype, each shape once."""
    loads: tuple[Load, ...]


def read(paths: Sequence[Path], gpu: Gpu, told: Told) -> Measurements:
    """What the files hold of `gpu`. HeadwayError where one cannot be understood, or none says anything of it."""
    files: list[File] = []
    samples: list[Samples] = []
    found: list[Load] = []
    for path in paths:
        if benchmarks.is_benchmark(path):
            more, left = benchmarks.read(path, told)
            found += more
            files.append(File(str(path), "benchmark", len(more) + len(left), len(more), notes=tuple(left)))
        elif sum(mark in header(path) for mark in SERVING_MARKS) >= 2:
            file, more = _serving(path, gpu)
            files.append(file)
            found += more
        else:
            file, some = _operators(path, gpu)
            files.append(file)
            samples += some
    merged, again = _merged(samples)
    if again:
        files.append(File("all files together", "operators", 0, 0, again))
    if not samples and not found:
        raise HeadwayError(f"nothing that can be used for {gpu.name}: {'; '.join(map(_left, files))}")
    return Measurements(tuple(files), tuple(merged), tuple(_loads_once(found)))


def header(path: Path) -> list[str]:
    """The first line of a CSV, gzip or not. HeadwayError where there is no such file, or no text."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as file:
            line = file.readline(1 << 16).decode("utf-8-sig")
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: cannot be read as text: {error}") from None
    if not line.strip():
        raise HeadwayError(f"{path}: is empty; expected {KNOWN}")
    return [name.strip() for name in next(csv.reader([line]))]


def _left(file: File) -> str:
    why = (*(f"{num:,} {why}" for why, num in file.left_out.items()), *file.notes)
    return f"{file.file}: {', '.join(why) or 'no rows'}"


def _operators(path: Path, gpu: Gpu) -> tuple[File, list[Samples]]:
    if operators.recognise(header(path)) is None:
        raise HeadwayError(f"{path}: line 1: not recognised; expected {KNOWN}")
    reading = operators.read(path, gpu)
    left_out = dict(reading.left_out)
    samples = [physical(each, gpu, left_out, str(path)) for each in reading.samples]
    used = sum(len(each.seconds) for each in samples)
    return File(str(path), reading.format, reading.num_rows, used, left_out, reading.notes), samples


def _serving(path: Path, gpu: Gpu) -> tuple[File, list[Load]]:
    experiments, problems = serving.read(path, skip_bad=True)
    found, left = loads(experiments, gpu)
    num_rows = sum(len(each.stages) for each in experiments) + len(problems)
    notes = (*(f"left out: {each}" for each in problems), *(f"left out: {each}" for each in left))
    return File(str(path), "serving", num_rows, len(found), notes=notes), found


def _merged(samples: Sequence[Samples]) -> tuple[list[Samples], dict[str, int]]:
    """Samples of the same operator from several files as one."""
    again: dict[str, int] = {}
    merged = []
    for _, group in groupby(sorted(samples, key=lambda each: each.key), key=lambda each: each.key):
        parts = list(group)
        one = parts[0]
        if len(parts) > 1:
            shape = {name: np.concatenate([part.shape[name] for part in parts]) for name in one.shape}
            seconds = np.concatenate([part.seconds for part in parts])
            software = ", ".join(dict.fromkeys(part.software for part in parts if part.software))
            one = operators.once(Samples(one.kind, one.dtype, shape, seconds, software), again)
        merged.append(one)
    return merged, again


def _loads_once(found: Sequence[Load]) -> list[Load]:
    """Loads of two files with the same numbers count once."""
    seen: dict[tuple[object, ...], Load] = {}
    for load in found:
        key = (load.model.name, load.tp, load.rate_rps, load.prompt_tokens, load.output_tokens, load.tpot_s)
        seen.setdefault(key, load)
    return list(seen.values())
