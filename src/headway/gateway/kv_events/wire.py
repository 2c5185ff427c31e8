"""The format of KV cache events in vLLM and SGLang: msgpack batches with a sequence number.

Source: vLLM's `vllm/distributed/kv_events.py` and SGLang's `srt/disaggregation/kv_events.py`. Earlier versions of both
write events as arrays that grew with each version; later versions write maps. Absent fields have their defaults;
unknown fields and events are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.gateway.errors import DECODE_ERRORS

Hash = int | bytes
"""An engine's own name of a block. It identifies the tokens of the block and of all blocks before."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends the answer to a replay request."""
_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
"""First bytes of msgpack arrays."""


class BlockStored(Struct, tag="BlockStored", omit_defaults=True):
    """An event: consecutive blocks of one prompt have been stored in the cache."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    """Hash of the block before the event's first block; None if the first block begins the prompt."""
    token_ids: list[int | tuple[int, ...]] = []
    """The tokens of all blocks together. SGLang with EAGLE names blocks by pairs of a token and its successor."""
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    """`GPU`, or the name of a slower memory. None means the GPU."""
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """Further inputs of each block's hash, such as images."""
    group_idx: int | None = None
    """The group of layers that share one kind of cache. Engines number groups as they appear in the model."""
    kv_cache_spec_kind: str | None = None
    """The kind of the group: `full_attention`, `sliding_window`, `mamba` or another."""
    kv_cache_spec_sliding_window: int | None = None
    """Window of the group, in tokens."""
    cache_salt: Any = None
    """A request's `cache_salt` in SGLang; vLLM puts it into `extra_keys` of a prompt's first block."""

    @property
    def is_on_gpu(self) -> bool:
        medium = self.medium
        return medium == "GPU" or medium is None or medium.upper() == "GPU"

    @property
    def ids(self) -> list[int]:
        """The token ids. Of a pair, the first id."""
        ids = self.token_ids
        if ids and type(ids[0]) is not int:
            return [each if isinstance(each, int) else each[0] for each in ids]
        return ids  # type: ignore[return-value]  # all are like the first one


class BlockRemoved(Struct, tag="BlockRemoved", omit_defaults=True):
    """Blocks that are no longer in the cache."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    remaining_copy_counts: list[int] | None = None
    """Number of remaining copies of each block."""

    @property
    def is_on_gpu(self) -> bool:
        medium = self.medium
        return medium == "GPU" or medium is None or medium.upper() == "GPU"


class AllBlocksCleared(Struct, tag="AllBlocksCleared", omit_defaults=True):
    """The engine has emptied its prefix cache."""


class _StoredArray(BlockStored, tag="BlockStored", omit_defaults=True, array_like=True):
    pass


class _RemovedArray(BlockRemoved, tag="BlockRemoved", omit_defaults=True, array_like=True):
    pass


class _ClearedArray(AllBlocksCleared, tag="AllBlocksCleared", omit_defaults=True, array_like=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, omit_defaults=True):
    """The events of one iteration of an engine."""

    ts: float
    """Time in seconds since 1970, on the engine's clock."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _ArrayBatch(Struct, omit_defaults=True, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _ArrayOfMaps(Struct, omit_defaults=True, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_MAP_EVENT = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_ARRAY_EVENT = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_MAPS, _ARRAY_BATCHES = msgspec.msgpack.Decoder(EventBatch), msgspec.msgpack.Decoder(_ArrayBatch)
_ARRAYS_OF_MAPS = msgspec.msgpack.Decoder(_ArrayOfMaps)
_TAGS = frozenset(("BlockStored", "BlockRemoved", "AllBlocksCleared"))
_encoder = msgspec.msgpack.Encoder()


def replayed(parts: Sequence[bytes]) -> tuple[int, bytes] | None:
    """The sequence number and the batch in a message of a replay; None at its end. Raises HeadwayError for any other
    message. Since vLLM 0.26 and SGLang 0.5.23 a topic stands between the empty frame and the number."""
    if len(parts) not in (3, 4) or parts[0] or len(parts[-2]) != 8:
        sizes = ", ".join(str(len(part)) for part in parts)
        raise HeadwayError(
            f"a replay sends a message of {len(parts)} parts ({sizes} bytes); expected an empty one, a topic, which "
            "older engines leave out, a sequence number of 8 bytes, and a batch"
        )
    return None if parts[-2] == END_OF_REPLAY else (int.from_bytes(parts[-2], "big"), parts[-1])


def decode(payload: bytes) -> Sequence[Event]:
    """The known events of a batch. Raises HeadwayError if the payload is not a batch."""
    is_array = payload[:1] != b"" and payload[0] in _ARRAYS
    decoders = (_ARRAY_BATCHES, _ARRAYS_OF_MAPS) if is_array else (_MAPS,)
    for decoder in decoders:
        with suppress(*DECODE_ERRORS):
            return decoder.decode(payload).events
    try:
        return _known(payload)
    except (*DECODE_ERRORS, LookupError, TypeError, ValueError) as error:
        raise HeadwayError(f"a batch of KV cache events is malformed: {error}") from None


def _known(payload: bytes) -> list[Event]:
    """The known events of a batch that also has unknown kinds."""
    batch = msgspec.msgpack.decode(payload)
    events = batch["events"] if isinstance(batch, dict) else batch[1]
    found: list[Event] = []
    for event in events:
        is_map = isinstance(event, dict)
        if (event["type"] if is_map else event[0]) in _TAGS:
            found.append((_MAP_EVENT if is_map else _ARRAY_EVENT).decode(_encoder.encode(event)))
    return found


def encode(events: Sequence[Event], now: float, as_arrays: bool) -> bytes:
    """A batch in vLLM's format, or in the array format of SGLang and earlier vLLM (`as_arrays`)."""
    if not as_arrays:
        return _encoder.encode(EventBatch(now, list(events)))
    arrays: list[_StoredArray | _RemovedArray | _ClearedArray] = []
    for event in events:
        if isinstance(event, BlockStored):
            arrays.append(_StoredArray(*(getattr(event, name) for name in event.__struct_fields__)))
        elif isinstance(event, BlockRemoved):
            arrays.append(_RemovedArray(*(getattr(event, name) for name in event.__struct_fields__)))
        else:
            arrays.append(_ClearedArray())
    return _encoder.encode(_ArrayBatch(now, arrays))
