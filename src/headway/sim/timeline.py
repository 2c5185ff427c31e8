"""A batch in time: the epoch that is running, when its iterations end, and when to look again.

While a batch stays the same its iterations form an epoch: iteration k takes `a_s + k*b_s`, and one clock function says
when it ends. The replica sleeps until boundary `k_end`; `k` is the last boundary that has been dealt with. Reads in
between see the iterations that are over, and cut nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headway.control.recorder import Recorder
from headway.core.fleet import Pool
from headway.core.policy import Ordering
from headway.core.record import boundary_s
from headway.sim.clock import completed, first_boundary_at
from headway.sim.kernel import FINISH, Kernel
from headway.sim.preemption import Preempting
from headway.sim.swap import HostMemory

Line = Callable[[int, int, Sequence[tuple[int, int]], int, int], tuple[float, float, int | None]]
"""perf's answer to a batch: see `perf.step.StepModel.line`."""


class Timeline(Preempting):
    """A batch, its present epoch, and its place in the kernel's events."""

    __slots__ = (
        "_events", "_line", "_on_wake", "_opened", "_pack_stretch", "_push", "_put_stretch", "_undecided", "a_s", "b_s",
        "is_due", "k", "k_end", "kernel", "opened_s", "start_s", "valid", "version",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        pool: Pool,
        line: Line,
        kv_blocks: int,
        swap: HostMemory,
        ordering: Ordering,
        kernel: Kernel,
        recorder: Recorder,
    ) -> None:
        super().__init__(id, pool, kv_blocks, swap, ordering, recorder)
        self.kernel = kernel
        self._push, self._events, self._undecided = kernel.push, kernel.heap, kernel.undecided
        self._pack_stretch, self._put_stretch = recorder.stretches.pack, recorder.stretches.write
        self._line = line
        self._on_wake = self._wake
        self.version = 0
        self.is_due = False
        self.idle()

    def idle(self) -> None:
        """No epoch."""
        self.opened_s = self.start_s = self.a_s = self.b_s = 0.0
        self.valid: int | None = None
        self.k = self.k_end = 0
        self.advances = False
        self._opened = (0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0)

    def _wake(self, now: float, version: int) -> None:
        """The boundary until which the replica slept; another version has been set since if it is not this one."""
        raise NotImplementedError

    def decide(self, now: float) -> None:
        """Everything else at this instant has happened."""
        raise NotImplementedError

    # What a view reads, as of the last completed iteration.

    @property
    def kv_blocks_used(self) -> int:
        """Blocks that requests hold."""
        if not self.decoding:
            return self.kv.pinned
        return self.kv.used(self.tick + self._ahead(self.kernel.now))

    @property
    def queue_lengths(self) -> Sequence[int]:
        """Requests by the ordering's queue."""
        return self._queues or (self.num_in_flight,)

    @property
    def block_size_tokens(self) -> int:
        """Tokens of a KV block."""
        return self.kv.block

    @property
    def kv_blocks_host(self) -> int:
        """Blocks that are swapped out."""
        return self.kv.blocks(self.swap.used_tokens)

    @property
    def head_demand_blocks(self) -> int:
        """Blocks that the first in line asks for."""
        live = self.head()
        if live is None:
            return 0
        return self.kv.blocks(live.swapped_tokens or live.target_tokens) - live.resident_blocks

    @property
    def tokens_generated(self) -> int:
        """Output tokens of the requests here."""
        if not self.decoding:
            return self.generated_offset
        return self.generated_offset + len(self.decoding) * (self.tick + self._ahead(self.kernel.now))

    @property
    def output_tokens_left(self) -> int:
        """True output tokens to come (an oracle's)."""
        return self.output - self.tokens_generated

    def _ahead(self, now: float) -> int:
        """Ticks completed since the last boundary at which something happened."""
        if not self.advances or self.k_end == self.k:
            return 0
        return completed(self.start_s, self.a_s, self.b_s, now, self.k, self.k_end) - self.k

    def catch_up(self, now: float) -> None:
        """Bring ticks up to the last completed iteration, before something changes in the middle of a stretch.

        A boundary at this very instant ends the sleep: what is decided there takes the change into account.
        """
        n = self._ahead(now)
        if not n:
            return
        self.k += n
        self.tick += n
        if self.window is not None:
            self.saturate(n)
        if self.k < self.k_end and boundary_s(self.start_s, self.a_s, self.b_s, self.k) == now:
            self.k_end = self.k
            self.version += 1
            self._ask()

    # When to look again.

    def _look(self, now: float, later: int = 0) -> None:
        """Look again at the first boundary from now on, or so many boundaries later."""
        if self.k == self.k_end:
            self._ask()
        elif self.k_end - self.k > 1:
            k = first_boundary_at(self.start_s, self.a_s, self.b_s, now, self.k + 1, self.k_end) + later
            if k < self.k_end:
                self._sleep_until(k)

    def _ask(self) -> None:
        """Decide once everything else at this instant has happened."""
        if not self.is_due:
            self.is_due = True
            self._undecided.append(self)

    def _sleep_until(self, k: int) -> None:
        self.k_end = k
        self.version = version = self.version + 1
        time_s = boundary_s(self.start_s, self.a_s, self.b_s, k)
        self._push((time_s, FINISH, self.id, version, self._on_wake, version))

    # The epoch.

    def _open_epoch(self, now: float) -> None:
        self.opened_s = now
        if self.stall_s:
            now += self.stall_s
            self.stall_s = 0.0
        self.start_s = now
        self.changed = False
        self.k = 0
        tick = self.tick
        num_decode = context = 0
        if self.advances:
            num_decode = len(self.decoding)
            context = self.context_offset + num_decode * tick
        self.a_s, self.b_s, self.valid = line = self._line(
            num_decode, context, self.shape, self.window_tokens, self.num_growing
        )
        self._opened = (
            self.id, tick, now, line[0], line[1], num_decode, self.given, context, self.num_waiting,
        )  # fmt: skip

    def _close_epoch(self) -> None:
        if self.k:
            self._put_stretch(self._pack_stretch(*self._opened, self.k))

    def _check_line(self) -> None:
        """In exact mode perf is asked for every iteration, and must agree with the line it drew."""
        context = self.context_offset + len(self.decoding) * self.tick
        a_s, _, _ = self._line(len(self.decoding), context, (), self.window_tokens, self.num_growing)
        line = self.a_s + self.k * self.b_s
        if abs(a_s - line) > 1e-9 * a_s:
            raise AssertionError(f"perf drew a line of {line} s for iteration {self.k}, which takes {a_s} s")
