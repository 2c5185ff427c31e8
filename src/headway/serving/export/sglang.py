"""What SGLang is told on its command line to be a replica of a pool.

Source: SGLang's documentation of its server's arguments, and of prefill and decode on different servers
(`--disaggregation-mode`).
"""

from __future__ import annotations

from headway.core.fleet import Pool
from headway.serving.export.vllm import PORT, longest_tokens

NAME = "sglang"
COMMAND = ["python3", "-m", "sglang.launch_server"]
WAITING = "sglang:num_queue_reqs"
"""The metric of requests that wait."""
BOOTSTRAP_PORT = 8998
"""Where a decode server asks a prefill server for KV caches."""
_BACKENDS = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake"}
"""As SGLang calls what vLLM has connectors for."""


def arguments(pool: Pool, by_priority: bool, connector: str) -> list[str]:
    """Of one replica. `by_priority`: its own queue goes by tiers. `connector`: how KV caches are handed over."""
    engine, parallel = pool.engine, pool.parallel
    said = ["--model-path", pool.model.hf_id, "--served-model-name", pool.model.hf_id, "--host", "0.0.0.0"]
    num_ranks = str(parallel.tp * parallel.dp)
    said += ["--port", str(PORT), "--tp-size", num_ranks, "--pp-size", str(parallel.pp)]
    if parallel.dp > 1:
        said += ["--dp-size", str(parallel.dp), "--enable-dp-attention"]
    if parallel.ep:
        said += ["--ep-size", num_ranks]
    said += ["--max-running-requests", str(engine.max_num_seqs)]
    said += ["--chunked-prefill-size", str(engine.max_num_batched_tokens)]
    said += ["--mem-fraction-static", f"{engine.gpu_memory_utilization:g}", "--enable-metrics"]
    if not engine.prefix_caching:
        said.append("--disable-radix-cache")
    if engine.kv_dtype_bytes == 1:
        said += ["--kv-cache-dtype", "fp8_e5m2"]
    if (longest := longest_tokens(pool)) < pool.model.max_context_tokens:
        said += ["--context-length", str(longest)]
    if by_priority:
        said.append("--enable-priority-scheduling")
    if pool.role != "mixed":
        backend = _BACKENDS.get(connector, connector)
        said += ["--disaggregation-mode", pool.role, "--disaggregation-transfer-backend", backend]
    if pool.role == "prefill":
        said += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
    return said


def image(version: str) -> str:
    """The one that SGLang's makers publish for a version, which has three parts; else their newest."""
    return f"lmsysorg/sglang:v{version}" if version.count(".") == 2 else "lmsysorg/sglang:latest"


def ports(pool: Pool) -> dict[str, int]:
    """By name, besides the one for requests."""
    return {"bootstrap": BOOTSTRAP_PORT} if pool.role == "prefill" else {}


def environment(pool: Pool, connector: str) -> list[dict[str, object]]:
    """Nothing that its arguments do not say."""
    return []
