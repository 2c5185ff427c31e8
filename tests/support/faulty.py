"""Engines of `bench/faulty_engine.py` as processes: they fail as they are told to, and count what they run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import serving

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))
import faults  # noqa: E402
from faulty_engine import POISON, text_of  # noqa: E402

__all__ = ["POISON", "FaultyEngine", "executions", "faults", "text_of"]


class FaultyEngine(serving.Process):
    """One engine."""

    def __init__(self, *options: str, port: int = 0) -> None:
        super().__init__(str(BENCH / "faulty_engine.py"), "--port", str(port), *options)

    def fail(self, name: str = "", **how: Any) -> None:
        """Set the fault of all further completions; without a name, end it."""
        serving.send(self, "/fault", {"name": name, **how} if name else {}, method="PUT").json()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


def executions(engines: Sequence[FaultyEngine]) -> Counter[str]:
    """By request id, how often these engines, as far as they live, have begun a request."""
    total: Counter[str] = Counter()
    for engine in engines:
        if engine.is_alive:
            total.update(serving.send(engine, "/executions").json())
    return total
