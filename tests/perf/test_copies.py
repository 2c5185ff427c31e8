"""Host copies, KV transfers and cold starts: invariants, and the shipped coefficients against measurements."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import pytest

from headway import catalog
from headway.catalog.costs import costs
from headway.core.errors import HeadwayError
from headway.perf.copies import cold_start_s, host_copy_s, load_s, start_s
from headway.perf.memory import kv_bytes_per_token
from headway.perf.params import weights_bytes

GIB = 2**30
needs_data = pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")


def rows(name: str) -> list[dict[str, str]]:
    with gzip.open(Path(os.environ["HEADWAY_DATA"]) / "measured" / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def test_host_copies_use_every_gpus_link() -> None:
    h100, gib = catalog.gpu("h100"), 2**30
    one, four = host_copy_s(gib, h100), host_copy_s(gib, h100, tp=4)
    assert 0.015 < one < 0.03
    assert one / four == pytest.approx(4, rel=0.02)


def test_weights_come_sooner_from_nearer() -> None:
    cost, size = costs().cold_start, weights_bytes(catalog.model("llama-3.1-70b"))
    near, far = (load_s(size, 4, storage, cost) for storage in ("local", "hub"))
    assert near < load_s(size, 4, "weka", cost) < load_s(size, 4, "gp3", cost) < far
    assert load_s(size, 8, "local", cost) == pytest.approx(near / 2)
    assert cold_start_s(size, 4, "hub", cost) == far + start_s(cost)
    assert start_s(cost, graphs=False) < start_s(cost) < start_s(cost, compiled=False)
    with pytest.raises(HeadwayError, match="unknown storage 'weca'; did you mean 'weka'"):
        load_s(size, 4, "weca", cost)


@needs_data
def test_kv_transfers() -> None:
    cost = costs().kv_transfer["mooncake-h800"]
    for row in rows("kv_transfer_mooncake_h800"):
        predicted_s = cost.latency_s + float(row["kv_bytes_calc"]) * cost.s_per_byte
        assert predicted_s == pytest.approx(float(row["transfer_ms"]) / 1e3, rel=0.08)
    num_bytes = 8192 * kv_bytes_per_token(catalog.model("llama-3.1-8b"))
    assert cost.latency_s + num_bytes * cost.s_per_byte == pytest.approx(7.8e-3, rel=0.05)


@needs_data
def test_cold_start_of_the_run_measured_whole() -> None:
    """Llama-3.3-70B on two nodes of four GPUs, from a hub: 258 s until graphs were captured."""
    found_s = cold_start_s(8 * 16.46 * GIB, 8, "hub", costs().cold_start)
    assert found_s == pytest.approx(258, rel=0.1)
