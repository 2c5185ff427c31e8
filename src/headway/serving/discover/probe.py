"""Reads a running engine's properties from its own pages: models, version, parallelism, limits and caches.

| page | engine | what it says |
|---|---|---|
| /v1/models | all | models, LoRA adapters, context; llama.cpp: sizes of the model |
| /metrics | vLLM | block size, KV blocks, prefix caching, data parallel ranks |
| /version | vLLM, TensorRT-LLM, Ollama (/api/version), Headway's gateway | version |
| /server_info, /get_server_info | SGLang | version, parallelism, limits, KV tokens, KV events |
| /api/show, /api/tags, /api/ps | Ollama | sizes of the model, bytes of its weights, context of the loaded one |
| /props | llama.cpp | slots, context, version, file of the weights |

A property that the engine does not report is unknown. No defaults of other engines are used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from msgspec import Struct, field

from headway.core.errors import HeadwayError
from headway.gateway.settings import Api


class Fetch(Protocol):
    def __call__(self, path: str, body: Any = None) -> bytes | None:
        """The body of a page, or the answer to a JSON body; None if the engine has no such page. Raises HeadwayError if
        the engine cannot be reached."""


Page = Mapping[str, Any]
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_UNKNOWN_BUILD = "b0-unknown"
"""The build that llama.cpp tells if it was compiled outside its repository, as Python packages are."""
_CACHE_CONFIG = "vllm:cache_config_info{"
_RANKED = re.compile(r'^vllm:num_requests_running\{[^}]*engine="(\d+)"', re.MULTILINE)
_RUNNING = re.compile(
    r"^(?:vllm:num_requests_running|sglang:num_running_reqs|llamacpp:requests_processing)\S*\s+(\S+)", re.MULTILINE
)


class FoundEngine(Struct, frozen=True):
    """The properties that one engine reports. None: not reported."""

    url: str
    api: Api
    product: str = ""
    """The engine's product name; empty if it is not recognised."""
    version: str = ""
    model: str = ""
    """The engine's own name of the model."""
    weights: str = ""
    """A repository or a path of the weights."""
    other_models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    context_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    """KV cache tokens, summed over all data-parallel ranks."""
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of the model by llama.cpp's names: `n_params`, `size` (bytes), `n_embd`, `n_ctx_train`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings by the keys of a fleet file's `engine`."""
    kv_events: str = ""
    """Address at which the engine publishes KV events."""
    is_idle: bool | None = None


def probe(url: str, fetch: Fetch) -> FoundEngine:
    """Probe the engine at `url`. Raises HeadwayError if there is no OpenAI-compatible list of models."""
    listed = _json(fetch("/v1/models"))
    models = [each for each in listed.get("data") or () if isinstance(each, dict) and isinstance(each.get("id"), str)]
    if not models:
        raise HeadwayError(f"{url}: lists no models at /v1/models; expected the address of an OpenAI-compatible engine")
    page = (fetch("/metrics") or b"").decode("utf-8", "replace")
    owner = str(models[0].get("owned_by", ""))
    found = _read(url, owner, page, fetch)
    if found.get("product") == "Ollama":
        found |= _ollama(str(models[0]["id"]), fetch)
    base = [each for each in models if not each.get("parent")] or models
    adapters = tuple(str(each["id"]) for each in models if each.get("parent"))
    running = [float(each) for each in _RUNNING.findall(page)]
    more: dict[str, Any] = {
        "model": base[0]["id"],
        "adapters": adapters,
        "other_models": tuple(str(each["id"]) for each in base[1:]),
        "weights": found.get("weights") or _text(base[0], "root") or base[0]["id"],
        "context_tokens": found.get("context_tokens") or _whole(base[0], "max_model_len"),
        "sizes": found.get("sizes") or _sizes(base[0].get("meta")),
        "is_idle": not any(running) if running else None,
    }
    return FoundEngine(url, **{**found, **more})


def _read(url: str, owner: str, page: str, fetch: Fetch) -> dict[str, Any]:
    """The fields found on the pages that belong to the engine's product."""
    if "vllm:" in page or owner == "vllm":
        return _vllm(url, page, fetch)
    if owner == "headway" and "sglang:" not in page:  # an emulated SGLang engine has this owner, too
        return {"api": "openai", "product": "Headway", "version": _text(_json(fetch("/version")), "version")}
    for path in ("/server_info", "/get_server_info"):
        info = _json(fetch(path))
        if "tp_size" in info or "model_path" in info:
            return _sglang(info)
    if "sglang:" in page or owner == "sglang":
        return {"api": "sglang", "product": "SGLang"}
    props = _json(fetch("/props"))
    if "total_slots" in props or owner == "llamacpp":
        return _llama_cpp(props)
    version = _json(fetch("/api/version"))
    if isinstance(version.get("version"), str):
        return {"api": "openai", "product": "Ollama", "version": version["version"]}
    if owner.startswith("tensorrt"):
        return {"api": "openai", "product": "TensorRT-LLM", "version": _text(_json(fetch("/version")), "version")}
    return {"api": "openai"}


def _vllm(url: str, page: str, fetch: Fetch) -> dict[str, Any]:
    found: dict[str, Any] = {
        "api": "vllm",
        "product": "vLLM",
        "version": _text(_json(fetch("/version")), "version"),
        "dp": len(set(_RANKED.findall(page))) or None,
    }
    ranks = [dict(_LABEL.findall(line)) for line in page.splitlines() if line.startswith(_CACHE_CONFIG)]
    if not ranks:
        return found
    first = ranks[0]
    settings: dict[str, Any] = {}
    block, blocks = _whole(first, "block_size"), [_whole(rank, "num_gpu_blocks") for rank in ranks]
    if block:
        settings["block_size_tokens"] = block
        if all(blocks):
            found["kv_capacity_tokens"] = block * sum(num for num in blocks if num)
    if first.get("enable_prefix_caching") in ("True", "False"):
        settings["prefix_caching"] = first["enable_prefix_caching"] == "True"
    if (share := _number(first, "gpu_memory_utilization")) is not None:
        settings["gpu_memory_utilization"] = share
    return found | {"settings": settings}


def _sglang(info: Page) -> dict[str, Any]:
    keys = {
        "max_num_seqs": "max_running_requests",
        "max_num_batched_tokens": "chunked_prefill_size",
        "block_size_tokens": "page_size",
    }
    settings: dict[str, Any] = {name: num for name, key in keys.items() if (num := _whole(info, key))}
    if isinstance(info.get("disable_radix_cache"), bool):
        settings["prefix_caching"] = not info["disable_radix_cache"]
    if (share := _number(info, "mem_fraction_static")) is not None:
        settings["gpu_memory_utilization"] = share
    events = info.get("kv_events_config")
    publisher = _json(events.encode()) if isinstance(events, str) else {}
    kv_tokens, dp = _whole(info, "max_total_num_tokens"), _whole(info, "dp_size")
    return {
        "api": "sglang",
        "product": "SGLang",
        "version": _text(info, "version"),
        "weights": _text(info, "model_path"),
        "context_tokens": _whole(info, "context_length"),
        "tp": _whole(info, "tp_size"),
        "pp": _whole(info, "pp_size"),
        "dp": dp,
        "kv_capacity_tokens": kv_tokens * (dp or 1) if kv_tokens else None,
        "settings": settings,
        "kv_events": _text(publisher, "endpoint"),
    }


def _llama_cpp(props: Page) -> dict[str, Any]:
    slots = _whole(props, "total_slots")
    generation = props.get("default_generation_settings")
    context = _whole(generation, "n_ctx") if isinstance(generation, dict) else None
    return {
        "api": "llama.cpp",
        "product": "llama.cpp",
        "version": _text(props, "build_info").removeprefix(_UNKNOWN_BUILD),
        "weights": _text(props, "model_path"),
        "context_tokens": context,
        "kv_capacity_tokens": context,  # the sum over all slots; see `unknown`
        "settings": {"max_num_seqs": slots} if slots else {},
    }


def _ollama(model: str, fetch: Fetch) -> dict[str, Any]:
    """The sizes of a model, and the context of the loaded one: Ollama's default is shorter than the model's."""
    info = _json(fetch("/api/show", {"model": model})).get("model_info")
    info = info if isinstance(info, dict) else {}
    arch = _text(info, "general.architecture")
    keys = {
        "n_params": "general.parameter_count",
        "n_embd": f"{arch}.embedding_length",
        "n_ctx_train": f"{arch}.context_length",
    }
    told = {name: info.get(key) for name, key in keys.items()} | {
        "size": _listed(fetch("/api/tags"), model).get("size")
    }
    return {"sizes": _sizes(told), "context_tokens": _whole(_listed(fetch("/api/ps"), model), "context_length")}


def _listed(body: bytes | None, model: str) -> Page:
    """The entry of a model in one of Ollama's lists; empty if it is not in it."""
    entries = _json(body).get("models")
    named = [each for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
    return next((each for each in named if model in (each.get("name"), each.get("model"))), {})


def _sizes(meta: Any) -> dict[str, int]:
    names = ("n_params", "size", "n_embd", "n_ctx_train")
    return {name: num for name in names if isinstance(meta, dict) and (num := _whole(meta, name))}


def unknown(engine: FoundEngine) -> Iterator[str]:
    """Properties that the engine did not report and a simulation needs."""
    if engine.tp is None:
        yield "tensor parallelism"
    if engine.kv_capacity_tokens is None:
        yield "the size of the KV cache"
    if "max_num_seqs" not in engine.settings:
        yield "the most sequences at once"
    if not engine.version:
        yield "the version"
    tokens, slots = engine.kv_capacity_tokens, engine.settings.get("max_num_seqs", 1)
    if engine.api == "llama.cpp" and tokens is not None and slots > 1:
        yield (
            f"whether its slots share one KV cache (assumed: they share {tokens:,} tokens, as without --parallel; "
            f"slots with a cache each hold {slots * tokens:,})"
        )


def _json(body: bytes | None) -> Page:
    """The object in a body; empty if there is none."""
    try:
        found = json.loads(body or b"null")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(page: Page, name: str) -> str:
    value = page.get(name)
    return value if isinstance(value, str) else ""


def _number(page: Page, name: str) -> float | None:
    value = page.get(name)
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _whole(page: Page, name: str) -> int | None:
    """The value of a key if it is a positive whole number."""
    value = _number(page, name)
    return int(value) if value is not None and value > 0 and value.is_integer() else None
