"""An autopilot's files: its state, its requests from the command line, and versions of the fleet file.

For `fleet.yaml` the files are `fleet.autopilot/state.json`, empty files `stop` and `now` beside it, and
`fleet.v1.yaml`, `fleet.v2.yaml`, ... beside the fleet file, so that relative paths in them stay valid.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from headway.autopilot.machine import State
from headway.core.errors import HeadwayError
from headway.gateway.telemetry.autopilot import AutopilotState, PastChange
from headway.workload.atomic_file import open_atomic

_MOST_PAST = 20


class Stored(Struct, frozen=True):
    """The content of the state file. It survives a restart of the gateway."""

    state: State = State()
    began_s: float = 0.0
    """Time at which the current or last change began, in seconds since 1970."""
    past: tuple[PastChange, ...] = ()
    """The last changes, newest first."""
    note: str = ""
    """Reason why no change is tried."""
    drift: tuple[str, ...] = ()
    """Replicas and their step-time terms that were wrong while the current or last change was tried."""

    def with_past(self, one: PastChange) -> Stored:
        return replace(self, past=(one, *self.past)[:_MOST_PAST])


class AutopilotFiles:
    """The files of one fleet file's autopilot."""

    def __init__(self, fleet: Path) -> None:
        self.fleet = fleet
        self.folder = fleet.with_name(f"{fleet.stem}.autopilot")
        self._state = self.folder / "state.json"
        self._stop, self._now = self.folder / "stop", self.folder / "now"

    def load(self) -> Stored:
        """Read the state. Raises HeadwayError for a damaged file."""
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=Stored)
        except FileNotFoundError:
            return Stored()
        except (OSError, msgspec.MsgspecError) as error:
            raise HeadwayError(f"{self._state}: cannot be read: {error}") from None

    def save(self, stored: Stored) -> None:
        _write(self._state, msgspec.json.format(msgspec.json.encode(stored)))

    # Requests.

    def is_stopped(self) -> bool:
        return self._stop.exists()

    def stop(self) -> None:
        _write(self._stop, b"")

    def resume(self) -> None:
        self._stop.unlink(missing_ok=True)

    def look_now(self) -> None:
        _write(self._now, b"")

    def take_request(self) -> bool:
        """Whether a search for changes has been requested since the last call."""
        if not self._now.exists():
            return False
        self._now.unlink(missing_ok=True)
        return True

    # Versions.

    def text(self) -> str:
        """The text of the current fleet file."""
        return self.fleet.read_text(encoding="utf-8")

    def path(self, version: str) -> Path:
        return self.fleet.with_name(version)

    def version_of(self, text: str) -> str:
        """The name of the version with this text. A new version is written. Raises HeadwayError if writing fails."""
        numbered = re.compile(rf"{re.escape(self.fleet.stem)}\.v(\d+){re.escape(self.fleet.suffix)}")
        found = [
            (int(match[1]), each) for each in self.fleet.parent.iterdir() if (match := numbered.fullmatch(each.name))
        ]
        for _, each in sorted(found, reverse=True):
            if each.read_text(encoding="utf-8") == text:
                return each.name
        name = f"{self.fleet.stem}.v{max((num for num, _ in found), default=0) + 1}{self.fleet.suffix}"
        _write(self.path(name), text.encode())
        return name

    def use(self, version: str) -> None:
        """Replace the fleet file by a version, atomically."""
        _write(self.fleet, self.path(version).read_bytes())

    def is_at(self, version: str) -> bool:
        """Whether the fleet file is this version."""
        try:
            return self.fleet.read_bytes() == self.path(version).read_bytes()
        except OSError:
            return False


def shown(stored: Stored) -> AutopilotState:
    """The state as `headway autopilot status` and the gateway show it."""
    state, change = stored.state, stored.state.change
    gains = state.gains
    return AutopilotState(
        stage=state.stage,
        stopped=state.is_stopped,
        change=None if change is None else change.name,
        version=None if change is None else change.version,
        share=None if change is None else change.staging.share,
        pairs=len(gains),
        gain=fmean(gains) if gains else None,
        saved=fmean(state.savings) if state.savings else None,
        reason=state.reason or stored.note,
        past=list(stored.past),
        drift=list(stored.drift),
        note=stored.note,
    )


def _write(path: Path, data: bytes) -> None:
    """Write a file so that it is complete even after a crash of the machine."""
    with open_atomic(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
