"""Names the KV blocks of prompts by their tokens: a text is tokenized here with the model's files, or by an engine."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from headway.control import token_blocks
from headway.core.request import Segment
from headway.gateway.relay.request import ClientRequest
from headway.gateway.upstream.engine import EngineEndpoint

if TYPE_CHECKING:
    from headway.gateway.kv_events.checked_tokenizer import CheckedTokenizer

_MOST_PROMPTS, _MOST_BLOCKS = 4096, 1 << 20
"""Cached prompts and blocks."""
_TRIES = 2


def salt_of(body: Mapping[str, Any]) -> str:
    """The `cache_salt` that separates a request's blocks from blocks with the same tokens. SGLang's `extra_key`
    separates blocks, too, but events do not report `extra_key`: a prompt with an `extra_key` matches no block."""
    salt, extra = body.get("cache_salt"), body.get("extra_key")
    if extra is None and (salt is None or isinstance(salt, str)):
        return salt or ""
    return repr((salt, extra))


class PromptBlocks:
    """The blocks of requests' prompts. Repeated bodies, as of retries, are not tokenized again."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[int, tuple[Segment, ...]]] = OrderedDict()
        self._num_blocks = 0
        self._turns = count()
        self._tokenizers: dict[str, CheckedTokenizer] = {}
        """Tokenizers by path."""

    def prepare(self, engine: EngineEndpoint) -> None:
        """Read and check the tokenizer of an engine that is up, unless that has been done."""
        if engine.event_block_tokens and engine.tokenizer:
            self._tokenizer(engine).check([engine])

    def _tokenizer(self, engine: EngineEndpoint) -> CheckedTokenizer:
        from headway.gateway.kv_events.checked_tokenizer import CheckedTokenizer

        found = self._tokenizers.get(engine.tokenizer)
        if found is None:
            found = self._tokenizers[engine.tokenizer] = CheckedTokenizer(engine.tokenizer)
        return found

    async def name(self, request: ClientRequest, engines: Sequence[EngineEndpoint]) -> None:
        """Set a request's `blocks` and number of tokens, if the events of one of the engines are read. If no tokenizer
        and no engine tokenizes the prompt in time, the request keeps the segments of its text."""
        reading = [engine for engine in engines if engine.event_block_tokens]
        if not reading or request.is_passthrough:
            return
        block = reading[0].event_block_tokens
        lora = request.model if request.model in (reading[0].listed_loras or ()) else ""
        salt = salt_of(request.body)
        if request.prompt_ids is not None:
            request.blocks = token_blocks.segments(request.prompt_ids, block, lora, salt)
            return
        if not request.is_single or request.has_media:
            return
        digest = hashlib.sha1(request.raw, usedforsecurity=False).digest()
        found = self._known.get(digest)
        if found is None:
            if reading[0].tokenizer:
                found = await self._tokenizer(reading[0]).blocks(request.body, block, lora, reading, salt)
            if found is None:
                ids = await self._tokenize(request, reading)
                if ids is None:
                    return
                found = len(ids), token_blocks.segments(ids, block, lora, salt)
            self._remember(digest, found)
        else:
            self._known.move_to_end(digest)
        request.counted_tokens, request.blocks = found

    async def _tokenize(self, request: ClientRequest, engines: Sequence[EngineEndpoint]) -> list[int] | None:
        """The prompt's tokens. The engines are asked one after the other."""
        able = [engine for engine in engines if engine.adapter.tokenize is not None and engine.adapter.template is None]
        for _ in range(min(_TRIES, len(able))):
            ids = await able[next(self._turns) % len(able)].tokenize(request.body)
            if ids is not None:
                return ids
        return None

    def _remember(self, digest: bytes, found: tuple[int, tuple[Segment, ...]]) -> None:
        self._known[digest] = found
        self._num_blocks += len(found[1])
        while len(self._known) > _MOST_PROMPTS or self._num_blocks > _MOST_BLOCKS:
            _, (_, blocks) = self._known.popitem(last=False)
            self._num_blocks -= len(blocks)
