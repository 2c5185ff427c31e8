"""What the publishers of vLLM and SGLang have written, read; and what vLLM's own cache manager reused, expected.

`scripts/record_kv_events.py` makes the files.
"""

from __future__ import annotations

import base64
import gzip
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.control import token_blocks
from headway.control.cache_index import CacheIndex
from headway.control.live import Live
from headway.gateway.kv_events import wire
from headway.gateway.kv_events.engine_blocks import EngineBlocks

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json.gz"))


@cache
def _recorded(file: Path) -> Any:
    return msgspec.json.decode(gzip.decompress(file.read_bytes()))


LIVED = [
    (file, name)
    for file in FILES
    for name in (*_recorded(file).get("models", ()), "salted")
    if name in _recorded(file).get("models", ()) or name in _recorded(file)
]


def _parts(texts: list[str]) -> list[bytes]:
    return [base64.b64decode(text) for text in texts]


class _Reader:
    """An index that one engine's batches feed."""

    def __init__(self, block: int) -> None:
        self.blocks, self.index = EngineBlocks(block, 1 << 16), CacheIndex(block, 1 << 16, guesses=False)
        self.index.groups = self.blocks.layer_groups

    def read(self, payload: bytes) -> None:
        self.index.apply_blocks(self.blocks.changes(wire.decode(payload)))

    def cached_tokens(self, prompt: list[int], salt: str | None = None) -> int:
        prefix = token_blocks.segments(prompt, self.blocks.block_size_tokens, "", salt or "")
        return self.index.cached_tokens(Live(0, 0.0, len(prompt), 1, prefix=prefix))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_a_replay_has_what_was_published(file: Path) -> None:
    recorded = _recorded(file)
    published = [_parts(each) for each in recorded["published"]]
    assert len(published) > 4 and all(len(each) == 3 and each[0] == b"kv@model" for each in published)
    first = int.from_bytes(published[0][1], "big")
    replayed = [wire.replayed(_parts(each)) for each in recorded["replayed"]]
    assert replayed.pop() is None, "the end"
    by_number = {number: payload for number, payload in filter(None, replayed)}
    assert len(by_number) == len(replayed) > 2
    for _, number, payload in published:
        at = int.from_bytes(number, "big")
        assert at < min(by_number) or by_number[at] == payload
    assert first <= min(by_number)
    reader, most = _Reader(16), 0
    for _, _, payload in published:
        assert msgspec.msgpack.decode(payload)[2] == 1, "the rank"
        reader.read(payload)
        most = max(most, len(reader.blocks))
    assert most >= 2 and not reader.blocks.ignored and not len(reader.blocks), "the last event clears the cache"


@pytest.mark.parametrize("file", [file for file in FILES if file.name.startswith("sglang")], ids=lambda file: file.name)
def test_sglang_s_pages_pairs_and_salts_are_found(file: Path) -> None:
    ids, reader = list(range(100, 164)), _Reader(16)
    expected = [(32, 0), (48, 0), (32, 0), (32, 0), (32, 16)]
    for each, (plain, salted) in zip(_recorded(file)["published"], expected, strict=False):
        reader.read(_parts(each)[2])
        has_salts = "cache_salt" in str(msgspec.msgpack.decode(_parts(_recorded(file)["published"][4])[2]))
        assert reader.cached_tokens(ids) == plain
        assert reader.cached_tokens(ids[:17], "team-a") == (salted if has_salts else 0)


@pytest.mark.parametrize(("file", "name"), LIVED, ids=lambda each: str(getattr(each, "name", each)))
def test_the_index_expects_what_vllm_reuses(file: Path, name: str) -> None:
    recorded = _recorded(file)
    lived = recorded["salted"] if name == "salted" else recorded["models"][name]
    reader, total = _Reader(lived["block"]), 0
    for number, step in enumerate(lived["steps"]):
        assert reader.cached_tokens(step["prompt"], step["salt"]) == step["reused"], number
        total += step["reused"]
        reader.read(base64.b64decode(step["events"]))
    assert total > 300
    if name != "states alone":  # whose blocks follow some that are not reported
        assert not reader.blocks.ignored
