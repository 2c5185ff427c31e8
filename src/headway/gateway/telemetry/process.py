"""The operating system's figures of this process, under the metric names of Prometheus' client libraries."""

from __future__ import annotations

import os
import platform
import resource
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from headway import __version__
from headway.gateway.telemetry.metrics import Metric

_PROC = Path("/proc")
_START_TICKS, _VIRTUAL_BYTES, _RESIDENT_PAGES = 19, 20, 21
"""Fields of /proc/PID/stat, counted from the field after the program's name (proc(5))."""


def is_compiled() -> bool:
    """Whether the loops of the simulator and gateway are compiled (`setup.py`)."""
    loop = find_spec("headway.sim.kernel")
    return loop is not None and str(loop.origin).endswith(tuple(EXTENSION_SUFFIXES))


def build_info() -> Metric:
    labels = {"version": __version__, "python": platform.python_version(), "compiled": "yes" if is_compiled() else "no"}
    return "headway_build_info", [(labels, 1.0)]


def process_metrics(folder: Path = _PROC) -> list[Metric]:
    """CPU time, memory, start time and file descriptors. Without Linux's /proc: CPU time and the descriptor limit."""
    times, (most_fds, _) = os.times(), resource.getrlimit(resource.RLIMIT_NOFILE)
    found: list[tuple[str, float]] = [
        ("process_cpu_seconds_total", times.user + times.system),
        ("process_max_fds", float(most_fds)),
    ]
    try:
        fields = (folder / "self/stat").read_bytes().rpartition(b")")[2].split()
        boot = next(line for line in (folder / "stat").read_bytes().splitlines() if line.startswith(b"btime "))
        ticks, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        found += [
            ("process_resident_memory_bytes", float(fields[_RESIDENT_PAGES]) * page_bytes),
            ("process_virtual_memory_bytes", float(fields[_VIRTUAL_BYTES])),
            ("process_start_time_seconds", int(boot.split()[1]) + int(fields[_START_TICKS]) / ticks),
            ("process_open_fds", float(len(os.listdir(folder / "self/fd")))),
        ]
    except (OSError, StopIteration, IndexError, ValueError):  # not Linux, or /proc is hidden
        pass
    return [(name, [({}, value)]) for name, value in found]
