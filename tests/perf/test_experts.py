"""The experts of a layer: read from a table by hand, and against the smooth form where there is none."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog
from headway.catalog.coefficients import ExpertCurve, ExpertTable
from headway.core.fleet import Model, Parallel
from headway.perf.experts import Experts, expert_chances

GPU = catalog.gpu("h100")
MIXTRAL = catalog.model("mixtral-8x7b")
PUBLISHED = {
    each["name"] for each in json.loads((files("headway.catalog") / "data/models/published.json").read_text("utf-8"))
}
MIXTURES = [
    model for model in catalog.models() if model.moe and model.name != "deepseek-r1-awq" and model.name not in PUBLISHED
]
"""Those whose quantisation is in a table: models that are listed by their published configs alone have none."""
KNOWN = catalog.coefficients("h100-80gb-sxm", "vllm-0.15")
CURVE = ExpertCurve("bf16", 4096, 14336, 2, 8, 2, 1, (100.0, 400.0, 400.0, 4000.0))
TABLE = ExpertTable("by hand", {}, True, (1.0, 4.0, 100.0, 1000.0), (CURVE,))


def layer_us(num_tokens: int, tp: int = 2, table: ExpertTable | None = TABLE) -> float:
    experts = Experts(MIXTRAL, GPU, Parallel(tp=tp), replace(KNOWN, experts=table))
    return 1e6 * experts.seconds(num_tokens)


def touched(num_tokens: int) -> float:
    return sum(count * (1 - (1 - chance) ** num_tokens) for count, chance in expert_chances(MIXTRAL))


def test_large_batches_read_the_table_at_their_tokens() -> None:
    assert layer_us(100) == pytest.approx(400, rel=1e-3)
    assert layer_us(1000) == pytest.approx(4000, rel=1e-3)
    assert layer_us(316) == pytest.approx(400 * 10**0.5, rel=0.01)  # halfway between the logarithms
    assert layer_us(2000) == pytest.approx(8000, rel=1e-3)  # proportional beyond


def test_small_batches_read_the_table_at_the_experts_that_they_touch() -> None:
    # With balanced rows, 4 tokens touch all 8 experts and time is proportional to the tokens: 100 us for each.
    for num_tokens in (1, 2, 3):
        assert layer_us(num_tokens) == pytest.approx(100 * touched(num_tokens) / 2)
    assert layer_us(8) == pytest.approx(400 - 100 * (8 - touched(8)) / 2)


def test_a_power_law_is_read_as_it_is() -> None:
    skewed = replace(TABLE, balanced=False)
    assert layer_us(2, table=skewed) == pytest.approx(200)


def test_shapes_that_the_table_lacks_use_the_smooth_form() -> None:
    assert layer_us(64, tp=4) == layer_us(64, tp=4, table=None) != pytest.approx(400)
    assert not Experts(MIXTRAL, GPU, Parallel(tp=4), replace(KNOWN, experts=TABLE)).is_measured


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MIXTURES, ids=lambda model: model.name)
def test_the_catalogs_mixtures_are_measured_on_hopper(model: Model, tp: int, ep: bool) -> None:
    for gpu in ("h100-80gb-sxm", "h200-141gb-sxm"):
        used = catalog.coefficients(gpu, "vllm-0.15")
        assert Experts(model, catalog.gpu(gpu), Parallel(tp=tp, ep=ep), used).is_measured


def test_tables_are_of_the_gpu_or_of_one_with_the_same_peaks() -> None:
    for name, has in (("h100-80gb-sxm", True), ("a100-80gb", True), ("l40s", False), ("b200-180gb-sxm", False)):
        assert (catalog.coefficients(name, "vllm-0.15").experts is not None) is has, name


@given(st.integers(1, 20_000), st.integers(1, 500), st.sampled_from(MIXTURES))
def test_more_tokens_never_take_less_time(num_tokens: int, more: int, model: Model) -> None:
    experts = Experts(model, GPU, Parallel(tp=2), KNOWN)
    assert experts.seconds(num_tokens) <= experts.seconds(num_tokens + more) * (1 + 1e-12)
