"""Prefill here, decode there: one attempt in two requests, in the words of vLLM's KV connectors.

Source: vLLM's documentation of disaggregated prefill (`kv_transfer_params`). The prefill replica is asked for one
token, and says where it keeps the prompt's KV cache; what it says goes into the request to the decode replica, which
fetches the cache and computes the prompt's last token anew, so that the first token is its own. Nothing else of it is
understood. A cache that is fetched is gone: what may have been fetched is never offered to another replica.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headway.gateway.relay.request import ClientRequest
from headway.gateway.upstream.errors import EngineError

PARAMS = "kv_transfer_params"
Params = dict[str, Any]
_REMOTE: Params = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")
_STREAMS = ("stream", "stream_options", "return_token_ids", "logprobs", "top_logprobs")
_WHOLE = ("echo", "prompt_logprobs", "use_beam_search")
"""What hangs on the prompt's own computation, or on several sequences."""


class Prefilled(Struct):
    """What Headway reads of a prefill replica's answer."""

    kv_transfer_params: Params | None = None
    usage: _Usage | None = None

    @property
    def prompt_tokens(self) -> int:
        """As it counted them; 0: it did not say."""
        return 0 if self.usage is None else self.usage.prompt_tokens


class _Usage(Struct):
    prompt_tokens: int = 0


def can_be_split(ask: ClientRequest) -> bool:
    """It is one sequence of several tokens, of which the first replica only computes the prompt."""
    body = ask.body
    if ask.is_opaque or ask.max_tokens == 1 or any(body.get(name) for name in _WHOLE):
        return False
    is_single = ask.is_chat or ask.prompt_ids is not None or isinstance(body.get("prompt"), str)
    return is_single and body.get("n") in (None, 1) and body.get("best_of") in (None, 1)


def prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The request to who computes the prompt."""
    kept = {name: value for name, value in body.items() if name not in _STREAMS}
    limits = {name: min(body[name], 1) for name in _LIMITS if isinstance(body.get(name), int)}
    return {**kept, **limits, "max_tokens": 1, "stream": False, PARAMS: dict(_REMOTE)}


def decode(body: dict[str, Any], params: Params | None) -> dict[str, Any]:
    """The request to who decodes. Without `params` it computes the prompt itself; a client's own never get there."""
    if params is not None:
        return {**body, PARAMS: params}
    return {name: value for name, value in body.items() if name != PARAMS} if PARAMS in body else body


def read(data: bytes) -> Prefilled:
    """A prefill replica's answer. EngineError where it is none."""
    try:
        return msgspec.json.decode(data, type=Prefilled)
    except msgspec.MsgspecError as error:
        raise EngineError(f"answered a prefill with what is no completion ({error})") from None
