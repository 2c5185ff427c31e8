"""The timeline of a replica: when the iterations of its current batch end, and when the replica decides again.

While a batch stays the same, its iterations form an *epoch*: iteration k takes `a_s + k*b_s` seconds, and
`boundary_s` gives the end of each. The replica sleeps until boundary `k_end`; `k` is the last processed
boundary. Reads in between see the complete iterations and do not end the epoch.
"""

from __future__ import annotations

from math import inf, nextafter, sqrt
from typing import Final

from headway.control.recorder import BegunStretch, StretchTable
from headway.sim.api_server import ApiServer
from headway.sim.batch import Batch
from headway.sim.kernel import Kernel
from headway.sim.replica_resources import PoolResources


class Timeline:
    """The epoch of a batch, and its events in the kernel."""

    __slots__ = (
        "_batch",
        "_boundaries",
        "_graph_s",
        "_lag",
        "_line",
        "_model",
        "_opened",
        "_reports_late",
        "_seen_s",
        "_slot",
        "_stretches",
        "_undecided",
        "a_s",
        "advances",
        "api_server",
        "b_s",
        "ended_s",
        "is_due",
        "is_settled",
        "k",
        "k_end",
        "kernel",
        "late_s",
        "least_launch_s",
        "next_s",
        "slowdown",
        "start_s",
        "valid",
    )  # fmt: skip

    def __init__(
        self,
        slot: int,
        batch: Batch,
        resources: PoolResources,
        kernel: Kernel,
        stretches: StretchTable,
    ) -> None:
        """`slot`: the number that the kernel gave the replica."""
        self._batch = batch
        self.kernel = kernel
        self._boundaries, self._undecided = kernel.boundaries, kernel.undecided
        self._slot = slot
        self._stretches, self._line, self._model = stretches, resources.line, resources.model
        self._lag, self._reports_late = resources.schedule_lag > 0, resources.reports_late
        self._graph_s = resources.launch_overhead_s
        self.least_launch_s = 0.0
        """The shortest launch, for which the report of an iteration with prompts waits at least."""
        self.slowdown = 1.0
        """Factor on the times of `line`, from the next epoch on."""
        self.api_server: ApiServer | None = None
        """Sends the tokens of each tick; None: sending takes no time."""
        self.is_due = False
        """Whether the replica is among the kernel's undecided ones."""
        self.reset()

    def reset(self) -> None:
        self.start_s = self.a_s = self.b_s = 0.0
        self.next_s = 0.0
        """When the engine schedules the epoch's second iteration: see `scheduled_s`."""
        self.late_s = self.ended_s = self._seen_s = 0.0
        """How long after its end at `ended_s` the engine reports the last iteration: see `report_late`."""
        self.is_settled = False
        """Whether `late_s` is final."""
        self.valid: int | None = None
        """Boundary until which `a_s` and `b_s` hold; None = any."""
        self.k = self.k_end = 0
        self.advances = False
        """Whether every iteration is a tick, in which decoding requests gain a token."""
        self._opened: BegunStretch = (0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0)

    def stop(self) -> None:
        """Forget the epoch, and sleep no more."""
        self._boundaries.set(self._slot, inf)
        self.reset()

    # The epoch.

    def open(self, now: float) -> None:
        """Record the current epoch and begin a new one. `Batch.stall_s` delays its first iteration."""
        if self.k:
            self._stretches.write(self._opened, self.k)
        batch = self._batch
        has_prompts, is_idle, late_s, scheduled_s, start_s = batch.chunk_tokens > 0, not self.k, self.late_s, now, now
        if has_prompts and self._lag:
            scheduled_s = self.scheduled_s(now)
        if late_s:
            start_s, self.late_s, self.is_settled = self.ended_s, 0.0, False
        if batch.stall_s:
            start_s += batch.stall_s
            batch.stall_s = 0.0
        if start_s < now and not has_prompts:
            start_s = now  # a graph is launched whole
        self.start_s, self.next_s = start_s, now
        self.k = num_decode = context = 0
        batch.is_changed = False
        tick = batch.tick
        if self.advances:
            num_decode = len(batch.decoding)
            context = batch.context_offset + num_decode * tick
        model, shapes, window, growing = self._model, batch.chunk_shapes, batch.window_tokens, batch.num_growing
        if model is not None:
            a_s, b_s, self.valid = model.line(num_decode, context, shapes, window, growing)
        else:
            a_s, b_s, self.valid = self._line(num_decode, context, shapes, window, growing)
        launch_s, is_next_launched = 0.0, False
        if has_prompts:
            launch_s, b_s = b_s, 0.0
        if batch.speculation is not None and num_decode:
            if batch.speculation.resize(num_decode):
                batch.redraft(batch.speculation)
            b_s *= batch.speculation.mean_tokens() / num_decode
        if self.slowdown != 1.0:
            a_s *= self.slowdown
            b_s *= self.slowdown
        if launch_s:
            launched_s = scheduled_s + launch_s
            if launched_s - start_s > a_s:
                a_s = launched_s - start_s
            if is_idle and self._lag:  # an idle engine takes as long to launch this one and the next
                self.next_s = launched_s - self._graph_s
            elif self._reports_late:
                is_next_launched = num_decode > 0
                if launched_s > now:
                    self.next_s = launched_s
        if late_s and start_s + a_s < now:  # other prompts than those for which the report waited
            self.start_s = start_s = self.ended_s
            a_s = late_s
            while start_s + a_s < now:
                a_s = nextafter(a_s, inf)
        self.a_s, self.b_s = a_s, b_s
        self._opened = (
            batch.replica,
            tick,
            start_s,
            a_s,
            b_s,
            num_decode,
            batch.chunk_tokens,
            context,
            batch.num_waiting,
        )
        if is_next_launched and (wait_s := self.next_s + self.least_launch_s - (start_s + a_s)) > 0.0:
            self.ended_s, self.late_s, self._seen_s = start_s + a_s, wait_s, self.next_s
            self.start_s += wait_s

    def scheduled_s(self, now: float) -> float:
        """When the engine scheduled the iteration that follows boundary `k_end`, which is reported `now`.

        An engine that schedules ahead does so when it has reported the iteration before the one that ends then.
        """
        if self.late_s:
            return self._seen_s
        k = self.k_end
        if not self._lag or not k:
            return now
        return self.next_s if k == 1 else boundary_s(self.start_s, self.a_s, self.b_s, k - 1)

    def ended_at(self, now: float) -> float:
        """When the iteration ended that is reported now."""
        return self.ended_s if self.late_s else now

    def report_late(self, late_s: float, scheduled_s: float, ended_s: float) -> None:
        """Let the engine report the iteration that ended at `ended_s`, boundary `k_end`, `late_s` later: it launches
        the next one first, which it scheduled at `scheduled_s`.

        Until then the iteration counts as incomplete for everything outside: its boundary is moved to the report.
        """
        batch, n = self._batch, self.k_end - 1 - self.k
        if n > 0 and self.advances:
            if self.api_server is not None:
                self.send(self.api_server, self.k + n)
            batch.advance(n)
        self.k = self.k_end - 1
        batch.is_changed = True  # the next epoch begins now
        self.start_s += late_s - self.late_s
        self.late_s, self.ended_s, self._seen_s, self.is_settled = late_s, ended_s, scheduled_s, True
        time_s = ended_s + late_s
        while boundary_s(self.start_s, self.a_s, self.b_s, self.k_end) < time_s:
            self.start_s = nextafter(self.start_s, inf)
        self._boundaries.set(self._slot, time_s)

    def close(self) -> None:
        """Record the current epoch if it has a complete iteration."""
        if self.k:
            self._stretches.write(self._opened, self.k)

    def check_line(self) -> None:
        """Compare the step time of the next iteration with the epoch's line. Raises AssertionError."""
        batch = self._batch
        if batch.speculation is not None:
            return  # contexts grow by accepted tokens, of which the line knows only the mean
        context = batch.context_offset + len(batch.decoding) * batch.tick
        a_s, _, _ = self._line(len(batch.decoding), context, (), batch.window_tokens, batch.num_growing)
        a_s *= self.slowdown
        line = self.a_s + self.k * self.b_s
        if abs(a_s - line) > 1e-9 * a_s:
            raise AssertionError(f"perf drew a line of {line} s for iteration {self.k}, which takes {a_s} s")

    def ticks_ahead(self, now: float) -> int:
        """Ticks completed since the last processed boundary.

        With speculative decoding the ticks are processed at once, because they gave several tokens to a request: read
        the batch after this call.
        """
        low, high = self.k, self.k_end
        if low == high or not self.advances:
            return 0
        n = completed(self.start_s, self.a_s, self.b_s, now, low, high) - low
        if n and self._batch.speculation is not None:
            self._pass(n, now)
            return 0
        return n

    def holds_until_s(self, ticks: int) -> float:
        """The time of the next tick, after the ticks that `ticks_ahead` returned; infinite if an event comes first."""
        k = self.k + ticks
        if k >= self.k_end or not self.advances:
            return inf
        return boundary_s(self.start_s, self.a_s, self.b_s, k + 1)

    def note_change(self) -> None:
        """Note that a value of the replica that policies read changes now."""
        changes = self.kernel.changes
        if changes.is_read:
            changes.ids.append(self._batch.replica)

    def catch_up(self, now: float) -> None:
        """Advance to the last complete iteration, before a change in the middle of a stretch.

        A boundary at this instant ends the sleep, so that its decision includes the change.
        """
        n = self.ticks_ahead(now)
        if n:
            self._pass(n, now)

    def _pass(self, n: int, now: float) -> None:
        """Process n complete ticks."""
        if self.api_server is not None:
            self.send(self.api_server, self.k + n)
        self.k += n
        self._batch.advance(n)
        if self.k < self.k_end and boundary_s(self.start_s, self.a_s, self.b_s, self.k) == now:
            self.k_end = self.k
            self._boundaries.set(self._slot, inf)
            self.request_decision()

    def send(self, api_server: ApiServer, k: int) -> None:
        """Pass the tokens of the ticks up to boundary k to the server."""
        batch = self._batch
        num = len(batch.decoding) if batch.speculation is None else batch.speculation.mean_tokens()
        api_server.take(num, self.start_s, self.a_s, self.b_s, self.k, k)

    # When to decide again.

    def wake_by(self, now: float, num_later: int = 0) -> None:
        """Decide at the first boundary from `now` on, or `num_later` boundaries after it: ahead of the engine's
        schedule."""
        if self.k == self.k_end:
            self.request_decision()
        elif num_later and not self.k and now <= self.next_s:
            self.sleep_until(1)
        elif self.k_end - self.k > 1:
            k = first_boundary_at(self.start_s, self.a_s, self.b_s, now, self.k + 1, self.k_end) + num_later
            if k < self.k_end:
                self.sleep_until(k)

    def request_decision(self) -> None:
        """Decide after everything else at this instant."""
        if not self.is_due:
            self.is_due = True
            self._undecided.append(self._slot)

    def sleep_until(self, k: int) -> None:
        """Wake the owner at boundary k. Cancels an earlier sleep."""
        self.k_end = k
        self._boundaries.set(self._slot, boundary_s(self.start_s, self.a_s, self.b_s, k))


def boundary_s(start_s: float, a_s: float, b_s: float, k: int) -> float:
    """End of the k-th iteration of a stretch (k = 0: its start), in seconds. All code uses this one formula."""
    return start_s + k * a_s + b_s * (k * (k - 1) // 2)


# Both functions first solve for the (real) number of iterations since `start_s`. Only within `_ROUNDING` of a boundary
# can the result differ from `boundary_s`, which then decides. The code is inlined: a call would take as long as the
# arithmetic.

_ROUNDING: Final = 1e-3


def first_boundary_at(start_s: float, a_s: float, b_s: float, now: float, low: int, high: int) -> int:
    """The smallest k in [low, high] whose boundary is at or after `now`; `high` if none is."""
    elapsed, x = now - start_s, 0.0
    if elapsed > 0.0:
        if b_s > 0.0:
            linear = a_s - 0.5 * b_s
            x = 2.0 * elapsed / (linear + sqrt(linear * linear + 2.0 * b_s * elapsed))
        elif a_s > 0.0:
            x = elapsed / a_s
    k = int(x)
    if _ROUNDING < x - k < 1.0 - _ROUNDING:
        return low if k < low else high if k >= high else k + 1
    k = low if k < low else high if k > high else k
    while k > low and boundary_s(start_s, a_s, b_s, k - 1) >= now:
        k -= 1
    while k < high and boundary_s(start_s, a_s, b_s, k) < now:
        k += 1
    return k


def completed(start_s: float, a_s: float, b_s: float, now: float, low: int, high: int) -> int:
    """The largest k in [low, high] whose boundary is at or before `now`; `low` if none is."""
    elapsed, x = now - start_s, 0.0
    if elapsed > 0.0:
        if b_s > 0.0:
            linear = a_s - 0.5 * b_s
            x = 2.0 * elapsed / (linear + sqrt(linear * linear + 2.0 * b_s * elapsed))
        elif a_s > 0.0:
            x = elapsed / a_s
    k = int(x)
    if _ROUNDING < x - k < 1.0 - _ROUNDING:
        return low if k < low else high if k > high else k
    k = low if k < low else high if k > high else k
    while k > low and boundary_s(start_s, a_s, b_s, k) > now:
        k -= 1
    while k < high and boundary_s(start_s, a_s, b_s, k + 1) <= now:
        k += 1
    return k
