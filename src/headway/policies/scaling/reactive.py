"""SageServe's reactive scaling (section 4), the baseline of its forecasts."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.view import PoolsView
from headway.policies.arguments import above
from headway.policies.reaction import Reaction


class Reactive:
    """One replica more while a pool's effective memory utilisation is above `out_above`, one less below `in_below`.

    Utilisation is KV cache in use over KV cache there is, of those that do not drain. Steps of a pool are `cooldown_s`
    apart. With `pending_guard`, which the paper does not have, replicas that are starting count as if they were up
    and took their part of the load, so that one rise is not answered again and again until the first of them is
    there; and none is given back while any starts. The paper asks at each request; here it is every `interval_s`.
    """

    def __init__(
        self,
        out_above: float = 0.7,
        in_below: float = 0.3,
        cooldown_s: float = 15.0,
        pending_guard: bool = True,
        interval_s: float = 5.0,
    ) -> None:
        above("interval_s", interval_s, 0)
        self.interval_s = interval_s
        self._reaction = Reaction(out_above, in_below, cooldown_s, pending_guard)

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        wanted: dict[str, int] = {}
        for pool in view.pools:
            wanted |= self._reaction.step(pool, self._reaction.direction(pool), view.now)
        return wanted
