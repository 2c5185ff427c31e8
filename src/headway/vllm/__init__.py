"""A Headway ordering inside vLLM: `vllm serve MODEL --scheduler-cls headway.vllm.Scheduler`.

Only `scheduler` imports vLLM, and only vLLM's own process imports `scheduler`. Read `ranking` first.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Scheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headway.vllm.scheduler import Scheduler

    return Scheduler
