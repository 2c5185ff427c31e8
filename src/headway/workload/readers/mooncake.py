"""Mooncake traces, JSON lines: {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}, and Bailian's.

A hash id identifies a block of 512 prompt tokens together with all tokens before it. Source: kvcache-ai/Mooncake. Other
tools write the same keys with seconds (guidellm) or other block sizes (Dynamo, AIPerf) without declaring it. Traces of
Alibaba's Bailian have seconds, blocks of 16 tokens, and `chat_id` and `parent_chat_id`, which tie the turns of a chat.
Source: alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import HeadwayError
from headway.workload.readers.shared import ReadOptions, blocks, normalised, without_failures
from headway.workload.table import MAX_TOKENS, Floats, Longs, Prefix, Workload

BLOCK_TOKENS, BAILIAN_BLOCK_TOKENS = 512, 16
OTHER_BLOCKS = (256, 128, 64, 32, 16, 1024, 2048, 8, 4, 1)
"""Block sizes that are tried if 512 does not fit."""
TICK_S, PER_TICK = 0.5, 2.0
"""A note is added if arrivals are multiples of a longer time, with more requests at each on average: they are
bunched."""


class MooncakeRequest(msgspec.Struct, gc=False):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    chat_id: int = -1
    parent_chat_id: int = -1
    """Parent of the turn; -1 for a chat's first turn."""


def matches_bailian(line: str) -> bool:
    return matches(line) and '"chat_id"' in line


def read_bailian(path: Path, options: ReadOptions) -> Workload:
    """Read arrivals, lengths, chats as sessions, and hash blocks as prefix segments."""
    return _read(path, options, "s", BAILIAN_BLOCK_TOKENS)


def matches(line: str) -> bool:
    return line.startswith("{") and '"input_length"' in line and '"timestamp"' in line


def read(path: Path, options: ReadOptions) -> Workload:
    """Read arrivals, lengths, and hash blocks as prefix segments.

    Raises HeadwayError if the rows have more hash ids than blocks of any usual size.
    """
    return _read(path, options, options.timestamp_unit, options.block_tokens)


def _read(path: Path, options: ReadOptions, unit: str | None, block_tokens: int | None) -> Workload:
    arrivals, prompt, output = array("d"), array("i"), array("i")
    ids, counts = array("q"), array("i")
    chats, sessions = dict[int, int](), array("q")
    bad: list[str] = []
    for line in _lines(path, options, bad):
        arrivals.append(line.timestamp)
        prompt.append(line.input_length)
        output.append(line.output_length)
        ids.extend(line.hash_ids)
        counts.append(len(line.hash_ids))
        session = chats.get(line.parent_chat_id, line.chat_id)
        chats[line.chat_id] = session
        sessions.append(session)
    if not arrivals:
        raise HeadwayError(f"{path}: no requests in the file")
    prompt_tokens = np.array(prompt, "i4")
    notes = [f"{len(bad)} bad lines skipped; the first: {bad[0]}"] if bad else []
    arrival_s, unit_notes = _seconds(np.array(arrivals), unit)
    arrival_s, tick_notes = _on_ticks(arrival_s, options.spread_ticks)
    notes += unit_notes + tick_notes
    if block_tokens is None:
        block_tokens, block_notes = fitting_block(np.array(counts, "i8"), prompt_tokens.astype("i8"), str(path))
        notes += block_notes
    columns = {
        "arrival_s": arrival_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": np.array(output),
    }
    if max(sessions) >= 0:
        columns["session_id"] = np.array(sessions)
    prefix = hash_prefix(np.array(ids, "i8"), np.array(counts, "i8"), prompt_tokens.astype("i8"), block_tokens)
    return normalised(without_failures(Workload(columns, prefix=prefix, notes=tuple(notes))), path, options)


def _seconds(timestamps: Floats, unit: str | None) -> tuple[Floats, list[str]]:
    """Timestamps in seconds. Without a unit, whole numbers are Mooncake's milliseconds and fractions are seconds."""
    if unit:
        return timestamps / (1.0 if unit == "s" else 1e3), []
    if bool((timestamps == np.floor(timestamps)).all()):
        return timestamps / 1e3, ["whole timestamps, taken for milliseconds; timestamp_unit: s for seconds"]
    return timestamps, ["timestamps with fractions, taken for seconds; timestamp_unit: ms for milliseconds"]


def _on_ticks(arrival_s: Floats, spread: bool) -> tuple[Floats, list[str]]:
    """Arrivals, and notes if they are bunched, as in Mooncake's conversations, whose clock ticks every 3 s."""
    ticks, index, num = np.unique(arrival_s, return_inverse=True, return_counts=True)
    gaps = np.diff(ticks)
    if len(ticks) < 3 or num.mean() < PER_TICK or gaps.min() < TICK_S:
        return arrival_s, []
    clumps = f"{num.mean():.1f} requests at a time, {gaps.min():g} s apart at least"
    if not spread:
        return arrival_s, [f"arrivals come in clumps, {clumps}: the trace's clock; spread_ticks: true spreads them"]
    order = np.argsort(index, kind="stable")
    place = np.empty(len(index))
    place[order] = np.arange(len(index)) - np.repeat(np.cumsum(num) - num, num)
    widths = np.append(gaps, gaps.min())
    return arrival_s + place / num[index] * widths[index], [f"arrivals in clumps were spread: {clumps}"]


def fitting_block(
    counts: Longs, prompt_tokens: Longs, where: str, numbers: Sequence[int] | None = None
) -> tuple[int, list[str]]:
    """The block size that explains the number of hash ids in each row, and a note if it is not Mooncake's size.

    A row's last block, which is not full, may have an id or none. `numbers` are line numbers. Raises HeadwayError if
    most rows have more hash ids than their prompts have blocks of any usual size.
    """
    rows = np.flatnonzero(counts > 0)
    counts, prompt_tokens = counts[rows], prompt_tokens[rows]

    def num_blocks(size: int) -> Longs:
        return -(-prompt_tokens // size)

    for has_last in (True, False):
        for size in (BLOCK_TOKENS, *OTHER_BLOCKS):
            is_full = False if has_last else counts == prompt_tokens // size
            if bool(((counts == num_blocks(size)) | is_full).all()):
                if size == BLOCK_TOKENS:
                    return size, []
                return size, [
                    f"hash blocks of {size} tokens, the size that fits the prompts; block_tokens: N for another"
                ]
    beyond = np.maximum(counts - num_blocks(BLOCK_TOKENS), 0)
    num_beyond = int(np.count_nonzero(beyond))
    if not num_beyond:
        fewer = f"hash blocks taken for {BLOCK_TOKENS} tokens: rows have fewer ids than blocks of any usual size"
        return BLOCK_TOKENS, [f"{fewer}; block_tokens: N for another"]
    if num_beyond < len(counts) / 2:
        return BLOCK_TOKENS, [f"{beyond.sum()} hash ids of {num_beyond} requests are beyond their prompts"]
    row = int(np.argmax(beyond > 0))
    at = f"request {rows[row] + 1}" if numbers is None else f"line {numbers[rows[row]]}"
    raise HeadwayError(
        f"{where}: {at}: {counts[row]} hash_ids for {prompt_tokens[row]:,} tokens; no usual size of a block fits all "
        "requests: give block_tokens"
    )


def _lines(path: Path, options: ReadOptions, bad: list[str]) -> Iterator[MooncakeRequest]:
    """Yield the valid lines. Append a description of each bad line to `bad`."""
    decode = msgspec.json.Decoder(MooncakeRequest).decode
    num_left = math.inf if options.limit is None else options.limit
    last_ms = -math.inf
    for first, block in blocks(path):
        for number, text in enumerate(block.split(b"\n"), first):
            if num_left <= 0:
                return
            if not text.strip():
                continue
            problem, line = "", None
            try:
                line = decode(text)
                problem = _problem(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = f"{error}; expected timestamp, input_length, output_length and hash_ids"
            if line is None or problem:
                if not options.skip_bad:
                    raise HeadwayError(f"{path}: line {number}: {problem}; --skip-bad leaves bad lines out")
                bad.append(f"line {number}: {problem}")
                continue
            if line.timestamp < last_ms and not options.sort:
                raise HeadwayError(
                    f"{path}: line {number}: timestamp: arrives before the line above it;"
                    " say sort=True (--sort) to sort by arrival"
                )
            last_ms = line.timestamp
            num_left -= 1
            yield line


def _problem(line: MooncakeRequest) -> str:
    if not 0 <= line.timestamp < math.inf:
        return f"timestamp: {line.timestamp}; expected a time of 0 or more"
    if not 0 <= line.input_length <= MAX_TOKENS:
        return f"input_length: {line.input_length}; expected 0 to {MAX_TOKENS:,}"
    if not 0 <= line.output_length <= MAX_TOKENS:
        return f"output_length: {line.output_length}; expected 0 to {MAX_TOKENS:,}"
    if any(not 0 <= i < 2**63 for i in line.hash_ids):
        return "hash_ids: expected ids from 0 to 2^63"
    return ""


def hash_prefix(ids: Longs, counts: Longs, prompt_tokens: Longs, block_tokens: int) -> Prefix:
    """Hash blocks as segments, the last one shorter. Row i owns `counts[i]` of the `ids`.

    Blocks after the end of the prompt are dropped.
    """
    place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = np.minimum(np.repeat(prompt_tokens, counts) - place * block_tokens, block_tokens)
    inside = tokens > 0
    num_inside = np.bincount(np.repeat(np.arange(len(counts)), counts)[inside], minlength=len(counts))
    offsets = np.concatenate(([0], np.cumsum(num_inside))).astype("i8")
    return Prefix(offsets, ids[inside], tokens[inside].astype("i4"))
