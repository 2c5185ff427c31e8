"""Cauchy's equations against values computed by hand, against sums, and against the real shapes of models."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headway import catalog
from headway.core.fleet import Model
from headway.perf import memory
from headway.perf.params import num_params, weights_bytes
from headway.planning.combos.cost_efficiency import (
    PhaseCosts,
    a1,
    a2,
    closed_form,
    of_shape,
    served_tokens_per_usd,
    stated,
    summed_tokens_per_usd,
)

LLAMA = catalog.model("llama-3.1-8b")
# Table 1: FLOP/s, bytes/s, $/h
H800, A800, H20 = (989e12, 3350e9, 2.69), (312e12, 1935e9, 1.19), (148e12, 4000e9, 1.50)
A10, RTX_4090, MI210 = (125e12, 600e9, 0.75), (165e12, 1008e9, 0.69), (181e12, 1638e9, 1.40)
LENGTHS = {"cnn-dailymail": (702, 42), "sharegpt": (290, 207), "longwriter": (337, 1330)}


def prefill_flop(costs: PhaseCosts, batch: float, r_in: float) -> float:
    """FLOP_prefill of a batch of prompts (Eq. 3)."""
    return batch * (costs.c1 * r_in**2 + costs.c2 * r_in)


def prefill_s(costs: PhaseCosts, batch: float, r_in: float, num_gpus: int, gpu_flops: float) -> float:
    """T_prefill (Eq. 4)."""
    return prefill_flop(costs, batch, r_in) / (num_gpus * gpu_flops)


def prefill_tokens_per_s(costs: PhaseCosts, r_in: float, num_gpus: int, gpu_flops: float) -> float:
    """S_prefill (Eq. 5)."""
    return num_gpus * gpu_flops * a1(costs, r_in)


def decode_bytes(costs: PhaseCosts, batch: float, r_in: float, r_out: float) -> float:
    """Byte_decode of all steps of a batch (Eq. 9).

    The sum of Eq. 8 is less by `batch c4 r_out / 2`: Eq. 9 takes R_out^2 / 2 for R_out (R_out - 1) / 2.
    """
    return (costs.c3 + batch * costs.c4 * r_in) * r_out + 0.5 * batch * costs.c4 * r_out**2


def decode_s(
    costs: PhaseCosts, batch: float, r_in: float, r_out: float, num_gpus: int, gpu_bytes_per_s: float
) -> float:
    """T_decode (Eq. 10)."""
    return decode_bytes(costs, batch, r_in, r_out) / (num_gpus * gpu_bytes_per_s)


def decode_tokens_per_s(
    costs: PhaseCosts, batch: float, r_in: float, r_out: float, num_gpus: int, gpu_bytes_per_s: float
) -> float:
    """S_decode (Eq. 11)."""
    return num_gpus * gpu_bytes_per_s * a2(costs, batch, r_in, r_out)


def test_coefficients_of_llama_by_hand() -> None:
    # l 32, h 4096, i 14336, k 8, s 128, v 128256, d 2
    # C1 = 4 * 32 * 4096 = 524,288
    # C2 = 8 * 32 * 4096^2 + 6 * 32 * 4096 * 14336 = 4,294,967,296 + 11,274,289,152
    # C3 = 2 * (2 * 128256 * 4096 + (4 * 4096^2 + 3 * 4096 * 14336 + 2 * 4096) * 32)
    #    = 2 * (1,050,673,152 + 243,277,824 * 32) = 2 * 8,835,563,520
    # C4 = 2 * 2 * 32 * 8 * 128
    assert stated(LLAMA) == PhaseCosts(524_288, 15_569_256_448, 17_671_127_040, 131_072)


def test_coefficients_of_the_real_shape_by_hand() -> None:
    # per layer: attention 4096 * 128 * (2 * 32 + 2 * 8) = 41,943,040; gate, up, down 3 * 4096 * 14336 = 176,160,768
    # C1: 4 FLOPs a pair and element of 4096, half of the pairs: 2 * 32 * 4096
    # C2 = 2 * 32 * 218,103,808; C3 = 2 * (32 * (218,103,808 + 2 * 4096) + 128256 * 4096 + 4096)
    costs = of_shape(LLAMA)
    assert costs.c1 == 262_144
    assert costs.c2 == pytest.approx(13_958_643_712, rel=1e-12)
    assert costs.c3 == pytest.approx(15_009_849_344, rel=1e-12)
    assert costs.c4 == 131_072


def test_equations_3_to_5_by_hand() -> None:
    # 8 prompts of 702: 8 * (524,288 * 702^2 + 15,569,256,448 * 702)
    costs = stated(LLAMA)
    flop = 8 * (524_288 * 702**2 + 15_569_256_448 * 702)
    assert prefill_flop(costs, 8, 702) == flop
    assert prefill_s(costs, 8, 702, 2, 989e12) == pytest.approx(flop / 1978e12)
    assert prefill_tokens_per_s(costs, 702, 2, 989e12) == pytest.approx(8 * 702 / (flop / 1978e12))
    # one H800: 989e12 / (524,288 * 702 + 15,569,256,448) = 989e12 / 15,937,306,624
    assert prefill_tokens_per_s(costs, 702, 1, 989e12) == pytest.approx(62_055.65, rel=1e-6)


def test_equations_8_to_11() -> None:
    costs, batch, r_in, r_out = stated(LLAMA), 32, 337, 1330
    summed = sum(costs.c3 + batch * costs.c4 * (r_in + j) for j in range(r_out))
    assert decode_bytes(costs, batch, r_in, r_out) - summed == pytest.approx(batch * costs.c4 * r_out / 2)
    seconds = decode_s(costs, batch, r_in, r_out, 2, 4000e9)
    assert decode_tokens_per_s(costs, batch, r_in, r_out, 2, 4000e9) == pytest.approx(batch * r_out / seconds)
    # one H20: 4e12 / (131,072 * 665 + 131,072 * 337 + 17,671,127,040 / 32) = 4e12 / 683,556,864
    assert decode_tokens_per_s(costs, 32, 337, 1330, 1, 4000e9) == pytest.approx(5_851.7443, rel=1e-6)


def test_equation_15_is_equation_14_for_any_counts() -> None:
    costs = stated(LLAMA)
    ce = closed_form(a1(costs, 290), a2(costs, 64, 290, 207), H800[0], H800[2], H20[1], H20[2])
    for n, k in ((1, 1), (1, 6), (2, 3)):
        speeds = prefill_tokens_per_s(costs, 290, n, H800[0]), decode_tokens_per_s(costs, 64, 290, 207, k, H20[1])
        assert summed_tokens_per_usd(speeds[0], n * H800[2], speeds[1], k * H20[2]) == pytest.approx(ce)


def test_peaks_per_dollar_as_in_table_1() -> None:
    """TFLOP/$ in thousands and GB/$ in millions, with 3,600 s to the hour."""
    table = {H800: (1320, 4.48), A10: (600, 2.88), RTX_4090: (861, 5.26), A800: (944, 5.85), MI210: (465, 4.21)}
    for (flops, _, usd), (tflop, _) in {**table, H20: (355, 9.60)}.items():
        assert closed_form(1.0, 0.0, flops / 1e12, usd, 0.0, usd) == pytest.approx(tflop * 1e3, rel=0.005)
    for (_, bytes_per_s, usd), (_, gb) in {**table, H20: (355, 9.60)}.items():
        assert closed_form(0.0, 1.0, 0.0, usd, bytes_per_s / 1e9, usd) == pytest.approx(gb * 1e6, rel=0.005)


@pytest.mark.parametrize("name", LENGTHS)
def test_the_closed_form_takes_the_best_gpu_of_each_phase_for_any_workload(name: str) -> None:
    """H800 to H20 ranks first for every dataset; the order by goodput may differ, and the paper's does."""
    r_in, r_out = LENGTHS[name]
    costs = stated(LLAMA)
    gpus = {"h800": H800, "a800": A800, "h20": H20}
    values = {
        (first, second): closed_form(a1(costs, r_in), a2(costs, 32, r_in, r_out), p[0], p[2], d[1], d[2]) or 0.0
        for first, p in gpus.items()
        for second, d in gpus.items()
    }
    assert max(values, key=lambda pair: values[pair]) == ("h800", "h20")
    assert min(values, key=lambda pair: values[pair]) == ("h20", "h800")


def test_served_tokens_per_dollar_of_table_3_and_the_example_of_3_3_2() -> None:
    """The paper's measured CE is goodput over price, with one number of tokens per request for a workload."""
    table_3 = [(1505.23e3, 2.14, 1), (1636.24e3, 2.32, 1), (1525.31e3, 2.90, 2), (1630.15e3, 3.14, 2)]
    table_3 += [(1231.35e3, 2.96, 3), (1329.15e3, 3.22, 3)]
    for ce, goodput, num_decode in table_3:
        assert served_tokens_per_usd(goodput, 825, 0, H800[2] + num_decode * H20[2]) == pytest.approx(ce, rel=0.01)
    for ce, goodput, usd in ((1.07e6, 0.82, 1.09), (1.15e6, 1.23, 1.50)):
        assert served_tokens_per_usd(goodput, 392.5, 0, usd) == pytest.approx(ce, rel=0.01)


def test_embeddings_of_any_type_are_not_read() -> None:
    other = replace(LLAMA, embedding_dtype="q4.5")
    read = LLAMA.vocab_size * LLAMA.hidden_size * (2 - 4.5 / 8)  # the output matrix is read
    assert of_shape(LLAMA).c3 - of_shape(other).c3 == pytest.approx(read, rel=1e-9)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-8b", "qwen1.5-14b", "deepseek-v3", "gpt-oss-120b"])
def test_costs_of_real_shapes_match_the_models_memory(name: str) -> None:
    model: Model = catalog.model(name)
    costs = of_shape(model, batch=10**9)
    embedding = 0 if model.tie_embeddings else 2.0 * model.vocab_size * model.hidden_size
    assert costs.c3 == pytest.approx(weights_bytes(model) - embedding, rel=1e-6)
    assert costs.c4 == memory.kv_bytes_per_token(model)
    assert costs.c2 < 2 * num_params(model)


def test_a_dense_model_with_as_many_kv_heads_is_as_stated_but_for_embeddings_and_the_mask() -> None:
    model = catalog.model("llama-2-7b")
    real, said = of_shape(model), stated(model)
    assert real.c2 == pytest.approx(said.c2, rel=1e-12) and real.c4 == said.c4 and 2 * real.c1 == said.c1
    assert said.c3 - real.c3 == pytest.approx(2 * model.vocab_size * model.hidden_size, rel=1e-3)


def test_a_batch_touches_more_experts_than_a_sequence_and_no_more_than_all() -> None:
    model = catalog.model("deepseek-v3")
    read = [of_shape(model, batch=batch).c3 for batch in (1, 8, 64, 4096)]
    assert read == sorted(read) and read[-1] < 1.001 * weights_bytes(model)
    moe = model.moe
    assert moe is not None and read[0] < 0.1 * read[-1]
    assert of_shape(model).c2 < 0.1 * stated(model).c2 * moe.num_experts


def test_tp_beyond_the_kv_heads_copies_them() -> None:
    llama, deepseek = catalog.model("llama-3.1-8b"), catalog.model("deepseek-v3")
    assert of_shape(llama, tp=8).c4 == of_shape(llama).c4
    assert of_shape(llama, tp=16).c4 == 2 * of_shape(llama).c4
    assert of_shape(deepseek, tp=8).c4 == 8 * of_shape(deepseek).c4


def test_free_combos_have_no_finite_efficiency() -> None:
    assert served_tokens_per_usd(1.0, 10, 10, 0.0) is None
    assert summed_tokens_per_usd(1.0, 1.0, 1.0, 0.0) is None
    assert summed_tokens_per_usd(1.0, 0.0, 1.0, 1.0) is None
