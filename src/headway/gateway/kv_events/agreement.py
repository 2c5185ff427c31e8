"""Whether what an engine's events let expect of its prefix cache is what its answers report (`cached_tokens`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MIN_SAMPLES, _MAX_SAMPLES = 16, 64
"""Answers that are compared before a judgement, and the last ones of which it is made."""
LEAST_AGREEMENT = 0.5
"""Of the larger count of tokens, the least part that the smaller one may be, over the last answers."""


class Agreement:
    """Expected and reported tokens of the answers of one replica.

    Engines that report nothing are not judged: many report cached tokens only where they are asked to
    (`--enable-prompt-tokens-details` of vLLM, `--enable-cache-report` of SGLang), and none where there are none. So the
    first answer that reports some begins the comparison.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[int, int]] = deque(maxlen=_MAX_SAMPLES)
        self.num_compared = 0
        """Answers of which either count was more than 0."""
        self.expected_tokens = self.reported_tokens = 0
        """Of these."""
        self._reports = False

    def add(self, expected: Sequence[int], reported: int, block_tokens: int) -> None:
        """Compare one answer. `expected`: tokens at each data-parallel rank; the engine chose one of them. Counts that
        differ by a block agree: an engine that speculates computes the last one again."""
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
        """The part of the larger counts that the smaller ones are, 1 for equal ones; None: too few were compared."""
        if len(self._pairs) < MIN_SAMPLES:
            return None
        return sum(map(min, self._pairs)) / sum(map(max, self._pairs))

    def forget(self) -> None:
        """The events are read anew: judge by the answers to come."""
        self._pairs.clear()
