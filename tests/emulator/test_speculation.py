"""An emulated engine that speculates: answers in chunks of several tokens, and vLLM's and SGLang's metrics."""

from __future__ import annotations

import asyncio
import re

import httpx2 as httpx
import pytest
from msgspec.structs import replace

from headway import catalog
from headway.core.fleet import Pool, Speculative
from headway.emulator.completion import SurfaceConfig
from headway.emulator.engine import EmulatedEngine
from headway.emulator.sglang import SglangSurface
from headway.emulator.vllm import VllmSurface, application
from headway.policies.ordering.fcfs import FcfsOrdering

DRAFTS = Speculative(method="ngram", num_speculative_tokens=3, acceptance=(1.0, 1.0, 0.0))
ENGINE = replace(catalog.engine("vllm-0.15"), speculative=DRAFTS)
POOL = Pool("one", catalog.model("llama-3.1-8b"), catalog.gpu("h100"), ENGINE)


def metrics(surface: VllmSurface, pool: Pool = POOL) -> dict[str, float]:
    """Metrics after one answer of 31 tokens, by name and position."""

    async def run() -> str:
        config = SurfaceConfig("llama", output_tokens=31)
        app = application(lambda: EmulatedEngine(pool, FcfsOrdering(), speed=50.0), config, surface)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                answer = await client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 31})
                assert answer.json()["usage"]["completion_tokens"] == 31
                return (await client.get("/metrics")).text

    line = r'^([\w:]+){engine="0",model_name="llama"(?:,position="(\d)")?} (\S+)$'
    found = re.findall(line, asyncio.run(run()), re.MULTILINE)
    return {name + position: float(value) for name, position, value in found}


def test_drafts_are_counted_as_vllm_counts_them() -> None:
    """The prompt gives a token, then 10 iterations 3 each."""
    found = metrics(VllmSurface())
    assert found["vllm:spec_decode_num_drafts_total"] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 30
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 20
    per_position = [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{i}"] for i in range(3)]
    assert per_position == [10, 10, 0]


def test_sglang_has_the_mean_length() -> None:
    found = metrics(SglangSurface(None))
    assert found["sglang:spec_accept_length"] == 3.0
    assert found["sglang:spec_accept_rate"] == pytest.approx(2 / 3)


def test_without_speculation_there_are_no_such_metrics() -> None:
    found = metrics(VllmSurface(), replace(POOL, engine=catalog.engine("vllm-0.15")))
    assert not any("spec" in name for name in found)
