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

from headway.autopilot.evidence import Bounds
from headway.autopilot.machine import MOST_LOST, Saving
from headway.core.errors import HeadwayError
from headway.planning.advise.judge import HOURS_PER_MONTH
from headway.planning.advise.trials import SHORTFALL

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
        mended_by = answer.get("mended_by")
        but = "" if mended_by is None else f", but with `simulation: {{step_time_factor: {mended_by:g}}}`"
        return f"advice is withheld: the records do not come out when they are rehearsed as they ran{but}"
    return "" if answer["proposals"] else "no change is distinguishable from today's fleet"


def changes_of(proposal: dict[str, Any]) -> dict[tuple[str | int, ...], Any]:
    return {tuple(each["key"]): each["value"] for each in proposal["changes"]}


def saving_of(proposal: dict[str, Any], answer: dict[str, Any]) -> Saving | None:
    """The saving by which a change can be judged; None if none is certain.

    The accepted loss of SLO attainment is worth as much as the saving that must be certain (see
    `advise.trials.gain`): attainment above the target counts as much as its share of the dollars, and below the target
    `SHORTFALL` times more.
    """
    usd, today = proposal.get("usd_per_month"), answer["today"]
    if usd is None or usd["low"] <= 0:
        return None
    a_month = HOURS_PER_MONTH * today["usd_per_hour"]
    saving = Saving(Bounds(usd["low"] / a_month, usd["high"] / a_month), MOST_LOST)
    above = max(today["attainment"] - answer["target"], 0.0)
    worth = min(saving.least, (saving.least + SHORTFALL * above) / (1 + SHORTFALL))
    return Saving(saving.predicted, min(worth, MOST_LOST))


def kinds_option(kinds: Sequence[str]) -> tuple[str, str]:
    return "--kinds", ",".join(kinds)
