"""The containers of engines: image, command line, ports and environment for a replica of a pool.

Sources: the documentation of the arguments of vLLM's and SGLang's servers, of vLLM's `--kv-transfer-config`, and of
SGLang's `--disaggregation-mode`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from headway.core.fleet import Pool, Speculative
from headway.gateway.settings import Api
from headway.gateway.upstream.dialects import ADAPTERS
from headway.perf import memory

PORT = 8000
_NIXL_PORT = 5600
"""The port of vLLM's NIXL connector for other engines."""
_BOOTSTRAP_PORT = 8998
"""The port on which SGLang's decode servers ask a prefill server for KV caches."""
_SGLANG_BACKENDS = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake"}
"""SGLang's names for vLLM's connectors."""
_SGLANG_ALGORITHMS = {"draft_model": "STANDALONE", "eagle": "EAGLE", "eagle3": "EAGLE3", "mtp": "EAGLE"}
"""SGLang's names for vLLM's methods. SGLang runs an MTP layer as an EAGLE head."""
_ROUNDED_TOKENS = 1024
_KV_MARGIN = 0.9
"""Maximum share of the predicted KV cache that the longest request may need. An engine whose KV cache is smaller than
the longest request does not start."""


class EngineContainer(Struct, frozen=True):
    """How to run the engines of one dialect."""

    name: str
    module: str
    """The Python module that starts the engine."""
    waiting_metric: str
    """The metric for waiting requests."""
    image: Callable[[str], str]
    """The official image for a version, or the latest image."""
    arguments: Callable[[Pool, str, bool, str], list[str]]
    """Arguments by pool, model name for clients, whether the engine orders its queue by tier, and the connector that
    transfers KV caches."""
    ports: Callable[[Pool], dict[str, int]]
    """Ports by name, in addition to the port for requests."""
    environment: Callable[[Pool, str], list[dict[str, Any]]] = lambda pool, connector: []


def _vllm_arguments(pool: Pool, served_name: str, by_priority: bool, connector: str) -> list[str]:
    engine, parallel = pool.engine, pool.parallel
    names = dict.fromkeys(name for name in (served_name, pool.model.hf_id, pool.model.name) if name)
    args = ["--model", pool.model.hf_id, "--served-model-name", *names]
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
    if (longest := _longest_tokens(pool)) < pool.model.max_context_tokens:
        args += ["--max-model-len", str(longest)]
    if engine.drafts is not None:
        args += ["--speculative-config", json.dumps(_vllm_speculation(engine.drafts))]
    if by_priority:
        args += ["--scheduling-policy", "priority"]
    if pool.role != "mixed":
        args += ["--kv-transfer-config", json.dumps({"kv_connector": connector, "kv_role": "kv_both"})]
    return args


def _vllm_speculation(drafts: Speculative) -> dict[str, Any]:
    """vLLM's `SpeculativeConfig`. An MTP layer is part of the model's own weights."""
    config: dict[str, Any] = {"method": drafts.method, "num_speculative_tokens": drafts.num_speculative_tokens}
    optional = {
        "model": drafts.model if drafts.method != "mtp" else "",
        "draft_tensor_parallel_size": drafts.draft_tensor_parallel_size,
        "num_speculative_tokens_per_batch_size": drafts.num_speculative_tokens_per_batch_size,
        "prompt_lookup_max": drafts.prompt_lookup_max,
        "prompt_lookup_min": drafts.prompt_lookup_min,
    }
    return config | {key: value for key, value in optional.items() if value}


def _sglang_speculation(drafts: Speculative) -> list[str]:
    """SGLang's options for one chain of drafts. SGLang's number of draft tokens includes the token before the drafted
    tokens."""
    if drafts.method == "ngram":
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(drafts.most_tokens)]
    args = ["--speculative-algorithm", _SGLANG_ALGORITHMS[drafts.method]]
    if drafts.method != "mtp":
        args += ["--speculative-draft-model-path", drafts.model]
    args += ["--speculative-num-steps", str(drafts.num_speculative_tokens), "--speculative-eagle-topk", "1"]
    return [*args, "--speculative-num-draft-tokens", str(drafts.most_tokens)]


def _vllm_environment(pool: Pool, connector: str) -> list[dict[str, Any]]:
    if pool.role == "mixed" or connector != "NixlConnector":
        return []
    return [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(_NIXL_PORT)},
    ]


def _sglang_arguments(pool: Pool, served_name: str, by_priority: bool, connector: str) -> list[str]:
    engine, parallel = pool.engine, pool.parallel
    served_name = served_name or pool.model.hf_id
    args = ["--model-path", pool.model.hf_id, "--served-model-name", served_name, "--host", "0.0.0.0"]
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
    if (longest := _longest_tokens(pool)) < pool.model.max_context_tokens:
        args += ["--context-length", str(longest)]
    if engine.drafts is not None:
        args += _sglang_speculation(engine.drafts)
    if by_priority:
        args.append("--enable-priority-scheduling")
    if pool.role != "mixed":
        backend = _SGLANG_BACKENDS.get(connector, connector)
        args += ["--disaggregation-mode", pool.role, "--disaggregation-transfer-backend", backend]
    if pool.role == "prefill":
        args += ["--disaggregation-bootstrap-port", str(_BOOTSTRAP_PORT)]
    return args


_DRAIN = """import time, urllib.request
end_s = time.monotonic() + {drain_s:g}
time.sleep({notice_s:g})
while time.monotonic() < end_s:
    with urllib.request.urlopen("http://127.0.0.1:{port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    if not any(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith({names})):
        break
    time.sleep(1)
"""
"""Waits until the gateway has noticed the end of the pod, and then until the engine has no requests."""


def drain_command(api: Api, drain_s: float, notice_s: float, port: int = PORT) -> list[str]:
    """The command that a pod runs before its engine is stopped. It takes at most `drain_s`."""
    adapter = ADAPTERS[api]
    names = (*adapter.running, *adapter.waiting)
    return ["python3", "-c", _DRAIN.format(drain_s=drain_s, notice_s=notice_s, port=port, names=repr(names))]


def _longest_tokens(pool: Pool) -> int:
    """Prompt and output tokens of the longest request, limited by the model and by the KV cache."""
    plan = memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel)
    room = int(plan.kv_capacity_tokens * _KV_MARGIN) // _ROUNDED_TOKENS * _ROUNDED_TOKENS
    return min(pool.model.max_context_tokens, max(room, _ROUNDED_TOKENS))


def option_of(word: str) -> str:
    """The option that a command-line word sets: `prefix-caching` for `--no-prefix-caching`; "" for a value."""
    found = re.match(r"--?(?:no-)?([a-zA-Z][\w-]*)", word)
    return found[1].replace("_", "-") if found else ""


def with_own_arguments(args: Sequence[str], own: Sequence[str]) -> list[str]:
    """The command line with the user's arguments at its end. Options that they override are left out."""
    replaced, kept, is_kept = {option_of(word) for word in own} - {""}, [], True
    for word in args:
        is_kept = option_of(word) not in replaced if option_of(word) else is_kept
        if is_kept:
            kept.append(word)
    return [*kept, *own]


CONTAINERS = {
    "vllm": EngineContainer(
        name="vllm",
        module="vllm.entrypoints.openai.api_server",
        waiting_metric="vllm:num_requests_waiting",
        image=lambda version: f"vllm/vllm-openai:v{version}" if version else "vllm/vllm-openai:latest",
        arguments=_vllm_arguments,
        ports=lambda pool: {"nixl": _NIXL_PORT} if pool.role != "mixed" else {},
        environment=_vllm_environment,
    ),
    "sglang": EngineContainer(
        name="sglang",
        module="sglang.launch_server",
        waiting_metric="sglang:num_queue_reqs",
        # Image tags have versions with three parts.
        image=lambda version: f"lmsysorg/sglang:{f'v{version}' if version.count('.') == 2 else 'latest'}",
        arguments=_sglang_arguments,
        ports=lambda pool: {"bootstrap": _BOOTSTRAP_PORT} if pool.role == "prefill" else {},
    ),
}
"""Containers by dialect."""
