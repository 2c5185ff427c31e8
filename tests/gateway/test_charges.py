"""What keys pay where another pool answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headway import serving
from headway.control.live import Live
from headway.core.record import Outcome

pytest.importorskip("sqlalchemy")
from headway.gateway.charges import Charges
from headway.limits.budgets import MostTokens, TokenPrices


class Ledger:
    """Accounts that keep what is reserved and charged."""

    def __init__(self) -> None:
        self.reserved: list[float] = []
        self.charged: list[Any] = []

    def reserve(self, owner: str, tokens: int, usd: float) -> str:
        self.reserved.append(usd)
        return "hold"

    def settle(self, hold: str, charges: Any) -> None:
        self.charged += charges


def test_a_fallbacks_price_is_reserved_and_only_paid_if_it_answers(tmp_path: Path) -> None:
    price = {"usd_per_million_input_tokens": 1.0, "usd_per_million_output_tokens": 2.0}
    dear = {"usd_per_million_input_tokens": 10.0, "usd_per_million_output_tokens": 30.0}
    hosted = {"name": "hosted", "model": "big", "hosted": {}, "endpoints": ["https://example.com"], **dear}
    own = {"name": "own", "model": "small", "endpoints": ["http://127.0.0.1:1"], "fallback": ["hosted"], **price}
    other = {"name": "other", "model": "third", "endpoints": ["http://127.0.0.1:2"], **price}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": [own, hosted, other]}))
    _, plan = serving.load(path)
    ledger: Any = Ledger()
    charges = Charges(ledger, {served.pool.name: served for served in plan.pools}, lambda: plan)
    most = MostTokens(1_000_000, 100_000)
    charges.hold("key", "small", most)
    charges.hold("key", "third", most)
    assert ledger.reserved == [13.0, 1.2]
    for pool, model in (("own", "small"), ("hosted", "big")):
        live = Live(0, 0.0, 1_000_000, 100_000, model)
        live.placed_s, live.generated_tokens = 0.0, 100_000
        request: Any = SimpleNamespace(
            budget_hold="hold",
            live=live,
            earlier_charges=(),
            replica=SimpleNamespace(pool=pool),
            outcome=Outcome.FINISHED,
        )
        charges.settle(request)
    assert [(each.model, each.usd) for each in ledger.charged] == [("small", 1.2), ("big", 13.0)]


def test_cached_tokens_have_their_own_price() -> None:
    assert TokenPrices(2.0, 10.0, 0.5).usd(1_000_000, 100_000, 600_000) == pytest.approx(0.8 + 0.3 + 1.0)
    assert TokenPrices(2.0, 10.0).usd(1_000_000, 100_000, 600_000) == pytest.approx(3.0)
