"""Kernels of a GPU that takes a known time for each, with a clock that passes with them."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from headway import catalog
from headway.calibration.measure import plan, sweep
from headway.calibration.measure.plan import OperatorCase
from headway.calibration.measure.sweep import TimedKernel

ON = replace(catalog.gpu("h100"), gpus_per_node=2)


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_runs = 0

    def __call__(self) -> float:
        return self.now_s

    def kernel(self, seconds: float, calls: int = 1, cold_s: float = 0.0) -> TimedKernel:
        """One whose first run also takes `cold_s`, and that works only when waited for."""
        queued = [cold_s]

        def run() -> None:
            self.num_runs += 1
            queued.append(seconds * calls)

        def wait() -> None:
            self.now_s += sum(queued)
            queued.clear()

        return TimedKernel(run, wait, calls)

    def device(
        self, wrong: Callable[[OperatorCase], str | None] = lambda _: None
    ) -> Callable[[OperatorCase], TimedKernel]:
        """A GPU that takes 5 microseconds and what 70% of the peaks allow, and casts at half its bandwidth."""

        def make(operation: OperatorCase) -> TimedKernel:
            if why := wrong(operation):
                raise sweep.KernelError(why)
            m, _, k = operation.shape if operation.dtype == "fp8" else (0, 0, 0)
            cast_s = 3 * m * k / (0.5 * ON.bandwidth_bytes_per_s)
            return self.kernel(5e-6 + plan.least_s(operation, ON) / 0.7 + cast_s)

        return make
