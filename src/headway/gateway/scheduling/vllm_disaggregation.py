"""Disaggregated prefill with vLLM's KV connectors: one attempt as two requests, first to the prefill replica.

Source: vLLM's documentation of disaggregated prefill (`kv_transfer_params`). The prefill replica generates one token
and returns where it stores the prompt's KV cache. The gateway copies this value into the request to the decode replica.
The decode replica fetches the cache, recomputes the prompt's last token, and generates the first token itself. A cache
can be fetched only once: if a decode replica may have fetched the cache, the cache is not offered to another replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from headway.gateway.upstream.errors import EngineError

PARAMS = "kv_transfer_params"
Params = dict[str, Any]
_STORE_KV: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_ANSWER_OPTIONS = ("stream", "stream_options", "return_token_ids", "logprobs", "top_logprobs")


class PrefillAnswer(Struct):
    """The fields of a prefill replica's answer that are read."""

    kv_transfer_params: Params | None = None
    usage: _PrefillUsage | None = None

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens by the engine's count; 0: not reported."""
        return 0 if self.usage is None else self.usage.prompt_tokens


class _PrefillUsage(Struct):
    prompt_tokens: int = 0


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for the prefill replica: generate one token, and store the KV cache."""
    shared = {name: value for name, value in body.items() if name not in _ANSWER_OPTIONS}
    limits = {name: min(body[name], 1) for name in _LIMITS if isinstance(body.get(name), int)}
    return {**shared, **limits, "max_tokens": 1, "stream": False, PARAMS: dict(_STORE_KV)}


def decode_body(body: dict[str, Any], params: Params | None) -> dict[str, Any]:
    """The body for the decode replica. Without `params`, the decode replica computes the prompt. A client's own
    parameters are removed."""
    if params is not None:
        return {**body, PARAMS: params}
    return {name: value for name, value in body.items() if name != PARAMS} if PARAMS in body else body


def read_prefill_answer(data: bytes) -> PrefillAnswer:
    """Decode a prefill replica's answer. Raises EngineError if it is not a completion."""
    try:
        return msgspec.json.decode(data, type=PrefillAnswer)
    except msgspec.MsgspecError as error:
        raise EngineError(f"answered a prefill with what is no completion ({error})") from None
