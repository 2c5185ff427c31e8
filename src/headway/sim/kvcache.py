"""Paged KV memory of one replica, with the growth of decoding requests in closed form.

Blocks are counted, not named. Two kinds of holders: decoding requests, and `pinned` blocks (of requests in prefill,
and of the prefix cache while running requests share them). A decoding request that joined with c tokens of its own has
c + (tick - joined) at any later tick. So c - joined says all about it, their sum is all that is kept, and a histogram
of it modulo the block size says how many blocks the coming ticks take.
"""

from __future__ import annotations

from functools import cache
from operator import add, sub


@cache
def _slacks(block: int) -> tuple[tuple[int, ...], ...]:
    """Of one request whose offset is so much modulo the block size: its unused tokens, by tick modulo the same."""
    return tuple(tuple(-(residue + tick) % block for tick in range(block)) for residue in range(block))


class KvCache:
    """Block counts. At tick t the `count` decoding requests have `offset + count * t` tokens of their own."""

    __slots__ = ("_residues", "_slack", "_slacks", "block", "count", "offset", "pinned", "total", "watermark")

    def __init__(self, total_blocks: int, block_size_tokens: int, watermark: float) -> None:
        self.total = total_blocks
        self.block = block_size_tokens
        self.watermark = int(watermark * total_blocks)
        self.pinned = 0
        self.offset = 0
        self.count = 0
        self._residues = [0] * block_size_tokens
        self._slack = [0] * block_size_tokens
        """Unused tokens in the last blocks of the decoding requests, by tick modulo the block size."""
        self._slacks = _slacks(block_size_tokens)

    def blocks(self, tokens: int) -> int:
        """Blocks that this many tokens take."""
        return -(-tokens // self.block)

    def join(self, tokens: int, tick: int) -> None:
        """A request with this many KV tokens of its own starts to decode."""
        offset = tokens - tick
        self.offset += offset
        self.count += 1
        residue = offset % self.block
        self._residues[residue] += 1
        self._slack = list(map(add, self._slack, self._slacks[residue]))

    def leave(self, tokens: int, tick: int) -> None:
        """A decoding request that now has this many tokens of its own goes, and its blocks with it."""
        offset = tokens - tick
        self.offset -= offset
        self.count -= 1
        residue = offset % self.block
        self._residues[residue] -= 1
        self._slack = list(map(sub, self._slack, self._slacks[residue]))

    def used(self, tick: int) -> int:
        """Blocks held by requests."""
        block = self.block
        return self.pinned + (self.offset + self.count * tick + self._slack[tick % block]) // block

    def free(self, tick: int) -> int:
        """Blocks that nobody holds."""
        return self.total - self.used(tick)

    def has_free(self, blocks: int, tick: int) -> bool:
        """Whether `blocks` are free; counts exactly only when a bound does not settle it."""
        bound = (self.offset + self.count * (tick + self.block - 1)) // self.block + self.pinned
        return self.total - bound >= blocks or self.free(tick) >= blocks

    def needed_next(self, tick: int) -> int:
        """Blocks that the next tick takes: one for each decoding request whose last block is full."""
        return self._residues[-tick % self.block]

    def can_tick(self, tick: int, more: int = 0) -> bool:
        """Whether the blocks of the next tick are free, and `more` besides."""
        block = self.block
        if self.offset + self.count * (tick + block) <= (self.total - self.pinned - more) * block:
            return True
        return self.free(tick) - more >= self._residues[-tick % block]

    def ticks_left(self, tick: int, wanted: int) -> int:
        """How many ticks, at most `wanted`, the decoding requests can grow before blocks run out."""
        block = self.block
        count = self.count
        bound = self.offset + count * (tick + block - 1 + wanted)
        if bound <= (self.total - self.pinned) * block or not count:
            return wanted
        free = self.free(tick)
        periods = max(0, free // count - 1)
        free -= periods * count
        ticks = periods * block
        while ticks < wanted:
            free -= self._residues[-(tick + ticks) % block]
            if free < 0:
                return ticks
            ticks += 1
        return wanted
