"""One engine: its address, its API, and its reports about itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.gateway.errors import DECODE_ERRORS
from headway.gateway.upstream.client import JSON, Client, Connection
from headway.gateway.upstream.dialects import Adapter, Load, LoadReader
from headway.gateway.upstream.errors import EngineError, ExhaustedError, NoAnswerError, RefusedError, UnreachableError
from headway.gateway.upstream.reports import LlamaProps, Models, RenderedPrompt, SglangInfo, Tokens, TokensText
from headway.gateway.upstream.sse import EventSplitter, is_done, payload, read_chunk

log = logging.getLogger("headway.gateway")
_DEFAULT_BOOTSTRAP_PORT = 8998
_TEMPLATE_TIMEOUT_S = 60.0
"""Time limit for rendering a template. Engines render templates in parallel to their requests, and sometimes slowly."""
_COUNT_TIMEOUT_S = 2.0
_UNREADABLE_S = 10.0
_MAX_NOTED = 32
_CANARY_TOKEN_S = 0.2
"""Time for each token of a canary."""
_HOSTED_HEALTHY = (404, 405, 429)
"""Statuses that show a healthy hosted service: 404 and 405 if it does not list its models, 429 if it limits such
requests."""
_COUNTED_FIELDS = ("prompt", "messages", "tools", "chat_template_kwargs", "add_special_tokens", "add_generation_prompt")
"""The fields of a request that determine its number of prompt tokens."""


class EngineEndpoint:
    """One engine's address and client."""

    is_single_phase = False
    """Whether the engine was started for only prefill or only decode (SGLang)."""
    is_shared = False

    def __init__(
        self,
        id: int,
        pool: str,
        model: str,
        url: str,
        adapter: Adapter,
        max_context_tokens: int,
        client: Client | None = None,
        api_key: str = "",
        is_hosted: bool = False,
    ) -> None:
        """`is_hosted`: whether the engine is a third party's service. Such a service gets no client's key, and is not
        asked for its models."""
        self.id, self.pool, self.model = id, pool, model
        self.name = f"{pool}/{id}"
        """The name in logs and headers."""
        self.url, self.adapter = url, adapter
        self.client = client or Client(url, api_key=api_key, keeps_keys=is_hosted)
        self.is_hosted = is_hosted
        self.api_key = api_key
        """The engine's own key; empty: the engine gets the client's key."""
        self.max_context_tokens = max_context_tokens
        self.num_arriving = 0
        self.noted: set[str] = set()
        """Problems with reading the engine's answers that were already logged."""
        self.reported_model: str | None = None
        """The engine's own name for the model."""
        self.aliases: list[str] = []
        """All names of the model at the engine."""
        self.listed_loras: frozenset[str] | None = None
        """The LoRA adapters that the engine lists; None before the first list."""
        self.event_block_tokens = 0
        """Tokens of a KV block if the engine's KV cache events are read and name blocks by tokens; otherwise 0."""
        self.tokenizer = ""
        """Path of the files that tokenize prompts like the engine; empty: the engine tokenizes."""
        self.kv_folder: Path | None = None
        """The shared folder for saved KV caches (llama.cpp)."""
        self.engine_ordering = ""
        """The Headway ordering that the engine must run, with its arguments; empty if none is required."""
        self._unreadable: dict[str, float] = {}
        """Maps each unreadable path to the time until which it is not requested, on the event loop's clock."""
        self._loads = LoadReader(adapter)
        self._unclear: set[str] = set()
        """Metrics that were logged as unknown."""
        self.bootstrap_port = 0
        """The port for KV transfers of a prefill engine (SGLang)."""

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the longest possible request."""
        return self.max_context_tokens

    async def check_health(self, timeout_s: float) -> None:
        """Raises EngineError if the health check fails."""
        status, data = await self.client.fetch_status(self.adapter.health, timeout_s)
        if status != 200 and not (self.is_hosted and status in _HOSTED_HEALTHY):
            raise RefusedError(status, data)

    async def _read(self, path: str, timeout_s: float) -> bytes | None:
        """A page on which the engine reports about itself. None if the page is unreadable; then it is not requested
        again for a while. Raises EngineError if the engine cannot be reached."""
        now = asyncio.get_running_loop().time()
        if now < self._unreadable.get(path, now):
            return None
        try:
            status, data = await self.client.fetch(path, timeout_s)
        except (UnreachableError, ExhaustedError):
            raise
        except EngineError as error:
            self._cannot_read(path, str(error))
            return None
        self._unreadable.pop(path, None)
        return data if status == 200 else None

    def _cannot_read(self, path: str, why: str) -> None:
        if path not in self._unreadable:
            log.warning("%s: what %s says is unknown: %s", self.name, path, why)
        self._unreadable[path] = asyncio.get_running_loop().time() + _UNREADABLE_S

    async def read_details(self, timeout_s: float) -> None:
        """Read the model's name and the longest request, as far as readable. Raises EngineError if the engine cannot be
        reached."""
        if self.is_hosted:
            return
        data = await self._read("/v1/models", timeout_s)
        if data is None:
            return
        try:
            models = msgspec.json.decode(data, type=Models).data
        except DECODE_ERRORS:
            return
        if not models:
            return
        bases = [model for model in models if model.parent is None] or models
        listed = next((model for model in bases if model.id == self.model), bases[0])
        self.reported_model = listed.id
        self.aliases = [model.id for model in bases if model.root is not None and model.root == listed.root]
        self.listed_loras = frozenset(model.id for model in models if model.parent is not None)
        if listed.max_model_len is not None:
            self.max_context_tokens = min(listed.max_model_len, self.max_context_tokens)

    async def read_load(self, timeout_s: float) -> Load | None:
        """The load by the engine's metrics; None without readable metrics. Raises EngineError if the engine cannot be
        reached."""
        if self.adapter.metrics is None:
            return None
        data = await self._read(self.adapter.metrics, timeout_s)
        if data is None:
            return None
        names = {self.model, *self.aliases, *([self.reported_model] if self.reported_model else [])}
        load = self._loads.read(data, names)
        for metric in load.unclear:
            if metric not in self._unclear and len(self._unclear) < _MAX_NOTED:
                self._unclear.add(metric)
                log.warning(
                    "%s: samples of %s may be parts, copies or totals: the gateway's own counts are used",
                    self.name,
                    metric,
                )
        return load

    async def run_canary(self, timeout_s: float, num_tokens: int = 1) -> None:
        """Complete `num_tokens` tokens: one without streaming, several as a stream. Raises EngineError if the engine
        does not.

        A single-phase engine completes one without an engine for the other phase.
        """
        if self.is_single_phase:
            status, data = await self.client.fetch("/health_generate", timeout_s)
            is_refused = status != 200
        elif num_tokens > 1:
            await self._stream_canary(timeout_s, num_tokens)
            return
        else:
            body = {"model": self.reported_model or self.model, "prompt": "a", "max_tokens": 1}
            status, data = await self.client.fetch("/v1/completions", timeout_s, msgspec.json.encode(body))
            is_refused = status >= 500
        if is_refused:
            raise RefusedError(status, data)

    async def _stream_canary(self, timeout_s: float, num_tokens: int) -> None:
        """Stream `num_tokens` tokens. A refusal, or an early end of the answer, is no failure."""
        body: dict[str, Any] = {
            "model": self.reported_model or self.model,
            "prompt": "a",
            "max_tokens": num_tokens,
            "stream": True,
        }
        if self.adapter.api != "openai":
            body["ignore_eos"] = True
        limit_s = timeout_s + num_tokens * _CANARY_TOKEN_S
        try:
            async with asyncio.timeout(limit_s):
                connection = await self.client.request("POST", "/v1/completions", JSON, msgspec.json.encode(body))
                try:
                    if connection.status >= 400:
                        if connection.status >= 500:
                            raise RefusedError(connection.status, await connection.read(1 << 16))
                        return
                    await _read_stream(connection)
                finally:
                    self.client.release(connection)
        except TimeoutError:
            raise NoAnswerError(f"{num_tokens} tokens did not come within {limit_s:g} s") from None

    async def render_chat(self, body: dict[str, Any]) -> str | None:
        """The prompt for a chat; None if the engine does not render chats, or not in time. Raises EngineError if the
        engine is gone."""
        if self.adapter.template is None:
            return None
        try:
            status, data = await self.client.fetch(
                self.adapter.template, _TEMPLATE_TIMEOUT_S, msgspec.json.encode(body)
            )
        except NoAnswerError:
            return None
        if status != 200:
            return None
        try:
            return msgspec.json.decode(data, type=RenderedPrompt).prompt
        except msgspec.MsgspecError:
            raise EngineError("rendered no prompt of a chat") from None

    async def text_of(self, ids: list[int]) -> str | None:
        """The text of these tokens; None if the engine does not return it. Raises EngineError if the engine is gone."""
        if self.adapter.detokenize is None:
            return None
        body = {"model": self.reported_model or self.model, "tokens": ids}
        status, data = await self.client.fetch(self.adapter.detokenize, _TEMPLATE_TIMEOUT_S, msgspec.json.encode(body))
        try:
            text = msgspec.json.decode(data, type=TokensText) if status == 200 else TokensText()
        except DECODE_ERRORS:
            return None
        return text.prompt if text.prompt is not None else text.content

    async def count_tokens(self, body: dict[str, Any]) -> int | None:
        """The tokens of a request's prompt by the engine's count; None without a count in time."""
        reply = await self._tokenize(body)
        if reply is None:
            return None
        count = reply.count if reply.count is not None else len(reply.tokens or ())
        return count if count > 0 else None

    async def tokenize(self, body: dict[str, Any]) -> list[int] | None:
        """The token ids of a request's prompt by the engine; None without a report in time."""
        reply = await self._tokenize(body)
        ids = None if reply is None else reply.tokens
        return ids if ids and all(type(id) is int for id in ids) else None

    async def _tokenize(self, body: dict[str, Any]) -> Tokens | None:
        if self.adapter.tokenize is None:
            return None
        fields = {name: body[name] for name in _COUNTED_FIELDS if name in body}
        try:
            if self.adapter.template is not None:  # an engine with templates counts only texts
                text = body.get("prompt") if "messages" not in body else await self.render_chat(body)
                if not isinstance(text, str):
                    return None
                fields = {"content": text, "add_special": True}
            fields["model"] = self.reported_model or self.model
            path, sent = self.adapter.tokenize, msgspec.json.encode(fields)
            status, data = await self.client.fetch(path, _COUNT_TIMEOUT_S, sent)
            return msgspec.json.decode(data, type=Tokens) if status == 200 else None
        except (EngineError, *DECODE_ERRORS):
            return None

    async def read_num_slots(self, timeout_s: float) -> int:
        """The number of llama.cpp's slots. Raises EngineError if the server does not report it."""
        status, data = await self.client.fetch("/props", timeout_s)
        try:
            num_slots = msgspec.json.decode(data, type=LlamaProps).total_slots if status == 200 else 0
        except msgspec.MsgspecError:
            num_slots = 0
        if num_slots < 1:
            raise EngineError("reports no slots: is it a llama.cpp server?")
        return num_slots

    async def read_bootstrap_port(self, role: str, timeout_s: float) -> None:
        """Read an SGLang engine's port for KV transfers. Raises EngineError if the engine was not started for
        `role`."""
        data = await self._read("/get_server_info", timeout_s)
        if data is None:
            return
        try:
            info = msgspec.json.decode(data, type=SglangInfo)
        except DECODE_ERRORS:
            return
        if info.disaggregation_mode and info.disaggregation_mode != role:
            mode = {"null": "both phases"}.get(info.disaggregation_mode, info.disaggregation_mode)
            raise EngineError(f"was started for {mode} (--disaggregation-mode), expected {role}")
        self.bootstrap_port = info.disaggregation_bootstrap_port or _DEFAULT_BOOTSTRAP_PORT


async def _read_stream(connection: Connection) -> None:
    """Read a stream to its end. Raises EngineError if it breaks, reports an error, or ends early."""
    splitter, has_finished = EventSplitter(), False
    while part := await connection.read_part():
        for event in splitter.split(part):
            data = payload(event)
            if data is not None and is_done(data):
                return
            if data is not None:
                has_finished |= any(choice.finish_reason is not None for choice in read_chunk(data)[0].choices)
    if not has_finished:
        raise EngineError("ended its stream without [DONE]")


async def count_prompt(
    body: dict[str, Any], num_chars: int, output_tokens: int, engines: Sequence[EngineEndpoint]
) -> int | None:
    """The prompt's tokens by an engine's count, if the count may decide which engine can hold the request.

    None: the length does not matter, because the request fits all engines or all have the same limit, or no engine
    counts.
    """
    limits = {engine.max_request_tokens for engine in engines}
    if len(limits) < 2 or num_chars + output_tokens <= min(limits):
        return None
    for engine in engines:
        if engine.adapter.tokenize is not None:
            return await engine.count_tokens(body)
    return None
