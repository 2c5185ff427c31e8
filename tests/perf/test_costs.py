"""Copies, cold starts and watts: what must hold, and the shipped coefficients against the measurements."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog
from headway.catalog.costs import costs, kv_transfer, power
from headway.core.errors import HeadwayError
from headway.perf.coldstart import cold_start_s, load_s, start_s
from headway.perf.links import kv_bytes, kv_transfer_s
from headway.perf.memory import weights_bytes
from headway.perf.power import decode_shares, guessed, joules_per_token, watts

GIB = 2**30
needs_data = pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")
SHARES = st.floats(0, 1)


def rows(name: str) -> list[dict[str, str]]:
    with gzip.open(Path(os.environ["HEADWAY_DATA"]) / "measured" / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


@given(SHARES, SHARES, SHARES, st.sampled_from(costs().power))
def test_watts_grow_with_use_up_to_the_limit(memory: float, compute: float, more: float, cost) -> None:  # type: ignore[no-untyped-def]
    drawn = watts(memory, compute, cost)
    assert 0 < cost.base_w <= drawn <= cost.limit_w
    assert drawn <= watts(memory + more, compute, cost) and drawn <= watts(memory, compute + more, cost)


def test_batching_saves_energy() -> None:
    """A token of a large batch costs far fewer joules than one of a batch of one."""
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("h100")
    cost = power(gpu.name)
    assert cost is not None
    spent = []
    for batch, tokens_per_s in ((8, 1070.0), (256, 9010.0)):
        shares = decode_shares(model, gpu, 1, batch, 300, tokens_per_s)
        spent.append(joules_per_token(watts(*shares, cost), tokens_per_s))
    assert spent[0] > 4 * spent[1]


def test_a_batch_touches_more_experts_the_larger_it_is() -> None:
    model, gpu = catalog.model("mixtral-8x7b"), catalog.gpu("h100")
    one, many = (decode_shares(model, gpu, 2, batch, 0, 100.0 * batch)[0] for batch in (1, 64))
    assert 0.2 < one / many < 0.4  # two experts of eight, and what is not an expert


def test_gpus_nobody_measured_draw_less_than_their_board_allows() -> None:
    assert power("l40s") is None
    cost = guessed(catalog.gpu("l40s"))
    assert cost.base_w < watts(0.5, 0.1, cost) <= 350


def test_weights_come_sooner_from_nearer() -> None:
    cost, size = costs().cold_start, weights_bytes(catalog.model("llama-3.1-70b"))
    near, far = (load_s(size, 4, storage, cost) for storage in ("local", "hub"))
    assert near < load_s(size, 4, "weka", cost) < load_s(size, 4, "gp3", cost) < far
    assert load_s(size, 8, "local", cost) == pytest.approx(near / 2)
    assert cold_start_s(size, 4, "hub", cost) == far + start_s(cost)
    assert start_s(cost, graphs=False) < start_s(cost) < start_s(cost, compiled=False)
    with pytest.raises(HeadwayError, match="unknown storage 'weca'; did you mean 'weka'"):
        load_s(size, 4, "weca", cost)


def test_an_unknown_network_is_named() -> None:
    with pytest.raises(HeadwayError, match="unknown network"):
        kv_transfer("string and cans")


@needs_data
def test_kv_transfers() -> None:
    cost = kv_transfer("mooncake-h800")
    for row in rows("kv_transfer_mooncake_h800"):
        found_s = kv_transfer_s(float(row["kv_bytes_calc"]), cost)
        assert found_s == pytest.approx(float(row["transfer_ms"]) / 1e3, rel=0.08)
    assert kv_transfer_s(kv_bytes(catalog.model("llama-3.1-8b"), 8192), cost) == pytest.approx(7.8e-3, rel=0.05)


@needs_data
def test_cold_start_of_the_run_measured_whole() -> None:
    """Llama-3.3-70B on two nodes of four GPUs, from a hub: 258 s until graphs were captured."""
    found_s = cold_start_s(8 * 16.46 * GIB, 8, "hub", costs().cold_start)
    assert found_s == pytest.approx(258, rel=0.1)


@needs_data
@pytest.mark.parametrize(("name", "most"), [("h100-80gb-sxm", 0.10), ("b200-180gb-sxm", 0.09)])
def test_watts_while_serving(name: str, most: float) -> None:
    """Over every text configuration of a model that the catalog knows: median and mean below `most`."""
    gpu, cost, errors = catalog.gpu(name), power(name), []
    known = {name for model in catalog.models() for name in (model.hf_id, *model.aliases)}
    assert cost is not None
    for row in rows("mlenergy_llm"):
        of_text = row["task"] in ("lm-arena-chat", "gpqa", "sourcegraph-fim") and row["model_id"] in known
        if catalog.gpu(row["gpu_model"]) != gpu or not of_text:
            continue
        num_gpus, rate = int(row["num_gpus"]), float(row["output_throughput_tokens_per_sec"])
        dtype = {"bfloat16": "bf16", "fp8": "fp8", "mxfp4": "int4"}[row["weight_precision"]]
        model = replace(catalog.model(row["model_id"]), dtype=dtype)
        context = float(row["avg_output_len"]) / 2
        shares = decode_shares(model, gpu, num_gpus, float(row["avg_batch_size"]), context, rate)
        errors.append(abs(watts(*shares, cost) * num_gpus / float(row["avg_power_watts"]) - 1))
    assert len(errors) > 100
    assert median(errors) < most and fmean(errors) < most
