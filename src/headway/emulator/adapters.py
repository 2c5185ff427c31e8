"""LoRA adapters of an emulated engine, with vLLM's interface: names in requests, loading and unloading, and the metric.

Sources: vLLM's documentation of LoRA adapters, and `vllm/entrypoints/openai/serving_models.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from headway.core.errors import HeadwayError
from headway.core.fleet import LoraAdapter
from headway.emulator.completion import BadRequestError, SurfaceConfig
from headway.emulator.engine import EmulatedEngine


class UnknownModelError(BadRequestError):
    """The request names neither the model nor an adapter."""


def lora_of(engine: EmulatedEngine, config: SurfaceConfig, body: dict[str, Any]) -> str:
    """The adapter that a request names; "" for the model itself.

    Raises UnknownModelError for another name, if the engine has slots for adapters.
    """
    name = body.get("model")
    if isinstance(name, str) and name in engine.adapters:
        return name
    if engine.pool.lora is not None and name not in (None, "", config.name, *engine.pool.model.names):
        raise UnknownModelError(f"The model `{name}` does not exist.")
    return ""


def lora_metric(engine: EmulatedEngine) -> list[str]:
    """vLLM's metric: the adapters are labels, and the value is the time."""
    if engine.pool.lora is None:
        return []
    running, waiting, num_slots = engine.lora_load()
    label = f'max_lora="{num_slots}",running_lora_adapters="{",".join(sorted(running))}"'
    label += f',waiting_lora_adapters="{",".join(sorted(waiting))}"'
    return ["# TYPE vllm:lora_requests_info gauge\n", f"vllm:lora_requests_info{{{label}}} {time.time()}\n"]


class _LoadRequest(msgspec.Struct):
    lora_name: str
    lora_path: str


class _UnloadRequest(msgspec.Struct):
    lora_name: str


def adapter_routes(engine: Callable[[], EmulatedEngine]) -> list[Route]:
    """Routes that load and unload adapters while the engine runs."""

    async def load(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=_LoadRequest)
            engine().load_adapter(LoraAdapter(name=body.lora_name))
        except (msgspec.MsgspecError, HeadwayError) as error:
            return _error(400, "InvalidUserInput", str(error))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=_UnloadRequest)
        except msgspec.MsgspecError as error:
            return _error(400, "InvalidUserInput", str(error))
        try:
            engine().unload_adapter(body.lora_name)
        except HeadwayError as error:
            return _error(404, "NotFoundError", str(error))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return [
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
    ]


def _error(status: int, kind: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)
