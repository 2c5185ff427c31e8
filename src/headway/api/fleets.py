"""A served fleet for tests and notebooks: the gateway in a separate process, in front of emulated engines."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from headway.api.scenarios import ScenarioLike, source_of
from headway.config import strict_yaml
from headway.config.scenario import with_absolute_paths
from headway.core.duration import seconds
from headway.core.errors import HeadwayError

_STOP_S = 15.0
_POLL_S = 0.05


@dataclass(frozen=True)
class ServedFleet:
    """A gateway that accepts requests."""

    url: str
    """A URL such as "http://127.0.0.1:40123". OpenAI's clients use `url + "/v1"`."""
    num_replicas: int


@contextmanager
def serve(
    scenario: ScenarioLike, *, emulated: bool = True, options: Sequence[str] = (), start_s: float | str = 60.0
) -> Iterator[ServedFleet]:
    """Serve a scenario's fleet within a `with` block, on a free port of this machine.

    `emulated`: emulate every engine, without GPUs; otherwise the fleet must list its `endpoints` or `processes`.
    `options`: further options of `headway serve`. Raises HeadwayError if the fleet is not up after `start_s`, with the
    gateway's error.
    """
    document, _, base_dir = source_of(scenario)
    with TemporaryDirectory() as folder, TemporaryFile() as log:
        file = Path(folder) / "fleet.yaml"
        file.write_text(strict_yaml.dump(with_absolute_paths(document, base_dir)), encoding="utf-8")
        command = [sys.executable, "-m", "headway", "serve", str(file), "--port", "0", *options]
        command += ["--emulated"] if emulated else []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        try:
            yield _started(process, log, time.monotonic() + seconds(start_s))
        finally:
            _stop(process)


def _started(process: subprocess.Popen[bytes], log: IO[bytes], end_s: float) -> ServedFleet:
    """The fleet, once all of its replicas are up."""
    url = ""
    assert process.stdout is not None
    while time.monotonic() < end_s and process.poll() is None:
        if not url:
            if select.select([process.stdout], [], [], _POLL_S)[0]:
                _, marker, address = process.stdout.readline().decode().partition("http://")
                url = f"http://{address.split()[0]}" if marker else ""
            continue
        num_up, num_replicas = _health(url)
        if num_up and num_up == num_replicas:
            return ServedFleet(url, num_replicas)
        time.sleep(_POLL_S)
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    raise HeadwayError(
        f"the fleet did not start: {lines[-1].removeprefix('error: ') if lines else 'it was not up in time'}"
    )


def _health(url: str) -> tuple[int, int]:
    """Number of replicas that are up, and of all replicas."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            health = json.load(response)
    except (OSError, ValueError):
        return 0, 0
    return int(health.get("up", 0)), int(health.get("replicas", 0))


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
