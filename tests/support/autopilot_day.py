"""A day of a gateway with an autopilot in front of emulated engines, in virtual time: what it does does not depend on
how busy the machine is."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from headway.cli import main
from headway.control.decisions import Decision
from headway.gateway import blocking
from headway.gateway.gateway import Gateway
from headway.gateway.reload import Reloader
from headway.gateway.telemetry.autopilot import AutopilotState
from headway.gateway.telemetry.recording import Recording
from headway.records import parts
from headway.records.parts import Rows
from headway.serving import autopilot, proposals
from headway.serving.autopilot import Ask, Autopilot
from headway.serving.reload import FleetFile
from headway.workload.readers import run_parts
from virtual_time import ask_once, in_virtual_time, served_plan

BEFORE_TWO = datetime(2026, 11, 29, 1, 58, tzinfo=UTC).timestamp()
"""Two minutes before the autopilot looks for a change by itself."""


@dataclass
class Lived:
    """What a day came to."""

    state: AutopilotState
    decisions: list[Decision] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Of `headway advise`."""

    @property
    def told(self) -> list[str]:
        """The autopilot's lines of the decision log."""
        return [each.why for each in self.decisions if each.what == "autopilot"]


def lived_day(
    path: Path,
    records: Path,
    *,
    rate: float,
    prompt_tokens: int,
    output_tokens: int,
    most_s: float = 800.0,
    seed: int = 1,
    throttles: Mapping[str, tuple[float, float]] | None = None,
    look: Callable[[Path, Sequence[str]], dict[str, Any]] | None = None,
    after_s: float = 0.0,
    set_by_s: Callable[[float], float] = lambda _: 0.0,
) -> Lived:
    """Serve the fleet file with an autopilot from two minutes to 2:00 on, while requests come at random, until
    a change is promoted or rolled back or none begins, and `after_s` more. `look(records, kinds)` answers in place of
    `headway advise`. `set_by_s(time)`: by how much the wall clock was set by then."""
    file = FleetFile(path, lambda read: read)
    found = Lived(AutopilotState("idle", False, None, None, None, 0, None, None, "", []))
    made: list[Autopilot] = []

    async def advise(kinds: Sequence[str]) -> dict[str, Any]:
        records_s = file.scenario.spec.autopilot.records_s  # type: ignore[union-attr]
        asked = proposals.arguments(path, records, records_s, *proposals.kinds_option(kinds))
        found.answers.append(_printed(asked) if look is None else look(records, kinds))
        return found.answers[-1]

    def make() -> Gateway:
        loop, writer = asyncio.get_running_loop(), _Writer(records, {"fleet": path.read_text()})
        gateway = Gateway(file.plan, Recording(True, writer.write), found.decisions.append)
        Reloader(gateway, file.read_again, None).start()
        made.append(_pilot(gateway, file, records, advise, lambda: BEFORE_TWO + loop.time() + set_by_s(loop.time())))
        made[0].start()
        return gateway

    async def story() -> None:
        loop, random = asyncio.get_running_loop(), Random(seed)
        model = next(iter(file.plan.names))
        own = next(each.pool for each in file.plan.pools if each.pool.hosted is None)
        async with served_plan(file.plan, [], make=make, throttles=throttles, service=own) as (app, gateway):
            asked, at_s, end_s, id = set[asyncio.Task[Any]](), 1.0, most_s, 0
            while at_s < end_s:
                row = (at_s, prompt_tokens, output_tokens, 0, "", "", [])
                await asyncio.sleep(at_s - loop.time())
                asked.add(task := asyncio.create_task(ask_once(app, None, True, model, id, *row)))
                task.add_done_callback(asked.discard)
                id, at_s = id + 1, at_s + random.expovariate(rate)
                state = made[0].state()
                if end_s == most_s and (state.past or (state.stage == "idle" and state.reason)):
                    end_s = at_s + after_s
            await asyncio.gather(*asked)
            gateway().telemetry.flush()
        found.state = made[0].state()
        made[0].close()

    with in_virtual_time(path.parent) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(autopilot, "random", Random(seed))
        patch.setattr(asyncio, "to_thread", _at_once)
        patch.setattr(blocking, "start_in_thread", _started_at_once)
        runner.run(story())
    return found


def _pilot(gateway: Gateway, file: FleetFile, records: Path, ask: Ask, wall_clock: Callable[[], float]) -> Autopilot:
    return Autopilot(gateway, file, records, ask, wall_clock)


def _printed(arguments: Sequence[str]) -> dict[str, Any]:
    """What a command prints as JSON."""
    written = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(written, write_through=True)):
        assert main(list(arguments)) in (0, 3)
        found: dict[str, Any] = json.loads(written.getvalue())
    return found


async def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _started_at_once(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    try:
        ended.set_result(function(*arguments))
    except BaseException as error:
        ended.set_exception(error)
    return ended


class _Writer:
    """Writes the records of a run that is under way, at once."""

    def __init__(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        self._folder, self._provenance = folder, dict(provenance)
        (folder / run_parts.FOLDER).mkdir(parents=True, exist_ok=True)

    def write(self, rows: Rows) -> None:
        number = max(run_parts.numbers(self._folder), default=0) + 1
        state = replace(rows.state, provenance=self._provenance)
        parts.write(self._folder, number, rows.tables(), state)
