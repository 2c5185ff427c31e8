"""The step-time model: lines that hold, more work that never takes less time, operators by hand."""

from __future__ import annotations

from functools import cache
from itertools import combinations, groupby
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog
from headway.catalog.coefficients import (
    AllReduce,
    Coefficients,
    DecodeAttention,
    Kernels,
    Overhead,
    PrefillAttention,
    Roofline,
)
from headway.catalog.load import coefficients
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.perf.attention import windowed_pairs
from headway.perf.memory import kv_bytes_per_token
from headway.perf.operators import tiled_rows
from headway.perf.params import weights_bytes
from headway.perf.speculation import step_model
from headway.perf.step import StepModel, graph_tokens, launched_s, runs_of_slots

SHAPES = [
    ("llama-2-70b", "h100", 4, 1),
    ("llama-3.1-8b", "a100", 1, 1),
    ("llama-3.1-70b", "l40s", 4, 2),
    ("deepseek-v3", "h200", 8, 2),
    ("mixtral-8x7b", "mi300x", 2, 1),
    ("gpt-oss-120b", "h100", 2, 1),
    ("llama-4-scout", "h200", 4, 1),
    ("bloom-176b", "a100", 8, 1),
]
shapes = st.sampled_from(SHAPES)
sequences = st.integers(1, 400)
contexts = st.integers(1, 40_000)
chunks = st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000)), min_size=1, max_size=4)


@cache
def step(name: str, gpu: str, tp: int = 1, pp: int = 1, engine: str = "simulated") -> StepModel:
    return StepModel(catalog.model(name), catalog.gpu(gpu), catalog.engine(engine), Parallel(tp=tp, pp=pp))


@given(shapes, sequences, contexts, st.integers(0, 5000), st.data())
def test_a_line_holds_in_every_iteration(
    shape: tuple[str, str, int, int], num: int, context: int, k: int, data: st.DataObject
) -> None:
    growing = data.draw(st.integers(0, num))
    model = step(*shape)
    a_s, b_s, iterations = model.line(num, num * context, (), num * 100, growing)
    assert iterations is None
    later_s = model.line(num, num * context + k * num, (), num * 100 + k * growing, growing)[0]
    assert later_s == pytest.approx(a_s + k * b_s, rel=1e-12)


@given(shapes, sequences, contexts, chunks)
def test_a_line_with_chunks_is_one_iteration(
    shape: tuple[str, str, int, int], num: int, context: int, some: list[tuple[int, int]]
) -> None:
    num = max(num, shape[3])  # one to each stage at least; fewer would leave stages idle
    a_s, b_s, iterations = step(*shape).line(num, num * context, some)
    assert a_s > step(*shape).line(num, num * context)[0]
    assert (b_s >= 0.0, iterations) == (True, 1)


@given(shapes, sequences, contexts)
def test_another_sequence_never_saves_time(shape: tuple[str, str, int, int], num: int, context: int) -> None:
    model, num = step(*shape), max(num, shape[3])
    less, more = model.line(num, num * context), model.line(num + 1, (num + 1) * context)
    assert more[0] >= less[0] * (1 - 1e-12)
    assert model.line(num, num * context + 1)[0] > less[0]


@given(shapes, st.integers(0, 300), contexts, chunks, st.integers(1, 4096), st.integers(1, 50_000))
def test_more_prompt_never_saves_time(
    shape: tuple[str, str, int, int],
    num: int,
    context: int,
    some: list[tuple[int, int]],
    new: int,
    before: int,
) -> None:
    name, gpu, tp, _ = shape
    model = step(name, gpu, tp)
    base_s = model.line(num, num * context, some)[0]
    (first_new, first_before), rest = some[0], some[1:]
    assert model.line(num, num * context, [(first_new + new, first_before), *rest])[0] >= base_s
    assert model.line(num, num * context, [(first_new, first_before + before), *rest])[0] >= base_s
    assert model.line(num, num * context, [*some, (new, before)])[0] >= base_s


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "mi300x", "b200"])
@pytest.mark.parametrize("name", ["llama-2-70b", "mixtral-8x7b", "qwen2.5-32b", "deepseek-v3"])
def test_more_gpus_are_faster_at_long_prompts(gpu: str, name: str) -> None:
    times = [step(name, gpu, tp).line(0, 0, [(8192, 0)])[0] for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[3] > 2.9


def test_more_gpus_are_faster_at_decoding_a_large_model() -> None:
    times = [step("llama-2-70b", "h100", tp).line(32, 32 * 1000)[0] for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_small_steps_gain_little_from_more_gpus() -> None:
    one, eight = (step("llama-3.1-8b", "h100", tp).line(1, 100)[0] for tp in (1, 8))
    assert one / eight < 6


NO_WAIT = "0.16"
"""The first version of vLLM that schedules pipelines ahead."""


def pipeline(version: str = NO_WAIT, tp: int = 4, pp: int = 2, **engine: Any) -> StepModel:
    changed = replace(catalog.engine("vllm-0.15"), version=version, **engine)
    return StepModel(catalog.model("llama-2-70b"), catalog.gpu("h100"), changed, Parallel(tp=tp, pp=pp))


def test_a_pipeline_of_one_sequence_takes_as_long_as_its_stages() -> None:
    assert pipeline().line(1, 1000)[0] == pytest.approx(pipeline(pp=1).line(1, 1000)[0], rel=0.01)


def test_a_pipeline_decodes_a_little_more_than_its_share_at_a_time() -> None:
    # 64 sequences in two micro-batches: 32 in the mean, and half a standard deviation of 4 more in the fuller one.
    whole, piped = pipeline(pp=1), pipeline()
    assert whole.line(32, 32_000)[0] < piped.line(64, 64_000)[0] < whole.line(38, 38_000)[0]


def test_a_chunk_is_in_one_micro_batch() -> None:
    # An engine does not split the tokens of one prompt over micro-batches, so its iteration passes every stage whole.
    whole, piped = pipeline(pp=1), pipeline()
    assert piped.line(0, 0, [(2048, 0)])[0] == pytest.approx(whole.line(0, 0, [(2048, 0)])[0], rel=0.01)
    two = [(2048, 0), (2048, 0)]
    assert piped.line(0, 0, two)[0] == pytest.approx(whole.line(0, 0, two[:1])[0], rel=0.01)


def test_a_chunk_beyond_the_token_budget_takes_several_micro_batches() -> None:
    piped = pipeline(max_num_batched_tokens=2048)
    assert piped.line(0, 0, [(4096, 0)])[0] == pytest.approx(piped.line(0, 0, [(2048, 2048)])[0], rel=0.01)


def test_older_engines_let_a_pipeline_wait_for_the_host() -> None:
    host_s = catalog.coefficients("h100-80gb-sxm", "vllm-0.15").overhead.pipeline_step_s
    for version in ("0.15.1", ""):
        waiting_s = pipeline(version).line(1, 1000)[0] - pipeline().line(1, 1000)[0]
        assert waiting_s == pytest.approx(host_s) and host_s > 1e-3
    assert pipeline("0.15.1", pp=1).line(1, 1000) == pipeline(pp=1).line(1, 1000)


def test_calibrated_only_where_measured() -> None:
    assert step("llama-3.1-8b", "h100").calibrated
    assert step("llama-3.1-8b", "h100", engine="vllm-0.15").calibrated
    assert not step("llama-3.1-8b", "h800").calibrated
    assert not step("llama-3.1-8b", "mi300x").calibrated
    own = replace(catalog.gpu("h100"), name="one of my own")
    assert not StepModel(catalog.model("llama-3.1-8b"), own, catalog.engine("simulated"), Parallel()).calibrated


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(HeadwayError, match="tp 3 does not divide"):
        step("llama-2-70b", "h100", 3)


PERFECT = Coefficients(
    Kernels(
        gemm={d: Roofline(0.0, 1.0, 1.0, 60.0) for d in ("bf16", "fp8")},
        moe={d: Roofline(0.0, 1.0, 1.0, 60.0) for d in ("bf16", "fp8", "int4")},
        prefill_attention=PrefillAttention(1.0, 0.0),
        decode_attention=DecodeAttention(0.0, 1.0, 1.0),
        all_reduce={"2": AllReduce(0.0, 0.0, 1.0)},
        elementwise_efficiency=1e9,
    ),
    Overhead(0.0, 0.0, 0.0),
)
"""Kernels at the peaks, no overhead: what is left can be done by hand."""


def perfect(name: str, dtype: str | None = None, tp: int = 1) -> StepModel:
    model = catalog.model(name)
    model = replace(model, dtype=dtype) if dtype else model
    return StepModel(model, catalog.gpu("h100"), catalog.engine("simulated"), Parallel(tp=tp), PERFECT)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "int4"])
def test_decoding_at_the_peaks_reads_weights_and_cache(dtype: str) -> None:
    model = replace(catalog.model("llama-2-70b"), dtype=dtype)
    bandwidth = catalog.gpu("h100").bandwidth_bytes_per_s
    embedding = 2 * model.vocab_size * model.hidden_size
    a_s, b_s, _ = perfect("llama-2-70b", dtype).line(1, 1000)
    read = weights_bytes(model) - embedding + 1000 * kv_bytes_per_token(model)
    assert a_s == pytest.approx(read / bandwidth, rel=2e-3)
    assert b_s == pytest.approx(kv_bytes_per_token(model) / bandwidth)


def test_prefill_at_the_peaks_computes_parameters_and_pairs() -> None:
    tokens = 8192
    products = 2 * tokens * 80 * (8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    head_bytes = 2 * 8192 * 32000
    attention = 80 * 4 * 64 * 128 * tokens * tokens / 2
    expected_s = (products + attention) / 989.4e12 + head_bytes / 3.35e12
    found_s = perfect("llama-2-70b").line(0, 0, [(tokens, 0)])[0]
    assert found_s == pytest.approx(expected_s, rel=2e-3)


def test_one_chunk_is_the_sum_of_its_halves_attention() -> None:
    model = perfect("llama-2-70b")
    whole_s = model.line(0, 0, [(4096, 1000)])[0]
    base_s = model.line(0, 0, [(4096, 0)])[0]
    assert whole_s - base_s == pytest.approx(80 * 4 * 64 * 128 * 4096 * 1000 / 989.4e12, rel=1e-9)


def test_all_reduce_at_the_peaks() -> None:
    alone, paired = perfect("llama-2-70b"), perfect("llama-2-70b", tp=2)
    tokens = 8192
    wire_s = 161 * 2 * tokens * 8192 / 450e9 + 2 * 32000 / 2 / 450e9
    gained_s = (alone.line(0, 0, [(tokens, 0)])[0]) / 2
    assert paired.line(0, 0, [(tokens, 0)])[0] - gained_s == pytest.approx(wire_s, rel=0.01)


def test_number_of_touched_experts_matches_chance() -> None:
    model = catalog.model("mixtral-8x7b")
    one, many = perfect("mixtral-8x7b").line(1, 0)[0], perfect("mixtral-8x7b").line(64, 0)[0]
    experts_s = 32 * 8 * 3 * 4096 * 14336 * 2 / 3.35e12
    rest_s = (weights_bytes(model) - 2 * 32000 * 4096) / 3.35e12 - experts_s
    assert one == pytest.approx(experts_s * 2 / 8 + rest_s, rel=0.01)
    assert many == pytest.approx(experts_s + rest_s, rel=0.02)


def test_latent_attention_reads_the_latent_and_expands_the_context() -> None:
    model = perfect("deepseek-v3", tp=2)
    _, b_s, _ = model.line(1, 1000)
    by_bytes, by_flops = 576 * 2 / 3.35e12, 2 * 64 * (2 * 512 + 64) / 989.4e12
    assert b_s == pytest.approx(61 * max(by_bytes, by_flops))
    extra_s = model.line(0, 0, [(100, 1000)])[0] - model.line(0, 0, [(100, 0)])[0]
    pairs_s = 100 * 1000 * 2 * 64 * (192 + 128) / 989.4e12
    up_s = 1000 * 2 * 512 * 64 * 256 / 989.4e12
    assert extra_s == pytest.approx(61 * (pairs_s + up_s), rel=1e-6)


def test_a_window_bounds_what_half_the_layers_read() -> None:
    model = perfect("gpt-oss-20b")
    read_s = 2 * 8 * 64 * 2 / 3.35e12
    base_s = model.line(1, 0, (), 0, 0)[0]
    a_s, b_s, _ = model.line(1, 1000, (), 128, 0)
    assert a_s - base_s == pytest.approx(12 * (1000 + 128) * read_s)
    assert b_s == pytest.approx(12 * read_s)
    assert model.line(1, 100, (), 100, 1)[1] == pytest.approx(24 * read_s)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 40))
def test_windowed_pairs_are_near_the_counted_ones(new: int, before: int, window: int) -> None:
    counted = sum(min(before + i + 0.5, window) for i in range(new))
    assert windowed_pairs(new, before, window) == pytest.approx(counted, abs=new * 0.5 + 0.5)
    assert windowed_pairs(new, before, 10**6) == new * (before + new / 2)


@pytest.mark.parametrize(
    ("rows", "out", "share", "expected"),
    [
        (0, 4096, 1.0, 0),
        (1, 4096, 0.0, 64),
        (1, 4096, 1.0, 64 * 132 / 64),  # 64 tiles of 64 x 64 keep 132 multiprocessors busy
        (65, 4096, 1.0, 128 * 132 / 64),  # 2 x 32 tiles of 64 x 128
        (129, 4096, 1.0, 256 * 132 / 64),  # 2 x 32 tiles of 128 x 128
        (256, 132 * 128, 1.0, 256),  # two whole waves
        (257, 132 * 128, 0.5, 512),
        (256, 133 * 128, 1.0, 256 * 3 * 132 / 266),  # the third holds two tiles
        (256, 133 * 128, 0.5, 256 * (0.5 + 0.5 * 3 * 132 / 266)),
    ],
)
def test_tiles_by_hand(rows: int, out: int, share: float, expected: float) -> None:
    assert tiled_rows(rows, out, 132, share) == pytest.approx(expected)


@given(st.integers(1, 20_000), st.integers(1, 2000), st.integers(1, 70_000), st.floats(0, 1))
def test_more_rows_are_never_computed_sooner(rows: int, more: int, out: int, share: float) -> None:
    least, most = tiled_rows(rows, out, 132, share), tiled_rows(rows + more, out, 132, share)
    assert rows <= least * (1 + 1e-12) and least <= most * (1 + 1e-12)


def test_tiles_are_of_eight_bit_products_on_known_gpus() -> None:
    fp8 = Roofline(0.0, 1.0, 1.0, 60.0, wave_share=1.0)
    found = replace(PERFECT, kernels=replace(PERFECT.kernels, gemm={**PERFECT.kernels.gemm, "fp8": fp8}))
    engine, dense = catalog.engine("simulated"), catalog.model("llama-2-70b")

    def chunk_s(tokens: int, dtype: str = "fp8", num_sms: int | None = 132) -> float:
        gpu = replace(catalog.gpu("h100"), num_sms=num_sms)
        step = StepModel(replace(dense, dtype=dtype), gpu, engine, Parallel(), found)
        return step.line(0, 0, [(tokens, 0)])[0]

    assert chunk_s(2049) > 1.05 * chunk_s(2048)
    assert chunk_s(2049) == pytest.approx(chunk_s(2304), rel=0.02)
    for same in ({"dtype": "bf16"}, {"num_sms": None}):
        assert chunk_s(2049, **same) == pytest.approx(chunk_s(2048, **same), rel=0.002)


@given(st.integers(1, 8192), st.floats(0.05, 2.0), st.floats(0, 1))
def test_a_cast_takes_its_share_of_latency_and_bytes(tokens: int, efficiency: float, share: float) -> None:
    plain, engine = Roofline(1e-6, 1.0, 1.0, 60.0), catalog.engine("simulated")

    def chunk_s(latency_s: float, efficiency: float, share: float) -> float:
        cast = Roofline(latency_s, 1.0, 1.0, 60.0, cast_efficiency=efficiency, cast_share=share)
        found = replace(PERFECT, kernels=replace(PERFECT.kernels, gemm={"bf16": plain, "fp8": cast}))
        model = replace(catalog.model("llama-2-70b"), dtype="fp8")
        return StepModel(model, catalog.gpu("h100"), engine, Parallel(), found).line(0, 0, [(tokens, 0)])[0]

    fused_s, cast_s = (chunk_s(3e-6, efficiency, each) for each in (0.0, 1.0))
    assert chunk_s(3e-6, efficiency, share) == pytest.approx(fused_s + share * (cast_s - fused_s))
    assert fused_s == pytest.approx(chunk_s(1e-6, 1e9, 0.0), rel=1e-12)
    assert cast_s > fused_s


def test_overheads_are_added() -> None:
    plain = perfect("llama-2-70b").line(10, 1000)[0]
    found = replace(PERFECT, overhead=Overhead(step_s=1e-3, layer_s=1e-5, sequence_s=1e-6))
    costly = StepModel(
        catalog.model("llama-2-70b"), catalog.gpu("h100"), catalog.engine("simulated"), Parallel(), found
    )
    assert costly.line(10, 1000)[0] - plain == pytest.approx(1e-3 + 80 * 1e-5 + 10 * 1e-6)


@pytest.mark.parametrize(("name", "num_layers"), [("llama-2-70b", 0), ("qwen3-30b-a3b", 48), ("deepseek-v3", 58)])
def test_the_time_of_a_layer_with_experts_counts_for_those_alone(name: str, num_layers: int) -> None:
    found = replace(PERFECT, overhead=Overhead(0.0, 0.0, 0.0, expert_layer_s=-1e-6))
    step = StepModel(catalog.model(name), catalog.gpu("h100"), catalog.engine("simulated"), Parallel(tp=8), found)
    for chunks in ((), [(700, 0)]):
        less_s = perfect(name, tp=8).line(10, 1000, chunks)[0] - step.line(10, 1000, chunks)[0]
        assert less_s == pytest.approx(num_layers * 1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "layers_s"),
    [
        ("llama-3.1-8b", 32 * 1e-3),
        ("qwen3-30b-a3b", 48 * 1e-2),
        ("llama-4-scout", 48 * 3e-2),  # with a shared expert
        ("deepseek-v3", 3 * 1e-3 + 58 * 3.5e-2),  # in 8 bits
    ],
)
def test_launching_bounds_what_no_graph_holds(name: str, layers_s: float) -> None:
    overhead = Overhead(
        0.0, 0.0, 0.0, 1e-3, launch_expert_layer_s=1e-2, launch_fp8_expert_s=5e-3, launch_shared_expert_s=2e-2
    )
    found = replace(PERFECT, overhead=overhead)
    step = StepModel(catalog.model(name), catalog.gpu("h200"), catalog.engine("simulated"), Parallel(), found)
    assert launched_s(step.line(0, 0, [(513, 0)])) == pytest.approx(layers_s)
    assert launched_s(step.line(0, 0, [(512, 0)])) < layers_s / 2


@pytest.mark.parametrize("tp", [4, 8])
def test_a_prompt_delays_the_other_tokens_of_scout_as_measured(tp: int) -> None:
    """The launch of an iteration with a prompt begins with the iteration before it, whose tokens come first. Measured
    in bf16: 56 to 60 ms between tokens (99th percentile, 16 requests)."""
    step = StepModel(catalog.model("llama-4-scout"), catalog.gpu("h100"), catalog.engine("vllm-0.15"), Parallel(tp=tp))
    before_s, launch_s = step.line(16, 16_000)[0], step.line(16, 16_000, [(1000, 0)])[1]
    assert 0.050 < launch_s - before_s < 0.075


def test_the_shared_expert_runs_beside_the_routed_ones_in_small_batches() -> None:
    scout = catalog.model("llama-4-scout")
    coefficients = catalog.coefficients("h100-80gb-sxm", "vllm-0.15")
    in_turn = replace(coefficients, overhead=replace(coefficients.overhead, shared_beside_tokens=0))
    beside, after = (
        StepModel(scout, catalog.gpu("h100"), catalog.engine("vllm-0.15"), Parallel(tp=4), used)
        for used in (coefficients, in_turn)
    )
    assert 0.9 < beside.line(32, 0)[0] / after.line(32, 0)[0] < 0.97
    assert beside.line(257, 0) == after.line(257, 0)


@pytest.mark.parametrize(("num", "size"), [(1, 1), (3, 4), (5, 8), (8, 8), (9, 16), (250, 256), (257, 272), (512, 512)])
def test_graphs_have_the_sizes_of_vllm(num: int, size: int) -> None:
    assert graph_tokens(num) == size


def test_padding_of_a_graph_touches_experts_too() -> None:
    scout = StepModel(catalog.model("llama-4-scout"), catalog.gpu("h100"), catalog.engine("vllm-0.15"), Parallel(tp=4))
    nine, sixteen, seventeen = (scout.line(num, 0)[0] for num in (9, 16, 17))
    assert nine == pytest.approx(sixteen, rel=0.02)
    assert seventeen > 1.05 * sixteen


def test_an_old_gpu_computes_eight_bit_weights_in_sixteen() -> None:
    long = [(8192, 0)]
    model, engine = catalog.model("llama-2-70b"), catalog.engine("simulated")
    for gpu, faster in (("a100", False), ("h100", True)):
        times = [
            StepModel(replace(model, dtype=d), catalog.gpu(gpu), engine, Parallel(), PERFECT).line(0, 0, long)[0]
            for d in ("bf16", "fp8")
        ]
        assert (times[1] < 0.7 * times[0]) is faster


@pytest.mark.parametrize("num_slots", [1, 2, 4, 6])
def test_runs_of_slots_are_those_of_all_sets(num_slots: int) -> None:
    for num in range(1, num_slots + 1):
        sets = list(combinations(range(num_slots), num))
        lengths = [
            len(list(run)) for busy in sets for _, run in groupby(enumerate(busy), key=lambda pair: pair[1] - pair[0])
        ]
        found = runs_of_slots(num, num_slots)
        assert found == pytest.approx([lengths.count(length) / len(sets) for length in range(1, num + 1)])


def test_slots_with_their_own_caches_take_a_pass_for_each_run_of_neighbours() -> None:
    """llama.cpp with four slots: two of them are neighbours half of the time, all four always."""
    model, gpu, engine = catalog.model("llama-3.1-8b"), catalog.gpu("h100"), catalog.engine("llama.cpp")
    own = StepModel(model, gpu, engine, Parallel())
    shared = StepModel(model, gpu, replace(engine, passes_by_slot=False), Parallel())
    one, two, three, four = (own.line(num, 0)[0] for num in (1, 2, 3, 4))
    assert one == pytest.approx(shared.line(1, 0)[0], rel=0.01)
    assert four == pytest.approx(shared.line(4, 0)[0], rel=0.01)
    assert two == pytest.approx(one + 0.5 * shared.line(2, 0)[0], rel=0.01)
    assert three > four and own.line(2, 0, [(100, 0)])[0] > shared.line(2, 0, [(100, 0)])[0] + 0.9 * one


def test_step_times_of_equal_facts_are_computed_once() -> None:
    """Whatever objects state them; other coefficients, GPUs or engines have times of their own."""
    model, gpu, engine = catalog.model("llama-3.1-8b"), catalog.gpu("h100"), catalog.engine("vllm-v1")
    used = coefficients(gpu.name, engine.name)
    kept = step_model(model, gpu, engine, Parallel(), used)
    again = [msgspec.convert(msgspec.to_builtins(each), type(each)) for each in (model, gpu, engine, Parallel(), used)]
    assert step_model(*again) is kept
    slower = replace(used, overhead=replace(used.overhead, step_s=used.overhead.step_s + 1.0))
    others = (model, gpu, engine, Parallel(tp=2), used), (model, gpu, replace(engine, max_num_seqs=1), Parallel(), used)
    for facts in (*others, (model, gpu, engine, Parallel(), slower)):
        assert step_model(*facts) is not kept
    assert step_model(model, gpu, engine, Parallel(), slower).line(1, 1)[0] == pytest.approx(kept.line(1, 1)[0] + 1.0)
