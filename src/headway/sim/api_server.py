"""The process that sends a replica's tokens to their clients: one token after the other, at its own rate.

An iteration of n tokens gives it n more to send, so the last of them leaves n times its time for a token later. While
iterations give it more than it sends, tokens of later ones wait longer and longer. The engine waits for nothing.
"""

from __future__ import annotations


class ApiServer:
    """How late the tokens of a replica's last iteration leave, `late_s`."""

    __slots__ = ("_at_s", "_token_s", "late_s")

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._at_s = self.late_s = 0.0

    def take(self, num_tokens: float, start_s: float, a_s: float, b_s: float, low: int, high: int) -> None:
        """Iterations `low` + 1 to `high` of a stretch (see `core.record.boundary_s`) gave `num_tokens` tokens each.

        The last tokens are late by all work since some iteration, less the time since. It is the most since one of
        three: the last, the first, or all before, as iterations of a stretch never get shorter.
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
        """A further token at `now`."""
        late_s = self.late_s - (now - self._at_s)
        self.late_s = (late_s if late_s > 0.0 else 0.0) + self._token_s
        self._at_s = now
