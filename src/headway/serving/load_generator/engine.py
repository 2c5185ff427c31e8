"""The engine under load: its address, its requests, and its count of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from headway.core.request import Request
from headway.gateway.errors import DECODE_ERRORS
from headway.gateway.upstream.chunks import Chunk
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError
from headway.serving.discover.probe import FoundEngine
from headway.serving.load_generator.answer import Answer, ask
from headway.serving.load_generator.prompts import Count, Prompts

if TYPE_CHECKING:
    from headway.gateway.kv_events.local_tokenizer import LocalTokenizer

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
COUNT_TIMEOUT_S = 60.0
_NO_LIMIT = 1 << 30
_USAGES = {"stream_options": {"include_usage": True}}
_USAGES_BY_CHUNK = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Options(Struct, frozen=True):
    """Endpoint, sampling and timeout of a load's requests."""

    endpoint: Endpoint = "completions"
    temperature: float | None = None
    """None means the engine's default sampling."""
    is_exact_length: bool = True
    """Whether answers must have the requested length, if the engine supports it."""
    timeout_s: float | None = None


class Target:
    """One engine, one of its models, and the connections to it. Belongs to one event loop."""

    def __init__(self, found: FoundEngine, model: str, options: Options, api_key: str = "") -> None:
        self.found, self.model, self._options = found, model, options
        self._adapter = ADAPTERS[found.api]
        self._endpoint = EngineEndpoint(0, "load", model, found.url, self._adapter, _NO_LIMIT, api_key=api_key)
        self.path = PATHS[options.endpoint]
        self._names = {found.model, *found.other_models, *found.adapters}

    @property
    def is_chat(self) -> bool:
        return self._options.endpoint == "chat"

    def close(self) -> None:
        self._endpoint.client.close()

    async def send(
        self, prompt: dict[str, Any], output_tokens: int, now: Callable[[], float], model: str = ""
    ) -> Answer:
        """Send a request for `output_tokens` tokens. `model`: another model of the engine, such as a LoRA adapter."""
        body = {"model": model or self.model, **prompt, "max_tokens": output_tokens, "stream": True, **self._fields()}
        return await ask(self._endpoint.client, self.path, body, now, self._options.timeout_s)

    def _fields(self) -> dict[str, Any]:
        api = self.found.api
        fields: dict[str, Any] = dict(self._adapter.token_options)
        fields |= _USAGES_BY_CHUNK if api == "sglang" else _USAGES
        if self._options.is_exact_length and api != "openai":
            fields["ignore_eos"] = True
        if self._options.temperature is not None:
            fields["temperature"] = self._options.temperature
        return fields

    def asker(self, prompts: Prompts) -> Callable[[Request, Callable[[], float]], Any]:
        """The function with which a driver sends each request."""

        async def ask_for(request: Request, now: Callable[[], float]) -> Answer:
            model = next((name for name in (request.lora, request.model) if name in self._names), "")
            answer = await self.send(prompts.fields(request), request.output_tokens, now, model)
            if answer.is_whole:
                prompts.keep(request, answer.text)
            return answer

        return ask_for

    # Counting tokens.

    async def counter(self, tokenizer: LocalTokenizer | None) -> Count | None:
        """The best available counter of a prompt's tokens: the tokenizer files, the engine's /tokenize, or the usage in
        the engine's answers. None if there is none."""
        if tokenizer is not None:
            return self._by(tokenizer)
        for count in (self._count_by_engine, self._count_by_usage):
            if await count(" of") is not None:
                return count
        return None

    def _by(self, tokenizer: LocalTokenizer) -> Count:
        from headway.gateway.kv_events.chat_template import NotExactError

        async def count(text: str) -> int | None:
            try:
                return len(tokenizer.ids(self._prompt(text)))
            except NotExactError:  # a chat without a template
                return None

        return count

    def _prompt(self, text: str) -> dict[str, Any]:
        if self.is_chat:
            return {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
        return {"prompt": text}

    async def _count_by_engine(self, text: str) -> int | None:
        return await self._endpoint.count_tokens(self._prompt(text))

    async def _count_by_usage(self, text: str) -> int | None:
        """The prompt tokens in the usage of a request for one token."""
        prompt = self._prompt(text)
        prompt.pop("add_generation_prompt", None)
        body = msgspec.json.encode({"model": self.model, **prompt, "max_tokens": 1})
        try:
            status, data = await self._endpoint.client.fetch(self.path, COUNT_TIMEOUT_S, body)
            if status != 200:
                return None
            usage = msgspec.json.decode(data, type=Chunk).usage
        except (EngineError, *DECODE_ERRORS):
            return None
        return None if usage is None else usage.prompt_tokens or None
