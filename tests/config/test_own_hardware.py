"""GPUs, models and engines of a scenario's own: values beside the catalog's, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

from headway import catalog
from headway.config.scenario import Scenario, StepTimes, assemble
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine

NVL = {"name": "h100-lab", "like": "h100", "memory_bytes": 94e9, "bandwidth_bytes_per_s": 3.9e12}
WHOLE = {
    "name": "x1",
    "memory_bytes": 48e9,
    "bandwidth_bytes_per_s": 1e12,
    "peak_flops": {"bf16": 2e14},
    "link_bytes_per_s": 3e10,
    "host_link_bytes_per_s": 3e10,
    "usd_per_hour": 1.0,
    "watts": 300,
}
WIDE = {"name": "wide-8b", "like": "llama-3.1-8b", "hidden_size": 6144}
EAGER = {"name": "eager", "like": "vllm-0.15", "max_num_seqs": 32}


def _made(pool: dict[str, Any], **sections: Any) -> Scenario:
    workload = {"arrivals": 1, "num_requests": 2, "prompt_tokens": 9, "output_tokens": 9}
    fleet = [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", **pool}]
    return assemble({"workload": workload, "fleet": fleet, **sections}, Places(), Path())


def test_an_own_gpu_has_the_kernels_of_what_it_is_like() -> None:
    made = _made({"gpu": "h100-lab"}, gpus=[NVL])
    (pool,) = made.fleet.pools
    assert (pool.gpu.name, pool.gpu.memory_bytes) == ("h100-lab", 94e9)
    assert pool.gpu.peak_flops == catalog.gpu("h100").peak_flops
    used = StepTimes(made).coefficients[pool.name]
    assert used.kernels == catalog.coefficients("h100-80gb-sxm", "vllm-0.15").kernels
    assert not used.calibrated and used.estimated == ("kernels of h100-80gb-sxm",)


def test_a_whole_gpu_a_model_and_an_engine() -> None:
    (pool,) = _made(
        {"gpu": "x1", "model": "wide-8b", "engine": "eager"}, gpus=[WHOLE], models=[WIDE], engines=[EAGER]
    ).fleet.pools
    assert (pool.gpu.watts, pool.model.hidden_size, pool.engine.max_num_seqs) == (300, 6144, 32)
    assert pool.model.num_layers == 32 and pool.engine.name == "eager"


@pytest.mark.parametrize(
    ("pool", "sections", "words"),
    [
        ({"gpu": "h100-lub"}, {"gpus": [NVL]}, "unknown GPU 'h100-lub'; did you mean 'h100-lab'"),
        ({}, {"gpus": [{**NVL, "like": "h1000"}]}, r"gpus\[0\].like: unknown GPU 'h1000'"),
        ({}, {"gpus": [{"like": "h100"}]}, r"gpus\[0\].name: missing"),
        ({}, {"gpus": [NVL, NVL]}, r"gpus\[1\].name: 'h100-lab' is here a second time"),
        ({}, {"gpus": [{**NVL, "memory_byte": 1}]}, "unknown key 'memory_byte'; did you mean 'memory_bytes'"),
        ({}, {"gpus": [{**NVL, "bandwidth_bytes_per_s": 0}]}, "bandwidth_bytes_per_s: 0.*; expected more than 0"),
        ({}, {"gpus": [{**NVL, "peak_flops": {"bf16": -1}}]}, "peak_flops: -1.*; expected more than 0"),
        ({}, {"gpus": [{"name": "x"}]}, r"gpus\[0\]: 'memory_bytes' is missing"),
        ({}, {"models": [{**WIDE, "num_layers": 0}]}, "num_layers: 0; expected more than 0"),
        ({}, {"engines": [{"name": "e", "like": "vlm"}]}, r"engines\[0\].like: unknown engine 'vlm'"),
    ],
)
def test_what_is_refused(pool: dict[str, Any], sections: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwayError, match=words):
        _made(pool, **sections)


@pytest.mark.parametrize("name", [field.name for field in fields(Engine) if type(field.default) in (int, float)])
def test_no_number_of_an_engine_is_negative(name: str) -> None:
    """Neither of the engine of a pool, nor of an own profile."""
    with pytest.raises(HeadwayError, match=f"{name}: -1.*; expected "):
        _made({"engine": {"name": "vllm", name: -1}})
    with pytest.raises(HeadwayError, match=f"{name}: -1.*; expected "):
        _made({"engine": "eager"}, engines=[{**EAGER, name: -1}])


def test_the_catalog_is_as_it_was() -> None:
    before = catalog.gpus()
    _made({"gpu": "h100-lab"}, gpus=[NVL])
    assert catalog.gpus() == before
    with pytest.raises(HeadwayError, match="unknown GPU 'h100-lab'"):
        catalog.gpu("h100-lab")
