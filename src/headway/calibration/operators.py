"""Reads measured operator latencies: AIConfigurator's tables and the files of `headway measure`.

A table is recognised by its columns. Every row is checked before any is used. Skipped rows are counted by reason.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pc
from msgspec import Struct, field

from headway import catalog
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.object_]
Mask = npt.NDArray[np.bool_]
OperatorKind = Literal[
    "gemm",
    "moe",
    "prefill_attention",
    "decode_attention",
    "mla_attention",
    "all_reduce",
    "device_copy",
    "host_copy",
    "top_p_sort",
    "top_p",
    "penalties",
]

SHAPES: dict[OperatorKind, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "moe": (
        "num_tokens",
        "hidden_size",
        "intermediate_size",
        "experts_per_token",
        "num_experts",
        "tp",
        "balanced",
    ),
    "prefill_attention": ("batch_size", "new_tokens", "context_tokens", "num_heads", "num_kv_heads", "head_dim"),
    "decode_attention": ("batch_size", "context_tokens", "num_heads", "num_kv_heads", "head_dim"),
    "mla_attention": ("batch_size", "context_tokens", "num_heads", "kv_lora_rank", "rope_head_dim"),
    "all_reduce": ("num_gpus", "num_bytes"),
    "device_copy": ("num_bytes",),
    "host_copy": ("num_bytes",),
    "top_p_sort": ("batch_size", "vocab_size"),
    "top_p": ("batch_size", "vocab_size"),
    "penalties": ("batch_size", "vocab_size"),
}
"""Columns of the shape, by kind of operator. `mla_attention` decodes over latent vectors. The last three are the
sampler's operations beyond greedy decoding: cutting candidates by sorting, cutting without sorting, and repetition
penalties."""
MAY_BE_ZERO = ("context_tokens", "balanced")
FIRST_COLUMNS = (
    "operator", "dtype", "m", "n", "k", "batch_size", "new_tokens", "context_tokens", "num_heads", "num_kv_heads",
    "head_dim", "num_gpus", "num_bytes", "latency_s", "gpu", "software",
)  # fmt: skip
COLUMNS = (
    *FIRST_COLUMNS,
    *SHAPES["moe"],
    "kv_lora_rank",
    "rope_head_dim",
    "vocab_size",
)
"""Columns of the files of `headway measure`. A row has values for the columns of its operator. Older files have
`FIRST_COLUMNS` alone."""
SYSTEMS = {"a100_sxm": "a100-80gb", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"}
"""AIConfigurator's system names, and the catalog's GPUs."""
DTYPES = {"bfloat16": "bf16", "float16": "bf16", "fp16": "bf16", "half": "bf16", "fp8_block": "fp8"}
MOE_DTYPES = {"bfloat16": "bf16", "fp8_block": "fp8", "w4a16_mxfp4": "int4", "fp8": "fp8, one scale a tensor"}
AIC_HEAD_DIM = 128
POWER_LAW = "power_law_1.01"
"""The least skewed measured routing of tokens to experts, for tables without balanced routing."""
ENGINE_ALL_REDUCE = ("vLLM_custom_graph", "NCCL")
"""All-reduce kernels of an engine: its own in a CUDA graph, or NCCL. The faster kernel counts."""


class OperatorSamples(Struct, frozen=True):
    """Valid rows of one operator in one dtype."""

    kind: OperatorKind
    dtype: str
    shape: dict[str, Floats]
    """Values by column of `SHAPES`."""
    seconds: Floats
    software: str = ""

    @property
    def key(self) -> str:
        """The name of the fit, such as `gemm.bf16` or `all_reduce`."""
        return f"{self.kind}.{self.dtype}" if self.dtype else self.kind

    def only(self, mask: Mask) -> OperatorSamples:
        shape = {name: values[mask] for name, values in self.shape.items()}
        return OperatorSamples(self.kind, self.dtype, shape, self.seconds[mask], self.software)


class OperatorTable(Struct, frozen=True):
    """The samples of one file, and the number of rows skipped by reason."""

    file: str
    format: str
    num_rows: int
    samples: tuple[OperatorSamples, ...]
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of skipped rows by reason. Together with the sample rows they sum to `num_rows`."""
    notes: tuple[str, ...] = ()


def _gemm(table: TableRows) -> Iterator[tuple[OperatorKind, str, Mask, dict[str, Floats]]]:
    dtypes = _renamed(table.words("gemm_dtype"), DTYPES)
    for dtype in ("bf16", "fp8"):
        yield "gemm", dtype, dtypes == dtype, {name: table.numbers(name) for name in ("m", "n", "k")}


def _moe(table: TableRows) -> Iterator[tuple[OperatorKind, str, Mask, dict[str, Floats]]]:
    dtypes = _renamed(table.words("moe_dtype"), MOE_DTYPES)
    own = {"intermediate_size": "inter_size", "experts_per_token": "topk", "tp": "moe_tp_size"}
    shape = {name: table.numbers(own.get(name, name)) for name in SHAPES["moe"][:-1]}
    routed = table.words("distribution")
    unsharded = table.numbers("moe_ep_size") == 1
    for dtype in ("bf16", "fp8", "int4"):
        matching = (dtypes == dtype) & unsharded
        chosen = "balanced" if (matching & (routed == "balanced") & table.of_gpu).any() else POWER_LAW
        balanced = (routed == "balanced").astype(float)
        yield "moe", dtype, matching & (routed == chosen), {**shape, "balanced": balanced}


def _attention(table: TableRows) -> Iterator[tuple[OperatorKind, str, Mask, dict[str, Floats]]]:
    step, new = table.numbers("step"), table.numbers("isl")
    own = ("batch_size", "num_heads")
    shape = {name: table.numbers(name) for name in own}
    shape |= {"num_kv_heads": table.numbers("num_key_value_heads"), "head_dim": np.full(len(step), AIC_HEAD_DIM, float)}
    decode = (new == 1) & (step > 0)
    yield "decode_attention", "", decode, {**shape, "context_tokens": step + 1}
    yield "prefill_attention", "", ~decode, {**shape, "new_tokens": new, "context_tokens": step}


def _collectives(table: TableRows) -> Iterator[tuple[OperatorKind, str, Mask, dict[str, Floats]]]:
    shape = {"num_gpus": table.numbers("num_gpus"), "num_bytes": table.numbers("message_size")}
    matching = np.isin(table.words("kernel_source").astype(str), ENGINE_ALL_REDUCE)
    half = np.isin(table.words("nccl_dtype").astype(str), ("", "half"))
    yield "all_reduce", "", (table.words("op_name") == "all_reduce") & matching & half, shape


def _measured(table: TableRows) -> Iterator[tuple[OperatorKind, str, Mask, dict[str, Floats]]]:
    operators, dtypes = table.words("operator"), _renamed(table.words("dtype"), DTYPES)
    for kind in get_args(OperatorKind):
        matching = operators == kind
        if not matching.any():
            continue
        shape = {name: table.numbers(name) for name in SHAPES[kind]}
        if kind in ("gemm", "moe"):
            for dtype in ("bf16", "fp8"):
                yield kind, dtype, matching & (dtypes == dtype), shape
        else:
            yield kind, "", matching, shape


class TableFormat(Struct, frozen=True):
    """A kind of table: identifying columns, further required columns, and how it is split into operators."""

    name: str
    marks: tuple[str, ...]
    needs: tuple[str, ...]
    parts: Callable[[TableRows], Iterator[tuple[OperatorKind, str, Mask, dict[str, Floats]]]]
    gpu: str = "system"
    software: str = "vllm"
    seconds: tuple[str, float] = ("latency_ms", 1e-3)


_MOE = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "distribution")
_ATTENTION = ("batch_size", "num_heads", "num_key_value_heads")
FORMATS = (
    TableFormat("moe", ("moe_dtype",), _MOE, _moe),
    TableFormat("gemm", ("gemm_dtype",), ("m", "n", "k"), _gemm),
    TableFormat("attention", ("isl", "step"), _ATTENTION, _attention),
    TableFormat("collectives", ("op_name", "message_size"), ("num_gpus", "kernel_source", "nccl_dtype"), _collectives),
    TableFormat("headway measure", ("operator",), FIRST_COLUMNS, _measured, "gpu", "software", ("latency_s", 1.0)),
)


class TableRows:
    """A table of text cells whose columns are converted to numbers on access."""

    def __init__(self, table: pa.Table, of_gpu: Mask) -> None:
        self._table = table
        self._numbers: dict[str, Floats] = {}
        self.of_gpu = of_gpu
        """Mask of the rows of the requested GPU."""

    def words(self, name: str) -> Words:
        values: Words = np.array([value.strip() for value in self._table[name].to_pylist()], dtype=object)
        return values

    def numbers(self, name: str) -> Floats:
        """A column as numbers; NaN for non-numeric cells and for a missing column."""
        if name not in self._numbers and name not in self._table.column_names:
            self._numbers[name] = np.full(self._table.num_rows, np.nan)
        elif name not in self._numbers:
            self._numbers[name] = np.array(
                [_number(value) for value in self._table[name].to_pylist()], dtype=np.float64
            )
        return self._numbers[name]


def recognise(header: list[str]) -> TableFormat | None:
    """The format of a table with these columns; if columns are missing, the nearest format. None if none is near."""
    for form in FORMATS:
        if all(mark in header for mark in form.marks):
            return form
    columns = {form.name: {*form.marks, *form.needs, form.seconds[0]} for form in FORMATS}
    nearest = max(FORMATS, key=lambda form: len(columns[form.name] & set(header)) / len(columns[form.name]))
    return nearest if len(columns[nearest.name] & set(header)) >= 3 else None


def read(path: Path, gpu: Gpu) -> OperatorTable:
    """Read the operator latencies of `gpu` in a table. Raises HeadwayError if columns are missing."""
    table, malformed = _table(path)
    header = [name.strip() for name in table.column_names]
    table = table.rename_columns(header)
    form = recognise(header)
    if form is None:
        raise HeadwayError(f"{path}: line 1: not an operator table: columns {', '.join(header)}")
    _check_header(path, form, header)
    num_rows = table.num_rows
    left_out = {"rows with too few or too many cells": malformed} if malformed else {}
    of_gpu, notes = _of_gpu(table, form, gpu, left_out)
    rows = TableRows(table, of_gpu)
    samples = tuple(_samples(rows, form, left_out))
    return OperatorTable(str(path), form.name, num_rows + malformed, samples, left_out, tuple(notes))


def _samples(rows: TableRows, form: TableFormat, left_out: dict[str, int]) -> Iterator[OperatorSamples]:
    column, unit = form.seconds
    seconds = rows.numbers(column) * unit
    taken = np.zeros(len(seconds), dtype=bool)
    for kind, dtype, chosen, shape in form.parts(rows):
        chosen = chosen & rows.of_gpu & ~taken
        taken |= chosen
        shape = {name: shape[name] for name in SHAPES[kind]}
        for why, bad in _faults(shape, seconds, column):
            count_skipped(left_out, why, chosen & bad)
            chosen = chosen & ~bad
        if not chosen.any():
            continue
        shape = {name: values[chosen] for name, values in shape.items()}
        yield deduplicated(
            OperatorSamples(kind, dtype, shape, seconds[chosen], _software(rows, form, chosen)), left_out
        )
    count_skipped(left_out, "of operators or dtypes that are not fitted", rows.of_gpu & ~taken)


def _faults(shape: Mapping[str, Floats], seconds: Floats, column: str) -> Iterator[tuple[str, Mask]]:
    for name, values in shape.items():
        yield f"with {name} that is not a number", ~np.isfinite(values)
        yield f"with {name} below {0 if name in MAY_BE_ZERO else 1}", values < (0 if name in MAY_BE_ZERO else 1)
    yield f"with {column} that is not a number", ~np.isfinite(seconds)
    yield f"with {column} of zero or below", seconds <= 0


def deduplicated(samples: OperatorSamples, left_out: dict[str, int]) -> OperatorSamples:
    """Reduce the samples to one row per shape, in order, and count the dropped rows in `left_out`.

    Of several measurements of a shape the median counts. For an all-reduce the fastest counts, because an engine
    chooses its kernel.
    """
    shapes, index = np.unique(np.column_stack(list(samples.shape.values())), axis=0, return_inverse=True)
    index = index.reshape(-1)
    order = np.lexsort((samples.seconds, index))
    group, ranked = index[order], samples.seconds[order]
    same = np.r_[False, (group[1:] == group[:-1]) & (ranked[1:] == ranked[:-1])]
    count_skipped(left_out, "that are duplicates", same)
    group, ranked = group[~same], ranked[~same]
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    size = np.diff(np.r_[first, len(group)])
    fastest = samples.kind == "all_reduce"
    why = (
        "of other kernels or runs, slower for the same size" if fastest else "that measure a shape again (median taken)"
    )
    count_skipped(left_out, why, np.repeat(size > 1, size - 1))
    seconds = ranked[first] if fastest else (ranked[first + (size - 1) // 2] + ranked[first + size // 2]) / 2
    shape = {name: shapes[:, i] for i, name in enumerate(samples.shape)}
    return OperatorSamples(samples.kind, samples.dtype, shape, seconds, samples.software)


def _software(rows: TableRows, form: TableFormat, chosen: Mask) -> str:
    try:
        names = {str(value) for value in rows.words(form.software)[chosen] if value}
    except KeyError:
        return ""
    prefix = "vLLM " if form.software == "vllm" else ""
    return ", ".join(prefix + each for each in sorted(names))


def _of_gpu(table: pa.Table, form: TableFormat, gpu: Gpu, left_out: dict[str, int]) -> tuple[Mask, list[str]]:
    if form.gpu not in table.column_names:
        return np.ones(table.num_rows, dtype=bool), [f"no column {form.gpu!r}: assumed to be measured on {gpu.name}"]
    names = np.array(table[form.gpu].to_pylist(), dtype=object)
    matching = np.zeros(len(names), dtype=bool)
    for name in dict.fromkeys(names):
        here = names == name
        try:
            measured_on = catalog.gpu(SYSTEMS.get(str(name), str(name))).name
        except HeadwayError:
            count_skipped(left_out, f"of unknown GPU {str(name)!r}", here)
            continue
        if measured_on == gpu.name:
            matching |= here
        else:
            count_skipped(left_out, f"of {measured_on}", here)
    return matching, []


def _check_header(path: Path, form: TableFormat, header: list[str]) -> None:
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise HeadwayError(f"{path}: line 1: columns given twice: {', '.join(twice)}")
    column = form.seconds[0]
    missing = [name for name in (*form.marks, *form.needs, column) if name not in header]
    if missing:
        stem = column.rsplit("_", 1)[0]
        other = next((name for name in header if name.startswith(f"{stem}_") and column in missing), None)
        hint = f"; {other} is there: give {column}" if other else ""
        raise HeadwayError(f"{path}: line 1: read as a {form.name} table; missing columns: {', '.join(missing)}{hint}")


def _table(path: Path) -> tuple[pa.Table, int]:
    """All columns as text, and the number of rows with a wrong number of cells."""
    malformed: list[object] = []

    def skip(row: object) -> str:
        malformed.append(row)
        return "skip"

    try:
        with pa.input_stream(str(path), compression="detect") as file:
            header = next(csv.reader([file.read(1 << 16).split(b"\n", 1)[0].decode("utf-8-sig").strip()]))
        options = pc.ConvertOptions(column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False)
        with pa.input_stream(str(path), compression="detect") as file:
            table = pc.read_csv(file, parse_options=pc.ParseOptions(invalid_row_handler=skip), convert_options=options)
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: cannot be read as CSV: {error}") from None
    columns = [column.cast(pa.string()) for column in table.columns]
    return pa.table(columns, names=table.column_names), len(malformed)


def _renamed(words: Words, names: Mapping[str, str]) -> Words:
    renamed: Words = np.array([names.get(word, word) for word in words], dtype=object)
    return renamed


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return float("nan")


def count_skipped(left_out: dict[str, int], why: str, rows: Mask) -> None:
    if num := int(rows.sum()):
        left_out[why] = left_out.get(why, 0) + num
