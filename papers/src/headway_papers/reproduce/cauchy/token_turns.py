"""Token-weighted round robin as turns, another reading of section 4.4: a policy of the reproduction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.policies.routing.cauchy import CauchyRouter, Combo
from headway.policies.routing.combos import WeightedRoundRobin, tokens_left


class TokenTurns(CauchyRouter):
    """Turns between combos in proportion to their remaining tokens.

    The paper calls the policy token-weighted round robin, but says that it prefers the combo with the highest remaining
    token count at any time, as in `between: tokens`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._token_turns = WeightedRoundRobin()

    def _combo(self, index: int, combos: Mapping[int, Combo]) -> Combo:
        left = {id: float(max(tokens_left(replicas), 1)) for id, replicas in combos.items()}
        total = sum(left.values())
        return combos[self._token_turns.next({id: tokens / total for id, tokens in left.items()})]
