"""K tiers of service, and in each of them reasoning before answering."""

from __future__ import annotations

from headway.core.request import Phase
from headway.core.view import RequestView
from headway.policies.arguments import at_least


class TiersAndPhases:
    """By tier, and within a tier reasoning before answering, each by turns of `quantum_tokens` output tokens.

    What K-tier Llumnix and PASCAL order by, together: a queue for each of `num_tiers` tiers (further ones share the
    last) and phase. A request that has reasoned for `demotion_tokens` stands with those that answer. A tier is a
    contract and a phase a matter of efficiency, so an answer of tier 0 goes before the reasoning of tier 1: who pays
    for tier 0 never waits for others to think, and a late tier may starve. With `phases_first` it is the other way
    round: all reasoning before all answers, tiers within.
    """

    preemptive: bool = True

    def __init__(
        self,
        num_tiers: int = 4,
        quantum_tokens: int = 500,
        demotion_tokens: int = 5000,
        phases_first: bool = False,
    ) -> None:
        at_least("num_tiers", num_tiers, 1)
        at_least("quantum_tokens", quantum_tokens, 1)
        at_least("demotion_tokens", demotion_tokens, 1)
        self.quantum: int | None = quantum_tokens
        self.num_queues = 2 * num_tiers
        self._num_tiers = num_tiers
        self._demotion_tokens = demotion_tokens
        self._phases_first = phases_first

    def rank(self, request: RequestView, now: float) -> tuple[int, int, float]:
        return self.queue(request), request.turn, request.arrival_s

    def queue(self, request: RequestView) -> int:
        tier = min(request.tier, self._num_tiers - 1)
        late = request.phase is Phase.ANSWERING or request.generated_tokens >= self._demotion_tokens
        return late * self._num_tiers + tier if self._phases_first else 2 * tier + late

    def next_change_tokens(self, request: RequestView) -> int | None:
        left = self._demotion_tokens - request.generated_tokens
        return left if request.phase is Phase.REASONING and left > 0 else None
