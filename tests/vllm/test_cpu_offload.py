"""Copies of KV blocks between an engine's cache on a CPU and vLLM's tiers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.core.errors import HeadwayError

BLOCKS, CHUNKS, PAGE = 6, 4, 8


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float


class Spec:
    """Stands in for `TieringOffloadingSpec`, for the parts that a worker needs."""

    _engine_id, num_chunks, kv_bytes_per_chunk, cpu_page_size_per_worker = "e", CHUNKS, 2 * PAGE, 2 * PAGE

    def __init__(self, world_size: int = 1, blocks_per_chunk: int = 1) -> None:
        parallel = SimpleNamespace(world_size=world_size)
        self.config = SimpleNamespace(parallel=parallel, canonical_layout=False)
        self.blocks_per_chunk = blocks_per_chunk


class Region:
    """Stands in for `SharedOffloadRegion`: rows of chunks, with the tensors' pages one after the other."""

    def __init__(self, engine_id: str, num_chunks: int, rank: int, chunk_bytes: int, page_bytes: int) -> None:
        assert (engine_id, rank) == ("e", 0)
        self.bytes, self._at = np.zeros((num_chunks, chunk_bytes), np.int8), 0
        self.is_clean = False

    def create_next_worker_view(self, size: int) -> Any:
        self._at += size
        view = self.bytes[:, self._at - size : self._at]
        return SimpleNamespace(numpy=lambda: view)

    def cleanup(self) -> None:
        self.is_clean = True


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The spec's class, of a `vllm` that is not there."""
    names = {
        "vllm.v1.kv_offload.base": {"OffloadingWorker": object, "TransferResult": TransferResult},
        "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": Region},
        "vllm.v1.kv_offload.tiering.spec": {"TieringOffloadingSpec": Spec},
    }
    for name, contents in names.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "headway.vllm.cpu_offload", raising=False)
    from headway.vllm.cpu_offload import CpuTieringSpec

    yield CpuTieringSpec
    sys.modules.pop("headway.vllm.cpu_offload", None)


def caches(num_tensors: int = 2) -> tuple[list[Any], Any]:
    """Tensors of random bytes, and what vLLM hands over: each is a layer of the one group."""
    chance = np.random.default_rng(0)
    arrays = [chance.integers(-128, 128, (BLOCKS, PAGE), np.int8) for _ in range(num_tensors)]
    tensors = [SimpleNamespace(tensor=SimpleNamespace(numpy=lambda a=a: a), page_size_bytes=PAGE) for a in arrays]
    refs = [SimpleNamespace(tensor_idx=i, page_size_bytes=PAGE) for i in range(num_tensors)]
    return arrays, SimpleNamespace(tensors=tensors, group_data_refs=[refs])


def blocks(*ids: int) -> Any:
    return SimpleNamespace(block_ids=np.array(ids, np.int32), group_sizes=[len(ids)])


def test_blocks_come_back_as_they_were_stored(spec: Any) -> None:
    arrays, given = caches()
    worker, before = spec().get_worker(given), [array.copy() for array in arrays]
    assert worker.submit_store(7, blocks(4, 1), SimpleNamespace(block_ids=np.array([2, 0], np.int32)))
    assert worker.submit_load(8, SimpleNamespace(block_ids=np.array([0, 2], np.int32)), blocks(5, 3))
    for array, old in zip(arrays, before, strict=True):
        assert (array[5] == old[1]).all() and (array[3] == old[4]).all()
        assert (array[[0, 1, 2, 4]] == old[[0, 1, 2, 4]]).all()
    done = worker.get_finished()
    assert [(each.job_id, each.success, each.transfer_size) for each in done] == [(7, True, 32), (8, True, 32)]
    assert not worker.get_finished()
    region = worker._region
    worker.shutdown()
    assert region.is_clean


def test_layouts_that_it_cannot_copy_are_refused(spec: Any) -> None:
    for refused in (spec(world_size=2), spec(blocks_per_chunk=4)):
        with pytest.raises(HeadwayError, match="expected one worker, one block a chunk"):
            refused.get_worker(caches()[1])
