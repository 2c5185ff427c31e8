# ruff: noqa: T201 (a script prints)
"""Compiles the loops of the simulator and the gateway with mypyc, if it can. docs/design.md says why.

`HEADWAY_PURE=1` leaves everything as Python, and so does an editable installation, whose sources change.
`HEADWAY_OPTIMIZE=0` has the C compiler take a quarter of the time, for tests of compiled modules.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILED = (
    "control/admissions", "control/cache_index", "control/cascade_stages", "control/changes", "control/control",
    "control/hold_queue", "control/live", "control/model_fallbacks", "control/parts",
    "control/paused", "control/recent_adapters", "control/recorder",
    "control/roles", "control/search", "control/service", "core/replica_counts", "gateway/admission",
    "gateway/auth/keys", "gateway/clock", "gateway/framing",
    "gateway/gateway", "gateway/picker/answer", "gateway/picker/bodies", "gateway/picker/exchange",
    "gateway/picker/messages", "gateway/picker/wire", "gateway/relay/choice_counts", "gateway/relay/continuation",
    "gateway/relay/engine_request", "gateway/relay/engine_stream", "gateway/relay/failover",
    "gateway/relay/json_body", "gateway/relay/quarantine", "gateway/relay/relay",
    "gateway/relay/partial_answer", "gateway/relay/request", "gateway/relay/request_reader",
    "gateway/relay/response", "gateway/run_telemetry",
    "gateway/scheduling/control", "gateway/scheduling/driver", "gateway/scheduling/hold_timeouts",
    "gateway/scheduling/in_flight", "gateway/scheduling/replica", "gateway/scheduling/roster",
    "gateway/scheduling/stalls", "gateway/served_models", "gateway/server/bodies", "gateway/server/completions",
    "gateway/server/http_cycle",
    "gateway/server/http_protocol", "gateway/telemetry/metrics",
    "gateway/telemetry/recording", "gateway/upstream/client", "gateway/upstream/engine", "gateway/upstream/sse",
    "perf/engine_times", "perf/operators", "perf/roofline", "perf/step", "planning/verdicts",
    "policies/endpoints",
    "policies/engine_pace", "policies/freeness", "policies/ordering/fcfs",
    "policies/routing/combos", "policies/routing/freest", "policies/routing/headway",
    "policies/routing/headway_load", "policies/routing/least_loaded", "policies/routing/lmetric",
    "policies/routing/opportunistic",
    "policies/routing/round_robin", "policies/routing/slo_misses",
    "policies/routing/work_left", "sim/api_server", "sim/batch", "sim/batching", "sim/checks",
    "sim/cluster", "sim/engine_scheduler", "sim/fabric", "sim/fleet", "sim/host_memory", "sim/in_transit", "sim/kernel",
    "sim/kvcache", "sim/lifetime", "sim/observation", "sim/placed", "sim/preemption", "sim/prefixcache", "sim/replica",
    "sim/replica_resources",
    "sim/replica_view", "sim/stall_tracker", "sim/timeline", "sim/tournament",
    "sim/transfers", "sim/waiting_queue", "workload/sources",
)  # fmt: skip


WITHOUT = {"editable_wheel", "egg_info", "dist_info", "sdist"}
"""Commands that need no compiled module: an installer asks for the package's metadata several times."""


def extensions() -> list[Extension]:
    """The compiled modules; none where they are not wanted, or mypyc refuses."""
    if os.environ.get("HEADWAY_PURE") == "1" or WITHOUT & set(sys.argv):
        return []
    try:
        from mypyc.build import mypycify

        files = [f"src/headway/{name}.py" for name in COMPILED]
        # What is not installed while a wheel is built has no types; what is not compiled is checked elsewhere.
        flags = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
        # A C file for each module: in one for all, the compiler's time grows faster than the code.
        made = mypycify(
            [*flags, *files], opt_level=os.environ.get("HEADWAY_OPTIMIZE", "3"), debug_level="0", multi_file=True
        )
    except (ImportError, SystemExit) as error:
        print(f"headway: not compiled, pure Python instead: {error}", file=sys.stderr)
        return []
    for extension in made:
        extension.optional = True  # without a C compiler: pure Python
        if sys.platform == "linux":  # calls between the modules go straight there: docs/log.md has the figures
            extension.extra_link_args.append("-Wl,-Bsymbolic")
    return made


class BuildExtensions(build_ext):
    """Compiles the C files of a module side by side: nearly all are one module's."""

    def build_extensions(self) -> None:
        one_by_one = self.compiler.compile
        with ThreadPoolExecutor(os.cpu_count()) as threads:

            def compile(sources: list[str], **options: Any) -> list[str]:
                objects = threads.map(lambda source: one_by_one([source], **options), sources)
                return [each for some in objects for each in some]

            self.compiler.compile = compile
            super().build_extensions()


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtensions})
