"""What a replica's engine needs: by its step-time model if there is one, corrected by what is observed."""

from __future__ import annotations

from math import inf
from typing import Final

from headway.core.view import EngineTimes

_UNKNOWN_TOKEN_S: Final = 1e-4
_UNKNOWN_STEP_S: Final = 0.02
_UNKNOWN_SEQUENCE_S: Final = 1e-4
_UNKNOWN_CONTEXT_TOKEN_S: Final = 1e-7
"""Assumed of an engine without a model: the same for all of them, so that only observations tell them apart."""

_LEAST_WINDOW_S: Final = 0.25
_MOST_WINDOW_S: Final = 1.5
"""Times between two samples of a replica of which the second counts: enough iterations, and no pause in between."""
_LEAST_RUNNING: Final = 2
"""Requests that run at both samples; with fewer, the replica may have been idle in between."""
_KEPT: Final = 0.9
"""Share of the observations so far that is kept at the next one: they are those of some ten windows."""
_PRIOR_S: Final = 0.5
"""Seconds as expected that are added to what was observed."""
_LIKELY: Final = 1.3
"""A model is believed within this factor."""
_MOST: Final = 20.0
_MOST_SPEEDS: Final = 256
"""Kinds of engines that are kept; a gateway makes new ones as it corrects what it expects of a replica."""
_STALE_S: Final = 60.0
"""Age of the last observation from which on it is forgotten, so that a replica that is avoided is tried again."""


class EngineSpeed:
    """Times of one kind of engine as numbers: seconds of a prompt token, and lines of iterations.

    Beyond `most` sequences, requests wait for a seat. An iteration grows on as if they ran: they take as long.
    """

    __slots__ = ("_lines", "_most", "first_s", "is_known", "times", "token_s")

    # Defaults, since pickle makes objects of compiled classes without arguments.
    def __init__(self, times: EngineTimes | None = None, most: int = 2) -> None:
        self.times = times
        self.is_known = times is not None
        self._most = max(most, 2)
        self._lines: list[tuple[float, float] | None] = [None] * 64
        self.first_s, self.token_s = _UNKNOWN_STEP_S, _UNKNOWN_TOKEN_S
        if times is not None:
            self.first_s = times.prefill_s(1)
            self.token_s = (times.prefill_s(8193) - self.first_s) / 8192

    def line(self, num: int) -> tuple[float, float]:
        """(seconds, seconds per KV token) of an iteration of so many sequences."""
        if num >= len(self._lines):
            if num > 4 * self._most:
                return self._compute(num)
            self._lines += [None] * (num + 1)
        found = self._lines[num]
        if found is None:
            found = self._lines[num] = self._compute(num)
        return found

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
    """The speeds of many replicas: those whose engines are expected to need the same times have one."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int | str, EngineSpeed] = {}

    def of(self, pool: str, times: EngineTimes | None, most: int) -> EngineSpeed:
        """Of a replica's pool, its times and the most sequences that it runs."""
        key: int | str = pool if times is None else id(times)  # which `EngineSpeed` keeps from being used again
        speed = self._found.get(key)
        if speed is None:
            if len(self._found) >= _MOST_SPEEDS:
                self._found.clear()
            speed = self._found[key] = EngineSpeed(times, most)
        return speed


class ObservedRatio:
    """How many times as long as expected a replica takes for what it does, over the last seconds in which it was busy.

    What it does is counted: prompt tokens computed and output tokens generated between two samples.
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
        """The ratio; 1 where a model is known and may well be right."""

    def update(
        self,
        speed: EngineSpeed,
        now: float,
        num_running: int,
        context_tokens: int,
        done_tokens: int,
        output_tokens: int,
    ) -> None:
        """Compare what has been done since the last sample with the time since then.

        `done_tokens` and `output_tokens` are the prompt tokens computed and tokens generated so far, in all.
        """
        took_s = now - self._start_s
        if took_s < _LEAST_WINDOW_S:
            return
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
