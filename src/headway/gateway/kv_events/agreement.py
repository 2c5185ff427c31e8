"""Compares the cached tokens expected from an engine's events with the `cached_tokens` that its answers report."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MIN_SAMPLES, _MAX_SAMPLES = 16, 64
"""(number of compared answers that a judgement needs, number of last answers that a judgement covers)."""
LEAST_AGREEMENT = 0.5
"""Minimum ratio of the smaller to the larger token count, summed over the last answers."""


class Agreement:
    """Expected and reported cached tokens in the answers of one replica.

    Engines that report nothing are not judged: many report cached tokens only with an option
    (`--enable-prompt-tokens-details` of vLLM, `--enable-cache-report` of SGLang), and omit a count of zero. The
    comparison therefore begins with the first answer that reports cached tokens.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[int, int]] = deque(maxlen=_MAX_SAMPLES)
        self.num_compared = 0
        """Answers with a positive expected or reported count."""
        self.expected_tokens = self.reported_tokens = 0
        """Sums over the compared answers: expected tokens and reported tokens."""
        self._reports = False

    def add(self, expected: Sequence[int], reported: int, block_tokens: int) -> None:
        """Compare one answer. `expected`: tokens at each data-parallel rank; the engine chose one of the ranks. Counts
        agree if they differ by at most one block, because a speculating engine computes the last block again."""
        self._reports |= reported > 0
        if not self._reports:
            return
        nearest = min(expected, key=lambda tokens: abs(tokens - reported))
        if abs(nearest - reported) <= block_tokens:
            nearest = reported
        if nearest or reported:
            self.num_compared += 1
            self.expected_tokens += nearest
            self.reported_tokens += reported
            self._pairs.append((nearest, reported))

    @property
    def share(self) -> float | None:
        """Ratio of the smaller to the larger count, summed over the compared answers: 1 if all are equal. None: too few
        answers were compared."""
        if len(self._pairs) < MIN_SAMPLES:
            return None
        return sum(map(min, self._pairs)) / sum(map(max, self._pairs))

    def forget(self) -> None:
        """Drop the compared answers, because the events are read again from the start."""
        self._pairs.clear()
