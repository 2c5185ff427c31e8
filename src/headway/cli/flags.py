"""Options that several commands share, and the scenario values that they set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headway import catalog
from headway.cli.output import ABOVE_0, PATH, POSITIVE, SECONDS, SECONDS_ABOVE_0, SEED, list_option
from headway.config import strict_yaml
from headway.config.strict_yaml import Key, Places
from headway.core.duration import seconds
from headway.core.errors import HeadwayError, unknown
from headway.core.model import Model
from headway.policies import resolve
from headway.scenario.presets import BUILTINS, builtin
from headway.workload.spec import builtin_workloads

if TYPE_CHECKING:
    from headway.scenario.ray_cluster import RayExecutor

F = TypeVar("F", bound=Callable[..., Any])
Changes = dict[Key, tuple[str, Any]]
"""Values set by flags: from a scenario key to (flag, value)."""


def together(options: Iterable[Callable[[F], F]]) -> Callable[[F], F]:
    """Combine several options into one decorator."""

    def add(function: F) -> F:
        for option in reversed(list(options)):
            function = option(function)
        return function

    return add


ray_option = click.option("--ray", is_flag=True, help="Run on the Ray cluster of RAY_ADDRESS, or on a local one.")


def ray_pool(ray: bool) -> AbstractContextManager[RayExecutor | None]:
    """The processes of a Ray cluster, if `--ray` was given."""
    if not ray:
        return nullcontext()
    from headway.scenario.ray_cluster import cluster

    return cluster()


seed_option = click.option("--seed", type=SEED, help="Seed of all random streams. Default: the file's, or 0.")

synthetic_options = together(
    (
        click.option("--workload", help="A built-in workload, such as chat or reasoning, or a file, as --trace."),
        click.option("--rate", type=ABOVE_0, help="Poisson arrivals per second."),
        click.option("--num-requests", type=POSITIVE, help="Number of requests."),
        click.option("--prompt-tokens", help="A number, or a built-in distribution: azure-conv, ..."),
        click.option("--output-tokens", help="A number, or a built-in distribution."),
    )
)

trace_options = together(
    (
        click.option(
            "--trace", type=PATH, help="Azure, Mooncake, Bailian, BurstGPT, Parquet, CSV; or a records folder."
        ),
        click.option("--limit", type=POSITIVE, help="Read at most this many requests of the trace."),
        click.option("--rate-scale", type=ABOVE_0, help="Multiply the trace's rate; 2 is twice the rate."),
        click.option("--concurrency", type=POSITIVE, help="A closed loop of this many clients."),
    )
)

policy_options = together(
    (
        list_option("--routing", help="Routers, separated by commas: round-robin,least-loaded. Or module:Class."),
        list_option("--ordering", help="Orderings, separated by commas: fcfs,edf. Or module:Class."),
        click.option("--migration", help="A migration policy, or module:Class."),
        click.option("--scaling", help="A scaler, or module:Class."),
        click.option("--ordering-at", type=click.Choice(["replica", "gateway", "both"]), help="Where orderings act."),
        click.option("--window", type=POSITIVE, help="Most requests that the gateway sends to a replica at a time."),
    )
)

run_options = together(
    (
        seed_option,
        click.option("--step", type=click.Choice(["stretch", "exact"]), help="exact simulates every iteration."),
        click.option("--until-s", type=SECONDS_ABOVE_0, help="Stop at this virtual time."),
        click.option("--warmup-s", type=SECONDS, help="Metrics exclude requests that arrive earlier."),
    )
)

slo_option = click.option("--slo", help="Of requests without SLOs of their own: ttft=2s,tpot=50ms,e2e=30s.")

gpu_file_option = click.option(
    "--gpu-file", type=PATH, help="A YAML file of GPUs of your own, each with `name` and `like`, or with all keys."
)

assume_option = click.option(
    "--assume", is_flag=True, default=None, help="Go on where a config.json has keys that are not understood."
)

fleet_options = together(
    (
        click.option("--model", help="A model of the catalog, of a local folder, or of the hub's cache."),
        click.option(
            "--model-config", type=PATH, help="A Hugging Face config.json instead, its folder, or a GGUF file."
        ),
        assume_option,
        click.option("--gpu", help="A GPU of the catalog, or of --gpu-file."),
        gpu_file_option,
        click.option("--tp", type=POSITIVE, help="Tensor parallel ranks of a replica."),
        click.option("--pp", type=POSITIVE, help="Pipeline stages of a replica."),
        click.option("--replicas", type=POSITIVE, help="Number of replicas."),
        click.option(
            "--engine", help="An engine of the catalog: vllm, sglang, ... Default: the file's, else simulated."
        ),
        click.option("--coefficients", type=PATH, help="A file that headway calibrate wrote."),
        click.option("--max-num-seqs", type=POSITIVE, help="Most sequences that a replica runs at once."),
        click.option("--max-num-batched-tokens", type=POSITIVE, help="Token budget of an iteration."),
    )
)

scenario_options = together(
    (
        click.argument("scenario", type=PATH, required=False),
        click.option("--builtin", "preset", help=f"A built-in scenario instead of a file: {', '.join(BUILTINS)}."),
        trace_options,
        synthetic_options,
        fleet_options,
        policy_options,
        run_options,
    )
)

_SLOS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
_WORKLOAD = {
    "rate": "arrivals",
    "num_requests": "num_requests",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "concurrency": "concurrency",
}
_POOL = {
    "model": "model",
    "model_config": "model",
    "gpu": "gpu",
    "tp": "tp",
    "pp": "pp",
    "replicas": "replicas",
    "engine": "engine",
    "coefficients": "coefficients",
}
_PATHS = ("model_config", "coefficients")
_RUN: dict[str, Key] = {
    "seed": ("seed",),
    "step": ("simulation", "step"),
    "until_s": ("simulation", "until_s"),
    "warmup_s": ("simulation", "warmup_s"),
    "routing": ("policies", "routing"),
    "ordering": ("policies", "ordering"),
    "ordering_at": ("policies", "ordering_at"),
    "window": ("policies", "window"),
    "migration": ("policies", "migration"),
    "scaling": ("policies", "scaling"),
}


def scenario_file(scenario: Path | None, preset: str | None) -> Path | None:
    """The scenario file, or None."""
    if scenario is not None and preset is not None:
        raise HeadwayError("SCENARIO and --builtin: expected one of them")
    return scenario if preset is None else builtin(preset)


_LISTS = ("routing", "ordering")


def used_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def flag(name: str) -> str:
    """The option of a flag: `--num-requests` for `num_requests`."""
    return "--" + name.replace("_", "-")


def check_complete(used: Mapping[str, Any]) -> None:
    """Raise HeadwayError if options without a scenario file lack a workload or a model."""
    for name in ("limit", "rate_scale"):
        if name in used and "trace" not in used:
            raise HeadwayError(f"{flag(name)}: goes with --trace")
    if not used.keys() & {"trace", "workload", "prompt_tokens", "output_tokens"}:
        raise HeadwayError(
            "no workload: give a SCENARIO, --trace, --workload,"
            " or --rate, --num-requests, --prompt-tokens and --output-tokens"
        )
    if not used.keys() & {"model", "model_config"}:
        raise HeadwayError("--model or --model-config is missing; headway catalog models lists names")


def changes(flags: Mapping[str, Any], num_pools: int = 1) -> Changes:
    """The scenario values that the used flags set, for a scenario with `num_pools` pools."""
    used = used_flags(flags)
    return dict([*_workload(used), *_fleet(used, num_pools), *_run(used)])


def check_trace(document: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raises HeadwayError if a trace flag is used without a trace."""
    workload = document.get("workload")
    trace = workload.get("trace") if isinstance(workload, Mapping) else None
    for name in ("limit", "rate_scale"):
        if flags.get(name) is not None and isinstance(trace, Mapping) and not trace.get("path"):
            raise HeadwayError(f"{flag(name)}: goes with a trace; expected --trace, or a scenario that has one")


def _workload(used: Mapping[str, Any]) -> Iterator[tuple[Key, tuple[str, Any]]]:
    if "trace" in used and "workload" in used:
        raise HeadwayError("--trace and --workload: expected one of them")
    for name in ("trace", "workload"):
        if name in used:
            path = Path(used[name])
            is_file = name == "trace" or bool(path.suffix) or (path.is_dir() and used[name] not in builtin_workloads())
            source = {"trace": {"path": str(path.absolute())}} if is_file else {"builtin": used[name]}
            yield ("workload",), (flag(name), source)
    for name in ("limit", "rate_scale"):
        if name in used:
            yield ("workload", "trace", name), (flag(name), used[name])
    for name, key in _WORKLOAD.items():
        if name in used:
            yield ("workload", key), (flag(name), _tokens(used[name]))


def _fleet(used: Mapping[str, Any], num_pools: int) -> Iterator[tuple[Key, tuple[str, Any]]]:
    if "model" in used and "model_config" in used:
        raise HeadwayError("--model and --model-config: expected one of them")
    if "gpu_file" in used:
        yield ("gpus",), ("--gpu-file", gpu_entries(Path(used["gpu_file"])))
    for i in range(num_pools):
        for name, key in _POOL.items():
            if name in used:
                value = str(used[name].absolute()) if name in _PATHS else used[name]
                if name in ("model", "model_config"):
                    value = model_entry(value, bool(used.get("assume")), name == "model_config")
                yield ("fleet", i, key), (flag(name), value)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if name in used:
                yield ("fleet", i, "engine", name), (flag(name), used[name])


def model_entry(given: str, assume: bool, is_config: bool = False) -> Any:
    """The `model` entry of a scenario, from the value of --model (a name or a folder) or of --model-config."""
    if not is_config:
        if "=" not in given and Path(given).is_dir():
            given = str(Path(given).absolute())
        with suppress(HeadwayError):
            if not assume or catalog.model(given):
                return given
    return {"config": given, **({"assume": True} if assume else {})}


def one_model(name: str | None, config: Path | None, assume: bool) -> Model:
    """The model given by --model or --model-config."""
    if (name is None) == (config is None):
        raise HeadwayError("--model, --model-config: expected one of them")
    return catalog.model_of_config(config, assume=assume) if config else catalog.find_model(str(name), assume=assume)


def gpu_entries(path: Path) -> list[Any]:
    """The GPUs of a file: one GPU's keys, or a list of GPUs under `gpus`."""
    data, _ = strict_yaml.read(path)
    entries = data.get("gpus", [data])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise HeadwayError(f"{path}: gpus: expected a list of GPUs, each with keys and values")
    return entries


def with_gpus(document: dict[str, Any], places: Places, gpu_file: Path | None) -> tuple[dict[str, Any], Places]:
    """A scenario whose own GPUs are replaced by those of a file."""
    if gpu_file is None:
        return document, places
    return strict_yaml.change(document, places, {("gpus",): ("--gpu-file", gpu_entries(gpu_file))})


def _run(used: Mapping[str, Any]) -> Iterator[tuple[Key, tuple[str, Any]]]:
    for name, key in _RUN.items():
        if name in used:
            value = [each.strip() for each in used[name].split(",") if each.strip()] if name in _LISTS else used[name]
            yield key, (flag(name), value)


def _tokens(value: Any) -> Any:
    """A number, or the name of a distribution."""
    try:
        return int(value) if isinstance(value, str) else value
    except ValueError:
        return value


def listed(text: str | None, name: str) -> list[str]:
    """The comma-separated parts of a text. Raises HeadwayError for an empty text."""
    names = [each.strip() for each in (text or "").split(",") if each.strip()]
    if text is not None and not names:
        raise HeadwayError(f"{name}: nothing is listed; expected at least one")
    return names


def check_name(find: Callable[[str], object], name: str, option: str) -> None:
    """Raise HeadwayError, with the option's name, if `find` raises it. A `module:Class` is looked up later."""
    if ":" not in name:
        try:
            find(name)
        except HeadwayError as error:
            raise HeadwayError(f"{option}: {error}") from None


def listed_routers(text: str) -> list[str]:
    """The routers of `--routing`. Raises HeadwayError if one is unknown."""
    names = listed(text, "--routing")
    for name in names:
        check_name(resolve.router, name, "--routing")
    return names


def whole(text: str, name: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise HeadwayError(f"{name}: {text!r}; expected whole numbers of 1 or more, separated by commas")
    return value


def slo_of(text: str | None) -> dict[str, float]:
    """The `slo` section, in seconds, of the value of `slo_option`. Raises HeadwayError for a text that gives no
    SLOs."""
    found: dict[str, float] = {}
    for each in filter(None, (part.strip() for part in (text or "").split(","))):
        name, _, value = each.partition("=")
        if name.strip() not in _SLOS:
            raise unknown("SLO", name.strip(), _SLOS, "--slo")
        try:
            limit_s = seconds(value)
        except HeadwayError:
            limit_s = 0.0
        if not limit_s:
            raise HeadwayError(f"--slo: {each!r}; expected more than 0 seconds, as in ttft=2s or tpot=50ms")
        found[_SLOS[name.strip()]] = limit_s
    if text is not None and not found:
        raise HeadwayError("--slo: nothing is listed; expected ttft=2s, tpot=50ms or e2e=30s")
    return found
