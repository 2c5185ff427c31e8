"""The pools of a fleet file, and the parts of its combos: what they are, and what those of one combo have in common."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from headway.config.scenario import Scenario
from headway.config.spec import PoolSpec
from headway.config.strict_yaml import Key, Places
from headway.control.policies import Policies
from headway.core.fleet import Combo, Pool
from headway.gateway.upstream.dialects import Adapter

_WAYS = ("endpoints", "processes", "kubernetes")


class DeclaredPool(Struct, frozen=True):
    """A pool, or a part of a combo, and where the file says so."""

    pool: Pool
    spec: PoolSpec
    at: Key
    combo: Combo | None = None

    @property
    def where(self) -> str:
        """As errors elsewhere in the file call it."""
        return f"{self.at[0]}[{self.at[1]}]" + "".join(f".{key}" for key in self.at[2:])

    @property
    def ways(self) -> list[str]:
        """Which keys say where its replicas are, or how they are started."""
        return [key for key in _WAYS if getattr(self.spec, key)]


def parts_of(chosen: Scenario) -> list[DeclaredPool]:
    """All of a fleet's, pools first."""
    spec, fleet = chosen.spec, chosen.fleet
    pools = zip(fleet.pools, spec.fleet, strict=True)
    found = [DeclaredPool(pool, each, ("fleet", i)) for i, (pool, each) in enumerate(pools)]
    for i, (combo, each) in enumerate(zip(fleet.combos, spec.combos, strict=True)):
        parts = [(key, part) for key in ("prefill", "decode", "aggregated") if (part := getattr(each, key)) is not None]
        pairs = zip(combo.parts, parts, strict=True)
        found += [DeclaredPool(pool, part, ("combos", i, key), combo) for pool, (key, part) in pairs]
    return found


def check_together(said: Sequence[DeclaredPool], places: Places) -> None:
    """The parts of a combo are started the same way, and every workload is one part's. HeadwayError else."""
    first: dict[str, DeclaredPool] = {}
    workloads: dict[tuple[str, str, str, str], DeclaredPool] = {}
    for each in said:
        if each.combo is not None and (other := first.setdefault(each.combo.name, each)).ways != each.ways:
            what = f"the replicas of {other.where} are said by `{other.ways[0]}`; expected the same way for both"
            raise places.error((*each.at, each.ways[0]), what)
        if (how := each.spec.kubernetes) is not None:
            other = workloads.setdefault((how.context, how.namespace, how.kind, how.name), each)
            if other is not each:
                raise places.error((*each.at, "kubernetes", "name"), f"{how.name} is {other.where}'s, too")


def check_halves(said: Sequence[DeclaredPool], adapters: Sequence[Adapter], policies: Policies, places: Places) -> None:
    """Engines that are started for one phase do no other, and both of a pair speak the same. HeadwayError else."""
    apis: dict[str, str] = {}
    for each, adapter in zip(said, adapters, strict=True):
        if each.combo is None or each.pool.role == "mixed":
            continue
        if (api := apis.setdefault(each.combo.name, adapter.api)) != adapter.api:
            what = f"speaks {adapter.api}, and the other side {api}; expected the same, as KV caches are handed over"
            raise places.error(each.at, what)
        if not adapter.dual_dispatch:
            continue
        what = f"the engines of {each.where} ({adapter.api}) are started for one phase and cannot do the other"
        if getattr(policies.router(), "answers_in_place", False):
            hint = "this router has whoever is idle do all of a request; expected another, or `within: strict`"
            raise places.error(("policies", "routing"), f"{what}, and {hint}")
        if policies.migration is not None:
            hint = "nobody could go on alone with a request that moves; expected none"
            raise places.error(("policies", "migration"), f"{what}, so {hint}")
