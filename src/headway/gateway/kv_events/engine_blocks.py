"""One engine's blocks: its events, which use its own hashes, become changes of the index, which uses common names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headway.control import token_blocks
from headway.control.cache_index import Change
from headway.gateway.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash

_ON_GPU, _SLOWER = 1, 2


class EngineBlocks:
    """Which blocks an engine holds, by its own hashes.

    Events that make no sense change nothing and are counted: blocks of another size, hashes whose number differs from
    that of the tokens, and blocks that follow one that the engine has not reported.
    """

    def __init__(self, block_size_tokens: int, most_blocks: int) -> None:
        """`most_blocks`: the number of blocks that are kept; an engine that reports more is wrong."""
        self.block_size_tokens = block_size_tokens
        self._most_blocks = most_blocks
        self._names: dict[Hash, int] = {}
        """By hash, in order of storing."""
        self._held: dict[int, int] = {}
        """By name, a sum of `_ON_GPU` and `_SLOWER`."""
        self.ignored: Counter[str] = Counter()
        """Events without effect, by reason."""
        self.num_events = 0
        """Blocks stored and removed."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def names(self) -> frozenset[int]:
        """The names of all blocks on the GPU."""
        return frozenset(name for name, held in self._held.items() if held & _ON_GPU)

    def clear(self) -> None:
        """Forget all blocks, as the engine has restarted."""
        self._names.clear()
        self._held.clear()

    def changes(self, events: Sequence[Event]) -> list[Change]:
        """What the events change, in order; `clear` has been reported if `AllBlocksCleared` is among them."""
        changes: list[Change] = []
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event, changes)
            elif isinstance(event, BlockRemoved):
                self._remove(event, changes)
            elif isinstance(event, AllBlocksCleared):
                changes += [(name, 0, 0) for name in self._held]
                self.clear()
        return changes

    def _store(self, event: BlockStored, changes: list[Change]) -> None:
        hashes, tokens, size = event.block_hashes, event.token_ids, self.block_size_tokens
        if event.group_idx:  # what decides is the first group: the others hold the same tokens, or fewer
            self.ignored["another group"] += len(hashes)
            return
        if event.block_size != size or len(tokens) != size * len(hashes):
            reason = "block size" if event.block_size != size else "malformed"
            self.ignored[reason] += len(hashes)
            return
        names, held = self._names, self._held
        if event.parent_block_hash is None:
            before = token_blocks.root(event.lora_name or ("" if event.lora_id is None else str(event.lora_id)))
        elif (found := names.get(event.parent_block_hash)) is None:
            self.ignored["unknown parent"] += len(hashes)
            return
        else:
            before = found
        tier = _ON_GPU if event.medium in (None, "GPU") else _SLOWER
        extra, start = event.extra_keys, 0
        for i, hash in enumerate(hashes):
            before = token_blocks.name(before, tokens[start : start + size])
            if extra is not None and i < len(extra) and extra[i]:
                before = _with_extra(before, extra[i], event.lora_name)
            start += size
            names[hash] = before
            held[before] = now = held.get(before, 0) | tier
            changes.append((before, now & _ON_GPU, now >> 1))
        self.num_events += len(hashes)
        while len(names) > self._most_blocks:
            oldest = next(iter(names))
            changes.append((names[oldest], 0, 0))
            held.pop(names.pop(oldest), None)
            self.ignored["too many blocks"] += 1

    def _remove(self, event: BlockRemoved, changes: list[Change]) -> None:
        if event.group_idx:
            self.ignored["another group"] += len(event.block_hashes)
            return
        tier = _ON_GPU if event.medium in (None, "GPU") else _SLOWER
        copies = event.remaining_copy_counts
        for i, hash in enumerate(event.block_hashes):
            if copies is not None and i < len(copies) and copies[i]:
                continue
            name = self._names.get(hash)
            if name is None:
                self.ignored["unknown block"] += 1
                continue
            left = self._held.get(name, 0) & ~tier
            if left:
                self._held[name] = left
            else:
                del self._names[hash]
                self._held.pop(name, None)
            changes.append((name, left & _ON_GPU, left >> 1))
        self.num_events += len(event.block_hashes)


def _with_extra(name: int, keys: Sequence[object], lora: str | None) -> int:
    """The name of a block whose KV also depends on `keys`, such as hashes of images: prompts' names do not match it."""
    others = [key for key in keys if key != lora]
    return token_blocks.name(name, (token_blocks.root(repr(others)),)) if others else name
