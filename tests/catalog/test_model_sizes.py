"""Sizes that the reader finds against those of `transformers`: scripts/model_sizes.py made the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway import catalog
from headway.core.errors import HeadwayError
from headway.core.fleet import Model, Parallel
from headway.perf.memory import plan
from headway.perf.params import active_params, expert_params, kv_bytes, num_params, state_bytes, weights_bytes
from headway.perf.step import StepModel

ROWS: dict[str, dict[str, Any]] = {
    row["family"]: row
    for row in json.loads((Path(__file__).parent / "model_sizes.json").read_text())
    if "error" not in row
}
REFUSED = {"blt", "deepseek_v4", "doge", "jetmoe", "longcat_flash", "zamba", "zamba2"}
EXPANDED = {"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"}
"""Families of sparse attention, whose latent vectors `transformers` keeps expanded, and engines do not."""
ELSEWHERE = {"minimax"}
"""Families whose states `transformers` keeps outside of the caches of layers."""


def read(family: str, folder: Path) -> Model:
    (folder / "config.json").write_text(json.dumps(ROWS[family]["config"]))
    return catalog.model_from_config(folder, family)


COUNTED = sorted(set(ROWS) - REFUSED)


def test_most_decoders_are_counted() -> None:
    assert len(COUNTED) >= 95


@pytest.mark.parametrize("family", COUNTED)
def test_sizes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model, row = read(family, tmp_path), ROWS[family]
    assert num_params(model) == pytest.approx(row["params"], rel=0.01)
    experts = sum(each.num for each in model.all_layers if each.has_experts) * expert_params(model)
    assert experts * (model.moe.num_experts if model.moe else 0) == pytest.approx(row["experts"], rel=0.01)
    if "kv_bytes" in row and family not in EXPANDED:
        assert kv_bytes(model) == pytest.approx(row["kv_bytes"], rel=0.01)
        if "window_kv_bytes" in row:
            assert kv_bytes(model, windowed=True) == pytest.approx(row["window_kv_bytes"], rel=0.01)
        if family not in ELSEWHERE:
            assert state_bytes(model) == pytest.approx(row["state_bytes"], rel=0.01)


@pytest.mark.parametrize("family", sorted(REFUSED & set(ROWS)))
def test_what_is_not_modelled_is_refused_by_name(family: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=f"model_type is '{family}', whose layers Headway does not model: "):
        read(family, tmp_path)


@pytest.mark.parametrize("family", COUNTED)
def test_every_family_has_step_times(family: str, tmp_path: Path) -> None:
    """No less than the bytes of what a token goes through take, and no less for more tokens."""
    model = read(family, tmp_path)
    gpu, engine = catalog.gpu("h200"), catalog.engine("vllm-0.15")
    step = StepModel(model, gpu, engine, Parallel())
    one, more = step.line(1, 100), step.line(64, 64 * 2000, (), 64 * min(2000, model.sliding_window_tokens or 0))
    read_s = (active_params(model) - model.vocab_size * model.hidden_size) * 2 / gpu.bandwidth_bytes_per_s
    assert one[0] > 0.9 * read_s and more[0] > one[0]
    prompt_s = step.line(0, 0, [(2048, 0)])[0]
    assert step.line(0, 0, [(512, 0)])[0] <= prompt_s <= step.line(0, 0, [(2048, 8192)])[0]
    if weights_bytes(model) < 0.8 * gpu.memory_bytes:
        short, long = (plan(model, gpu, engine, Parallel(), tokens).kv_capacity_tokens for tokens in (512.0, 65_536.0))
        assert long > short if model.memory_varies_with_length else long == short


def test_a_quantised_model_differs_by_its_bytes_alone(tmp_path: Path) -> None:
    for family in ("llama", "gemma3_text", "falcon_h1", "mimo_v2_flash"):
        plain = read(family, tmp_path)
        config = {**ROWS[family]["config"], "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        quantised = catalog.model_from_config(tmp_path, family)
        assert (num_params(quantised), kv_bytes(quantised)) == (num_params(plain), kv_bytes(plain))
        assert weights_bytes(quantised) < 0.6 * weights_bytes(plain)
