"""vLLM's command line for a replica of a pool.

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
"""The metric for waiting requests."""
NIXL_PORT = 5600
"""The port on which another engine's NIXL finds this one's."""
_ROUNDED_TOKENS = 1024
_KV_MARGIN = 0.9
"""Share of the predicted KV cache for the longest request: an engine with less memory than that does not start."""


def arguments(pool: Pool, by_priority: bool, connector: str) -> list[str]:
    """`by_priority`: the engine orders its queue by tier. `connector` transfers KV caches."""
    engine, parallel = pool.engine, pool.parallel
    args = ["--model", pool.model.hf_id, "--served-model-name", *dict.fromkeys((pool.model.hf_id, pool.model.name))]
    args += ["--port", str(PORT), "--tensor-parallel-size", str(parallel.tp)]
    args += ["--pipeline-parallel-size", str(parallel.pp)]
    if parallel.dp > 1:
        args += ["--data-parallel-size", str(parallel.dp)]
    if parallel.ep:
        args.append("--enable-expert-parallel")
    args += ["--max-num-seqs", str(engine.max_num_seqs), "--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    args += ["--gpu-memory-utilization", f"{engine.gpu_memory_utilization:g}"]
    args.append("--enable-prefix-caching" if engine.prefix_caching else "--no-enable-prefix-caching")
    if engine.kv_dtype_bytes == 1:
        args += ["--kv-cache-dtype", "fp8"]
    if (longest := longest_tokens(pool)) < pool.model.max_context_tokens:
        args += ["--max-model-len", str(longest)]
    if by_priority:
        args += ["--scheduling-policy", "priority"]
    if pool.role != "mixed":
        args += ["--kv-transfer-config", json.dumps({"kv_connector": connector, "kv_role": "kv_both"})]
    return args


def image(version: str) -> str:
    """vLLM's official image for a version, or the latest one."""
    return f"vllm/vllm-openai:v{version}" if version else "vllm/vllm-openai:latest"


def ports(pool: Pool) -> dict[str, int]:
    """Ports by name, besides the one for requests."""
    return {"nixl": NIXL_PORT} if pool.role != "mixed" else {}


def environment(pool: Pool, connector: str) -> list[dict[str, object]]:
    if pool.role == "mixed" or connector != "NixlConnector":
        return []
    here = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": here},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(NIXL_PORT)},
    ]


def longest_tokens(pool: Pool) -> int:
    """Prompt and output of the longest request, by the model's limit and by the KV cache."""
    plan = memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel)
    room = int(plan.kv_capacity_tokens * _KV_MARGIN) // _ROUNDED_TOKENS * _ROUNDED_TOKENS
    return min(pool.model.max_context_tokens, max(room, _ROUNDED_TOKENS))
