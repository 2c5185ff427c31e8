"""Scenarios as data: reading, variants, typed edits, step times."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from headway import catalog
from headway.config.scenario import (
    Scenario,
    StepTimes,
    assemble,
    only_variant,
    read,
    variant,
    variants,
    with_policies,
    with_seed,
)
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import GREEDY, Pool, Sampling
from headway.perf.memory import plan
from headway.perf.params import num_params, weights_bytes

DOCUMENT: dict[str, Any] = {
    "workload": {"builtin": "chat", "num_requests": 20},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "a100-80gb", "replicas": 2}],
}


def assembled(**changes: Any) -> Scenario:
    return assemble({**DOCUMENT, **changes}, Places(), Path())


def test_a_file_without_a_name_is_named_after_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    (tmp_path / "named.yaml").write_text("name: other\n")
    assert read(tmp_path / "mine.yaml")[0] == {"seed": 3, "name": "mine"}
    assert read(tmp_path / "named.yaml")[0] == {"name": "other"}


def test_variants_are_every_pair_of_routing_and_ordering() -> None:
    chosen = assembled(policies={"routing": ["random", "round-robin"], "ordering": ["fcfs", "edf"]})
    pairs = [(each.spec.policies.routing, each.spec.policies.ordering) for each in variants(chosen)]
    assert pairs == [("random", "fcfs"), ("random", "edf"), ("round-robin", "fcfs"), ("round-robin", "edf")]
    with pytest.raises(HeadwayError, match=r"policies\.routing: several are for headway compare; expected one"):
        only_variant(chosen)


def test_a_named_variant_changes_only_its_own_keys() -> None:
    named = [{"name": "a", "routing": "random"}, {"name": "b", "window": 3}]
    chosen = assembled(policies={"routing": "least-kv"}, variants=named)
    first, second = (variant(chosen, name).spec.policies for name in "ab")
    assert (first.routing, first.window, second.routing, second.window) == ("random", None, "least-kv", 3)
    with pytest.raises(HeadwayError, match="unknown variant 'c'"):
        variant(chosen, "c")


def test_edits_leave_the_scenario_as_it_is() -> None:
    chosen = assembled(policies={"routing": ["random", "least-kv"]})
    edited = with_policies(with_seed(chosen, 7), variants(chosen)[1].spec.policies)
    assert (edited.spec.seed, edited.spec.policies.routing) == (7, "least-kv")
    assert (chosen.spec.seed, chosen.spec.policies.routing) == (0, ["random", "least-kv"])


def test_step_times_are_the_same_in_another_process() -> None:
    chosen = assembled()
    pool = chosen.fleet.pools[0]
    times = StepTimes(chosen)
    again = pickle.loads(pickle.dumps(times))
    assert again(pool)(4, 1000) == times(pool)(4, 1000)


def test_the_workloads_sampling_goes_before_the_models() -> None:
    def sampling(**workload: Any) -> Sampling | None:
        scenario = assembled(workload={**DOCUMENT["workload"], **workload})
        return scenario.fleet.pools[0].model.sampling

    assert sampling() == catalog.model("llama-3.1-8b").sampling
    assert sampling(sampling="greedy") == GREEDY
    assert sampling(sampling={"top_p": 0.5, "share": 0.2}) == Sampling(top_p=0.5, share=0.2)
    with pytest.raises(HeadwayError, match="top_p: 5"):
        sampling(sampling={"top_p": 5})


def test_sampling_makes_every_iteration_longer() -> None:
    def decode_s(**workload: Any) -> float:
        scenario = assembled(workload={**DOCUMENT["workload"], **workload})
        return StepTimes(scenario)(scenario.fleet.pools[0])(64, 64_000, (), 0, 0)[0]

    assert decode_s() > decode_s(sampling="greedy")


def pool_of(**changes: Any) -> Pool:
    fleet = [{"model": "llama-3.1-70b", "gpu": "h100", "tp": 4, **changes}]
    return assembled(fleet=fleet).fleet.pools[0]


@pytest.mark.parametrize(
    ("quantization", "num_bytes"),
    [("none", 2), ("fp8", 1), ("fp8_block", 1), ("awq", 0.52), ("gptq", 0.52), ("int4", 0.52), ("mxfp4", 0.53)],
)
def test_quantized_weights_take_less_memory(quantization: str, num_bytes: float) -> None:
    model = pool_of(quantization=quantization).model
    embeddings_bytes = 2 * 2 * model.vocab_size * model.hidden_size
    in_layers = (weights_bytes(model) - embeddings_bytes) / (num_params(model) - embeddings_bytes / 2)
    assert in_layers == pytest.approx(num_bytes, rel=0.01)


def test_four_bits_of_a_mixture_are_of_all_layers_or_of_experts_only() -> None:
    found = {
        name: weights_bytes(
            assembled(fleet=[{"model": "mixtral-8x7b", "gpu": "h200", "quantization": name}]).fleet.pools[0].model
        )
        for name in ("awq", "mxfp4")
    }
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    experts = 32 * 8 * 3 * 4096 * 14336
    more_bytes = (2 - 4.15625 / 8) * attention + (4.25 - 4.15625) / 8 * experts
    assert found["mxfp4"] - found["awq"] == pytest.approx(more_bytes, rel=0.01)


def test_quantized_weights_decode_faster_and_own_no_other_kernels() -> None:
    times = []
    for quantization in ("none", "fp8", "awq"):
        fleet = [{"model": "llama-3.1-70b", "gpu": "h100", "tp": 4, "quantization": quantization}]
        scenario = assembled(fleet=fleet)
        times.append(StepTimes(scenario)(scenario.fleet.pools[0])(1, 1000, (), 0, 0)[0])
    assert times == sorted(times, reverse=True)
    assert 0.3 < times[2] / times[0] < 0.65


def test_a_kv_cache_in_8_bits_holds_twice_the_tokens() -> None:
    full, half = (
        plan(pool.model, pool.gpu, pool.engine, pool.parallel).kv_capacity_tokens
        for pool in (pool_of(), pool_of(kv_cache_dtype="fp8"))
    )
    assert half == pytest.approx(2 * full, rel=1e-3)


def test_an_unknown_quantization_is_named() -> None:
    with pytest.raises(HeadwayError, match="awk"):
        pool_of(quantization="awk")


def test_another_version_of_the_engine_is_not_calibrated() -> None:
    def estimated(**engine: str) -> tuple[str, ...]:
        scenario = assembled(
            fleet=[{"model": "llama-3.1-8b", "gpu": "h100", "engine": {"name": "vllm-0.15", **engine}}]
        )
        return StepTimes(scenario).coefficients["pool-0"].estimated

    assert estimated() == estimated(version="0.15.3") == ()
    assert estimated(name="vllm") == estimated(name="vllm", version="0.25.9") == ()
    assert estimated(name="vllm-v1", version="0.15.1") == ()
    with pytest.raises(HeadwayError, match=r"fleet\[0\].engine.version: 0.3; expected it in quotes, as 0.30"):
        assembled(fleet=[{"model": "llama-3.1-8b", "gpu": "h100", "engine": {"name": "vllm", "version": 0.30}}])
    assert estimated(version="0.24.0") == ("overhead of vllm 0.15.1, not 0.24.0",)
