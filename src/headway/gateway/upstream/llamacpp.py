"""What llama.cpp's server can be asked besides completions."""

from __future__ import annotations

import msgspec

from headway.gateway.fleet.replica import Engine
from headway.gateway.relay.request import ClientRequest
from headway.gateway.upstream.client import EngineError

_PATIENCE_S = 5.0


class _Prompt(msgspec.Struct):
    prompt: str


async def template(engine: Engine, ask: ClientRequest) -> str | None:
    """The prompt that the engine makes of a chat; None: it does not tell. EngineError if it is not there."""
    assert engine.adapter.template is not None
    status, data = await engine.client.fetch(engine.adapter.template, _PATIENCE_S, msgspec.json.encode(ask.body))
    if status != 200:
        return None
    try:
        return msgspec.json.decode(data, type=_Prompt).prompt
    except msgspec.MsgspecError:
        raise EngineError("told no prompt of a chat") from None
