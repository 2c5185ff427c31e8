"""Expected times of a replica's engine: from its step-time model if there is one, corrected by observations."""

from __future__ import annotations

from math import inf
from typing import Final

from headway.core.view import EngineTimes

_UNKNOWN_TOKEN_S: Final = 1e-4
_UNKNOWN_STEP_S: Final = 0.02
_UNKNOWN_SEQUENCE_S: Final = 1e-4
_UNKNOWN_CONTEXT_TOKEN_S: Final = 1e-7
"""Seconds of an iteration per KV token, the same for every engine without a model, so that only observations
distinguish these engines."""

_LEAST_WINDOW_S: Final = 0.25
_MOST_WINDOW_S: Final = 1.5
"""Maximum time between two samples that are compared. A longer time may contain a pause."""
_LEAST_RUNNING: Final = 2
"""Minimum number of requests running at both samples. With fewer, the replica may have been idle in between."""
_KEPT: Final = 0.9
"""Factor on past observations at each new observation, so that about ten observations count."""
_PRIOR_S: Final = 0.5
"""Prior weight, in seconds of expected service, mixed into the observed ratio."""
_LIKELY: Final = 1.3
"""A model is trusted if the ratio is within this factor."""
_MOST: Final = 20.0
_MOST_SPEEDS: Final = 256
"""Number of engine kinds that are kept. A gateway creates new ones when it corrects a replica's expected times."""
_STALE_S: Final = 60.0
"""Age at which the last observation is forgotten, so that an avoided replica is tried again."""


class _Line:
    """The time of an iteration of a number of sequences: an object whose floats compiled code reads as they are."""

    __slots__ = ("base_s", "token_s")

    def __init__(self, base_s: float = 0.0, token_s: float = 0.0) -> None:
        self.base_s, self.token_s = base_s, token_s


class EngineSpeed:
    """Numeric times of one kind of engine: seconds per prompt token, and the lines of iteration times.

    Beyond `most` sequences, requests wait for a batch slot. The iteration time keeps growing with the waiting requests,
    because waiting costs as much.
    """

    __slots__ = ("_lines", "_most", "first_s", "is_known", "times", "token_s")

    # Defaults, because pickle creates objects of compiled classes without arguments.
    def __init__(self, times: EngineTimes | None = None, most: int = 2) -> None:
        self.times = times
        self.is_known = times is not None
        self._most = max(most, 2)
        self._lines: list[_Line | None] = [None] * 64
        self.first_s, self.token_s = _UNKNOWN_STEP_S, _UNKNOWN_TOKEN_S
        if times is not None:
            self.first_s = times.prefill_s(1)
            self.token_s = (times.prefill_s(8193) - self.first_s) / 8192

    def line(self, num: int) -> tuple[float, float]:
        """(seconds, seconds per KV token) of an iteration with this many sequences."""
        if num >= len(self._lines):
            if num > 4 * self._most:
                return self._compute(num)
            self._lines += [None] * (num + 1)
        found = self._lines[num]
        if found is None:
            found = self._lines[num] = _Line(*self._compute(num))
        return found.base_s, found.token_s

    def _compute(self, num: int) -> tuple[float, float]:
        times = self.times
        if times is None:
            return _UNKNOWN_STEP_S + num * _UNKNOWN_SEQUENCE_S, _UNKNOWN_CONTEXT_TOKEN_S
        if not num:
            return 0.0, 0.0
        if num <= self._most:
            base_s = times.step_s(num, 0)
            return base_s, (times.step_s(num, 1 << 17) - base_s) / (1 << 17)
        half = self._most // 2
        base_s, token_s = self.line(self._most)
        growth_s = (base_s - self.line(half)[0]) / (self._most - half)
        return base_s + (num - self._most) * growth_s, token_s


class EngineSpeeds:
    """The speeds of many replicas. Replicas whose engines have equal expected times share one speed."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int | str, EngineSpeed] = {}

    def of(self, pool: str, times: EngineTimes | None, most: int) -> EngineSpeed:
        """The speed for a replica's pool, expected times and largest number of sequences."""
        key: int | str = pool if times is None else id(times)  # `EngineSpeed` keeps the object, so its id is not reused
        speed = self._found.get(key)
        if speed is None:
            if len(self._found) >= _MOST_SPEEDS:
                self._found.clear()
            speed = self._found[key] = EngineSpeed(times, most)
        return speed


class ObservedRatio:
    """Ratio of a replica's actual to its expected time for its work, over the last busy seconds.

    Work is the prompt tokens computed and the output tokens generated between two samples.
    """

    __slots__ = (
        "_done_tokens",
        "_expected_s",
        "_num_running",
        "_observed_s",
        "_output_tokens",
        "_start_s",
        "_updated_s",
        "factor",
    )

    def __init__(self) -> None:
        self._observed_s = self._expected_s = 0.0
        self._start_s = self._updated_s = -inf
        self._num_running = self._done_tokens = self._output_tokens = 0
        self.factor = 1.0
        """The ratio; 1 if a model is known and its error is not significant."""

    def is_due(self, now: float) -> bool:
        """Whether enough time has passed since the last sample for another one."""
        return now - self._start_s >= _LEAST_WINDOW_S

    def update(
        self,
        speed: EngineSpeed,
        now: float,
        num_running: int,
        context_tokens: int,
        done_tokens: int,
        output_tokens: int,
    ) -> None:
        """Compare the work since the last sample with the time since then. Call it only if `is_due`.

        `done_tokens` and `output_tokens` are the total prompt tokens computed and tokens generated so far.
        """
        took_s = now - self._start_s
        if took_s <= _MOST_WINDOW_S and min(num_running, self._num_running) >= _LEAST_RUNNING:
            num = 0.5 * (num_running + self._num_running)
            base_s, token_s = speed.line(round(num))
            steps = max(output_tokens - self._output_tokens, 0) / num
            prompts_s = max(done_tokens - self._done_tokens, 0) * speed.token_s
            expected_s = steps * (base_s + token_s * context_tokens) + prompts_s
            if expected_s:
                self._observed_s = _KEPT * self._observed_s + took_s
                self._expected_s = _KEPT * self._expected_s + expected_s
                self._updated_s = now
                self._set_factor(speed.is_known)
        elif self.factor != 1.0 and now > self._updated_s + _STALE_S:
            self._observed_s = self._expected_s = 0.0
            self.factor = 1.0
        self._start_s, self._num_running = now, num_running
        self._done_tokens, self._output_tokens = done_tokens, output_tokens

    def _set_factor(self, is_known: bool) -> None:
        ratio = (self._observed_s + _PRIOR_S) / (self._expected_s + _PRIOR_S)
        ratio = max(1.0 / _MOST, min(_MOST, ratio))
        self.factor = 1.0 if is_known and 1.0 / _LIKELY < ratio < _LIKELY else ratio
