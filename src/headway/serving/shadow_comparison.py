"""Rehearses the fleet and the candidate of `--shadow` on each hour's records, and reports the candidate's gain."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from headway.control.decisions import Decision
from headway.core.errors import HeadwayError
from headway.gateway.gateway import Gateway
from headway.planning.advise.judge import HOURS_PER_MONTH
from headway.serving.proposals import advice

log = logging.getLogger("headway.gateway")
PERIOD_S = 3600.0


class ShadowComparison:
    """Runs comparisons as long as the gateway runs."""

    def __init__(
        self, gateway: Gateway, fleet: Path, candidate: Path, records: Path, period_s: float = PERIOD_S
    ) -> None:
        self._gateway, self._fleet, self._candidate, self._records = gateway, fleet, candidate, records
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                answer = await advice(self._fleet, self._records, self._period_s, "--candidate", str(self._candidate))
                self._show(answer)
            except HeadwayError as error:
                self._log(f"the last {self._period_s / 3600:.3g} h cannot be rehearsed: {error}")
            except Exception:
                log.exception("the candidate could not be rehearsed")

    def _show(self, answer: dict[str, Any]) -> None:
        shadows, found = self._gateway.shadows, answer["compared"]
        if found is None:
            return self._log("advice is withheld: the records do not come out when they are rehearsed as they ran")
        usd = {each: value / HOURS_PER_MONTH for each, value in found["usd_per_month"].items()}
        if shadows is not None:
            shadows.gain = {"attainment": found["attainment"], "usd_per_hour": usd}
        gain = {each: 100 * found["attainment"][each] for each in ("mean", "low", "high")}
        saves = (
            f" and saves ${usd['mean']:.2f} [${usd['low']:.2f}, ${usd['high']:.2f}] an hour"
            if any(usd.values())
            else ""
        )
        num = len(answer["tried"]["judged_on"])
        self._log(
            f"rehearsed on {num} parts of the last {self._period_s / 3600:.3g} h, the candidate"
            f" adds {gain['mean']:+.1f} points of SLO attainment [{gain['low']:+.1f}, {gain['high']:+.1f}]{saves}"
        )

    def _log(self, what: str) -> None:
        log.info("shadow: %s", what)
        decisions = self._gateway.telemetry.decisions
        if decisions is not None:
            line = Decision(time.time(), "shadow", "", "", 0, "", why=what)
            for listener in decisions.listeners:
                listener(line)
