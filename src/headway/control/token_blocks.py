"""Names of the KV blocks of a prompt, from its token ids.

Engines name blocks by hashes of their own, with seeds that differ between engines. A block's name here is the same for
all engines and in all processes, so that a prompt is looked up at many replicas with one set of names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from headway.core.request import Segment

_NAME_BITS = (1 << 63) - 1
MAX_BLOCKS = 1 << 14
"""Blocks of a prompt that are named; what follows is not looked up."""


def root(lora: str = "", salt: str = "") -> int:
    """The name before the first block. The KV of one text differs between LoRA adapters, and engines keep what requests
    of one `cache_salt` have stored from all others."""
    if not lora and not salt:
        return 0
    named = (f"\0{len(lora)} {lora} {salt}" if salt else lora).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha1(named, usedforsecurity=False).digest()[:8]) & _NAME_BITS


def name(before: int, token_ids: Sequence[int]) -> int:
    """The name of a block, which identifies its tokens and all before them. `before`: the previous block's name."""
    return hash((before, tuple(token_ids))) & _NAME_BITS  # of integers, so it is the same in every process


def names(before: int, token_ids: Sequence[int], block_size_tokens: int) -> list[int]:
    """The names of consecutive full blocks. `before`: the name of the block before them."""
    found = []
    for block in zip(*[iter(token_ids)] * block_size_tokens, strict=False):
        before = hash((before, block)) & _NAME_BITS
        found.append(before)
    return found


def segments(token_ids: Sequence[int], block_size_tokens: int, lora: str = "", salt: str = "") -> tuple[Segment, ...]:
    """The full blocks of a prompt as segments of one block each."""
    named = names(root(lora, salt), token_ids[: MAX_BLOCKS * block_size_tokens], block_size_tokens)
    return tuple([Segment(each, block_size_tokens) for each in named])
