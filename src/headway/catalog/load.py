"""Looks up GPUs, models, engines and step-time coefficients in the catalog's data files, which are read on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import msgspec

from headway.catalog.coefficients import CoefficientFile, Coefficients, ExpertTable, Overhead, scaled
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Engine, Gpu, Model

T = TypeVar("T")

GENERIC = "generic"
"""Name of the coefficients for unmeasured GPUs, and of the overhead for unmeasured engines."""
CPUS = ("cpu-server",)
"""Entries among the GPUs that are processors, on which llama.cpp may run."""
VERSION = re.compile(r"vllm-v?(?P<version>\d+\.\d+(\.\d+)?)")
VERSIONS_OF_VLLM = ("vllm-0.15", "vllm-0.25")
"""Profiles of measured versions, oldest first."""
ANY_VERSION = ("vllm", "vllm-v1")
"""Names of vLLM without a version."""
SIMULATED = ("simulated", "simulated-0.15")
SCHEDULES_AHEAD_FROM = [0, 14]
"""The version from which vLLM schedules one iteration ahead by default (its pull request 27614)."""
SIZED_BY_GPU = ("vllm-0.25",)
"""Engines whose defaults on large GPUs are in the profile, and on other GPUs in `ON_SMALLER_GPUS`."""
ON_SMALLER_GPUS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
LARGE_GPU_BYTES = 70 * 2**30


class _Engines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    aliases: dict[str, str]
    engines: tuple[Engine, ...]


def gpu(name: str) -> Gpu:
    """The GPU with this short name, alias or product name, in any case. Raises HeadwayError if there is none."""
    return _named(gpus, name, "GPU")


def model(name: str) -> Model:
    """The model with this short name, alias or Hugging Face id, in any case. Raises HeadwayError if there is none."""
    return _named(models, name, "model")


def repository_of(model: Model, name: str) -> str:
    """The Hugging Face repository for a name of the model: the name itself if it is a repository, otherwise the model's
    own."""
    wanted = _key(name)
    return next((each for each in model.aliases if "/" in each and _key(each) == wanted), model.hf_id)


def engine(name: str, version: str = "") -> Engine:
    """The engine profile with this name or alias, in any case, for this version. Raises HeadwayError if there is none.

    vLLM has a profile for each measured version. `vllm` and `vllm-v1` mean the profile of `version`, by default the
    newest; `vllm-0.N` contains the version itself. An unmeasured version uses the nearest older profile, or else the
    oldest.
    """
    data = _engines()
    profiles = {each.name: each for each in data.engines}
    wanted = name.strip().lower()
    said = VERSION.fullmatch(wanted)
    if wanted in ANY_VERSION or (said and wanted not in profiles):
        asked = said["version"] if said else version
        wanted = nearest_version(asked, {each: profiles[each].version for each in VERSIONS_OF_VLLM})
        version = version or asked
    profile = profiles.get(data.aliases.get(wanted, wanted))
    if profile is None:
        raise unknown("engine", name, [*data.aliases, *ANY_VERSION, *profiles])
    return _of_version(profile, version) if version else profile


def _of_version(profile: Engine, version: str) -> Engine:
    is_vllm = profile.name in (*VERSIONS_OF_VLLM, *SIMULATED)
    if is_vllm and [] < numbers(version)[:2] < SCHEDULES_AHEAD_FROM:
        profile = msgspec.structs.replace(profile, schedule_lag=0)
    return msgspec.structs.replace(profile, version=version)


def engine_on(profile: Engine, gpu: Gpu | None) -> Engine:
    """The profile with the engine's own limits on this GPU: vLLM has larger limits with 70 GiB, except on an A100.

    None: no GPU was given.
    """
    is_large = gpu is not None and gpu.memory_bytes >= LARGE_GPU_BYTES and not gpu.name.startswith("a100")
    if is_large or profile.name not in SIZED_BY_GPU:
        return profile
    return msgspec.structs.replace(profile, **ON_SMALLER_GPUS)


def nearest_version(wanted: str, versions: Mapping[str, str]) -> str:
    """The key of the nearest version not above `wanted`, or the oldest; the newest if `wanted` has no number."""
    asked = numbers(wanted)[:2]
    ordered = sorted(versions, key=lambda key: numbers(versions[key]))
    below = [key for key in ordered if not asked or numbers(versions[key])[:2] <= asked]
    return (below or ordered[:1])[-1]


@cache
def gpus() -> tuple[Gpu, ...]:
    return _all("gpus", Gpu)


@cache
def models() -> tuple[Model, ...]:
    return _all("models", Model)


def engines() -> tuple[Engine, ...]:
    return _engines().engines


@lru_cache(maxsize=256)  # a planner asks for the coefficients of the same few GPUs and engines thousands of times
def coefficients(gpu_name: str, engine_name: str, version: str = "") -> Coefficients:
    """Step-time coefficients of an engine on a GPU, both given by short names.

    Without measurements of this GPU, coefficients come from a GPU of the same silicon, otherwise from the generic file.
    Then `calibrated` is False; it is also False if `version` differs from the measured one in its first two numbers.
    The `simulated` engine has vLLM's overhead: of `version`, by default of the newest measured one.
    """
    found = _resolved(*_coefficients_of(gpu_name), gpu_name, engine_name, version)
    measured = found.overhead.version
    if not version or not measured or _minor(version) == _minor(measured):
        return found
    name = "vllm" if engine_name in (*VERSIONS_OF_VLLM, *ANY_VERSION, *SIMULATED) else engine_name
    other = f"overhead of {name} {measured}, not {version}"
    return msgspec.structs.replace(found, calibrated=False, estimated=(*found.estimated, other))


def numbers(version: str) -> list[int]:
    """The numbers among the first three parts of a version: [0, 25, 1] for "v0.25.1"."""
    return [int(each) for each in version.lstrip("v").split(".")[:3] if each.isdigit()]


def _minor(version: str) -> list[str]:
    """The first two numbers of a version."""
    return version.lstrip("v").split(".")[:2]


def has_measured_kernels(gpu_name: str) -> bool:
    """Whether the catalog's kernels of this GPU were measured on the GPU itself."""
    return _coefficients_of(gpu_name)[1]


def coefficients_in(path: Traversable, gpu_name: str, engine_name: str) -> Coefficients:
    """Step-time coefficients from a file of `headway calibrate`, in place of the catalog's.

    Raises HeadwayError if the file cannot be read or describes another GPU.
    """
    data = _own_file(path)
    measured_on = (*data.gpus, *data.like)
    if gpu_name not in measured_on:
        raise HeadwayError(f"{path}: coefficients of {', '.join(measured_on)}; expected {gpu_name}")
    return _resolved(data, gpu_name in data.gpus, gpu_name, engine_name)


def gpus_in(path: Traversable) -> tuple[str, ...]:
    """The GPUs that a file of `headway calibrate` describes. HeadwayError if it cannot be read."""
    return _own_file(path).gpus


def _own_file(path: Traversable) -> CoefficientFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CoefficientFile)
    except OSError as error:
        raise HeadwayError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise HeadwayError(f"{path}: not a file of coefficients: {error}") from None


def _resolved(
    data: CoefficientFile, measured: bool, gpu_name: str, engine_name: str, version: str = ""
) -> Coefficients:
    """The coefficients of one engine in a file. Generic ones fill its gaps."""
    generic = _coefficient_file(GENERIC)
    moe = {**generic.kernels.moe, **data.kernels.moe}
    kernels = msgspec.structs.replace(data.kernels, moe=moe)
    estimated = [] if measured else [f"kernels of {data.gpus[0]}" if data.gpus else "generic kernels"]
    overhead = _overhead(data, engine_name, version)
    if overhead is None:
        estimated.append(f"generic overhead of {engine_name}")
        overhead = _overhead(generic, engine_name, version) or generic.engines[GENERIC]
    kernels = scaled(kernels, overhead.kernel_factors) if overhead.kernel_factors else kernels
    overhead = msgspec.structs.replace(overhead, kernel_factors={})
    experts = _expert_table(kernels.expert_table) if _has_speed_of(kernels.expert_table, gpu_name) else None
    return Coefficients(kernels, overhead, not estimated, tuple(estimated), experts)


def _overhead(data: CoefficientFile, engine_name: str, version: str) -> Overhead | None:
    """An engine's overhead in a file. For vLLM, the overhead of the nearest version in it."""
    if engine_name in data.engines or engine_name not in (*VERSIONS_OF_VLLM, *ANY_VERSION, *SIMULATED):
        return data.engines.get(engine_name)
    measured = {key: each.version for key, each in data.engines.items() if key in (*VERSIONS_OF_VLLM, *ANY_VERSION)}
    return data.engines[nearest_version(version, measured)] if measured else None


def _has_speed_of(table: str, gpu_name: str) -> bool:
    """Whether the seconds in an expert table hold for a GPU: it is the table's GPU, or has the same peaks."""
    if not table or table == gpu_name:
        return bool(table)
    try:
        own, other = gpu(gpu_name), gpu(table)
    except HeadwayError:  # a user's own GPU
        return False
    return own.bandwidth_bytes_per_s == other.bandwidth_bytes_per_s and own.peak_flops == other.peak_flops


def _named(entries: Callable[[], Sequence[T]], name: str, kind: str) -> T:
    found: T | None = _by_key(entries).get(_key(name))
    if found is None:
        raise unknown(kind, name, (entry.name for entry in entries()))  # type: ignore[attr-defined]
    return found


@cache
def _by_key(entries: Callable[[], Sequence[Any]]) -> dict[str, Any]:
    """The entries by the keys of all their names. A name that several entries have maps to the first of them."""
    found: dict[str, Any] = {}
    for entry in entries():
        for name in (entry.name, getattr(entry, "hf_id", entry.name), *entry.aliases):
            found.setdefault(_key(name), entry)
    return found


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
    paths = sorted((_data() / folder).iterdir(), key=lambda file: file.name)
    return tuple(entry for file in paths if file.name.endswith(".json") for entry in _decode(file, tuple[kind, ...]))  # type: ignore[valid-type]


@cache
def _engines() -> _Engines:
    return _decode(_data() / "engines.json", _Engines)


@cache
def _coefficient_file(name: str) -> CoefficientFile:
    return _decode(_data() / "coefficients" / f"{name}.json", CoefficientFile)


@cache
def _expert_table(name: str) -> ExpertTable:
    return _decode(_data() / "experts" / f"{name}.json", ExpertTable)


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
