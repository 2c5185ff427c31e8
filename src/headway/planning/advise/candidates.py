"""Possible changes of a fleet, one key at a time, from the registered policies and the fleet's own bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headway.config.policy_preset import why_no_migration
from headway.config.scenario import Scenario
from headway.config.strict_yaml import Key, spell
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Pool
from headway.planning.advise.changes import Candidate, Change, LeftOut
from headway.planning.advise.phases import phases
from headway.planning.scaling.candidates import FAMILIES, LadderInputs, ladders
from headway.policies import ADMISSIONS, MIGRATIONS, ORDERINGS, ROUTERS
from headway.policies.resolve import PolicyChoice, admission, migration, ordering, router

KINDS = (
    "routing",
    "ordering",
    "admission",
    "migration",
    "preset",
    "scaling",
    "scaling.settings",
    "replicas",
    "engine",
    "disaggregation",
)
NOT_ASKED = "other kinds"
REPLICAS = (-2, -1, 1, 2)
ENGINE_FACTORS = (0.5, 2.0)
ENGINE_KEYS = ("max_num_seqs", "max_num_batched_tokens")
NEED_RATES = ("lt-i", "lt-u", "lt-ua")
_POLICIES: Mapping[str, tuple[Mapping[str, type], Callable[[Any], PolicyChoice[Any]]]] = {
    "routing": (ROUTERS, router),
    "ordering": (ORDERINGS, ordering),
    "admission": (ADMISSIONS, admission),
    "migration": (MIGRATIONS, migration),
}
_OPTIONAL = ("admission", "migration")
Assemble = Callable[[Mapping[str, Any]], Scenario]


def candidates(
    today: Scenario,
    document: Mapping[str, Any],
    mean_tokens: float,
    assemble: Assemble,
    kinds: Sequence[str] = KINDS,
    why_no_scaler: str = "",
) -> tuple[list[Candidate], list[LeftOut]]:
    """The changes of these kinds that a scenario of the fleet accepts, and the rejected ones with reasons.

    `today` has requests, because a scenario without requests cannot be assembled. `assemble` raises HeadwayError.
    `why_no_scaler`: why the requests cannot be used to compare scalers.
    """
    makers: Mapping[str, Callable[[], Iterator[Candidate | LeftOut]]] = {
        "routing": lambda: _policies("routing", today),
        "ordering": lambda: _policies("ordering", today),
        "admission": lambda: _policies("admission", today),
        "migration": lambda: _migrations(today),
        "preset": lambda: _presets(today),
        "scaling": lambda: _scalers(today, mean_tokens, why_no_scaler, "scaling"),
        "scaling.settings": lambda: _scalers(today, mean_tokens, why_no_scaler, "scaling.settings"),
        "replicas": lambda: _replicas(today, document),
        "engine": lambda: _engines(today),
        "disaggregation": lambda: phases(today, document),
    }
    found: list[Candidate] = []
    left_out: list[LeftOut] = []
    for kind in KINDS:
        if kind not in kinds:
            continue
        for each in makers[kind]():
            if isinstance(each, LeftOut):
                left_out.append(each)
                continue
            made = _accepted(each, document, assemble)
            (left_out if isinstance(made, LeftOut) else found).append(made)  # type: ignore[arg-type]
    if others := [kind for kind in KINDS if kind not in kinds]:
        left_out.append(LeftOut(NOT_ASKED, ", ".join(others), "not asked for", "--kinds"))
    return found, left_out


def _accepted(candidate: Candidate, document: Mapping[str, Any], assemble: Assemble) -> Candidate | LeftOut:
    """The candidate if it can be assembled. Otherwise, for an ordering, a candidate with the same ordering in the
    gateway's queue."""
    try:
        assemble(candidate.document(document))
        return candidate
    except HeadwayError as error:
        refused = LeftOut(candidate.kinds[0], candidate.name, str(error))
    if candidate.kinds == ("ordering",):
        at = Change(("policies", "ordering_at"), "gateway")
        moved = Candidate(candidate.kinds, f"{candidate.name} at the gateway", (*candidate.changes, at))
        try:
            assemble(moved.document(document))
            return moved
        except HeadwayError as error:
            refused = LeftOut("ordering", candidate.name, str(error))
    return refused


def _policies(kind: str, today: Scenario) -> Iterator[Candidate | LeftOut]:
    """The registered policies of a kind with default arguments, without today's policy."""
    registered, resolved = _POLICIES[kind]
    current = getattr(today.spec.policies, kind)
    if isinstance(current, list):
        (current,) = current
    own = current.get("name") if isinstance(current, Mapping) else current
    for name in registered:
        at = f"{kind}: {name}"
        if getattr(registered[name], "oracle", False):
            continue  # an oracle: no fleet can have it
        if name == own and current == own:
            continue
        try:
            resolved(name)
        except HeadwayError as error:
            yield LeftOut(kind, at, str(error), "its arguments, in a copy of the fleet file and headway compare")
            continue
        yield Candidate((kind,), f"{at} with its defaults" if name == own else at, (_set(kind, name),))
    if kind in _OPTIONAL and current is not None:
        yield Candidate((kind,), f"no {kind}", (_set(kind, None),))


def _set(kind: str, value: Any) -> Change:
    return Change(("policies", kind), value)


def _migrations(today: Scenario) -> Iterator[Candidate | LeftOut]:
    if why := why_no_migration(today.fleet):
        yield LeftOut("migration", "all of kind migration", why, "a second replica of a model")
        return
    yield from _policies("migration", today)


def _presets(today: Scenario) -> Iterator[Candidate | LeftOut]:
    policies = today.spec.policies
    if policies.preset is None:
        scaling = None if policies.scaling is None else today.document["policies"]["scaling"]
        yield Candidate(
            ("preset",), "preset: headway", (Change(("policies",), {"preset": "headway", "scaling": scaling}),)
        )


def _scalers(today: Scenario, mean_tokens: float, why_not: str, kind: str) -> Iterator[Candidate | LeftOut]:
    """Candidates with another value of one setting of today's scaler (kind "scaling.settings"), or with another
    scaler."""
    policies = today.spec.policies
    if policies.scaling is None:
        yield LeftOut(kind, f"all of kind {kind}", "the fleet does not scale", "`policies: scaling`, pools with bounds")
        return
    if why_not:
        yield LeftOut(kind, f"all of kind {kind}", why_not, "three days or more, or longer ones")
        return
    own = {"name": policies.scaling} if isinstance(policies.scaling, str) else policies.scaling
    kept, wants_own = (own, True) if kind == "scaling.settings" else ({}, False)
    inputs = LadderInputs(today.fleet, mean_tokens, None if policies.admission is None else 2, dict)
    for name in FAMILIES:
        if name in NEED_RATES:
            if (name == own["name"]) == wants_own:
                why = "what a replica serves in time is not known"
                yield LeftOut(kind, f"scaling: {name}", why, "headway plan scaling")
            continue
        for each in ladders([name], inputs):
            made = {**kept, **each.scaling}
            if (each.scaling["name"] == own["name"]) == wants_own and made != own:
                yield Candidate((kind,), f"scaling: {each.family}, {each.setting}", (_set("scaling", made),))


def _replicas(today: Scenario, document: Mapping[str, Any]) -> Iterator[Candidate | LeftOut]:
    if today.spec.policies.scaling is not None:
        yield LeftOut(
            "replicas", "all of kind replicas", "the scaler sets the numbers", "bounds: min_replicas, max_replicas"
        )
        return
    sections: tuple[tuple[str, Sequence[Pool | Combo]], ...] = (
        ("fleet", today.fleet.pools),
        ("combos", today.fleet.combos),
    )
    for section, deployments in sections:
        for i, each in enumerate(deployments):
            given = document[section][i]
            if not isinstance(given, Mapping):
                continue
            yield from _numbers((section, i), each, given.get("endpoints") or ())


def _numbers(at: Key, deployment: Pool | Combo, endpoints: Sequence[str]) -> Iterator[Candidate | LeftOut]:
    """Other numbers of replicas, within the pool's bounds."""
    name, num = deployment.name, deployment.replicas
    if isinstance(deployment, Pool) and deployment.hosted is not None:
        return
    for more in REPLICAS:
        wanted = num + more
        if wanted < max(deployment.min_replicas if deployment.max_replicas is not None else 1, 1):
            continue
        if deployment.max_replicas is not None and wanted > deployment.max_replicas:
            continue
        label = f"{wanted} replica{'s' if wanted > 1 else ''} of {name}"
        if not endpoints:
            yield Candidate(("replicas",), label, (Change((*at, "replicas"), wanted),))
        elif more < 0:
            yield Candidate(("replicas",), label, (Change((*at, "endpoints"), list(endpoints[:wanted])),))
        else:
            yield LeftOut(
                "replicas", label, "there are no more endpoints", f"the address of another engine in {spell(at)}"
            )


def _engines(today: Scenario) -> Iterator[Candidate | LeftOut]:
    """Half and double the batch limits of every pool."""
    for i, pool in enumerate(today.fleet.pools):
        if pool.hosted is not None:
            continue
        for key in ENGINE_KEYS:
            for factor in ENGINE_FACTORS:
                value = int(getattr(pool.engine, key) * factor)
                yield Candidate(
                    ("engine",), f"{key} {value:,} of {pool.name}", (Change(("fleet", i, "engine", key), value),)
                )
    if today.fleet.combos:
        yield LeftOut(
            "engine", "engines of combos", "limits of the two sides depend on each other", "headway plan combos"
        )


NEVER_TRIED = (
    LeftOut(
        "GPU type", "other GPUs, and other tensor parallelism", "no engine of the fleet runs on them",
        "headway plan fleet, and headway measure or calibrate on such a GPU",
    ),
    LeftOut(
        "speculative", "speculative decoding on or off", "the share of accepted drafts is not recorded",
        "the acceptance that the engine reports on these prompts, as speculative: acceptance",
    ),
    LeftOut(
        "arguments", "other arguments of policies", "only their defaults, and the ladders of scalers, are tried",
        "headway arena search",
    ),
    LeftOut(
        "tiers", "other numbers of tiers, and head-room for them", "which customers may share a tier is not recorded",
        "headway plan tiers",
    ),
    LeftOut(
        "gateway", "other times for which requests are held", "a rehearsal has no clients that give up",
        "headway load, against the gateway with each setting",
    ),
    LeftOut(
        "demand", "more or less demand than was recorded", "the days are rehearsed as they were",
        "headway plan scaling or plan capacity, with the demand that is expected",
    ),
)  # fmt: skip
"""Kinds of changes that need data which records do not contain."""
