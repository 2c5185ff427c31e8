"""The catalog's data files, read when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TypeVar

import msgspec

from headway.catalog.coefficients import CoefficientFile, Coefficients
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Engine, Gpu, Model

T = TypeVar("T")

GENERIC = "generic"
"""Names the coefficients of a GPU, and the overhead of an engine, that nobody measured."""


class _Engines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    aliases: dict[str, str]
    engines: tuple[Engine, ...]


def gpu(name: str) -> Gpu:
    """The GPU of this short name, alias or product name, in any case. HeadwayError if there is none."""
    found = _named(_gpus(), name)
    if found is None:
        raise unknown("GPU", name, (g.name for g in _gpus()))
    return found


def model(name: str) -> Model:
    """The model of this short name, alias or Hugging Face id, in any case. HeadwayError if there is none."""
    found = _named(_models(), name)
    if found is None:
        raise unknown("model", name, (m.name for m in _models()))
    return found


def engine(name: str) -> Engine:
    """The engine profile of this name or alias, in any case. HeadwayError if there is none."""
    data = _engines()
    wanted = name.strip().lower()
    wanted = data.aliases.get(wanted, wanted)
    for profile in data.engines:
        if profile.name == wanted:
            return profile
    raise unknown("engine", name, [*data.aliases, *(e.name for e in data.engines)])


def gpus() -> tuple[Gpu, ...]:
    """Every GPU, by family."""
    return _gpus()


def models() -> tuple[Model, ...]:
    """Every model, by family."""
    return _models()


def engines() -> tuple[Engine, ...]:
    """Every engine profile."""
    return _engines().engines


def coefficients(gpu_name: str, engine_name: str) -> Coefficients:
    """Step-time coefficients of an engine on a GPU, both by their short names.

    What was not measured is taken from the same silicon, else from the generic file; `calibrated` says
    which. The `simulated` engine stands for vLLM V1 and has its overhead.
    """
    return resolved(*_coefficients_of(gpu_name), engine_name)


def measured_kernels(gpu_name: str) -> bool:
    """Whether the catalog's kernels of this GPU were measured on it, and not on a relation."""
    return _coefficients_of(gpu_name)[1]


def resolved(data: CoefficientFile, measured: bool, engine_name: str) -> Coefficients:
    """An engine's coefficients in a file, which may have been `measured` on the GPU; generic ones fill its gaps."""
    engine_name = "vllm-v1" if engine_name == "simulated" else engine_name
    generic = _coefficient_file(GENERIC)
    moe = {**generic.kernels.moe, **data.kernels.moe}
    kernels = msgspec.structs.replace(data.kernels, moe=moe)
    overhead = data.engines.get(engine_name)
    if overhead is not None:
        return Coefficients(kernels, overhead, calibrated=measured)
    overhead = generic.engines.get(engine_name, generic.engines[GENERIC])
    return Coefficients(kernels, overhead, calibrated=False)


def _named(entries: Iterable[T], name: str) -> T | None:
    wanted = _key(name)
    for entry in entries:
        names = (entry.name, getattr(entry, "hf_id", entry.name), *entry.aliases)  # type: ignore[attr-defined]
        if wanted in map(_key, names):
            return entry
    return None


def _key(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _data() -> Traversable:
    return files("headway.catalog") / "data"


def _decode(file: Traversable, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise HeadwayError(f"{file}: {error}") from error


def _all(folder: str, kind: type[T]) -> tuple[T, ...]:
    found = sorted((_data() / folder).iterdir(), key=lambda file: file.name)
    return tuple(entry for file in found if file.name.endswith(".json")
                 for entry in _decode(file, tuple[kind, ...]))  # type: ignore[valid-type]  # fmt: skip


@cache
def _gpus() -> tuple[Gpu, ...]:
    return _all("gpus", Gpu)


@cache
def _models() -> tuple[Model, ...]:
    return _all("models", Model)


@cache
def _engines() -> _Engines:
    return _decode(_data() / "engines.json", _Engines)


@cache
def _coefficient_file(name: str) -> CoefficientFile:
    return _decode(_data() / "coefficients" / f"{name}.json", CoefficientFile)


def _coefficients_of(gpu_name: str) -> tuple[CoefficientFile, bool]:
    names = sorted(f.name.removesuffix(".json") for f in (_data() / "coefficients").iterdir())
    for name in names:
        data = _coefficient_file(name)
        if gpu_name in data.gpus:
            return data, True
    for name in names:
        data = _coefficient_file(name)
        if gpu_name in data.like:
            return data, False
    return _coefficient_file(GENERIC), False
