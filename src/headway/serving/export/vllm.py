"""What vLLM is told on its command line to be a replica of a pool.

Source: vLLM's documentation of its server's arguments, and of `--kv-transfer-config` for disaggregated prefill.
"""

from __future__ import annotations

import json

from headway.core.fleet import Pool
from headway.perf import memory

PORT = 8000
NAME = "vllm"
COMMAND = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
WAITING = "vllm:num_requests_waiting"
"""The metric of requests that wait."""
NIXL_PORT = 5600
"""Where NIXL's side of two engines find each other."""
_ROUNDED_TOKENS = 1024
_SAFE = 0.9
"""Of the KV cache that is predicted, what the longest request may have: an engine that has less does not start."""


def arguments(pool: Pool, by_priority: bool, connector: str) -> list[str]:
    """Of one replica. `by_priority`: its own queue goes by tiers. `connector`: how KV caches are handed over."""
    engine, parallel = pool.engine, pool.parallel
    said = ["--model", pool.model.hf_id, "--served-model-name", *dict.fromkeys((pool.model.hf_id, pool.model.name))]
    said += ["--port", str(PORT), "--tensor-parallel-size", str(parallel.tp)]
    said += ["--pipeline-parallel-size", str(parallel.pp)]
    if parallel.dp > 1:
        said += ["--data-parallel-size", str(parallel.dp)]
    if parallel.ep:
        said.append("--enable-expert-parallel")
    said += ["--max-num-seqs", str(engine.max_num_seqs), "--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    said += ["--gpu-memory-utilization", f"{engine.gpu_memory_utilization:g}"]
    said.append("--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching")
    if engine.kv_dtype_bytes == 1:
        said += ["--kv-cache-dtype", "fp8"]
    if (longest := longest_tokens(pool)) < pool.model.max_context_tokens:
        said += ["--max-model-len", str(longest)]
    if by_priority:
        said += ["--scheduling-policy", "priority"]
    if pool.role != "mixed":
        said += ["--kv-transfer-config", json.dumps({"kv_connector": connector, "kv_role": "kv_both"})]
    return said


def image(version: str) -> str:
    """The one that vLLM's makers publish for a version; without one: their newest."""
    return f"vllm/vllm-openai:v{version}" if version else "vllm/vllm-openai:latest"


def ports(pool: Pool) -> dict[str, int]:
    """By name, besides the one for requests."""
    return {"nixl": NIXL_PORT} if pool.role != "mixed" else {}


def environment(pool: Pool, connector: str) -> list[dict[str, object]]:
    """Where another engine's NIXL finds this one's."""
    if pool.role == "mixed" or connector != "NixlConnector":
        return []
    here = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": here},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(NIXL_PORT)},
    ]


def longest_tokens(pool: Pool) -> int:
    """Prompt and output of the longest request: of the model, or of what KV cache there will be."""
    plan = memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel)
    room = int(plan.kv_capacity_tokens * _SAFE) // _ROUNDED_TOKENS * _ROUNDED_TOKENS
    return min(pool.model.max_context_tokens, max(room, _ROUNDED_TOKENS))
