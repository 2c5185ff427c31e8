"""Host memory as a second tier of the prefix cache: KV that the GPU has let go can be copied back, not recomputed.

Every block that gets content on the GPU is copied out as well, beside the computation, as vLLM's offloading does. What
comes back stands in front of the next iteration, as a swap does. Blocks are kept by prompt segment, as in
`prefixcache`; the segment that was used least recently goes first, its last blocks first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class HostTier:
    """Leading blocks of segments, in host memory."""

    __slots__ = ("_blocks", "_copy_s", "_room", "_used")

    def __init__(self, room_blocks: int, copy_s: Callable[[int], float]) -> None:
        self._room = room_blocks
        self._copy_s = copy_s
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def blocks(self, segment: int) -> int:
        """Leading blocks of a segment that are here."""
        return self._blocks.get(segment, 0)

    def store(self, segment: int, blocks: int) -> None:
        """So many leading blocks of a segment are computed, or used again."""
        held = self._blocks.pop(segment, 0)
        self._blocks[segment] = blocks = max(blocks, held)
        self._used += blocks - held
        while self._used > self._room:
            oldest, held = self._blocks.popitem(last=False)
            kept = max(0, held - (self._used - self._room))
            self._used -= held - kept
            if kept:
                self._blocks[oldest] = kept
                self._blocks.move_to_end(oldest, last=False)

    def load_s(self, blocks: int) -> float:
        """Seconds to copy so many blocks to the GPU."""
        return self._copy_s(blocks)
