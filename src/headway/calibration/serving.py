"""Reads measured serving experiments: a CSV with a row per stage of load and a summary row per experiment.

Every row is checked before any is used. Errors name the line; nothing is guessed.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import GREEDY, Engine, Gpu, Model, Parallel, Sampling
from headway.perf.memory import check_shape
from headway.workload.readers.shared import open_unpacked
from headway.workload.table import Floats, Workload

T = TypeVar("T")
CsvRow = dict[str, str]
"""Cells by column."""

LATENCIES = (
    "e2e_mean_ms",
    "e2e_p90_ms",
    "e2e_p99_ms",
    "ttft_mean_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "itl_mean_ms",
)
REQUIRED = (
    "exp_id", "model", "gpu", "tp", "max_num_batched_tokens", "sys_prompt_len", "question_len", "output_len",
    "stage", "rate_rps", "duration_s", *LATENCIES,
)  # fmt: skip
OPTIONAL = (
    "set", "folder", "workload", "precision", "cpu_kv_offload", "gpu_mem_util", "dp", "engine",
    "pp", "ep", "max_num_seqs", "prefix_caching", "prompt_groups", "prompts_per_group", "sampling",
    "tpot_from_e2e_ms", "mean_concurrency_est",
)  # fmt: skip
SETTINGS = (*REQUIRED[:8], *OPTIONAL[3:15])
"""Columns in which all rows of an experiment agree."""
SUMMARY = "summary"
DTYPES = {"": "", "FP16": "bf16", "BF16": "bf16", "FP8": "fp8", "INT4": "int4"}
NO, YES = ("0", "0.0", "no", "false", "off", "none"), ("yes", "true", "on", "enabled", "1")
SAMPLINGS: dict[str, Sampling | None] = {"": None, "default": None, "greedy": GREEDY}
"""Sampling by its name in a file; None: as in the model's published `generation_config.json`."""
OFFLOAD_BYTES = 32e9
"""Host memory for the KV cache if a file only says yes."""
SLOWEST_RATIO = 10.0
"""Largest plausible ratio of a latency to the value implied by the other latencies. A larger ratio means another
unit."""
SHORTEST_MS = 0.1
"""Shortest plausible latency; a smaller one is not in milliseconds."""
CONTRADICTION = 0.1
"""Largest relative difference between the ITL and the time per token computed from E2E."""
NAMED = 10

_QUANTISED = re.compile(r"[-_](fp8|w8a8|w4a16|awq|gptq|int4|quantized)([-_.].*)?$", re.IGNORECASE)


class MeasuredLatencies(Struct, frozen=True):
    """Latencies of one stage, or of a whole experiment, in milliseconds; NaN: not measured."""

    e2e_mean_ms: float
    e2e_p90_ms: float
    e2e_p99_ms: float
    ttft_mean_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    """Mean over tokens."""
    tpot_mean_ms: float = math.nan
    """Mean over requests. NaN: computed from E2E and TTFT, because all outputs have the same length."""

    def tpot_ms(self, output_tokens: int) -> float:
        """Time per output token after the first: the measured value, otherwise computed from E2E and TTFT."""
        if self.tpot_mean_ms == self.tpot_mean_ms:
            return self.tpot_mean_ms
        return (self.e2e_mean_ms - self.ttft_mean_ms) / max(output_tokens - 1, 1)


class MeasuredRequests(Struct, frozen=True):
    """Latencies of a run's requests, one value each, in milliseconds; NaN: not measured."""

    ttft_ms: Floats
    tpot_ms: Floats
    e2e_ms: Floats


class LoadStage(Struct, frozen=True):
    """Poisson arrivals at one rate for a duration, and the measured latencies."""

    rate_rps: float
    duration_s: float
    measured: MeasuredLatencies


class GivenLoad(Struct, frozen=True):
    """A load given as the requests that a run's file lists."""

    workload: Workload
    concurrency: int | None = None
    """Clients of a closed loop, which replaces the arrival times; None: requests arrive at their times."""


TOKEN_ID_S = 1.9e-6
"""Time until the scheduler sees a request, per prompt token that is sent as an id (vLLM 0.25.1, measured)."""


class ServingExperiment(Struct, frozen=True):
    """One engine under stages of load, and the measured latencies."""

    id: str
    workload: str
    model: Model
    gpu: Gpu
    tp: int
    dp: int
    engine: str
    engine_version: str
    """The engine's version; empty: the version of the catalog's profile."""
    max_num_batched_tokens: int
    gpu_memory_utilization: float | None
    kv_offload_bytes: float
    """Host memory that extends the KV cache."""
    sys_prompt_tokens: int
    question_tokens: int
    output_tokens: int
    stages: tuple[LoadStage, ...]
    measured: MeasuredLatencies
    """Latencies over all stages."""
    pp: int = 1
    ep: bool = False
    max_num_seqs: int = 128
    prefix_caching: bool = True
    prompt_groups: int = 10
    """Groups of prompts that share a system prompt."""
    prompts_per_group: int = 10
    """Prompts that each group repeats in turn; 0: every prompt is new."""
    profile: Engine | None = None
    """The engine with all of its settings; None: the catalog's engine of that name with the settings above."""
    load: GivenLoad | None = None
    """A given load in place of stages with constant lengths; the lengths above are then means."""
    kv_capacity_tokens: int | None = None
    """KV tokens of the cache; None: computed from the GPU's free memory."""
    requests: MeasuredRequests | None = None
    """Latencies by request; None: the file has only means and percentiles."""
    sends_token_ids: bool = False
    """Whether prompts were sent as token ids, so that no text is tokenised."""

    @property
    def contradiction(self) -> str | None:
        """An inconsistency within the measurement, if any."""
        if self.load is not None:  # lengths differ, so means over tokens and over requests differ, too
            return None
        ratio = self.measured.itl_mean_ms / self.measured.tpot_ms(self.output_tokens)
        if abs(ratio - 1) <= CONTRADICTION:
            return None
        return f"its ITL is {ratio:.2f}x the time per token that its E2E and TTFT leave"


class _BadRowError(Exception):
    """A row cannot be used; the message gives the reason."""


def read(path: Path, skip_bad: bool = False) -> tuple[list[ServingExperiment], list[str]]:
    """The experiments in a file, and the problems of skipped rows.

    Raises HeadwayError for missing columns, and for bad rows (unknown model or GPU, latencies that are not positive
    numbers, mixed units, duplicates) unless `skip_bad`, which skips the experiments of bad rows.
    """
    rows = list(_rows(path))
    groups: dict[str, list[tuple[int, CsvRow]]] = {}
    for line, row in rows:
        groups.setdefault(row["exp_id"], []).append((line, row))
    found = list(_problems(rows, groups))
    problems = [f"line {line}: experiment {exp_id}: {what}" for exp_id, line, what in found]
    count = f"{len(problems)} bad row{'' if len(problems) == 1 else 's'}"
    if problems and not skip_bad:
        named = "; ".join(problems[:NAMED]) + ("; ..." if len(problems) > NAMED else "")
        raise HeadwayError(f"{path}: {count}: {named}; --skip-bad leaves them out")
    bad = {exp_id for exp_id, _, _ in found}
    good = [_experiment([row for _, row in group]) for exp_id, group in groups.items() if exp_id not in bad]
    if not good:
        raise HeadwayError(f"{path}: no usable experiment; {count}")
    return good, problems


def _rows(path: Path) -> Iterator[tuple[int, CsvRow]]:
    with open_unpacked(path) as packed, TextIOWrapper(packed, "utf-8", "replace", newline="") as file:
        reader = csv.DictReader(file)
        header = [name.strip() for name in reader.fieldnames or ()]
        _check_header(path, header)
        reader.fieldnames = header
        for row in reader:
            yield reader.line_num, {name: (row[name] or "").strip() for name in header}


def _check_header(path: Path, header: list[str]) -> None:
    if twice := {name for name in header if header.count(name) > 1}:
        raise HeadwayError(f"{path}: line 1: columns given twice: {', '.join(sorted(twice))}")
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        seconds = [name for name in missing if name.endswith("_ms") and f"{name[:-3]}_s" in header]
        hint = f"; {seconds[0][:-3]}_s is there: give milliseconds" if seconds else ""
        raise HeadwayError(f"{path}: line 1: missing columns: {', '.join(missing)}{hint}")
    if others := [name for name in header if name not in (*REQUIRED, *OPTIONAL)]:
        raise unknown("column", others[0], (*REQUIRED, *OPTIONAL), f"{path}: line 1")


def _problems(
    rows: list[tuple[int, CsvRow]], groups: dict[str, list[tuple[int, CsvRow]]]
) -> Iterator[tuple[str, int, str]]:
    """Yield (experiment, line, problem) for every bad row, one problem per row."""
    seen: dict[tuple[str, str], int] = {}
    for line, row in rows:
        key = (row["exp_id"], row["stage"])
        if key in seen:
            yield row["exp_id"], line, f"stage {row['stage']} a second time (first on line {seen[key]})"
            continue
        seen[key] = line
        try:
            _check(row)
        except (_BadRowError, HeadwayError) as error:
            yield row["exp_id"], line, str(error)
    for exp_id, group in groups.items():
        line = group[0][0]
        changed = [name for name in SETTINGS if len({row.get(name) for _, row in group}) > 1]
        if sum(row["stage"] == SUMMARY for _, row in group) != 1:
            yield exp_id, line, f"needs one row with stage {SUMMARY!r}"
        elif len(group) < 2:
            yield exp_id, line, "has no stage, only a summary"
        elif changed:
            yield exp_id, line, f"{changed[0]} differs between its rows"


def _check(row: CsvRow) -> None:
    """Raise _BadRowError or HeadwayError if the row cannot be used."""
    if not row["exp_id"]:
        raise _BadRowError("exp_id is empty")
    experiment = _settings(row, (), _measured(row))
    check_shape(experiment.model, Parallel(experiment.tp, experiment.pp, experiment.ep))
    if row["stage"] != SUMMARY:
        _number(row, "stage", int, low=0)
        _stage(row)
    _check_latencies(experiment.measured, experiment.output_tokens)


def _check_latencies(latencies: MeasuredLatencies, output_tokens: int) -> None:
    for kind in ("e2e", "ttft"):
        mean, p90, p99 = (getattr(latencies, f"{kind}_{name}_ms") for name in ("mean", "p90", "p99"))
        if p99 < p90 or p99 < mean / SLOWEST_RATIO:
            raise _BadRowError(f"{kind}_p99_ms {p99:g} is below {kind}_p90_ms {p90:g}: mixed units or columns swapped")
        if p90 * SLOWEST_RATIO**2 < mean or mean * SLOWEST_RATIO**2 < p90:
            raise _BadRowError(f"{kind}_p90_ms {p90:g} beside {kind}_mean_ms {mean:g}: mixed units")
    e2e_ms, ttft_ms, itl_ms = latencies.e2e_mean_ms, latencies.ttft_mean_ms, latencies.itl_mean_ms
    if e2e_ms < ttft_ms:
        raise _BadRowError(f"e2e_mean_ms {e2e_ms:g} is below ttft_mean_ms {ttft_ms:g}: mixed units?")
    if itl_ms < SHORTEST_MS or ttft_ms < SHORTEST_MS:
        raise _BadRowError(f"latencies below {SHORTEST_MS} ms: seconds in a column of milliseconds?")
    if output_tokens > 1:
        ratio = itl_ms / max(latencies.tpot_ms(output_tokens), 1e-9)
        if not 1 / SLOWEST_RATIO < ratio < SLOWEST_RATIO:
            raise _BadRowError(f"itl_mean_ms {itl_ms:g} is {ratio:.3g}x what e2e_mean_ms implies: mixed units")


def _experiment(rows: list[CsvRow]) -> ServingExperiment:
    summary = next(row for row in rows if row["stage"] == SUMMARY)
    stages = sorted((row for row in rows if row is not summary), key=lambda row: int(row["stage"]))
    return _settings(summary, tuple(map(_stage, stages)), _measured(summary))


def _stage(row: CsvRow) -> LoadStage:
    return LoadStage(_number(row, "rate_rps", float), _number(row, "duration_s", float), _measured(row))


def _measured(row: CsvRow) -> MeasuredLatencies:
    return MeasuredLatencies(*(_number(row, name, float) for name in LATENCIES))


def _settings(row: CsvRow, stages: tuple[LoadStage, ...], measured: MeasuredLatencies) -> ServingExperiment:
    engine = row.get("engine", "").split()  # The version may follow the name.
    utilization = _optional(row, "gpu_mem_util", float)
    if utilization is not None and utilization > 1:
        raise _BadRowError(f"gpu_mem_util {utilization:g}; expected a share, above 0 and at most 1")
    return ServingExperiment(
        id=row["exp_id"],
        workload=row.get("workload", ""),
        model=_model(row),
        gpu=_catalogued(catalog.gpu, (row["gpu"], f"{row['gpu']}gb")) or catalog.gpu(row["gpu"]),
        tp=_number(row, "tp", int),
        dp=_optional(row, "dp", int) or 1,
        engine=catalog.engine(*engine[:2] or ["vllm"]).name,
        engine_version=engine[1] if len(engine) > 1 else "",
        max_num_batched_tokens=_number(row, "max_num_batched_tokens", int),
        gpu_memory_utilization=utilization,
        kv_offload_bytes=_offload(row.get("cpu_kv_offload", "")),
        sys_prompt_tokens=_number(row, "sys_prompt_len", int, low=0),
        question_tokens=_number(row, "question_len", int),
        output_tokens=_number(row, "output_len", int),
        stages=stages,
        measured=measured,
        pp=_optional(row, "pp", int) or 1,
        ep=_yes(row, "ep", False),
        max_num_seqs=_optional(row, "max_num_seqs", int) or 128,
        prefix_caching=_yes(row, "prefix_caching", True),
        prompt_groups=_optional(row, "prompt_groups", int) or 10,
        prompts_per_group=10 if not row.get("prompts_per_group") else _number(row, "prompts_per_group", int, low=0),
    )


def _number(row: CsvRow, name: str, kind: Callable[[str], T], low: float | None = None) -> T:
    """A positive number, or one of at least `low`. Whole numbers may be written as 2.0."""
    text = row[name]
    number = float("nan")
    with suppress(ValueError):
        number = float(text)
    good = number >= low if low is not None else number > 0
    if not good or number == float("inf") or (kind is int and number != int(number)):
        wanted = "a whole number" if kind is int else "a number"
        raise _BadRowError(
            f"{name} is {text!r}; expected {wanted} {'above 0' if low is None else f'of at least {low:g}'}"
        )
    return kind(number)  # type: ignore[arg-type]


def _optional(row: CsvRow, name: str, kind: Callable[[str], T]) -> T | None:
    return _number(row, name, kind) if row.get(name) else None


def _yes(row: CsvRow, name: str, default: bool) -> bool:
    text = row.get(name, "").lower()
    if not text:
        return default
    if text in NO or text in YES:
        return text in YES
    raise _BadRowError(f"{name} is {row[name]!r}; expected yes or no")


def _offload(text: str) -> float:
    """Bytes of host memory from yes, no or a number of GiB."""
    lowered = text.lower()
    if lowered in ("", *NO):
        return 0.0
    if lowered in YES:
        return OFFLOAD_BYTES
    with suppress(ValueError):
        number = float(lowered)
        if 0 < number < float("inf"):
            return number * 2**30
    raise _BadRowError(f"cpu_kv_offload is {text!r}; expected yes, no or GiB")


def _catalogued(look_up: Callable[[str], T], names: Iterable[str]) -> T | None:
    """The catalog's entry for the first name that the catalog knows."""
    for name in names:
        with suppress(HeadwayError):
            return look_up(name)
    return None


def _model(row: CsvRow) -> Model:
    """The catalog's model of a row. A quantised or republished variant is found by the name of its base."""
    name = row["model"]
    precision = row.get("precision", "").upper()
    if precision not in DTYPES:
        raise unknown("precision", precision, [key for key in DTYPES if key])
    model = catalogued_model(name)
    how = row.get("sampling", "").lower()
    if how not in SAMPLINGS:
        raise unknown("sampling", how, [key for key in SAMPLINGS if key])
    model = replace(model, sampling=SAMPLINGS[how] or model.sampling)
    return replace(model, dtype=DTYPES[precision]) if precision else model


def catalogued_model(name: str) -> Model:
    """The catalog's model with this name or path, or the model of which it is a variant. Raises HeadwayError if there
    is none."""
    name = name.rstrip("/")
    return _catalogued(catalog.model, _names(name)) or catalog.model(name.rsplit("/", 1)[-1])


def _names(name: str) -> Iterator[str]:
    base = _QUANTISED.sub("", name)
    yield name
    yield base
    short = base.rsplit("/", 1)[-1]
    yield short
    for model in catalog.models():
        if any(short.lower() == alias.rsplit("/", 1)[-1].lower() for alias in (model.hf_id, *model.aliases)):
            yield model.name
    yield re.sub(r"(-(instruct|chat|it|hf|base|v0\.\d))+$", "", short, flags=re.IGNORECASE)
