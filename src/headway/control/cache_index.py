"""What the prefix cache of a replica holds, as far as the gateway knows: from the engine's events, or guessed.

Content is named by the ids of prompt segments (`core.request.Segment`), which identify their tokens and all before
them. A feed of an index uses these ids: the simulator has them, a subscriber to an engine's events makes them from
block hashes. Simulator and gateway use the same index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from headway.core.request import Segment
from headway.core.view import RequestView

Span = tuple[int, int, int]
"""A segment's id, its first block and its end block in a prompt."""
Change = tuple[int, int, int]
"""A segment's id, and its leading blocks on the GPU and in slower memory; 0 = it was evicted."""


def spans(prefix: tuple[Segment, ...], block_size_tokens: int) -> Iterator[Span]:
    """The spans of the segments that own at least one full block.

    A block that straddles two segments belongs to the later one.
    """
    start = 0
    for segment in prefix:
        end = start + segment.tokens
        low, high = start // block_size_tokens, end // block_size_tokens
        if high > low:
            yield segment.id, low, high
        start = end


class SegmentBlocks:
    """Leading blocks of prompt segments, within a capacity.

    The segment that was used least recently is evicted first, its last blocks first.
    """

    __slots__ = ("_blocks", "_capacity_blocks", "_used", "changed")

    def __init__(self, capacity_blocks: float) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._used = 0
        self.changed: set[int] | None = None
        """Segments whose blocks have changed, for a reader that empties the set; None = nobody reads."""

    def __len__(self) -> int:
        return len(self._blocks)

    def blocks(self, segment: int) -> int:
        """Leading blocks of a segment that are stored."""
        return self._blocks.get(segment, 0)

    def reach(self, prompt: Iterable[Span], start: int) -> int:
        """Number of leading blocks of a prompt without a gap, if the first `start` are stored elsewhere."""
        reach = start
        for segment, low, high in prompt:
            if high <= reach:
                continue
            if low > reach:
                break
            reach = max(reach, low + self._blocks.get(segment, 0))
            if reach < high:
                break
        return reach

    def store(self, segment: int, blocks: int) -> None:
        """Store this many leading blocks of a segment, or mark the segment as used again."""
        stored = self._blocks.pop(segment, 0)
        self._blocks[segment] = blocks = max(blocks, stored)
        self._used += blocks - stored
        if self.changed is not None and blocks > stored:
            self.changed.add(segment)
        if self._used > self._capacity_blocks:
            self._evict()

    def hold(self, held: dict[int, int]) -> None:
        """Have exactly these leading blocks of these segments, which count as used now unless they are fewer."""
        blocks = self._blocks
        # Evictions first: what comes in their place fits only then.
        for segment, num in held.items():
            if num < blocks.get(segment, 0):
                self.discard(segment)
        for segment, num in held.items():
            if num:
                stored = blocks.pop(segment, 0)
                blocks[segment] = num
                self._used += num - stored
                if self.changed is not None and num > stored:
                    self.changed.add(segment)
        if self._used > self._capacity_blocks:
            self._evict()

    def _evict(self) -> None:
        while self._used > self._capacity_blocks:
            oldest, stored = self._blocks.popitem(last=False)
            left = max(0, stored - int(self._used - self._capacity_blocks))
            self._used -= stored - left
            if self.changed is not None:
                self.changed.add(oldest)
            if left:
                self._blocks[oldest] = left
                self._blocks.move_to_end(oldest, last=False)

    def discard(self, segment: int) -> None:
        """Forget a segment, if it is stored."""
        self._used -= self._blocks.pop(segment, 0)
        if self.changed is not None:
            self.changed.add(segment)

    def clear(self) -> None:
        """Forget all segments."""
        if self.changed is not None:
            self.changed.update(self._blocks)
        self._blocks.clear()
        self._used = 0


class CacheIndex:
    """What one replica holds of any prompt, on its GPU and in slower memory that it can load from.

    With `guesses`, there are no events: the index assumes that the replica keeps the prompts that were placed there,
    and evicts the least recently used when its GPU's blocks are full. Otherwise it holds what `apply` says.
    """

    __slots__ = ("_block", "gpu", "guesses", "slower")

    def __init__(self, block_size_tokens: int, gpu_blocks: int, guesses: bool, slower_blocks: float = inf) -> None:
        self._block = block_size_tokens
        self.guesses = guesses
        self.gpu = SegmentBlocks(gpu_blocks)
        self.slower = SegmentBlocks(slower_blocks)

    def cached_tokens(self, request: RequestView) -> int:
        """See `ReplicaView.cached_tokens`."""
        block = self._block
        return min(self.gpu.reach(spans(request.prefix, block), 0), self._most(request)) * block

    def loadable_tokens(self, request: RequestView) -> int:
        """See `ReplicaView.loadable_tokens`."""
        if not len(self.slower):
            return 0
        block = self._block
        cached = min(self.gpu.reach(spans(request.prefix, block), 0), self._most(request))
        return (
            max(0, min(self.slower.reach(spans(request.prefix, block), cached), self._most(request)) - cached) * block
        )

    def _most(self, request: RequestView) -> int:
        """Full blocks before the last token, which is always computed."""
        return (request.prompt_tokens + request.generated_tokens - 1) // self._block

    def placed(self, request: RequestView) -> None:
        """Assume, if the index guesses, that the replica keeps the prompt of a request that is placed there."""
        if not self.guesses:
            return
        prompt = list(spans(request.prefix, self._block))
        rest = -(-request.prompt_tokens // self._block) - (prompt[-1][2] if prompt else 0)
        if rest > 0:
            self.gpu.store(-1 - request.id, rest)  # takes its place, but is never found
        for segment, low, high in reversed(prompt):
            self.gpu.store(segment, high - low)

    def apply(self, changes: Sequence[Change]) -> None:
        """Make changes that the engine reports, in order. They state what is held, so that one may come twice."""
        self.gpu.hold({segment: blocks for segment, blocks, _ in changes})
        if len(self.slower) or any([slower for _, _, slower in changes]):
            self.slower.hold({segment: slower for segment, _, slower in changes})

    def clear(self) -> None:
        """The replica holds nothing: it has restarted."""
        self.gpu.clear()
        self.slower.clear()
