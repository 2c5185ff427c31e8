"""One engine's blocks. Translates the engine's events, with the engine's own hashes, into changes of the index, with
common names. Models with several kinds of layers have one group of blocks for each kind. The leading group is the first
group whose layers need the KV of all earlier tokens: the index holds its blocks. The other groups limit how much of a
prompt can be reused (`cache_index.LayerGroup`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from math import ceil, inf

from headway.control import token_blocks
from headway.control.cache_index import BlockChange, LayerGroup
from headway.gateway.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash
from headway.gateway.names import cut

_WHOLE = frozenset((None, "full_attention", "mla_attention", "sink_full_attention"))
"""Kinds of layers that need the KV of all earlier tokens. Older engines, which know no kinds, send None."""
_WINDOWS = frozenset(("sliding_window", "sliding_window_mla"))
_STATES = frozenset(("mamba",))
MAX_HASH_BYTES = 64
"""Maximum length of an engine's hash of a block. Hashes are kept as long as their blocks, and no known engine has
longer hashes."""
_MAX_GROUPS, _MAX_MEMORIES = 32, 16
"""Maximum numbers of an engine's groups and memories. Events of further groups are ignored; further memories count as
the last memory."""


class _Group:
    """The blocks of one group that does not lead the index, by hash."""

    def __init__(self, block_tokens: int, num_needed: float) -> None:
        self.names: dict[Hash, int] = {}
        self.copies: dict[Hash, int] = {}
        self.layers = LayerGroup(block_tokens, num_needed)


class EngineBlocks:
    """The blocks that an engine holds, by its own hashes.

    Inconsistent events change nothing and are counted: blocks of another size, a number of hashes that does not fit the
    tokens, and blocks that follow an unreported block.
    """

    def __init__(self, block_size_tokens: int, most_blocks: int, name_tokens: int | None = None) -> None:
        """`most_blocks`: the largest number of blocks that are kept; an engine that reports more is wrong.
        `name_tokens`: prompts are named in pieces of this many tokens, and a block has a whole number of pieces; None:
        in blocks. A block has the name of its last piece."""
        self.block_size_tokens = block_size_tokens
        self._name_tokens = name_tokens or block_size_tokens
        self._most_blocks = most_blocks
        self._names: dict[Hash, int] = {}
        """Block names of the leading group by hash, in order of storing."""
        self._copies: dict[Hash, int] = {}
        """Maps each hash to the number of further blocks with the same content. vLLM reports each such block when it is
        stored and when it is removed."""
        self._leading: int | None = None
        """The number of the leading group; None before it was seen."""
        self._groups: dict[int, _Group] = {}
        """The groups that do not lead, by number."""
        self.layer_groups: list[LayerGroup] = []
        """The blocks of the other layer groups, in the form of the index."""
        self._slower: dict[int, int] = {}
        """Maps each block name to the slower memories that hold the block, as bits."""
        self._memories: dict[str, int] = {}
        """The bit of each memory, by the memory's name."""
        self._off_gpu: set[int] = set()
        """Names of blocks that are only in slower memories."""
        self.ignored: Counter[str] = Counter()
        """Events without effect, by reason."""
        self.num_events = 0
        """Number of blocks stored and removed."""

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> frozenset[int]:
        """The names of all blocks of the leading group on the GPU."""
        return frozenset(self._names.values()) - self._off_gpu

    def sizes(self, events: Sequence[Event]) -> set[int]:
        """Sizes of the GPU blocks in these events, for the group that leads or will lead."""
        leading = self._leading
        return {
            event.block_size
            for event in events
            if isinstance(event, BlockStored)
            and event.token_ids
            and event.is_on_gpu
            and ((event.group_idx or 0) == leading if leading is not None else self._may_lead(event))
        }

    def adopt(self, block_size_tokens: int) -> bool:
        """Expect this block size from now on, unless the engine has reported another size or prompts do not fit it."""
        fits = not self._names and block_size_tokens > 0 and block_size_tokens % self._name_tokens == 0
        if fits:
            self.block_size_tokens = block_size_tokens
        return fits

    def clear(self) -> None:
        """Forget all blocks, as the engine has restarted."""
        self._leading = None
        self._groups.clear()
        self.layer_groups.clear()
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        self._names.clear()
        self._copies.clear()
        self._slower.clear()
        self._off_gpu.clear()
        for group in self._groups.values():
            group.names.clear()
            group.copies.clear()
            group.layers.held.clear()

    def changes(self, events: Sequence[Event]) -> list[BlockChange]:
        """The changes of the index that the events cause, in order. After `AllBlocksCleared`, no block is known."""
        found: list[BlockChange] = []
        others: list[BlockStored | BlockRemoved] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                found += [(True, False, list(self._names.values())), (False, False, list(self._slower))]
                self._forget_blocks()
                others.clear()
            elif isinstance(event, BlockStored) and not _are_short(event.block_hashes):
                self.ignored["hash too long"] += len(event.block_hashes)
            elif (event.group_idx or 0) != self._leading and not self._leads(event):
                others.append(event)
            else:
                is_on_gpu = event.is_on_gpu
                if isinstance(event, BlockStored):
                    found.append((is_on_gpu, True, self._store(event, is_on_gpu)))
                else:
                    removed = self._remove(event, is_on_gpu)
                    if is_on_gpu or not self._slower:
                        found.append((is_on_gpu, False, removed))
                    else:  # another slow memory may still hold some of the removed blocks
                        found.append((False, False, [name for name in removed if name not in self._slower]))
                if len(self._names) > self._most_blocks:
                    oldest = self._forget_oldest()
                    found += [(True, False, oldest), (False, False, oldest)]
        # last, because these blocks may follow blocks of the leading group that were stored by the same events
        for event in others:
            self._note_other(event, found)
        return found

    # The leading group.

    def _may_lead(self, event: BlockStored) -> bool:
        return event.kv_cache_spec_kind in _WHOLE and (event.kv_cache_spec_kind is not None or not event.group_idx)

    def _leads(self, event: BlockStored | BlockRemoved) -> bool:
        """Whether an event concerns the leading group. The first suitable event determines the group."""
        if self._leading is not None:
            return False
        if isinstance(event, BlockRemoved):
            return not self._groups and not event.group_idx  # a block that was not reported
        if self._may_lead(event):
            self._leading = event.group_idx or 0
            return True
        return False

    def _store(self, event: BlockStored, is_on_gpu: bool) -> list[int]:
        """The names of the stored blocks; empty if the event is inconsistent."""
        hashes, tokens, size, names = event.block_hashes, event.ids, self.block_size_tokens, self._names
        if not tokens and not event.block_size:
            return self._copied(event)
        if event.block_size != size or len(tokens) != size * len(hashes):
            reason = "block size" if event.block_size != size else "malformed"
            self.ignored[reason] += len(hashes)
            return []
        before = self._before(event, names)
        if before is None:
            return []
        stored = self._name(before, event, tokens, size)
        if not is_on_gpu:
            self._note_slower(event, stored)
            self._off_gpu.update([name for hash, name in zip(hashes, stored, strict=True) if hash not in names])
        else:
            if event.group_idx is not None and not names.keys().isdisjoint(hashes):
                _count_copies(names, self._copies, [hash for hash in hashes if names.get(hash) not in self._off_gpu])
            if self._off_gpu:
                self._off_gpu.difference_update(stored)
        names.update(zip(hashes, stored, strict=True))
        self.num_events += len(hashes)
        return stored

    def _copied(self, event: BlockStored) -> list[int]:
        """The names of blocks that are copied to slower memory. The events of such copies contain only the blocks'
        hashes."""
        known = [name for hash in event.block_hashes if (name := self._names.get(hash)) is not None]
        if len(known) < len(event.block_hashes):
            self.ignored["copy of an unknown block"] += len(event.block_hashes) - len(known)
        if event.is_on_gpu:
            self.ignored["malformed"] += len(known)
            return []
        self._note_slower(event, known)
        self.num_events += len(known)
        return known

    def _note_slower(self, event: BlockStored | BlockRemoved, names: Sequence[int]) -> None:
        bit = self._bit(event)
        for name in names:
            self._slower[name] = self._slower.get(name, 0) | bit

    def _bit(self, event: BlockStored | BlockRemoved) -> int:
        """The bit of an event's memory. All memories beyond the limit share the last bit."""
        last = _MAX_MEMORIES - 1
        medium = cut(event.medium or "")
        found = self._memories.get(medium)
        if found is None:
            found = 1 << min(len(self._memories), last)
            if len(self._memories) <= last:
                self._memories[medium] = found
        return found

    def _before(self, event: BlockStored, *tables: dict[Hash, int]) -> int | None:
        """The name before an event's first block; None if the engine has not reported the previous block."""
        if event.parent_block_hash is None:
            lora = event.lora_name or ("" if event.lora_id is None else str(event.lora_id))
            return token_blocks.root(lora, _salt(event))
        for table in tables:
            found = table.get(event.parent_block_hash)
            if found is not None:
                return found
        self.ignored["unknown parent"] += len(event.block_hashes)
        return None

    def _forget_oldest(self) -> list[int]:
        """Forget the oldest blocks beyond the largest number that is kept. Returns their names."""
        names = self._names
        oldest = [names.pop(hash) for hash in list(islice(names, len(names) - self._most_blocks))]
        for name in oldest:
            self._slower.pop(name, None)
        if self._copies:
            self._copies = {hash: num for hash, num in self._copies.items() if hash in names}
        self._off_gpu.difference_update(oldest)
        self.ignored["too many blocks"] += len(oldest)
        return oldest

    def _remove(self, event: BlockRemoved, is_on_gpu: bool) -> list[int]:
        """The names of the blocks that one memory no longer holds."""
        hashes, copies, names = event.block_hashes, event.remaining_copy_counts, self._names
        self.num_events += len(hashes)
        if copies is not None:
            hashes = [hash for i, hash in enumerate(hashes) if i >= len(copies) or not copies[i]]
        if is_on_gpu and self._copies:
            hashes = _without_copies(self._copies, hashes)
        if is_on_gpu and not self._slower:
            removed = [name for hash in hashes if (name := names.pop(hash, None)) is not None]
        else:
            removed = [name for hash in hashes if (name := names.get(hash)) is not None]
            self._remove_from_one(hashes, 0 if is_on_gpu else self._bit(event))
        if len(removed) < len(hashes):
            self.ignored["unknown block"] += len(hashes) - len(removed)
        return removed

    def _remove_from_one(self, hashes: Sequence[Hash], memory: int) -> None:
        """Remove blocks from one memory, where 0 is the GPU's. Other memories may still hold them."""
        names, slower, off_gpu = self._names, self._slower, self._off_gpu
        for hash in hashes:
            name = names.get(hash)
            if name is None:
                continue
            if not memory:
                if name in slower:
                    off_gpu.add(name)
                else:
                    del names[hash]
                continue
            left = slower.get(name, 0) & ~memory
            if left:
                slower[name] = left
                continue
            slower.pop(name, None)
            if name in off_gpu:
                off_gpu.discard(name)
                del names[hash]

    def _name(self, before: int, event: BlockStored, tokens: Sequence[int], size: int) -> list[int]:
        """The names of consecutive blocks of one size after the block `before`."""
        piece, extra = self._name_tokens, event.extra_keys
        if extra is None or not any(extra):
            return token_blocks.names(before, tokens, piece)[size // piece - 1 :: size // piece]
        found, is_first = [], event.parent_block_hash is None
        for i, start in enumerate(range(0, len(tokens), size)):
            before = token_blocks.names(before, tokens[start : start + size], piece)[-1]
            if i < len(extra) and extra[i]:
                before = _with_extra(before, extra[i], event.lora_name, is_first and not i)
            found.append(before)
        return found

    # The other groups.

    def _note_other(self, event: BlockStored | BlockRemoved, found: list[BlockChange]) -> None:
        number = event.group_idx or 0
        if not event.is_on_gpu:
            self.ignored["another group"] += len(event.block_hashes)
        elif isinstance(event, BlockStored):
            self._store_other(number, event, found)
        elif (group := self._groups.get(number)) is not None:
            self.num_events += len(event.block_hashes)
            for hash in _without_copies(group.copies, event.block_hashes):
                name = group.names.pop(hash, None)
                if name is not None:
                    group.layers.held.discard(name)
        else:
            self.ignored["another group"] += len(event.block_hashes)

    def _store_other(self, number: int, event: BlockStored, found: list[BlockChange]) -> None:
        """Store blocks of sliding windows, of states, and of further groups that need all earlier tokens."""
        size, hashes, tokens = event.block_size, event.block_hashes, event.ids
        group = self._groups.get(number) or self._new_group(number, event)
        if group is None:
            self.ignored["another group"] += len(hashes)
            return
        num = len(tokens) // size if size > 0 else 0
        if not num or size % self._name_tokens or len(tokens) != num * size or len(hashes) > num:
            self.ignored["block size" if size > 0 and size % self._name_tokens else "malformed"] += len(hashes)
            return
        tables = [group.names, self._names, *(each.names for each in self._groups.values() if each is not group)]
        before = self._before(event, *tables)
        if before is None:
            return
        names = self._name(before, event, tokens, size)
        placed = zip(hashes, names, strict=True) if len(hashes) == num else self._matched(hashes, names, tables)
        stored = dict(placed)
        _count_copies(group.names, group.copies, stored)
        group.names.update(stored)
        group.layers.held.update(stored.values())
        self.num_events += len(stored)
        if self._leading is None:
            found.append((False, False, list(stored.values())))  # the blocks placed there are reported by now
        if len(group.names) > self._most_blocks:
            for hash in list(islice(group.names, len(group.names) - self._most_blocks)):
                group.copies.pop(hash, None)
                group.layers.held.discard(group.names.pop(hash))

    def _matched(
        self, hashes: Sequence[Hash], names: Sequence[int], tables: Sequence[dict[Hash, int]]
    ) -> list[tuple[Hash, int]]:
        """Match the blocks of an event that reports only some blocks, as layers with a state do. Equal hashes in other
        groups identify a block; without a match, the last hash is the last block."""
        able, found = frozenset(names), []
        for hash in hashes:
            name = next((name for table in tables if (name := table.get(hash)) is not None), None)
            if name is None and hash == hashes[-1]:
                name = names[-1]
            if name in able and name is not None:
                found.append((hash, name))
            else:
                self.ignored["unknown place"] += 1
        return found

    def _new_group(self, number: int, event: BlockStored) -> _Group | None:
        """The group that its first event describes; None if groups of this kind do not limit reuse, or the kind is
        unknown."""
        kind, size = event.kv_cache_spec_kind, event.block_size
        if len(self._groups) >= _MAX_GROUPS:
            return None
        if kind in _STATES:
            num_needed: float = 1
        elif kind in _WINDOWS and event.kv_cache_spec_sliding_window and size > 0:
            num_needed = max(ceil((event.kv_cache_spec_sliding_window - 1) / size), 1)
        elif kind in _WHOLE and kind is not None:
            num_needed = inf
        else:
            return None
        group = self._groups[number] = _Group(size, num_needed)
        self.layer_groups.append(group.layers)
        return group


def _are_short(hashes: Sequence[Hash]) -> bool:
    try:
        return max(map(len, hashes), default=0) <= MAX_HASH_BYTES  # type: ignore[arg-type]  # most are bytes
    except TypeError:
        return all(isinstance(each, int) or len(each) <= MAX_HASH_BYTES for each in hashes)


def _count_copies(names: dict[Hash, int], copies: dict[Hash, int], hashes: Iterable[Hash]) -> None:
    """Count stored blocks whose content is already held."""
    for hash in hashes:
        if hash in names:
            copies[hash] = copies.get(hash, 0) + 1


def _without_copies(copies: dict[Hash, int], hashes: list[Hash]) -> list[Hash]:
    """The removed blocks that have no further copy."""
    left = []
    for hash in hashes:
        num = copies.get(hash, 0)
        if not num:
            left.append(hash)
        elif num == 1:
            del copies[hash]
        else:
            copies[hash] = num - 1
    return left


def _salt(event: BlockStored) -> str:
    """The `cache_salt` of a prompt whose first block is stored: SGLang's field, or a string among vLLM's extra keys."""
    if event.extra_keys is None and event.cache_salt is None:
        return ""
    if isinstance(event.cache_salt, str):
        return event.cache_salt
    for key in _other_keys(event.extra_keys[0] if event.extra_keys else None, event.lora_name):
        if (salt := _as_salt(key)) is not None:
            return salt
    return ""


def _as_salt(key: object) -> str | None:
    """The salt in a key, alone or after its name; None if the key belongs to an image or to embeddings."""
    if isinstance(key, str):
        return key
    if isinstance(key, (list, tuple)) and len(key) == 2 and key[0] == "cache_salt" and isinstance(key[1], str):
        return key[1]
    return None


def _other_keys(keys: Sequence[object] | None, lora: str | None) -> list[object]:
    """The keys without the LoRA adapter's key, which comes first."""
    found = list(keys or ())
    if lora and found and found[0] in (lora, ["lora", lora], ("lora", lora)):
        del found[0]
    return found


def _with_extra(name: int, keys: Sequence[object], lora: str | None, is_first: bool) -> int:
    """The name of a block whose KV also depends on `keys`, such as hashes of images. No name of a prompt's block
    matches this name."""
    others = [key for key in _other_keys(keys, lora) if not (is_first and _as_salt(key) is not None)]
    return token_blocks.name(name, (token_blocks.root(repr(others)),)) if others else name
