"""The time of choosing tokens: bytes by hand, and when it counts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headway import catalog
from headway.catalog.coefficients import Overhead
from headway.core.fleet import GREEDY, Engine, Parallel, Sampling
from headway.perf.sampler import Sampler, is_before
from headway.perf.step import StepModel

GPU = catalog.gpu("h100")
MODEL = replace(catalog.model("llama-3.1-8b"), vocab_size=100_000)
TOP_P = Sampling(temperature=0.6, top_p=0.9)
OVERHEAD = Overhead(
    0.0, 0.0, 0.0, sort_bytes_per_logit=400, sorts_before="0.17", cut_bytes_per_logit=80, penalty_bytes_per_logit=100
)


def row_bytes(sampling: Sampling | None, version: str = "0.15.1", num_rows: int = 1) -> float:
    """Bytes per logit that take as long as the sampler does for each row."""
    sampler = Sampler(replace(MODEL, sampling=sampling), GPU, Engine("vllm-0.15", version=version), OVERHEAD)
    return sampler.seconds(num_rows) / num_rows * GPU.bandwidth_bytes_per_s / MODEL.vocab_size


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (None, 0),
        (GREEDY, 0),
        (Sampling(), 0),  # all tokens are candidates
        (TOP_P, 400),
        (Sampling(top_k=20), 400),
        (Sampling(temperature=0.0, top_p=0.9), 0),
        (Sampling(top_p=0.9, repetition_penalty=1.05), 500),
    ],
)
def test_only_candidates_that_are_cut_cost_time(sampling: Sampling | None, expected: float) -> None:
    assert row_bytes(sampling) == pytest.approx(expected)


def test_even_one_sequence_takes_the_latency_of_the_kernels() -> None:
    slow = replace(OVERHEAD, sampler_latency_s=1e-3)
    for sampling, expected_s in ((GREEDY, 0), (TOP_P, 1e-3), (replace(TOP_P, repetition_penalty=1.1), 2e-3)):
        engine = Engine("vllm-0.15")
        with_, without = (
            Sampler(replace(MODEL, sampling=sampling), GPU, engine, one).seconds(1) for one in (slow, OVERHEAD)
        )
        assert with_ - without == pytest.approx(expected_s)


def test_newer_engines_do_not_sort() -> None:
    assert row_bytes(TOP_P, "0.17.0") == pytest.approx(80)
    assert row_bytes(TOP_P, "") == row_bytes(TOP_P, "0.16.3") == pytest.approx(400)


def test_one_request_in_a_batch_makes_the_engine_sort_all_rows() -> None:
    some = replace(TOP_P, share=0.1)
    assert row_bytes(some) == pytest.approx(0.1 * 400)
    assert row_bytes(some, num_rows=2) == pytest.approx(0.19 * 400)
    assert row_bytes(some, num_rows=200) == pytest.approx(400, rel=1e-6)


@pytest.mark.parametrize(
    ("version", "limit", "before"),
    [("0.15.1", "0.16", True), ("v0.16.0", "0.16", False), ("0.9", "0.16", True), ("", "0.16", True), ("9", "", True)],
)
def test_versions_are_ordered(version: str, limit: str, before: bool) -> None:
    assert is_before(version, limit) is before


def test_the_sampler_adds_to_every_iteration_whatever_the_parallelism() -> None:
    engine, sampled = catalog.engine("vllm-0.15"), catalog.model("llama-3.1-70b")
    added_s = []
    for tp in (2, 8):
        with_, without = (
            StepModel(model, GPU, engine, Parallel(tp=tp)).line(64, 64_000)
            for model in (sampled, replace(sampled, sampling=GREEDY))
        )
        assert with_[1] == without[1]  # contexts cost the same
        added_s.append(with_[0] - without[0])
    assert added_s[0] == pytest.approx(added_s[1])
    assert added_s[0] / 64 == pytest.approx(16e-6, rel=0.05)  # 1.07 ms for 64 sequences of 131,072 logits


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"top_p": 0.0}, "top_p"), ({"temperature": -1.0}, "temperature"), ({"share": 2.0}, "share")],
)
def test_impossible_parameters_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**changes)
