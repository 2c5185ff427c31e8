"""The compared scalers, each with several values of the argument that sets its headroom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from headway.core.errors import unknown
from headway.core.fleet import Combo, Fleet, Pool, unit_of
from headway.sim.replica_resources import kv_blocks

KV_USES = (0.4, 0.55, 0.7, 0.85)
SHARES = (0.15, 0.3, 0.5, 0.75)
"""Shares of the requests that fit into a replica's batch and KV cache."""
THETA_FACTORS = (0.6, 0.85, 1.15, 1.5)
"""Multiples of the simulated rate that a replica serves in time."""
BATCH_TIER = 2
"""Tier from which the admission policy `queue-manager` and long-term scalers treat requests as batch work."""


class ScalerCandidate(Struct, frozen=True):
    family: str
    """Family such as "headway", "HPA" or "KEDA"."""
    setting: str
    """The value of the argument that sets the headroom, such as "use 0.7"."""
    scaling: dict[str, Any]
    """The scaler in a scenario's notation."""
    is_oracle: bool = False
    """Whether the scaler knows the trace."""


class LadderInputs(Struct, frozen=True):
    """Inputs that scale the values of the arguments."""

    fleet: Fleet
    mean_tokens: float
    """Mean prompt and output tokens of a request."""
    batch_tier: int | None
    """`BATCH_TIER` if batch work waits for room; None if nothing waits."""
    served_tps: Callable[[], Mapping[str, float]]
    """Input tokens per second that a unit serves in time, by pool."""
    forecaster: Mapping[str, Any] | None = None
    """Forecaster for scalers that forecast; None: their default."""


def _reactive(inputs: LadderInputs) -> list[ScalerCandidate]:
    return [
        ScalerCandidate(
            "reactive", f"out above {use:g}", {"name": "reactive", "out_above": use, "in_below": round(0.4 * use, 4)}
        )
        for use in (0.45, 0.6, 0.75, 0.9)
    ]


def _hpa(inputs: LadderInputs) -> list[ScalerCandidate]:
    on_kv = [
        ScalerCandidate("HPA", f"KV use {use:g}", {"name": "target-utilization", "kv_use": use}) for use in KV_USES
    ]
    return on_kv + [
        ScalerCandidate(
            "HPA", f"{number:g} in flight", {"name": "target-utilization", "kv_use": None, "in_flight": number}
        )
        for number in _requests(inputs)
    ]


def _keda(inputs: LadderInputs) -> list[ScalerCandidate]:
    made = [
        ScalerCandidate("KEDA", f"{number:g} requests", {"name": "keda", "threshold": number})
        for number in _requests(inputs)
    ]
    return made + [
        ScalerCandidate("KEDA", f"{number:g} waiting", {"name": "keda", "threshold": number, "metric": "waiting"})
        for number in (1.0, 5.0)
    ]


def _freeness(inputs: LadderInputs) -> list[ScalerCandidate]:
    return [
        ScalerCandidate(
            "freeness",
            f"out below {low:g}",
            {"name": "freeness", "normalised": True, "out_below": low, "in_above": min(low + 0.4, 0.95)},
        )
        for low in (0.1, 0.25, 0.4, 0.55)
    ]


def _chiron(inputs: LadderInputs) -> list[ScalerCandidate]:
    return [
        ScalerCandidate("Chiron", f"theta {theta:g}", {"name": "chiron", "theta": theta})
        for theta in (0.3, 0.6, 0.8, 0.95)
    ]


def _long_term(name: str, family: str) -> Callable[[LadderInputs], list[ScalerCandidate]]:
    def made(inputs: LadderInputs) -> list[ScalerCandidate]:
        candidates = []
        for factor in THETA_FACTORS:
            tps = {pool: round(factor * each, 3) for pool, each in inputs.served_tps().items()}
            scaling: dict[str, Any] = {"name": name, "plan": {"tps": tps}}
            if inputs.forecaster is not None:
                scaling["forecaster"] = dict(inputs.forecaster)
            candidates.append(ScalerCandidate(family, f"theta x{factor:g}", scaling))
        return candidates

    return made


def _headway(inputs: LadderInputs) -> list[ScalerCandidate]:
    common: dict[str, Any] = {} if inputs.batch_tier is None else {"batch_tier": inputs.batch_tier}
    if inputs.forecaster is not None:
        common["forecaster"] = dict(inputs.forecaster)
    made = [
        ScalerCandidate("headway", f"use {use:g}", {"name": "headway", "use": use, **common})
        for use in (0.4, 0.55, 0.7, 0.85)
    ]
    longer: dict[str, Any] = {"name": "headway", "use": 0.7, "hold_s": 3600.0, **common}
    return [*made, ScalerCandidate("headway", "use 0.7, kept for 1 h", longer)]


FAMILIES: Mapping[str, Callable[[LadderInputs], list[ScalerCandidate]]] = {
    "headway": _headway,
    "reactive": _reactive,
    "hpa": _hpa,
    "keda": _keda,
    "freeness": _freeness,
    "chiron": _chiron,
    "lt-i": _long_term("lt-i", "LT-I"),
    "lt-u": _long_term("lt-u", "LT-U"),
    "lt-ua": _long_term("lt-ua", "LT-UA"),
}


def ladders(names: Sequence[str], inputs: LadderInputs) -> list[ScalerCandidate]:
    """The candidates of these families. Raises HeadwayError for an unknown family."""
    for name in names:
        if name not in FAMILIES:
            raise unknown("scaler", name, FAMILIES, "--scalers")
    return [candidate for name in names for candidate in FAMILIES[name](inputs)]


def _requests(inputs: LadderInputs) -> list[float]:
    """Requests in flight of a unit, as shares of the requests that fit into the smallest unit."""
    units: list[Pool | Combo] = [*inputs.fleet.pools, *inputs.fleet.combos]
    fit = min(_fitting(unit, inputs.mean_tokens) for unit in units)
    return sorted({float(max(round(share * fit), 1)) for share in SHARES})


def _fitting(unit: Pool | Combo, mean_tokens: float) -> float:
    return max(
        min(kv_blocks(part) * part.engine.block_size_tokens / max(mean_tokens, 1.0), float(part.engine.max_num_seqs))
        for part in unit_of(unit)
    )
