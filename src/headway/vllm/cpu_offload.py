"""vLLM's tiers of offloaded KV blocks for an engine on a CPU. vLLM's own copies run only on GPUs.

For `--kv-transfer-config`: `"kv_connector": "OffloadingConnector"`, and in `kv_connector_extra_config` `"spec_name":
"CpuTieringSpec", "spec_module_path": "headway.vllm.cpu_offload"`. Everything else is as in `TieringOffloadingSpec`.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from headway.core.errors import HeadwayError


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not here when types are checked
    """Supports one block per file, and one worker."""

    def get_worker(self, kv_caches: Any) -> CopyingWorker:
        """Raises HeadwayError for engines with several workers, layouts or blocks per chunk."""
        if self.config.parallel.world_size != 1 or self.blocks_per_chunk != 1 or self.config.canonical_layout:
            raise HeadwayError("CpuTieringSpec: expected one worker, one block a chunk and no canonical_layout")
        region = SharedOffloadRegion(
            self._engine_id, self.num_chunks, 0, self.kv_bytes_per_chunk, self.cpu_page_size_per_worker
        )
        return CopyingWorker(kv_caches, region)


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks synchronously between the KV cache and the region that the tiers read and write."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._groups = kv_caches.group_data_refs
        tensors = kv_caches.tensors
        self._cache = [each.tensor.numpy() for each in tensors]
        """The bytes of each tensor, by block."""
        self._copies = [region.create_next_worker_view(each.page_size_bytes).numpy() for each in tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, src_spec, dst_spec, self._cache, self._copies)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, dst_spec, self._copies, self._cache)

    def _copy(
        self, job_id: int, grouped: Any, source: Any, target: Any, sources: list[Any], targets: list[Any]
    ) -> bool:
        start_s, first, num_bytes = perf_counter(), 0, 0
        for group, size in zip(self._groups, grouped.group_sizes, strict=True):
            rows = slice(first, first + size)
            for ref in group:
                targets[ref.tensor_idx][target.block_ids[rows]] = sources[ref.tensor_idx][source.block_ids[rows]]
                num_bytes += size * ref.page_size_bytes
            first += size
        self._done.append(TransferResult(job_id, True, num_bytes, perf_counter() - start_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: copies finish when they are submitted."""

    def shutdown(self) -> None:
        self._cache.clear()
        self._copies.clear()
        self._region.cleanup()
