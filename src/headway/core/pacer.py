"""The pace at which an answer is read, and when its reader runs out of tokens.

From PASCAL (sections II-C, III, V-A), after Andes: a reader reads one token every `tpot_s` seconds. Tokens that arrive
earlier are buffered; when the buffer is empty, the request is behind its pace.
"""

from __future__ import annotations

from msgspec import Struct

from headway.core.errors import HeadwayError


class Pacer(Struct, frozen=True, forbid_unknown_fields=True):
    """The pace of a reader."""

    ttfat_s: float | None = 0.25
    """Target from the end of reasoning to the first answering token; None: reading starts with that token."""
    tpot_s: float = 0.1
    """Time to read one token."""

    def __post_init__(self) -> None:
        if self.ttfat_s is not None and not 0 <= self.ttfat_s < float("inf"):
            raise HeadwayError(f"pacer: ttfat_s is {self.ttfat_s}; expected seconds, 0 or more, or null")
        if not 0 < self.tpot_s < float("inf"):
            raise HeadwayError(f"pacer: tpot_s is {self.tpot_s}; expected seconds, more than 0")

    def start_s(self, reasoning_end_s: float, answer_s: float) -> float | None:
        """When reading starts: at the target, or when the first answering token arrived if that was earlier.

        Arguments are NaN for events that have not happened, and `reasoning_end_s` is NaN for a request without
        reasoning. None: reading has not started.
        """
        if self.ttfat_s is not None and reasoning_end_s == reasoning_end_s:
            wanted_s = reasoning_end_s + self.ttfat_s
            return answer_s if answer_s < wanted_s else wanted_s
        return answer_s if answer_s == answer_s else None

    def run_dry_s(self, start_s: float, answer_tokens: int) -> float:
        """When the reader has read this many tokens and needs the next one."""
        return start_s + answer_tokens * self.tpot_s


class Emission:
    """When the tokens of one answer are sent on: at most one every `tpot_s` seconds, as soon as there are any.

    A reader of this pace reads the same tokens at the same times as without it, so QoE is the same.
    """

    def __init__(self, tpot_s: float) -> None:
        self._tpot_s, self._free_s = tpot_s, 0.0

    def send_s(self, generated_s: float, num_tokens: int = 1) -> float:
        """When so many tokens are sent that were generated together at `generated_s`. To be called in their order."""
        send_s = max(generated_s, self._free_s)
        self._free_s = send_s + num_tokens * self._tpot_s
        return send_s
