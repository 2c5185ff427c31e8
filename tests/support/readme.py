"""The README's commands, and what they leave behind."""

from __future__ import annotations

import re
from pathlib import Path

import engines
from document_commands import bash_blocks, files_in, run_blocks
from headway.report.page import library_name

BLOCKS = bash_blocks("README.md")
WRITTEN = {
    "out/requests.csv",
    "out/plan.yaml",
    "chat.yaml",
    "headway.schema.json",
    "out/chat.html",
    f"out/{library_name()}",
    "out/chat.json",
    "out/arena.html",
    "demand.yaml",
    "out/scaled.yaml",
}
"""Files that the blocks write without a real engine."""


def run_readme(folder: Path, programs: Path) -> None:
    """Run all blocks, and check what they leave behind."""
    assert len(BLOCKS) >= 5
    blocks = [block for block in BLOCKS if "tiny_llama" not in block or not engines.NO_LLAMA]
    done = run_blocks(blocks, folder, programs)
    made, expected = files_in(folder), set(WRITTEN)
    if len(blocks) == len(BLOCKS):
        recorded = {name for name in made if re.fullmatch(r"ran/\w+\.parquet", name)}
        expected |= {"fleet.yaml", "ask.py", "ran/decisions.jsonl", *recorded}
        words = re.search("^([A-J][a-j]{2}){1000}$", done.stdout, re.MULTILINE)
        assert "ran/requests.parquet" in recorded and words is not None
        assert " is down: " in done.stderr, "one engine was killed, and the answer has its 1,000 words"
    assert made == expected
