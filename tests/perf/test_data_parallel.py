"""Data parallel ranks that step together: by hand, in the limits, and as one rank alone."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog, scenario
from headway.catalog.coefficients import (
    AllReduce,
    Coefficients,
    DecodeAttention,
    Kernels,
    Overhead,
    PrefillAttention,
    Roofline,
)
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.perf.memory import plan
from headway.perf.params import routed_bytes
from headway.perf.step import StepModel, spread_over_ranks

MODEL, GPU, ENGINE = catalog.model("qwen3-30b-a3b"), catalog.gpu("h200"), catalog.engine("simulated")
FREE = 1e12
"""An efficiency at which an operator costs nothing."""
EXACT = 1e-9
LATENCY_S = 7e-6


def step(
    dp: int,
    tp: int = 1,
    *,
    own: float = 1.0,
    experts: float = 1.0,
    link: float = 1.0,
    latency_s: float = 0.0,
    per_sequence_s: float = 0.0,
) -> StepModel:
    """Efficiencies of what each rank does on its own, of the experts, and of the links."""
    kernels = Kernels(
        gemm={dtype: Roofline(0.0, own, own, 60.0) for dtype in ("bf16", "fp8")},
        moe={dtype: Roofline(0.0, experts, experts, 60.0) for dtype in ("bf16", "fp8", "int4")},
        prefill_attention=PrefillAttention(own, 0.0),
        decode_attention=DecodeAttention(0.0, own, own),
        all_reduce={"8": AllReduce(latency_s, 0.0, link)},
        elementwise_efficiency=own,
    )
    found = Coefficients(kernels, Overhead(0.0, 0.0, per_sequence_s))
    return StepModel(MODEL, GPU, ENGINE, Parallel(tp=tp, ep=True, dp=dp), found)


sequences, contexts, ranks = st.integers(1, 200), st.integers(0, 30_000), st.sampled_from([2, 4, 8])


@given(sequences, contexts, ranks, st.integers(1, 4096), st.integers(0, 9000))
def test_balanced_ranks_are_replicas_where_experts_and_links_are_free(
    num: int, context: int, dp: int, new: int, before: int
) -> None:
    alone, many = step(1, experts=FREE, link=FREE), step(dp, experts=FREE, link=FREE)
    assert many.line(dp * num, dp * num * context)[:2] == pytest.approx(alone.line(num, num * context)[:2], rel=EXACT)
    chunk = (new, before)
    together = many.line(dp * num, dp * num * context, [chunk] * dp)
    assert together[:2] == pytest.approx(alone.line(num, num * context, [chunk])[:2], rel=EXACT)
    assert together[2] == 1


@given(sequences, ranks)
def test_experts_are_spread_over_all_ranks(num: int, dp: int) -> None:
    alone, many = step(1, own=FREE, link=FREE), step(dp, own=FREE, link=FREE)
    tokens = dp * ceil(num / dp)
    assert many.line(num, 0)[0] == pytest.approx(alone.line(tokens, 0)[0] / dp, rel=1e-6)
    both = many.line(0, 0, [(512, 0), (512, 0)])[0]
    assert both == pytest.approx(alone.line(0, 0, [(1024, 0)])[0] / dp, rel=1e-6)


@pytest.mark.parametrize(("dp", "tokens"), [(2, 2), (2, 96), (8, 4096)])
def test_tokens_go_to_the_experts_and_back(dp: int, tokens: int) -> None:
    model = step(dp, own=FREE, experts=FREE, latency_s=LATENCY_S)
    wire_s = (dp - 1) / dp * 2 * tokens * MODEL.hidden_size / GPU.link_bytes_per_s
    assert model.line(tokens, 0)[0] == pytest.approx(MODEL.num_layers * 2 * (LATENCY_S + wire_s), rel=1e-6)


def test_between_nodes_the_network_is_the_link() -> None:
    within, across = (step(dp, own=FREE, experts=FREE).line(dp * 512, 0)[0] / ((dp - 1) * 512) for dp in (8, 16))
    assert across > 8 * within


@given(sequences, contexts, ranks)
def test_the_fullest_rank_decides(num: int, context: int, dp: int) -> None:
    model = step(dp)
    even = dp * ceil(num / dp)
    (a_s, b_s, holds), (even_s, even_b_s, _) = model.line(num, num * context), model.line(even, even * context)
    assert holds is None
    assert (a_s, b_s) == pytest.approx((even_s, even_b_s), rel=EXACT)
    assert model.line(num, num * context + 10 * num)[0] == pytest.approx(a_s + 10 * b_s, rel=EXACT)


def test_rank_without_work_does_not_shorten_the_iteration() -> None:
    model = step(4)
    assert model.line(1, 1000)[0] == pytest.approx(model.line(4, 4000)[0], rel=EXACT)
    assert model.line(5, 5000)[0] > model.line(4, 4000)[0]


def test_sequences_are_scheduled_rank_by_rank() -> None:
    cost = step(4, per_sequence_s=1e-3).line(10, 0)[0] - step(4).line(10, 0)[0]
    assert cost == pytest.approx(3e-3)


def test_a_single_chunk_keeps_one_rank_busy() -> None:
    model = step(2, experts=FREE, link=FREE)
    whole, halves = model.line(0, 0, [(4096, 0)])[0], model.line(0, 0, [(2048, 0), (2048, 0)])[0]
    assert whole == pytest.approx(step(1, experts=FREE).line(0, 0, [(4096, 0)])[0], rel=EXACT)
    assert whole > 1.9 * halves


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 100)), min_size=1, max_size=9), st.integers(1, 5))
def test_chunks_are_dealt_out(chunks: list[tuple[int, int]], num_ranks: int) -> None:
    found = spread_over_ranks(chunks, num_ranks)
    assert sorted(chunk for rank in found for chunk in rank) == sorted(chunks)
    assert all(found) and len(found) <= num_ranks
    tokens = [sum(new for new, _ in rank) for rank in found]
    assert max(tokens) <= sum(new for new, _ in chunks) / num_ranks + max(new for new, _ in chunks)


@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_hold_all_but_their_share_of_the_experts(dp: int) -> None:
    engine = replace(ENGINE, max_num_seqs=256, max_num_batched_tokens=8192)
    alone = plan(MODEL, GPU, engine, Parallel())
    ranked = replace(engine, max_num_seqs=dp * 256, max_num_batched_tokens=dp * 8192)
    found = plan(MODEL, GPU, ranked, Parallel(ep=True, dp=dp))
    assert alone.weights_bytes - found.weights_bytes == pytest.approx(routed_bytes(MODEL) * (1 - 1 / dp))
    freed = routed_bytes(MODEL) * (1 - 1 / dp) - (found.activation_bytes - alone.activation_bytes)
    more = freed / alone.kv_bytes_per_token_gpu
    assert found.kv_capacity_tokens == pytest.approx(dp * (alone.kv_capacity_tokens + more), abs=dp * 32)
    assert found.kv_blocks % dp == 0
    assert found.kv_bytes_per_token_replica == alone.kv_bytes_per_token_replica


def test_a_replica_has_the_gpus_of_all_its_ranks() -> None:
    assert Parallel(tp=2, pp=2, ep=True, dp=4).num_gpus == 16


@pytest.mark.parametrize(
    ("name", "parallel", "message"),
    [
        ("llama-3.1-8b", Parallel(dp=2), "llama-3.1-8b is dense, .*; use replicas: 2, dp: 1"),
        ("llama-3.1-8b", Parallel(dp=2, ep=True), "use replicas: 2, dp: 1"),
        ("qwen3-30b-a3b", Parallel(dp=2), "ranks step together where they share experts; set ep: true"),
        ("qwen3-30b-a3b", Parallel(dp=0, ep=True), "dp 0 must be at least 1"),
    ],
)
def test_invalid_ranks_are_errors(name: str, parallel: Parallel, message: str) -> None:
    with pytest.raises(HeadwayError, match=message):
        plan(catalog.model(name), GPU, ENGINE, parallel)
    with pytest.raises(HeadwayError, match=message):
        StepModel(catalog.model(name), GPU, ENGINE, parallel)


SCENARIO = """
workload: {arrivals: 30, num_requests: 200, prompt_tokens: 700, output_tokens: 60}
fleet: [{model: %s, gpu: h200, ep: true, dp: 2, engine: {name: vllm-0.15, max_num_seqs: 256}}]
simulation: {step: %s}
"""


def test_a_scenario_has_replicas_of_ranks(tmp_path: Path) -> None:
    path, ends = tmp_path / "ranks.yaml", []
    for way in ("stretch", "exact"):
        path.write_text(SCENARIO % ("qwen3-30b-a3b", way))
        records = scenario.run(scenario.load(path)).records
        assert [replica.num_gpus for replica in records.replicas] == [2]
        ends.append(records.requests["end_s"])
    assert len(ends[0]) == 200
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def test_dense_model_with_dp_is_an_error_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "ranks.yaml"
    path.write_text(SCENARIO % ("llama-3.1-8b", "stretch"))
    with pytest.raises(HeadwayError, match=r"fleet\[0\].*llama-3.1-8b is dense.*use replicas: 2, dp: 1"):
        scenario.load(path)
