# ruff: noqa: T201 (a script prints)
"""Compiles the simulator's loop with mypyc, if it can. docs/design.md says why.

`HEADWAY_PURE=1` leaves everything as Python, and so does an editable installation, whose sources change.
"""

from __future__ import annotations

import os
import sys

from setuptools import Extension, setup

COMPILED = (
    "control/admissions", "control/cache_index", "control/cascade_stages", "control/changes", "control/control",
    "control/hold_queue", "control/live", "control/service", "gateway/kv_events/engine_blocks", "perf/operators",
    "perf/step", "sim/batch", "sim/batching", "sim/cluster", "sim/host_memory", "sim/in_transit", "sim/kernel",
    "sim/kvcache", "sim/prefixcache", "sim/replica", "sim/stall_tracker", "sim/timeline", "workload/sources",
)  # fmt: skip


def extensions() -> list[Extension]:
    """The compiled modules; none where they are not wanted, or mypyc refuses."""
    if os.environ.get("HEADWAY_PURE") == "1" or "editable_wheel" in sys.argv:
        return []
    try:
        from mypyc.build import mypycify

        files = [f"src/headway/{name}.py" for name in COMPILED]
        # What is not installed while a wheel is built has no types.
        made = mypycify(["--config-file=", "--ignore-missing-imports", *files], opt_level="3", debug_level="0")
    except (ImportError, SystemExit) as error:
        print(f"headway: not compiled, pure Python instead: {error}", file=sys.stderr)
        return []
    for extension in made:
        extension.optional = True  # without a C compiler: pure Python
    return made


setup(ext_modules=extensions())
