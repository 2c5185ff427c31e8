"""How many combos of a kind there are, may be, and could go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.core.view import PoolView

_LITTLE = 1e-9


@dataclass(frozen=True)
class Stock:
    """A pool in numbers."""

    name: str
    goodput_rps: float
    """Of one of them."""
    cost: float
    """Of one of them, in whatever is minimised."""
    gpus: Mapping[str, int]
    """Of one of them, by type."""
    num_serving: int
    num_starting: int
    num_draining: int
    fewest: int
    most: int
    num_failed: int = 0
    """That are wanted, and do not start."""

    @property
    def num(self) -> int:
        """Those that serve or will."""
        return self.num_serving + self.num_starting

    @property
    def room(self) -> int:
        """How many more there may be, those that drain counted; none while one does not start."""
        return 0 if self.num_failed else max(self.most - self.num - self.num_draining, 0)

    @property
    def num_removable(self) -> int:
        """How many can be drained: none that is starting, nor the last that serves while others start."""
        return max(min(self.num_serving - bool(self.num_starting), self.num - self.fewest), 0)


def stock_of(pool: PoolView, cost: float) -> Stock:
    """A pool as it is now."""
    draining = {replica.combo for replica in pool.replicas if replica.is_draining}
    return Stock(
        pool.name, pool.goodput_rps or 0.0, cost, pool.gpus, pool.num_serving, pool.num_starting, len(draining),
        pool.min_replicas, pool.max_replicas, pool.num_failed,
    )  # fmt: skip


def surplus(stocks: Sequence[Stock], excess_rps: float, only: Mapping[str, int] | None = None) -> dict[str, int]:
    """Which combos to do without, and how many: again and again the one whose goodput is closest to the excess.

    None that has more goodput than is left of the excess, and of equals the dearest. One combo stays. `only` limits
    how many of each.
    """
    going: Counter[str] = Counter()
    num_serving = sum(stock.num_serving for stock in stocks)
    most = {stock.name: stock.num_removable for stock in stocks}
    if only is not None:
        most = {name: min(num, only.get(name, 0)) for name, num in most.items()}
    while num_serving > 1:
        fitting = [s for s in stocks if going[s.name] < most[s.name] and s.goodput_rps <= excess_rps + _LITTLE]
        if not fitting:
            break
        one = max(fitting, key=lambda stock: (stock.goodput_rps, stock.cost, stock.name))
        going[one.name] += 1
        excess_rps -= one.goodput_rps
        num_serving -= 1
    return dict(going)
