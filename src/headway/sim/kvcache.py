"""Paged KV memory of one replica, with the growth of decoding requests in closed form.

Blocks are counted, not named. They are held by decoding requests, or `pinned` (by requests in prefill, by transfers,
and by the prefix cache while running requests share them). A decoding request that joined with c tokens of its own has
c + (tick - joined) tokens at any later tick, so its offset c - joined describes it. The cache keeps the sum of the
offsets, and a histogram of the offsets modulo the block size, from which the blocks taken at each later tick follow.
The total is exact at one tick; reads advance it with the histogram.
"""

from __future__ import annotations


class KvCache:
    """Block counts. At tick t, the `count` decoding requests together have `offset + count * t` tokens of their own."""

    __slots__ = (
        "_counted_tick",
        "_draft_slots",
        "_held",
        "_residues",
        "block",
        "count",
        "offset",
        "pinned",
        "total",
        "watermark",
    )

    def __init__(self, total_blocks: int, block_size_tokens: int, watermark: float, draft_slots: int = 0) -> None:
        """`draft_slots`: further slots that a decoding request needs in a tick, besides one."""
        self._draft_slots = draft_slots
        self.total = total_blocks
        self.block = block_size_tokens
        self.watermark = int(watermark * total_blocks)
        self.pinned = 0
        self.offset = 0
        self.count = 0
        self._residues = [0] * block_size_tokens
        self._counted_tick = self._held = 0
        """A tick, and the blocks that the decoding requests hold at that tick."""

    def blocks(self, tokens: int) -> int:
        """Blocks for this many tokens."""
        return -(-tokens // self.block)

    def join(self, tokens: int, tick: int) -> None:
        """Add a decoding request with this many KV tokens of its own."""
        offset = tokens - tick
        self.offset += offset
        self.count += 1
        block = self.block
        self._residues[offset % block] += 1
        self._held += -(-(offset + self._counted_tick) // block)

    def leave(self, tokens: int, tick: int) -> None:
        """Remove a decoding request that now has this many tokens of its own, and free its blocks."""
        offset = tokens - tick
        self.offset -= offset
        self.count -= 1
        block = self.block
        self._residues[offset % block] -= 1
        self._held += -(offset + self._counted_tick) // block

    def grow(self, own: int, tokens: int, tick: int) -> None:
        """Add several tokens at once to a decoding request with `own` tokens of its own."""
        before = own - tick
        after = before + tokens
        self.offset += tokens
        block = self.block
        self._residues[before % block] -= 1
        self._residues[after % block] += 1
        counted = self._counted_tick
        self._held += -(before + counted) // block - -(after + counted) // block

    def used(self, tick: int) -> int:
        """Blocks held at a tick, including pinned ones."""
        counted = self._counted_tick
        if tick != counted:
            block, residues = self.block, self._residues
            periods = (tick - counted) // block
            held = self._held + periods * self.count
            for each in range(counted + periods * block, tick):
                held += residues[-each % block]
            self._held, self._counted_tick = held, tick
        return self.pinned + self._held

    def free(self, tick: int) -> int:
        """Blocks that are not held."""
        return self.total - self.used(tick)

    def has_free(self, blocks: int, tick: int) -> bool:
        """Whether this many blocks are free. Counts exactly only if a bound does not decide."""
        bound = (self.offset + self.count * (tick + self.block - 1)) // self.block + self.pinned
        return self.total - bound >= blocks or self.free(tick) >= blocks

    def needed_next(self, tick: int) -> int:
        """Blocks for the next tick: one for each decoding request whose last block is full."""
        if not self._draft_slots:
            return self._residues[-tick % self.block]
        return sum(num * self.needed(residue + tick) for residue, num in enumerate(self._residues) if num)

    def needed(self, tokens: int) -> int:
        """Further blocks that a decoding request with this many tokens of its own needs for the next tick."""
        return self.blocks(tokens + 1 + self._draft_slots) - self.blocks(tokens)

    def ticks_unchanged(self, tick: int) -> int:
        """Ticks after this tick during which `used` stays the same; at least one request must decode."""
        block, residues = self.block, self._residues
        num = 0
        while num < block and not residues[-(tick + num) % block]:
            num += 1
        return num

    def can_tick(self, tick: int, more: int = 0) -> bool:
        """Whether the blocks for the next tick plus `more` are free."""
        block = self.block
        if self._draft_slots:
            return self.free(tick) - more >= self.needed_next(tick)
        if self.offset + self.count * (tick + block) <= (self.total - self.pinned - more) * block:
            return True
        return self.free(tick) - more >= self._residues[-tick % block]

    def ticks_left(self, tick: int, wanted: int) -> int:
        """Ticks for which the decoding requests can grow before blocks run out, at most `wanted`."""
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

    def iterations_left(self, tick: int, wanted: int, most_tokens: int) -> int:
        """Ticks, at least one and at most `wanted`, for which blocks suffice even if each decoding request gains
        `most_tokens` tokens per tick."""
        spare = (self.total - self.pinned) * self.block - self.offset - self.count * (tick + self.block - 1)
        return max(1, min(wanted, (spare // self.count - 1 - self._draft_slots) // most_tokens + 1))
