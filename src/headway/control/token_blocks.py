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


def root(lora: str = "") -> int:
    """The name before the first block. The KV of one text differs between LoRA adapters."""
    return int.from_bytes(hashlib.sha1(lora.encode(), usedforsecurity=False).digest()[:8]) & _NAME_BITS if lora else 0


def name(before: int, token_ids: Sequence[int]) -> int:
    """The name of a block, which identifies its tokens and all before them. `before`: the previous block's name."""
    return hash((before, *token_ids)) & _NAME_BITS  # of integers, so it is the same in every process


def segments(token_ids: Sequence[int], block_size_tokens: int, lora: str = "") -> tuple[Segment, ...]:
    """The full blocks of a prompt as segments of one block each."""
    before, found = root(lora), []
    for start in range(0, min(len(token_ids) // block_size_tokens, MAX_BLOCKS) * block_size_tokens, block_size_tokens):
        before = name(before, token_ids[start : start + block_size_tokens])
        found.append(Segment(before, block_size_tokens))
    return tuple(found)
