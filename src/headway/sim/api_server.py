"""The process that sends a replica's tokens to their clients, one after the other, at its own rate.

An iteration of n tokens adds n tokens to its queue, so the last of them is sent n token times later. If iterations
produce tokens faster than the process sends them, its queue grows. The engine never waits for it.
"""

from __future__ import annotations


class ApiServer:
    """The delay `late_s` of the tokens of a replica's last iteration."""

    __slots__ = ("_at_s", "_token_s", "late_s")

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._at_s = self.late_s = 0.0

    def take(self, num_tokens: float, start_s: float, a_s: float, b_s: float, low: int, high: int) -> None:
        """Iterations `low` + 1 to `high` of a stretch (see `timeline.boundary_s`) produced `num_tokens` tokens each.

        The delay of the last tokens is the maximum over earlier iterations of the work since that iteration less the
        time since. Within a stretch iterations never get shorter, so the maximum is at the last iteration, the first
        one, or before the stretch.
        """
        last_s = start_s + high * a_s + b_s * (high * (high - 1) // 2)
        least_s = num_tokens * self._token_s
        work_s = (high - low) * least_s
        late_s = self.late_s + work_s - (last_s - self._at_s)
        if high - low > 1:
            first_s = start_s + (low + 1) * a_s + b_s * ((low + 1) * low // 2)
            since_first_s = work_s - (last_s - first_s)
            if since_first_s > late_s:
                late_s = since_first_s
        self.late_s = late_s if late_s > least_s else least_s
        self._at_s = last_s

    def add(self, now: float) -> None:
        """Count one more token, sent at `now`."""
        late_s = self.late_s - (now - self._at_s)
        self.late_s = (late_s if late_s > 0.0 else 0.0) + self._token_s
        self._at_s = now
