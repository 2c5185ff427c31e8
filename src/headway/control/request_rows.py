"""The rows of requests: one for each request that has ended, or that is in the system when the run ends."""

from __future__ import annotations

from headway.control.live import NEVER, Live
from headway.control.recorder import Recorder
from headway.core.record import FALLBACK_REASONS, Outcome


class RequestRows:
    """Writes the table of requests, and the columns that only some runs have."""

    def __init__(self, recorder: Recorder) -> None:
        self._pack, self._put = recorder.requests.pack, recorder.requests.write
        self._fallbacks, self._refusals = recorder.fallbacks, recorder.refusals

    def write(self, live: Live, end_s: float, outcome: Outcome, refused: int = 0) -> None:
        """Write a request's row. `refused`: the reason of a refusal, as in `REFUSED`."""
        if outcome is not Outcome.FINISHED:
            # The client gave up first: a later placement did not happen, and later tokens never arrived.
            if live.placed_s > end_s:
                live.placed_s = NEVER
            if live.first_token_s > end_s:
                live.first_token_s = NEVER
            if live.answer_s > end_s:
                live.answer_s = NEVER
        row = self._pack(
            live.id, outcome, live.attempt + 1, live.preemptions, live.replica, live.placed_s, live.admitted_s,
            live.first_token_s, live.answer_s, end_s, live.generated_tokens, live.cached_tokens,
            live.reasoning_end_s, live.moves, live.stage_index, live.score,
        )  # fmt: skip
        self._put(row)
        if (rows := self._fallbacks) is not None:
            rows.write(rows.pack(0 if live.fallback is None else 1 + FALLBACK_REASONS.index(live.fallback.why)))
        if (rows := self._refusals) is not None:
            rows.write(rows.pack(refused))
