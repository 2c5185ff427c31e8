"""SGLang's command line for a replica of a pool.

Source: SGLang's documentation of its server's arguments, and of prefill and decode on different servers
(`--disaggregation-mode`).
"""

from __future__ import annotations

from headway.core.fleet import Pool
from headway.serving.export.vllm import PORT, longest_tokens

NAME = "sglang"
COMMAND = ["python3", "-m", "sglang.launch_server"]
WAITING = "sglang:num_queue_reqs"
"""The metric for waiting requests."""
BOOTSTRAP_PORT = 8998
"""The port on which decode servers ask a prefill server for KV caches."""
_BACKENDS = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake"}
"""SGLang's names of vLLM's connectors."""


def arguments(pool: Pool, by_priority: bool, connector: str) -> list[str]:
    """`by_priority`: the engine orders its queue by tier. `connector` transfers KV caches."""
    engine, parallel = pool.engine, pool.parallel
    args = ["--model-path", pool.model.hf_id, "--served-model-name", pool.model.hf_id, "--host", "0.0.0.0"]
    num_ranks = str(parallel.tp * parallel.dp)
    args += ["--port", str(PORT), "--tp-size", num_ranks, "--pp-size", str(parallel.pp)]
    if parallel.dp > 1:
        args += ["--dp-size", str(parallel.dp), "--enable-dp-attention"]
    if parallel.ep:
        args += ["--ep-size", num_ranks]
    args += ["--max-running-requests", str(engine.max_num_seqs)]
    args += ["--chunked-prefill-size", str(engine.max_num_batched_tokens)]
    args += ["--mem-fraction-static", f"{engine.gpu_memory_utilization:g}", "--enable-metrics"]
    if not engine.prefix_caching:
        args.append("--disable-radix-cache")
    if engine.kv_dtype_bytes == 1:
        args += ["--kv-cache-dtype", "fp8_e5m2"]
    if (longest := longest_tokens(pool)) < pool.model.max_context_tokens:
        args += ["--context-length", str(longest)]
    if by_priority:
        args.append("--enable-priority-scheduling")
    if pool.role != "mixed":
        backend = _BACKENDS.get(connector, connector)
        args += ["--disaggregation-mode", pool.role, "--disaggregation-transfer-backend", backend]
    if pool.role == "prefill":
        args += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
    return args


def image(version: str) -> str:
    """SGLang's official image for a version, which has three parts, or the latest one."""
    return f"lmsysorg/sglang:v{version}" if version.count(".") == 2 else "lmsysorg/sglang:latest"


def ports(pool: Pool) -> dict[str, int]:
    """Ports by name, besides the one for requests."""
    return {"bootstrap": BOOTSTRAP_PORT} if pool.role == "prefill" else {}


def environment(pool: Pool, connector: str) -> list[dict[str, object]]:
    """None: arguments suffice."""
    return []
