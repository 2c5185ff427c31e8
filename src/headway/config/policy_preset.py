"""The policy preset: Headway's own set, as far as a fleet supports it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from headway.config.spec import PolicySpecs
from headway.core.fleet import Combo, Fleet, Pool

PARTS = PolicySpecs(
    routing="headway",
    ordering={"name": "priority", "preemptive": False},
    ordering_at="replica",
    migration="headway",
    admission="by-deadline",
    scaling="headway",
)
"""Headway's set. Running requests keep their place, as in vLLM: otherwise a request that waited long elsewhere would
take KV blocks of later arrivals, which would then be recomputed."""
KEYS = ("routing", "ordering", "ordering_at", "migration", "admission", "scaling")
"""Policy keys that a preset sets, unless the user sets them."""
PREEMPTING = "priority"
"""The ordering for engines that support any ordering (such as PASCAL's), and for gateways that pause running
requests."""


def expanded(policies: PolicySpecs, fleet: Fleet, given: Collection[str]) -> PolicySpecs:
    """The policies with their preset's values filled in, if they have a preset. `given` keys stay, even if they are
    None."""
    if policies.preset is None:
        return policies
    parts = {key: getattr(PARTS, key) for key in ("routing", "ordering", "admission")}
    takes_any = all(pool.engine.orderings is None for pool in _engines(fleet))
    if takes_any or policies.preempt_every_s is not None:
        parts["ordering"] = PREEMPTING
    # If engines order by tier, a hold queue would only delay the router's placements.
    parts["ordering_at"] = "replica" if all(map(_orders_by_tier, _engines(fleet))) else "gateway"
    if not why_no_migration(fleet):
        parts["migration"] = PARTS.migration
    if not why_no_scaling(fleet):
        parts["scaling"] = PARTS.scaling
    return replace(policies, **{key: part for key, part in parts.items() if key not in given})


def explained(policies: PolicySpecs, fleet: Fleet) -> list[str]:
    """One line on what the preset uses in a fleet, and one on what it leaves out.

    `policies` are expanded ones.
    """
    if policies.preset is None:
        return []
    where = {"replica": "at the engines", "gateway": "in the gateway's queue"}
    at = where.get(policies.ordering_at, "in the gateway's queue and at the engines")
    descriptions = {
        "routing": "placed by the time added",
        "ordering": f"by tier {at}",
        "admission": "requests with a late deadline wait for room",
        "migration": "migration",
        "scaling": "scaling",
    }
    used, own = [], []
    for key, text in descriptions.items():
        chosen = getattr(policies, key)
        if chosen == getattr(PARTS, key) or (key == "ordering" and chosen == PREEMPTING):
            used.append(text)
        elif chosen is not None:
            own.append(f"{key}: {chosen.get('name', 'your own') if isinstance(chosen, Mapping) else chosen}")
    if used[-2:] == ["migration", "scaling"]:
        used[-2:] = ["migration and scaling"]
    reasons = [f"no {name} ({why})" for name, why in _left_out(policies, fleet)]
    return [f"preset headway: {'; '.join([*used, *own])}", *([f"  {'; '.join(reasons)}"] if reasons else [])]


def _left_out(chosen: PolicySpecs, fleet: Fleet) -> Iterator[tuple[str, str]]:
    if chosen.admission is None:
        yield "admission", "switched off"
    if chosen.migration is None:
        yield "migration", why_no_migration(fleet) or "switched off"
    if chosen.scaling is None:
        yield "scaling", why_no_scaling(fleet) or "switched off"
    without = sorted({pool.engine.name for pool in _engines(fleet) if not _orders_by_tier(pool)})
    if without:
        yield "priorities at the engines", f"{', '.join(without)}: first come, first served"


def why_no_migration(fleet: Fleet) -> str:
    """Why no request can move between replicas; "": moves are possible."""
    parts = [part for combo in fleet.combos for part in combo.parts if part.role != "mixed"]
    if any(part.engine.name.startswith("sglang") for part in parts):
        return "SGLang's engines are started for one phase"
    models = [
        pool.model.name for each in _deployments(fleet) for pool in _parts(each) for _ in range(_most_replicas(each))
    ]
    return "" if len(models) > len(set(models)) else "no model has two replicas"


def why_no_scaling(fleet: Fleet) -> str:
    """Why the number of replicas is fixed; "": it is not fixed."""
    if any(_most_replicas(each) > each.min_replicas for each in _deployments(fleet) if each.max_replicas is not None):
        return ""
    return "no pool has `max_replicas` above its `min_replicas`"


def _deployments(fleet: Fleet) -> Sequence[Pool | Combo]:
    return (*fleet.pools, *fleet.combos)


def _parts(deployment: Pool | Combo) -> Sequence[Pool]:
    return deployment.parts if isinstance(deployment, Combo) else (deployment,)


def _most_replicas(deployment: Pool | Combo) -> int:
    return max(deployment.replicas, deployment.max_replicas or 0)


def _engines(fleet: Fleet) -> list[Pool]:
    """The pools that run their own engines."""
    return [pool for pool in fleet.all_pools if pool.hosted is None]


def _orders_by_tier(pool: Pool) -> bool:
    return pool.engine.orderings is None or "priority" in pool.engine.orderings
