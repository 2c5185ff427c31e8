"""The gateway's model of each replica's prefix cache, built from the engine's events or from placements.

Content is named by the ids of prompt segments (`core.request.Segment`); an id identifies the segment's tokens and all
tokens before them. The simulator feeds these ids directly; a subscriber to an engine's events computes them from block
hashes. Simulator and gateway use the same index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import inf, lcm
from typing import Protocol, cast

from headway.control.live import Live
from headway.core.request import Segment
from headway.core.view import RequestView

Span = tuple[int, int, int]
"""(segment id, its first block, its end block) in a prompt."""
Change = tuple[int, int, int]
"""(segment id, its leading blocks on the GPU, its leading blocks in slower memory). 0 blocks in both: the segment was
evicted."""
BlockChange = tuple[bool, bool, list[int]]
"""(whether in GPU memory, else in slower memory; whether cached, else evicted; ids of one-block segments)."""


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


def leading_blocks(prompt: Iterable[Span], start: int, blocks_of: Callable[[int], int]) -> int:
    """Number of gapless leading blocks of a prompt: the first `start`, then the stored blocks of each segment."""
    reach = start
    for segment, low, high in prompt:
        if high <= reach:
            continue
        if low > reach:
            break
        reach = max(reach, low + blocks_of(segment))
        if reach < high:
            break
    return reach


class SegmentBlocks:
    """Leading blocks of prompt segments, within a capacity.

    The least recently used segment is evicted first, from its last block.
    """

    __slots__ = ("_blocks", "_capacity_blocks", "_used", "changed")

    def __init__(self, capacity_blocks: float) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, int] = OrderedDict()
        self._used = 0
        self.changed: set[int] | None = None
        """Segments whose blocks have changed; the reader empties the set. None = there is no reader."""

    def __len__(self) -> int:
        return len(self._blocks)

    def blocks(self, segment: int) -> int:
        """Number of stored leading blocks of a segment."""
        return self._blocks.get(segment, 0)

    def reach(self, prompt: Iterable[Span], start: int) -> int:
        """Number of gapless leading blocks of a prompt whose first `start` blocks are stored elsewhere."""
        return leading_blocks(prompt, start, self.blocks)

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
        """Set the leading blocks of these segments. A segment counts as used now unless it has shrunk."""
        blocks, changed, used = self._blocks, self.changed, self._used
        known = blocks.keys() & held.keys()
        # Evictions first, to make room for the new blocks.
        for segment in known:
            if held[segment] < blocks[segment]:
                used -= blocks.pop(segment)
                if changed is not None:
                    changed.add(segment)
        for segment, num in held.items():
            if num:
                stored = blocks.pop(segment, 0) if segment in known else 0
                blocks[segment] = num
                used += num - stored
                if changed is not None and num > stored:
                    changed.add(segment)
        self._used = used
        if used > self._capacity_blocks:
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
        """Remove a segment, if it is stored."""
        self._used -= self._blocks.pop(segment, 0)
        if self.changed is not None:
            self.changed.add(segment)

    def hold_blocks(self, segments: Sequence[int]) -> None:
        """Add segments of one block each. Call `trim` after the last call."""
        self._blocks.update(dict.fromkeys(segments, 1))
        self._used = len(self._blocks)
        if self.changed is not None:
            self.changed.update(segments)

    def discard_all(self, segments: Collection[int]) -> None:
        """Remove these segments, if they are stored."""
        blocks, used = self._blocks, self._used
        for segment in segments:
            used -= blocks.pop(segment, 0)
        self._used = used
        if self.changed is not None:
            self.changed.update(segments)

    def trim(self) -> None:
        """Evict segments until the capacity suffices."""
        if self._used > self._capacity_blocks:
            self._evict()

    def clear(self) -> None:
        """Remove all segments, as when the engine clears its cache."""
        if self.changed is not None:
            self.changed.update(self._blocks)
        self._blocks.clear()
        self._used = 0


class PlacedPrompt(Protocol):
    """The fields of a placed request that an index reads."""

    @property
    def id(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def prefix(self) -> tuple[Segment, ...]: ...


class LayerGroup:
    """The cached blocks of one layer group of a replica, other than the main group.

    Sliding-window layers need the KV of the tokens in their window; layers with a state need only the block that holds
    the state. A prompt is cached up to the last position at which every group has its blocks, as in vLLM
    (`find_longest_cache_hit` of the managers in `vllm/v1/core/single_type_kv_cache_manager.py`).
    """

    __slots__ = ("block_tokens", "held", "num_needed")

    def __init__(self, block_tokens: int, num_needed: float) -> None:
        """`num_needed`: blocks that must be cached before the end of the reused part; inf: all."""
        self.block_tokens, self.num_needed = block_tokens, num_needed
        self.held: set[int] = set()
        """Names of the cached blocks."""

    def reach(self, names: dict[int, int], tokens: int, step_tokens: int, placed: SegmentBlocks) -> int:
        """Prompt tokens, at most `tokens`, that these layers can reuse.

        `names` maps a token count to the segment that ends there. The reused part ends at a multiple of `step_tokens`.
        """
        block, held, run = self.block_tokens, self.held, 0
        end = place = tokens // block * block
        while place > 0:
            name = names.get(place, -1)
            if name in held or placed.blocks(name):
                if not run:
                    if place % step_tokens:
                        place -= block
                        continue
                    end = place
                run += 1
                if run >= self.num_needed:
                    return end
            else:
                run = 0
            place -= block
        return end if run else 0


class CacheIndex:
    """The prompt blocks that one replica holds on its GPU and in slower memory from which it can load.

    With `guesses`, the index gets no events: it assumes that the replica caches every placed prompt, and evicts the
    least recently used prompt when the GPU's blocks are full. Without `guesses`, the index holds the blocks that
    `apply` reports. With `adds_placed`, the index also counts each placed prompt until an event names the prompt's
    blocks, because events arrive late.
    """

    __slots__ = ("_block", "_placed", "adds_placed", "gpu", "groups", "guesses", "slower")

    def __init__(
        self,
        block_size_tokens: int,
        gpu_blocks: int,
        guesses: bool,
        adds_placed: bool = False,
    ) -> None:
        self._block = block_size_tokens
        self.guesses, self.adds_placed = guesses, adds_placed
        self.gpu = SegmentBlocks(gpu_blocks)
        self.slower = SegmentBlocks(inf)
        self._placed = SegmentBlocks(gpu_blocks)
        """Blocks of placed prompts that no event has reported yet."""
        self.groups: list[LayerGroup] = []
        """Layer groups with their own reuse rule; the feed keeps their blocks."""

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks assumed on the GPU."""
        return len(self.gpu) or max([len(group.held) for group in self.groups], default=0)

    def _reach(self, request: RequestView) -> int:
        """Leading prompt blocks on the GPU: `leading_blocks`, in one pass over both sources."""
        on_gpu, placed = self.gpu.blocks, self._placed
        has_placed, reach = len(placed) > 0, 0
        for segment, low, high in spans(request.prefix, self._block):
            if high <= reach:
                continue
            if low > reach:
                break
            stored = on_gpu(segment)
            if has_placed and stored < high - low:
                stored = max(stored, placed.blocks(segment))
            reach = max(reach, low + stored)
            if reach < high:
                break
        return reach

    def cached_tokens(self, request: RequestView) -> int:
        """Prompt tokens that a request can reuse in GPU memory (`ReplicaView.cached_tokens`)."""
        reach = min(self._reach(request), self._most(request)) if len(self.gpu) or not self.groups else -1
        return reach * self._block if not self.groups else self._agreed(request, reach)

    def _agreed(self, request: RequestView, reach: int) -> int:
        """Prompt tokens that all layer groups can reuse, given the leading blocks that `reach` counts. -1 if no group
        needs all blocks, so there is no main group."""
        block, groups, end = self._block, self.groups, 0
        names: dict[int, int] = {}
        most = (request.prompt_tokens + request.generated_tokens - 1) if reach < 0 else reach * block
        for segment in request.prefix:
            end += segment.tokens
            if end > most:
                break
            names[end] = segment.id
        tokens = most if reach >= 0 else max(names, default=0)
        step = lcm(*[group.block_tokens for group in groups], *([block] if reach >= 0 else []))
        before = -1
        while tokens != before:
            before = tokens
            for group in groups:
                tokens = group.reach(names, tokens, step, self._placed)
        return tokens

    def loadable_tokens(self, request: RequestView) -> int:
        """Further prompt tokens that slower memory holds (`ReplicaView.loadable_tokens`)."""
        if not len(self.slower):
            return 0
        block = self._block
        cached = min(self._reach(request), self._most(request))
        return (
            max(0, min(self.slower.reach(spans(request.prefix, block), cached), self._most(request)) - cached) * block
        )

    def _most(self, request: RequestView) -> int:
        """Full blocks before the last prompt token; the last token is always computed."""
        return (request.prompt_tokens + request.generated_tokens - 1) // self._block

    def placed(self, request: PlacedPrompt) -> None:
        """Assume that the replica caches the prompt of a request placed there.

        Without events, until other prompts evict it; with `adds_placed`, until an event mentions it.
        """
        if not self.guesses:
            if not self.adds_placed:
                return
            for segment, low, high in spans(request.prefix, self._block):
                if self.gpu.blocks(segment) < high - low:
                    self._placed.store(segment, high - low)
            return
        prompt = list(spans(request.prefix, self._block)) if request.prefix else []
        rest = -(-request.prompt_tokens // self._block) - (prompt[-1][2] if prompt else 0)
        if rest > 0:
            self.gpu.store(-1 - request.id, rest)  # takes up capacity, but no lookup finds the segment
        for segment, low, high in reversed(prompt):
            self.gpu.store(segment, high - low)

    def apply(self, changes: Sequence[Change]) -> None:
        """Apply changes reported by the engine, in order. A change states the new content, so applying it twice is
        harmless."""
        self.gpu.hold({segment: blocks for segment, blocks, _ in changes})
        if len(self._placed):
            self._placed.discard_all([segment for segment, _, _ in changes])
        if len(self.slower) or any([slower for _, _, slower in changes]):
            self.slower.hold({segment: slower for segment, _, slower in changes})

    def apply_blocks(self, changes: Sequence[BlockChange]) -> None:
        """`apply` for an index of one-block segments."""
        has_placed = len(self._placed) > 0
        for is_on_gpu, is_held, segments in changes:
            memory = self.gpu if is_on_gpu else self.slower
            if is_held:
                memory.hold_blocks(segments)
            else:
                memory.discard_all(segments)
            if has_placed:
                self._placed.discard_all(segments)
        self.gpu.trim()
        self.slower.trim()

    def forget_placed(self) -> None:
        """Forget the placed prompts that no event has confirmed."""
        self._placed.clear()

    def resize(self, block_size_tokens: int) -> None:
        """Change the block size, and forget everything."""
        self._block = block_size_tokens
        self.clear()

    def clear(self) -> None:
        """Empty the index, after the replica restarted."""
        self.forget_placed()
        self.gpu.clear()
        self.slower.clear()
        for group in self.groups:
            group.held.clear()


class RanksIndex(CacheIndex):
    """The caches of one replica's data-parallel ranks. One rank serves a request.

    A prompt's cached tokens are those of the rank that caches the most of the prompt. A placed prompt may be at any
    rank until a rank reports it. While no rank's cache is known, the index treats all ranks as one cache.
    """

    __slots__ = ("ranks",)

    def __init__(self, block_size_tokens: int, gpu_blocks: int, num_ranks: int) -> None:
        super().__init__(block_size_tokens, gpu_blocks, guesses=True, adds_placed=True)
        self.ranks = [
            CacheIndex(block_size_tokens, gpu_blocks, guesses=True, adds_placed=True) for _ in range(num_ranks)
        ]
        for rank in self.ranks:
            rank._placed = self._placed

    @property
    def num_blocks(self) -> int:
        return sum([rank.num_blocks for rank in self._known()]) if self._known() else len(self.gpu)

    def _known(self) -> list[CacheIndex]:
        """The indexes of ranks whose events are read."""
        known = [rank for rank in self.ranks if not rank.guesses]
        if self.guesses == bool(known):
            self.gpu.clear()
            self._placed.clear()
            self.guesses = not known
        return known

    def cached_tokens(self, request: RequestView) -> int:
        known = self._known()
        return max([rank.cached_tokens(request) for rank in known]) if known else super().cached_tokens(request)

    def rank_cached_tokens(self, request: RequestView) -> list[int]:
        """`cached_tokens` of each rank whose events are read."""
        return [rank.cached_tokens(request) for rank in self._known()]

    def loadable_tokens(self, request: RequestView) -> int:
        """The value of the rank that has most of the prompt, loadable blocks included."""
        cached = self.cached_tokens(request)
        return (
            max([rank.cached_tokens(request) + rank.loadable_tokens(request) for rank in self._known()] + [cached])
            - cached
        )

    def placed(self, request: PlacedPrompt) -> None:
        known = self._known()
        if not known:
            super().placed(request)
            return
        for segment, low, high in spans(request.prefix, known[0]._block):
            if not any([rank.gpu.blocks(segment) >= high - low for rank in known]):
                self._placed.store(segment, high - low)

    def clear(self) -> None:
        super().clear()
        for rank in self.ranks:
            rank.clear()


class SchedulersIndex(CacheIndex):
    """One replica's cache as each of several schedulers knows it. A scheduler knows its own placements at once, and
    other schedulers' placements when they are reported."""

    __slots__ = ("_of", "_placed_by")

    def __init__(self, indexes: Sequence[CacheIndex]) -> None:
        """`indexes`: one per scheduler, of the same type."""
        first = indexes[0]
        super().__init__(first._block, 0, first.guesses, adds_placed=first.adds_placed)
        self._of = list(indexes)
        self._placed_by: list[list[RequestView]] = [[] for _ in indexes]

    def _own(self, request: RequestView) -> CacheIndex:
        return self._of[cast(Live, request).scheduler]

    def cached_tokens(self, request: RequestView) -> int:
        return self._own(request).cached_tokens(request)

    def loadable_tokens(self, request: RequestView) -> int:
        return self._own(request).loadable_tokens(request)

    def placed(self, request: PlacedPrompt) -> None:
        scheduler = cast(Live, request).scheduler
        self._of[scheduler].placed(request)
        self._placed_by[scheduler].append(cast(RequestView, request))

    def take_placed(self, scheduler: int) -> list[RequestView]:
        """The requests that a scheduler has placed since the last call."""
        taken = self._placed_by[scheduler]
        self._placed_by[scheduler] = []
        return taken

    def placed_elsewhere(self, scheduler: int, placed: Sequence[RequestView]) -> None:
        """Add the requests that another scheduler reports as placed."""
        for request in placed:
            self._of[scheduler].placed(request)

    def apply(self, changes: Sequence[Change]) -> None:
        for index in self._of:
            index.apply(changes)

    def forget_placed(self) -> None:
        for index in self._of:
            index.forget_placed()

    def clear(self) -> None:
        for index in self._of:
            index.clear()
