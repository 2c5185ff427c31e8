"""Durations of copies and transfers."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import catalog
from headway.perf.links import host_copy_s, kv_bytes, network_s


def test_kv_bytes_grow_with_tokens() -> None:
    assert kv_bytes(catalog.model("llama-2-70b"), 1000) == 327_680_000
    assert kv_bytes(catalog.model("llama-2-70b"), 1000, kv_dtype_bytes=1.0) == 163_840_000
    assert kv_bytes(catalog.model("llama-2-70b"), 0) == 0


def test_host_copies_use_every_gpus_link() -> None:
    h100, gib = catalog.gpu("h100"), 2**30
    one, four = host_copy_s(gib, h100), host_copy_s(gib, h100, tp=4)
    assert 0.015 < one < 0.03
    assert one / four == pytest.approx(4, rel=0.02)


@given(st.floats(0, 1e12), st.floats(1e6, 1e12), st.floats(0, 1))
def test_transfers_take_their_latency_and_their_bytes(num_bytes: float, rate: float, latency: float) -> None:
    assert network_s(num_bytes, rate, latency) == pytest.approx(latency + num_bytes / rate)


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")
def test_measured_kv_transfers_are_a_line() -> None:
    """Mooncake's measured transfers on H800: 0.59 ms and 6.48 ms a GB."""
    path = Path(os.environ["HEADWAY_DATA"]) / "measured" / "kv_transfer_mooncake_h800.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = [row for row in csv.DictReader(file) if float(row["kv_bytes_calc"]) > 50e6]
    for row in rows:
        found_s = network_s(float(row["kv_bytes_calc"]), 1e12 / 6.48, 0.59e-3)
        assert found_s == pytest.approx(float(row["transfer_ms"]) / 1e3, rel=0.25)
