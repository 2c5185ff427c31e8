"""A scenario: the user's document, with the specification and fleet that it describes."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, get_origin

from msgspec import NODEFAULT, UNSET, Struct, to_builtins
from msgspec.structs import FieldInfo, fields, replace

from headway.catalog import config_of, is_repository
from headway.catalog.coefficients import Coefficients, PoolCalibration
from headway.config import strict_yaml
from headway.config.fleet import coefficients_of, fleet_of
from headway.config.own_modules import plain, with_folder
from headway.config.placeholders import has_placeholder
from headway.config.policy_preset import KEYS as PRESET_KEYS
from headway.config.policy_preset import expanded
from headway.config.spec import PolicySpec, PolicySpecs, Seed, Spec, Variant
from headway.config.strict_yaml import Key, Places
from headway.core.duration import unlikely
from headway.core.errors import SloWarning, unknown
from headway.core.fleet import Combo, Fleet, Pool, unit_of
from headway.gateway.settings import Batches, KeyStoreSettings
from headway.perf.hosted import hosted_line
from headway.perf.speculation import AnyStepModel, step_model
from headway.sim.replica_resources import Line

Changes = Mapping[Key, tuple[str, Any]]
"""Key -> (the command line flag that sets it, the value)."""


@dataclass(frozen=True)
class Scenario:
    """Pure data. The names in its fleet are known and its models fit; its policies are not resolved."""

    spec: Spec
    fleet: Fleet
    document: dict[str, Any]
    """The file's content."""
    base_dir: Path
    """Folder to which paths are relative."""
    places: Places


@dataclass(frozen=True)
class StepTimes:
    """The step-time functions of a scenario's pools. Reads coefficients at the first call. Picklable."""

    scenario: Scenario

    @cached_property
    def coefficients(self) -> Mapping[str, Coefficients]:
        """The coefficients of step times, by pool."""
        scenario = self.scenario
        return coefficients_of(scenario.spec, scenario.fleet, scenario.base_dir, scenario.places)

    @property
    def pools(self) -> tuple[PoolCalibration, ...]:
        """The calibration of every pool on GPUs, and of every part of a combo."""
        found = []
        for pool in self.scenario.fleet.all_pools:
            if pool.hosted is not None:
                continue
            used = self.coefficients[pool.name]
            engine = pool.engine
            found.append(
                PoolCalibration(pool.name, pool.gpu.name, engine.name, used.calibrated, used.estimated, engine.version)
            )
        return tuple(found)

    def model(self, pool: Pool) -> AnyStepModel:
        return step_model(pool.model, pool.gpu, pool.engine, pool.parallel, self.coefficients[pool.name])

    def __call__(self, pool: Pool) -> Line:
        if pool.hosted is not None and self.coefficients is not None:  # it checks that the pool's speed is known
            return hosted_line(pool.hosted)
        factor = self.scenario.spec.simulation.step_time_factor
        line = self.model(pool).line
        return line if factor == 1.0 else _slowed(line, factor)


def _slowed(line: Line, factor: float) -> Line:
    def slowed(*batch: Any) -> tuple[float, float, int | None]:
        a_s, b_s, valid = line(*batch)
        return factor * a_s, factor * b_s, valid

    return slowed


def read(path: Path) -> tuple[dict[str, Any], Places]:
    """The document of a scenario file; its name defaults to the file's name."""
    document, places = strict_yaml.read(path)
    check_sections(document, places)
    return {**document, "name": document.get("name", path.stem)}, places


def check_sections(document: Mapping[str, Any], places: Places) -> None:
    """Raise HeadwayError unless each section is a mapping, or a list of mappings, as the schema says.

    Planners change documents before the whole is read.
    """
    for section in fields(Spec):
        value = document.get(section.name)
        if value is not None and section.type not in (str, Seed):
            kind = tuple[dict[Any, Any], ...] if get_origin(section.type) is tuple else dict[Any, Any]
            strict_yaml.convert(value, kind, places, (section.name,))


def assemble(document: Mapping[str, Any], places: Places, base_dir: Path, changes: Changes | None = None) -> Scenario:
    """The scenario of a document, with some values changed. Raises HeadwayError for invalid keys, values or fleets."""
    changed, places = strict_yaml.change(document, places, changes or {})
    if "workload" not in changed:  # the document is a fleet file
        raise places.error(
            (), "'workload' is missing; expected it there, or requests by an option (--trace, --workload, --demand)"
        )
    spec = strict_yaml.convert(_without_secrets(changed), Spec, places)
    fleet = fleet_of(spec, base_dir, places)
    spec = replace(spec, policies=expanded(spec.policies, fleet, changed.get("policies") or {}))
    scenario = Scenario(spec, fleet, changed, base_dir, places)
    _check_values(scenario)
    _check_faults(scenario)
    _check_role_changes(scenario)
    return scenario


def _without_secrets(document: dict[str, Any]) -> dict[str, Any]:
    """The document without gateway settings that have placeholders, which only the gateway reads."""
    settings = document.get("gateway")
    if not isinstance(settings, Mapping) or not has_placeholder(settings):
        return document
    return {**document, "gateway": {key: value for key, value in settings.items() if not has_placeholder(value)}}


_PATH_KEYS = (
    "path",
    "trace",
    "config",
    "coefficients",
    "endpoints_file",
    "slots",
    "log",
    "tokenizer",
    "records",
    "store",
)
_DEFAULT_STORES = {"batches": Batches().store, "key_store": KeyStoreSettings().store}
_FILE_PLACEHOLDER = re.compile(r"\$\{file:([^{}]*)\}")


def with_absolute_paths(document: Mapping[str, Any], base_dir: Path) -> dict[str, Any]:
    """A scenario's document in a form that is valid in any folder and process, and can be written to a file.

    Paths are absolute, and users' policies are named by class and module folder. Raises HeadwayError for a policy that
    other processes cannot import.
    """
    folder = base_dir.absolute()

    def absolute(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: absolute(name, each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [absolute("", each) for each in value]
        if not isinstance(value, str) or not value:
            return value
        if key in _PATH_KEYS and "://" not in value:
            return value if key == "config" and is_repository(value, folder) else str(folder / value)
        if key == "model" and (config := config_of(value, folder)) is not None and (folder / value).exists():
            return str(config)
        return _FILE_PLACEHOLDER.sub(lambda found: f"${{file:{folder / found[1]}}}", value)

    def with_folders(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: with_folders(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [with_folders(each) for each in value]
        return with_folder(value, folder) if isinstance(value, str) else value

    made: dict[str, Any] = plain(document)
    if isinstance(settings := made.get("gateway"), dict):
        stores = {
            key: {"store": store, **settings[key]}
            for key, store in _DEFAULT_STORES.items()
            if isinstance(settings.get(key), dict)
        }
        made = {**made, "gateway": {**settings, **stores}}
    sections: dict[str, Any] = {
        key: absolute(key, made[key]) for key in ("workload", "fleet", "combos", "gateway") if key in made
    }
    policies: dict[str, Any] = {
        key: with_folders(made[key]) for key in ("policies", "variants", "cascade") if key in made
    }
    return {**made, **sections, **policies}


def written(scenario: Scenario) -> dict[str, Any]:
    """The document that describes this scenario, whose policies, variants and seed may differ from those of the
    file."""
    spec, document = scenario.spec, dict(scenario.document)
    given = document.get("policies") or {}
    read_policies = strict_yaml.convert(given, PolicySpecs, scenario.places, ("policies",))
    if expanded(read_policies, scenario.fleet, given) != spec.policies:
        document["policies"] = _written_policies(spec.policies)
    if spec.variants != strict_yaml.convert(document.get("variants", ()), tuple[Variant, ...], scenario.places):
        document["variants"] = [_written_struct(each) for each in spec.variants]
    if spec.seed != document.get("seed", 0):
        document["seed"] = spec.seed
    return document


def _written_policies(policies: PolicySpecs) -> dict[str, Any]:
    """The values that differ from the defaults or from the preset's choice."""
    made = _written_struct(policies)
    chosen = {key: getattr(policies, key) for key in PRESET_KEYS} if policies.preset is not None else {}
    return {**made, **chosen}


def _written_struct(value: Struct) -> dict[str, Any]:
    """A Struct's keys whose values are not the defaults. Python values stay unchanged."""
    given = {field.encode_name: (getattr(value, field.name), field) for field in fields(value)}
    return {
        name: to_builtins(each) if isinstance(each, Struct) else each
        for name, (each, field) in given.items()
        if each is not UNSET and each != _default(field)
    }


def _default(field: FieldInfo) -> Any:
    return field.default if field.default_factory is NODEFAULT else field.default_factory()


def variants(scenario: Scenario) -> tuple[Scenario, ...]:
    """One scenario per variant, else per pair of routing and ordering, in listed order."""
    spec = scenario.spec
    if spec.variants:
        return tuple(_of_variant(scenario, variant) for variant in spec.variants)
    pairs = product(listed(spec.policies.routing), listed(spec.policies.ordering))
    return tuple([with_policies(scenario, replace(spec.policies, routing=r, ordering=o)) for r, o in pairs])


def variant(scenario: Scenario, name: str) -> Scenario:
    """The variant of that name. Raises HeadwayError if there is none."""
    for each, chosen in zip(scenario.spec.variants, variants(scenario), strict=False):
        if each.name == name:
            return chosen
    raise unknown("variant", name, [each.name for each in scenario.spec.variants])


def only_variant(scenario: Scenario) -> Scenario:
    """The single variant. Raises HeadwayError if there are several."""
    chosen = variants(scenario)
    if len(chosen) > 1:
        key = "routing" if len(listed(scenario.spec.policies.routing)) > 1 else "ordering"
        at = ("variants",) if scenario.spec.variants else ("policies", key)
        how = ", or --variant" if scenario.spec.variants else f", as with {_first_policies(scenario.spec)}"
        raise scenario.places.error(at, f"several are for headway compare; expected one{how}")
    return chosen[0]


def _first_policies(spec: Spec) -> str:
    """Command-line flags for the error message: one for each kind with several policies, naming the first of them."""
    kinds = {"--routing": listed(spec.policies.routing), "--ordering": listed(spec.policies.ordering)}
    first = {flag: each[0] for flag, each in kinds.items() if len(each) > 1}
    names = {flag: each if isinstance(each, str) else each.get("name") for flag, each in first.items()}
    return " ".join(f"{flag} {name}" for flag, name in names.items())


def with_policies(scenario: Scenario, policies: PolicySpecs) -> Scenario:
    """The same scenario under other policies."""
    return dataclasses.replace(scenario, spec=replace(scenario.spec, policies=policies))


def with_seed(scenario: Scenario, seed: int) -> Scenario:
    return dataclasses.replace(scenario, spec=replace(scenario.spec, seed=seed))


def listed(spec: PolicySpec | list[PolicySpec]) -> list[PolicySpec]:
    """A single policy or a list of policies, as a list."""
    return spec if isinstance(spec, list) else [spec]


_NONE_MEANS_NONE = {field.name for field in fields(Variant) if field.default is UNSET}
"""Variant keys whose null switches a policy off. For other keys, null means the value in `policies`."""


def _of_variant(scenario: Scenario, variant: Variant) -> Scenario:
    given = {key: getattr(variant, key) for key in variant.__struct_fields__[1:]}
    changes = {
        key: value
        for key, value in given.items()
        if value is not UNSET and (value is not None or key in _NONE_MEANS_NONE)
    }
    policies = replace(scenario.spec.policies, **changes)
    if variant.preset is not None:
        policies = expanded(policies, scenario.fleet, {*(scenario.document.get("policies") or {}), *changes})
    chosen = with_policies(scenario, policies)
    return dataclasses.replace(chosen, spec=replace(chosen.spec, variants=(variant,)))


def _warn_of_units(spec: Spec, places: Places) -> None:
    """Emit a SloWarning for each SLO that probably has the wrong unit."""
    declared: list[tuple[Key, Any]] = [(("slo",), spec.slo), (("workload", "slo"), spec.workload.slo)]
    tiers = spec.workload.tiers if isinstance(spec.workload.tiers, tuple) else ()
    declared += [(("workload", "tiers", i), tier) for i, tier in enumerate(tiers)]
    for at, slo in declared:
        for key in ("ttft_s", "tpot_s"):
            if (*at, key) not in places.warned and (text := unlikely(key, getattr(slo, key, None))):
                where = places.where((*at, key))
                warnings.warn(text.replace(key, where, 1), SloWarning, stacklevel=2)


def _check_values(scenario: Scenario) -> None:
    spec, places = scenario.spec, scenario.places
    _warn_of_units(spec, places)
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        slo = getattr(spec.slo, key)
        if slo is not None and slo <= 0:
            raise places.error(("slo", key), f"{slo}; expected more than 0")
    routings, orderings = listed(spec.policies.routing), listed(spec.policies.ordering)
    if not (routings and orderings):
        raise places.error(("policies",), "expected at least one routing and one ordering")
    if spec.variants and max(len(routings), len(orderings)) > 1:
        raise places.error(("policies",), "several routings or orderings, and variants; expected one or the other")


def _check_faults(scenario: Scenario) -> None:
    places, num_replicas = scenario.places, len(_num_partners(scenario.fleet))
    for i, fault in enumerate(scenario.spec.faults):
        if not 0 <= fault.replica < num_replicas:
            raise places.error(("faults", i, "replica"), f"{fault.replica}; expected 0 to {num_replicas - 1}")
        if fault.streams is not None and fault.streams < 1:
            raise places.error(("faults", i, "streams"), f"{fault.streams}; expected 1 or more")
        if fault.slowdown is not None and (fault.slowdown <= 0 or fault.streams is not None):
            raise places.error(("faults", i, "slowdown"), f"{fault.slowdown}; expected more than 0, without streams")
        if fault.at_s < 0 or (fault.down_s is not None and fault.down_s <= 0):
            raise places.error(("faults", i), "expected at_s of 0 or more, and down_s above 0")


def _check_role_changes(scenario: Scenario) -> None:
    places, num_partners = scenario.places, _num_partners(scenario.fleet)
    for i, change in enumerate(scenario.spec.roles):
        if not 0 <= change.replica < len(num_partners):
            raise places.error(("roles", i, "replica"), f"{change.replica}; expected 0 to {len(num_partners) - 1}")
        if not num_partners[change.replica]:
            partnered = ", ".join(str(replica) for replica, num in enumerate(num_partners) if num) or "none here"
            what = f"{change.replica} is alone and does both phases; expected one of a combo of several ({partnered})"
            raise places.error(("roles", i, "replica"), what)
        if change.at_s < 0 or change.switch_s < 0:
            raise places.error(("roles", i), "expected at_s and switch_s of 0 or more")


def _num_partners(fleet: Fleet) -> list[int]:
    """Holds, for each replica in fleet order, the number of other replicas in its combo."""
    deployments: list[Pool | Combo] = [*fleet.pools, *fleet.combos]
    units = [unit_of(each) for each in deployments for _ in range(each.replicas)]
    return [len(unit) - 1 for unit in units for _ in unit]
