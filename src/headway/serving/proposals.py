"""Proposals of `headway advise` for a running gateway, computed in a separate process at low priority."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError

_NICE = 10
_WITHHELD = 3


def arguments(fleet: Path, records: Path, last_s: float, *options: str) -> tuple[str, ...]:
    """Arguments of `headway` that request proposals from the last records."""
    return (
        "advise",
        str(fleet),
        "--records",
        str(records),
        "--last",
        f"{last_s:g}s",
        "--jobs",
        "1",
        "--json",
        "--no-cache",
        *options,
    )


async def advice(fleet: Path, records: Path, last_s: float, *options: str) -> dict[str, Any]:
    """The output of `headway advise --json` on the last records. Raises HeadwayError with its message if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "headway",
        *arguments(fleet, records, last_s, *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    try:
        written, errors = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode not in (0, _WITHHELD):
        lines = errors.decode(errors="replace").strip().splitlines()
        raise HeadwayError(lines[-1].removeprefix("error: ") if lines else f"exit code {process.returncode}")
    found: dict[str, Any] = json.loads(written)
    return found


def why_none(answer: dict[str, Any]) -> str:
    """Reason why an answer has no proposals; empty if it has proposals."""
    if answer["is_withheld"]:
        return "advice is withheld: the records do not come out when they are rehearsed as they ran"
    return "" if answer["proposals"] else "no change is distinguishable from today's fleet"


def changes_of(proposal: dict[str, Any]) -> dict[tuple[str | int, ...], Any]:
    return {tuple(each["key"]): each["value"] for each in proposal["changes"]}


def kinds_option(kinds: Sequence[str]) -> tuple[str, str]:
    return "--kinds", ",".join(kinds)
