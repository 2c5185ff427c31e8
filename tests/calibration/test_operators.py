"""Operator tables: recognised by their columns; what cannot be used is named and counted."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from headway.calibration.operators import COLUMNS, OperatorTable, read
from headway.calibration.peaks import peaks, plausible
from headway.core.errors import HeadwayError
from made_up_measurements import GPU, Row, all_reduce, attention, gemm, write


def used(reading: OperatorTable) -> int:
    return sum(len(samples.seconds) for samples in reading.samples)


def test_table_formats_are_recognised(tmp_path: Path) -> None:
    keys = {}
    for name, rows in {"gemm": gemm(), "attention": attention(), "collectives": all_reduce()}.items():
        reading = read(write(tmp_path / f"{name}.csv", rows), GPU)
        assert reading.format == name
        assert used(reading) == reading.num_rows == len(rows)
        keys[name] = {samples.key for samples in reading.samples}
    assert keys == {
        "gemm": {"gemm.bf16"},
        "attention": {"prefill_attention", "decode_attention"},
        "collectives": {"all_reduce"},
    }


def test_gzip_and_a_byte_order_mark(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.csv", gemm())
    zipped = tmp_path / "a.csv.gz"
    zipped.write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain.read_bytes()))
    assert (read(zipped, GPU).samples[0].seconds == read(plain, GPU).samples[0].seconds).all()


def test_a_file_of_headway_measure(tmp_path: Path) -> None:
    rows: list[Row] = []
    for i in range(1, 9):
        row: Row = {**dict.fromkeys(COLUMNS, ""), "gpu": "NVIDIA H100 80GB HBM3", "software": "torch 2"}
        rows.append({**row, "operator": "gemm", "dtype": "bf16", "m": i, "n": 4096, "k": 4096, "latency_s": 2e-5})
        rows.append({**row, "operator": "host_copy", "num_bytes": 1e6 * i, "latency_s": 3e-5 * i})
    reading = read(write(tmp_path / "m.csv", rows), GPU)
    assert [(s.key, len(s.seconds), s.software) for s in reading.samples] == [
        ("gemm.bf16", 8, "torch 2"),
        ("host_copy", 8, "torch 2"),
    ]
    assert not reading.left_out


def test_bad_rows_are_named_and_counted(tmp_path: Path) -> None:
    good = gemm()
    bad = [
        {**good[0], "m": 3, "latency_ms": 0},
        {**good[0], "m": 3, "latency_ms": -1.5},
        {**good[0], "m": 3, "latency_ms": "n/a"},
        {**good[0], "m": 3, "latency_ms": "inf"},
        {**good[0], "m": 0},
        {**good[0], "k": "many"},
        {**good[0], "system": "tpu_v9"},
        {**good[0], "system": "l40s"},
        {**good[0], "gemm_dtype": "nvfp4"},
        good[1],
        {**good[2], "latency_ms": good[2]["latency_ms"] * 3},  # type: ignore[operator]
    ]
    path = write(tmp_path / "a.csv", [*good, *bad])
    path.write_text(path.read_text() + "bfloat16,1,2\n")
    reading = read(path, GPU)
    assert reading.left_out == {
        "rows with too few or too many cells": 1,
        "of unknown GPU 'tpu_v9'": 1,
        "of l40s": 1,
        "with m below 1": 1,
        "with k that is not a number": 1,
        "with latency_ms that is not a number": 2,
        "with latency_ms of zero or below": 2,
        "that are duplicates": 1,
        "that measure a shape again (median taken)": 1,
        "of operators or dtypes that are not fitted": 1,
    }
    assert used(reading) == len(good)
    assert used(reading) + sum(reading.left_out.values()) == reading.num_rows == len(good) + len(bad) + 1


def test_the_median_of_several_measurements(tmp_path: Path) -> None:
    row = gemm()[0]
    path = write(tmp_path / "a.csv", [{**row, "latency_ms": ms} for ms in (5, 1, 2, 2, 9)])
    assert read(path, GPU).samples[0].seconds.tolist() == [0.0035]


def test_the_fastest_all_reduce_counts(tmp_path: Path) -> None:
    slow = [{**row, "latency_ms": 99, "kernel_source": "vLLM_custom_graph"} for row in all_reduce()]
    eager = [{**row, "latency_ms": 1e-9, "kernel_source": "vLLM_custom_eager"} for row in all_reduce()]
    reading = read(write(tmp_path / "a.csv", [*slow, *all_reduce(), *eager]), GPU)
    expected = [float(str(row["latency_ms"])) / 1e3 for row in all_reduce()]
    assert reading.samples[0].seconds == pytest.approx(expected)
    assert reading.left_out["of other kernels or runs, slower for the same size"] == len(slow)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gemm_dtype,m,n,latency_ms\nbf16,1,1,1\n", "a.csv: line 1: read as a gemm table; missing columns: k"),
        ("gemm_dtype,m,n,k,latency_s,system\n", "missing columns: latency_ms; latency_s is there: give latency_ms"),
        ("gemm_dtype,m,m,n,k,latency_ms\n", "columns given twice: m"),
        ("batch_size,num_heads,num_key_value_heads,latency_ms\n", "missing columns: isl, step"),
        ("a,b\n1,2\n", "not an operator table"),
    ],
)
def test_invalid_headers_are_errors(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(HeadwayError, match=message):
        read(tmp_path / "a.csv", GPU)


def test_table_without_a_gpu_column_gets_a_note(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name not in ("system", "vllm")} for row in gemm()]
    reading = read(write(tmp_path / "a.csv", rows), GPU)
    assert used(reading) == len(rows)
    assert "assumed to be measured on h100-80gb-sxm" in reading.notes[0]


@pytest.mark.parametrize(("factor", "message"), [(1e-3, "faster than the peaks"), (1e3, "times what the peaks")])
def test_a_table_in_another_unit_is_refused(tmp_path: Path, factor: float, message: str) -> None:
    rows = [{**row, "latency_ms": float(str(row["latency_ms"])) * factor} for row in gemm()]
    samples = read(write(tmp_path / "a.csv", rows), GPU).samples[0]
    with pytest.raises(HeadwayError, match=message):
        plausible(samples, GPU, {}, "a.csv")


def test_mixed_units_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = [
        {**row, "latency_ms": float(str(row["latency_ms"])) * (1e-3 if i % 10 == 0 else 1)}
        for i, row in enumerate(gemm())
    ]
    samples, left_out = read(write(tmp_path / "a.csv", rows), GPU).samples[0], dict[str, int]()
    kept = plausible(samples, GPU, left_out, "a.csv")
    assert left_out == {"gemm.bf16: far from the rest (mixed units?)": 5}
    assert len(kept.seconds) == len(rows) - 5


def test_peaks_bound_the_measurements(tmp_path: Path) -> None:
    for rows in (gemm(), attention(), all_reduce()):
        for samples in read(write(tmp_path / "a.csv", rows), GPU).samples:
            bound = peaks(samples, GPU)
            assert (samples.seconds > 0.9 * np.maximum(bound.memory_s, bound.compute_s)).all()
