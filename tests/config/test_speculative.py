"""The key `speculative` of a pool: what it becomes, and what is refused where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config.scenario import StepTimes, assemble
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool, Speculative

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.5}


def pool(setting: dict[str, Any], **pool: Any) -> Pool:
    made = {"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "speculative": setting, **pool}
    document = {"workload": {"builtin": "chat", "num_requests": 5}, "fleet": [made]}
    return assemble(document, Places(), Path()).fleet.pools[0]


def drafts(setting: dict[str, Any], **given: Any) -> Speculative:
    found = pool(setting, **given).engine.drafts
    assert found is not None
    return found


def test_a_rate_or_a_share_for_each_position() -> None:
    assert drafts(NGRAM).acceptance == (0.5, 0.25, 0.125)
    assert drafts({**NGRAM, "acceptance": [0.73, 0.52, 0.36]}).acceptance == (0.73, 0.52, 0.36)


def test_what_drafts() -> None:
    assert drafts(NGRAM).draft is None
    model = drafts({**NGRAM, "method": "draft_model", "model": "llama-3.2-3b"})
    assert model.draft is not None and (model.draft.num_layers, model.model) == (28, model.draft.hf_id)
    head = drafts({**NGRAM, "method": "eagle", "model": "acme/head"})
    assert head.draft is not None and (head.draft.num_layers, head.draft.vocab_size) == (1, 128_256)
    assert head.draft_shares_embeddings and head.model == "acme/head"
    own = drafts({**NGRAM, "method": "eagle3", "model": "acme/head"}).draft
    assert own is not None and own.vocab_size == 32_000
    mtp = drafts({**NGRAM, "method": "mtp"}, model="deepseek-v3", tp=8, gpu="h200", quantization="fp8").draft
    assert mtp is not None and mtp.moe is not None and (mtp.num_layers, mtp.moe.num_dense_layers) == (1, 0)


def test_a_workload_has_its_own_acceptance() -> None:
    document = {
        "workload": {"builtin": "chat", "num_requests": 5, "acceptance": 0.25},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "speculative": NGRAM}],
    }
    chosen = assemble(document, Places(), Path())
    assert chosen.spec.workload.acceptance == 0.25
    assert not StepTimes(chosen).model(chosen.fleet.pools[0]).calibrated


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        ({"method": "medusa"}, {}, r"speculative\.method: .*'medusa'"),
        ({"acceptance": 1.5}, {}, r"speculative\.acceptance"),
        ({"acceptance": [0.5, 0.2]}, {}, r"acceptance: 2 numbers; expected 3"),
        ({"acceptance": [0.5, 0.2, 0.3]}, {}, "do not rise"),
        ({"model": "llama-3.2-3b"}, {}, "ngram has none"),
        ({"method": "draft_model"}, {}, r"speculative\.model: missing"),
        ({"method": "draft_model", "model": "llama-3.2-4b"}, {}, "did you mean"),
        ({"method": "eagle", "match_share": 0.5}, {}, "goes with method ngram; this is eagle"),
        ({"draft_tensor_parallel_size": 3}, {}, r"3; expected 1 or tp \(1\)"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 5]]}, {}, "at most 3 tokens"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 3], [8, 9, 1]]}, {}, "behind the entry before"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 3]]}, {"engine": "sglang"}, "SGLang has no such setting"),
        ({}, {"pp": 2}, "expected pp: 1"),
        ({}, {"engine": "vllm-v0"}, "runs prompts apart"),
        ({}, {"engine": {"name": "vllm-0.15", "max_num_batched_tokens": 512}}, "1024 tokens in an iteration"),
    ],
)
def test_what_is_refused(change: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwayError, match=message) as error:
        pool({**NGRAM, **change}, **given)
    assert "fleet[0]" in str(error.value) and "\n" not in str(error.value)


def test_it_is_no_setting_of_an_engine() -> None:
    with pytest.raises(HeadwayError, match="expected it beside `engine`"):
        pool(NGRAM, engine={"name": "vllm-0.15", "speculative": NGRAM})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speculative": NGRAM}, "drafts by ngram"),
        ({"quantization": "fp8_block"}, "8-bit products with a scale for each block as with one for all"),
        ({"quantization": "awq"}, "4-bit products as 16-bit ones with fewer bytes"),
        ({"engine": {"name": "vllm-0.15", "version": "0.24"}}, "overhead of vllm 0.15.1, not 0.24"),
    ],
)
def test_what_was_not_measured_is_said(given: dict[str, Any], message: str) -> None:
    document = {
        "workload": {"builtin": "chat", "num_requests": 5},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "name": "one", **given}],
    }
    found = StepTimes(assemble(document, Places(), Path())).coefficients["one"]
    assert (found.calibrated, found.estimated) == (False, (message,))
