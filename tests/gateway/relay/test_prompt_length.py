"""Long prompts: an estimate of their length refuses nothing, and an engine's count decides which replica gets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("httptools")

from gateway_in_process import Inside, Reply

MODEL = "llama-3.1-8b"
CONTEXT_TOKENS = 131_072
SMALL_CONTEXT_TOKENS = 1024
LONG = "word " * (120_000 * 46 // 50)
"""120,000 tokens of 4.6 characters: they fit, and an estimate at 4 characters says that they do not."""


def _two_pools(folder: Path, engines: list[str], **changes: Any) -> Path:
    """A replica with little room for KV caches, and one with much."""
    pool = {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15"}
    small, large = ({**pool, "name": name, "endpoints": [url]} for name, url in zip(("a", "b"), engines, strict=True))
    path = folder / "fleet.yaml"
    quiet = {"scrape_period_s": 3600.0}
    path.write_text(
        yaml.safe_dump(
            {
                "fleet": [{**small, "kv_capacity_tokens": SMALL_CONTEXT_TOKENS}, large],
                "gateway": quiet,
            }
        )
    )
    return path


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Inside]:
    made = Inside(tmp_path, pool={"model": MODEL}, gateway={"scrape_period_s": 3600.0})
    yield made
    made.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Inside]:
    made = Inside(tmp_path, 2, _two_pools)
    yield made
    made.close()


def _chat(inside: Inside, text: str, **fields: Any) -> Reply:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    reply = inside.run(inside.post(body))
    assert isinstance(reply, Reply)
    return reply


def test_an_estimate_refuses_no_prompt(one: Inside) -> None:
    assert len(LONG) * 0.25 > CONTEXT_TOKENS
    assert _chat(one, LONG).status == 200
    assert _chat(one, LONG, max_tokens=8000).status == 200
    assert len(one.engines[0].bodies) == 2


def test_the_engine_refuses_what_is_too_long(one: Inside) -> None:
    refusal = b'{"error":{"message":"the maximum context length is 131072 tokens","type":"","param":"","code":400}}'
    one.engines[0].reply = [b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(refusal), refusal)]
    refused = _chat(one, LONG * 2)
    assert refused.status == 400 and "maximum context length" in refused.error()["message"]


def test_known_lengths_are_refused_without_an_engine(one: Inside) -> None:
    by_limit = _chat(one, "short", max_tokens=CONTEXT_TOKENS + 1)
    body = {"model": MODEL, "prompt": [7] * (CONTEXT_TOKENS + 1), "max_tokens": 1}
    by_ids = one.run(one.post(body, "/v1/completions"))
    for refused in (by_limit, by_ids):
        assert refused.status == 400 and refused.error()["code"] == "context_length_exceeded"
    assert not one.engines[0].bodies


@pytest.mark.parametrize(("counted", "chosen"), [(900, 0), (1100, 1), (None, 1)])
def test_an_engines_count_decides_where_engines_differ(two: Inside, counted: int | None, chosen: int) -> None:
    """The text is estimated at 1,250 tokens: more than the small replica holds."""
    for engine in two.engines:
        engine.num_prompt_tokens = counted
    assert _chat(two, "word " * 1000, max_tokens=8).status == 200
    completions = [[body for body in engine.bodies if "max_tokens" in body] for engine in two.engines]
    assert [len(each) for each in completions] == [chosen == 0, chosen == 1]
