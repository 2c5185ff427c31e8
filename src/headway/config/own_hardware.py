"""A scenario's own GPUs, models and engines, in addition to the catalog: sections `gpus`, `models`, `engines`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway import catalog
from headway.catalog.coefficients import Coefficients
from headway.config import strict_yaml
from headway.config.strict_yaml import Key, Places
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Engine, Gpu, Model

T = TypeVar("T", Gpu, Model, Engine)
Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class OwnHardware:
    """Looks up names in the scenario's sections first, then in the catalog."""

    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    engines: Mapping[str, Engine] = field(default_factory=dict)
    like: Mapping[str, str] = field(default_factory=dict)
    """Maps each own GPU or engine to the similar catalog entry."""

    def gpu(self, name: str) -> Gpu:
        return _look_up(name, self.gpus, catalog.gpu, catalog.gpus(), "GPU")

    def model(self, name: str, base_dir: Path = Path()) -> Model:
        """A model by name, by the path of a folder with a config.json (relative to `base_dir`), or from the hub's
        cache."""
        return _look_up(name, self.models, lambda each: catalog.find_model(each, base_dir), catalog.models(), "model")

    def engine(self, name: str, version: str = "") -> Engine:
        return _look_up(name, self.engines, lambda each: catalog.engine(each, version), catalog.engines(), "engine")

    def coefficients(self, gpu_name: str, engine_name: str, version: str = "") -> Coefficients:
        """Step-time coefficients of a GPU and an engine. An own GPU or engine has those of its `like`, marked
        uncalibrated."""
        used = self.like.get(gpu_name, gpu_name), self.like.get(engine_name, engine_name)
        found = catalog.coefficients(*used, version)
        estimated = []
        if used[0] != gpu_name:
            estimated.append(f"kernels of {used[0]}")
        if used[1] != engine_name:
            estimated.append(f"overhead of {used[1]}")
        if not estimated:
            return found
        return msgspec.structs.replace(found, calibrated=False, estimated=(*estimated, *found.estimated))


def own_hardware(gpus: Entries, models: Entries, engines: Entries, places: Places) -> OwnHardware:
    """The entries of a scenario's sections. Raises HeadwayError for an invalid entry."""
    like: dict[str, str] = {}
    return OwnHardware(
        _entries(gpus, Gpu, catalog.gpu, "gpus", places, like),
        _entries(models, Model, catalog.model, "models", places, {}),
        _entries(engines, Engine, catalog.engine, "engines", places, like),
        like,
    )


def _entries(
    entries: Entries, kind: type[T], find: Callable[[str], T], section: str, places: Places, like: dict[str, str]
) -> dict[str, T]:
    """Entries by name. An entry's `like` names a catalog entry, whose values fill the missing keys."""
    found: dict[str, T] = {}
    for i, entry in enumerate(entries):
        at: Key = (section, i)
        values = dict(entry)
        base = values.pop("like", None)
        if base is not None:
            with places.at(*at, "like"):
                known = find(str(base))
            values = {**msgspec.to_builtins(known), "aliases": (), **values}
            if kind is Engine:
                values.pop("aliases")
        made = strict_yaml.convert(values, kind, places, at)
        if isinstance(made, Model) and made.layers and "layers" not in entry:
            _check_layers_kept(entry, at, places)
        if not made.name or (base is not None and "name" not in entry):
            raise places.error((*at, "name"), "missing; expected a name of your own")
        if made.name in found:
            raise places.error((*at, "name"), f"{made.name!r} is here a second time")
        _check_positive(made, at, places)
        if base is not None:
            like[made.name] = known.name
        found[made.name] = made
    return found


_OF_LAYERS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "moe",
    "mla",
    "sliding_window_every",
)


def _check_layers_kept(entry: Mapping[str, Any], at: Key, places: Places) -> None:
    """Raise HeadwayError if an entry changes a key that the similar model's list of layers overrides."""
    for name in _OF_LAYERS:
        if name in entry:
            raise places.error(
                (*at, name), f"{entry['like']} has layers of several shapes; expected `layers` beside it"
            )


_MAY_BE_0 = frozenset(("usd_per_hour", "watts", "max_num_waiting"))
"""Numbers that may be 0, as those whose default is 0."""


def _check_positive(made: Gpu | Model | Engine, at: Key, places: Places) -> None:
    may_be_0 = _MAY_BE_0.union(field.name for field in msgspec.structs.fields(made) if field.default == 0)
    for name, value in msgspec.structs.asdict(made).items():
        numbers = value.values() if isinstance(value, dict) else [value]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if number < 0 or (number == 0 and name not in may_be_0):
                raise places.error((*at, name), f"{number}; expected more than 0")
    if isinstance(made, Engine) and made.drafts is not None:
        raise places.error((*at, "speculative"), "is a key of pools; expected it in `fleet`, beside `engine`")
    if isinstance(made, Gpu) and not made.peak_flops:
        raise places.error((*at, "peak_flops"), "expected FLOP/s by dtype, as in {bf16: 989e12}")


def _look_up(name: str, own: Mapping[str, T], find: Callable[[str], T], known: Sequence[T], kind: str) -> T:
    if name in own:
        return own[name]
    try:
        return find(name)
    except HeadwayError:
        if not own:
            raise
        raise unknown(kind, name, [*own, *(entry.name for entry in known)]) from None
