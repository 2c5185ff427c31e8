"""Names the KV blocks of a prompt by its token ids. Engines name blocks by their own hashes, with different seeds. The
names made here are the same for all engines and processes, so that a prompt's names are computed once and looked up at
many replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from headway.core.request import Segment

_NAME_BITS = (1 << 63) - 1
MAX_BLOCKS = 1 << 14
"""Maximum number of named blocks per prompt; later blocks are not looked up."""


def root(lora: str = "", salt: str = "") -> int:
    """The name before the first block. The name differs between LoRA adapters, because their KV differs, and between
    `cache_salt` values, because engines keep these apart."""
    if not lora and not salt:
        return 0
    named = (f"\0{len(lora)} {lora} {salt}" if salt else lora).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha1(named, usedforsecurity=False).digest()[:8]) & _NAME_BITS


def name(before: int, token_ids: Sequence[int]) -> int:
    """The name of a block. It identifies the block's tokens and all tokens before them. `before` is the previous
    block's name."""
    return hash((before, tuple(token_ids))) & _NAME_BITS  # a hash of integers, because it is the same in every process


def names(before: int, token_ids: Sequence[int], block_size_tokens: int) -> list[int]:
    """The names of consecutive full blocks. `before`: the name of the block before the first of them."""
    found = []
    for block in zip(*[iter(token_ids)] * block_size_tokens, strict=False):
        before = hash((before, block)) & _NAME_BITS
        found.append(before)
    return found


def segments(token_ids: Sequence[int], block_size_tokens: int, lora: str = "", salt: str = "") -> tuple[Segment, ...]:
    """A prompt's full blocks as one-block segments."""
    named = names(root(lora, salt), token_ids[: MAX_BLOCKS * block_size_tokens], block_size_tokens)
    return tuple([Segment(each, block_size_tokens) for each in named])
