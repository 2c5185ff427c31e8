"""One engine's blocks: its events, which use its own hashes, become changes of the index, which uses common names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from headway.control import token_blocks
from headway.control.cache_index import BlockChange
from headway.gateway.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash


class EngineBlocks:
    """Which blocks an engine holds, by its own hashes.

    Events that make no sense change nothing and are counted: blocks of another size, hashes whose number differs from
    that of the tokens, and blocks that follow one that the engine has not reported.
    """

    def __init__(self, block_size_tokens: int, most_blocks: int, name_tokens: int | None = None) -> None:
        """`most_blocks`: the number of blocks that are kept; an engine that reports more is wrong.

        `name_tokens`: prompts are named in pieces of this many tokens, of which a block has a whole number; None: in
        blocks. A block has the name of its last piece.
        """
        self.block_size_tokens = block_size_tokens
        self._name_tokens = name_tokens or block_size_tokens
        self._most_blocks = most_blocks
        self._names: dict[Hash, int] = {}
        """By hash, in order of storing."""
        self._slower: set[int] = set()
        self._off_gpu: set[int] = set()
        """Names of blocks in slower memory, and of those that are only there."""
        self.ignored: Counter[str] = Counter()
        """Events without effect, by reason."""
        self.num_events = 0
        """Blocks stored and removed."""

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> frozenset[int]:
        """The names of all blocks on the GPU."""
        return frozenset(self._names.values()) - self._off_gpu

    def adopt(self, block_size_tokens: int) -> bool:
        """Expect blocks of another size from now on, unless the engine has reported others or prompts do not fit it."""
        fits = not self._names and block_size_tokens > 0 and block_size_tokens % self._name_tokens == 0
        if fits:
            self.block_size_tokens = block_size_tokens
        return fits

    def clear(self) -> None:
        """Forget all blocks, as the engine has restarted."""
        self._names.clear()
        self._slower.clear()
        self._off_gpu.clear()

    def changes(self, events: Sequence[Event]) -> list[BlockChange]:
        """What the events change, in order; `clear` has been called if `AllBlocksCleared` is among them."""
        found: list[BlockChange] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                found += [(True, False, list(self._names.values())), (False, False, list(self._slower))]
                self.clear()
            elif event.group_idx:  # what decides is the first group: the others hold the same tokens, or fewer
                self.ignored["another group"] += len(event.block_hashes)
            else:
                is_on_gpu = event.medium in (None, "GPU")
                if isinstance(event, BlockStored):
                    found.append((is_on_gpu, True, self._store(event, is_on_gpu)))
                else:
                    found.append((is_on_gpu, False, self._remove(event, is_on_gpu)))
                if len(self._names) > self._most_blocks:
                    oldest = self._forget_oldest()
                    found += [(True, False, oldest), (False, False, oldest)]
        return found

    def _store(self, event: BlockStored, is_on_gpu: bool) -> list[int]:
        """The names of the stored blocks; none if the event makes no sense."""
        hashes, tokens, size, names = event.block_hashes, event.token_ids, self.block_size_tokens, self._names
        if event.block_size != size or len(tokens) != size * len(hashes):
            reason = "block size" if event.block_size != size else "malformed"
            self.ignored[reason] += len(hashes)
            return []
        if event.parent_block_hash is None:
            before = token_blocks.root(event.lora_name or ("" if event.lora_id is None else str(event.lora_id)))
        elif (found := names.get(event.parent_block_hash)) is None:
            self.ignored["unknown parent"] += len(hashes)
            return []
        else:
            before = found
        stored = self._name(before, event)
        if not is_on_gpu:
            self._slower.update(stored)
            self._off_gpu.update([name for hash, name in zip(hashes, stored, strict=True) if hash not in names])
        elif self._off_gpu:
            self._off_gpu.difference_update(stored)
        names.update(zip(hashes, stored, strict=True))
        self.num_events += len(hashes)
        return stored

    def _forget_oldest(self) -> list[int]:
        """Forget the blocks that were stored first, beyond the most that are kept. Returns their names."""
        names = self._names
        oldest = [names.pop(hash) for hash in list(islice(names, len(names) - self._most_blocks))]
        self._slower.difference_update(oldest)
        self._off_gpu.difference_update(oldest)
        self.ignored["too many blocks"] += len(oldest)
        return oldest

    def _remove(self, event: BlockRemoved, is_on_gpu: bool) -> list[int]:
        """The names of the blocks that one memory holds no longer."""
        hashes, copies, names = event.block_hashes, event.remaining_copy_counts, self._names
        self.num_events += len(hashes)
        if copies is not None:
            hashes = [hash for i, hash in enumerate(hashes) if i >= len(copies) or not copies[i]]
        if is_on_gpu and not self._slower:
            removed = [name for hash in hashes if (name := names.pop(hash, None)) is not None]
        else:
            removed = [name for hash in hashes if (name := names.get(hash)) is not None]
            self._remove_from_one(hashes, is_on_gpu)
        if len(removed) < len(hashes):
            self.ignored["unknown block"] += len(hashes) - len(removed)
        return removed

    def _remove_from_one(self, hashes: Sequence[Hash], is_on_gpu: bool) -> None:
        """Remove blocks from one memory; the other one may hold them, too."""
        names, slower, off_gpu = self._names, self._slower, self._off_gpu
        for hash in hashes:
            name = names.get(hash)
            if name is None:
                continue
            if is_on_gpu and name in slower:
                off_gpu.add(name)
            elif is_on_gpu or name in off_gpu:
                del names[hash]
            if not is_on_gpu:
                slower.discard(name)
                off_gpu.discard(name)

    def _name(self, before: int, event: BlockStored) -> list[int]:
        """The names of stored blocks, which follow the block `before`."""
        size, piece, extra = self.block_size_tokens, self._name_tokens, event.extra_keys
        if extra is None or not any(extra):
            return token_blocks.names(before, event.token_ids, piece)[size // piece - 1 :: size // piece]
        found = []
        for i, start in enumerate(range(0, len(event.token_ids), size)):
            before = token_blocks.names(before, event.token_ids[start : start + size], piece)[-1]
            if i < len(extra) and extra[i]:
                before = _with_extra(before, extra[i], event.lora_name)
            found.append(before)
        return found


def _with_extra(name: int, keys: Sequence[object], lora: str | None) -> int:
    """The name of a block whose KV also depends on `keys`, such as hashes of images: prompts' names do not match it."""
    others = [key for key in keys if key != lora]
    return token_blocks.name(name, (token_blocks.root(repr(others)),)) if others else name
