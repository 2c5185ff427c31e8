"""Common parts of `validate` and `calibrate`: measured runs, and the fleet on which they were measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.calibration.runs import read, served
from headway.calibration.runs.experiment import experiment
from headway.calibration.runs.run import MeasuredRun
from headway.calibration.serving import ServingExperiment, catalogued_model
from headway.calibration.steps.read import StepLog
from headway.catalog.coefficients import Coefficients
from headway.cli.flags import assume_option, changes, used_flags
from headway.cli.output import PATH, POSITIVE
from headway.config import scenario as scenarios
from headway.config import strict_yaml
from headway.config.proxied import proxied_names, without_proxied
from headway.config.scenario import StepTimes
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool

OPTIONS = (
    click.option("--fleet", type=PATH, help="A scenario or fleet file, with the pool that was measured."),
    click.option("--pool", help="The pool of the fleet, if it has several."),
    click.option("--model", help="The model, if a run does not name one of the catalog."),
    click.option("--model-config", type=PATH, help="A Hugging Face config.json instead, its folder, or a GGUF file."),
    assume_option,
    click.option("--gpu", help="The GPU, of the catalog or of --gpu-file."),
    click.option("--gpu-file", type=PATH, help="A YAML file of GPUs of your own."),
    click.option("--tp", type=POSITIVE, help="Tensor parallel ranks, if a run does not give them."),
    click.option("--engine", help="The engine profile of the catalog."),
    click.option("--max-num-seqs", type=POSITIVE, help="Most sequences that the engine ran at once."),
    click.option("--max-num-batched-tokens", type=POSITIVE, help="Token budget of an iteration of the engine."),
    click.option("--greedy", is_flag=True, help="Requests asked for temperature 0, where the file does not say."),
    click.option("--token-ids", is_flag=True, help="Prompts were sent as token ids, of which nothing is tokenised."),
)
NAMES = tuple(
    "fleet pool model model_config assume gpu gpu_file tp engine max_num_seqs max_num_batched_tokens greedy"
    " token_ids".split()
)
DEFAULT_ENGINE = "vllm"
"""Engine of runs that do not name one."""
STEP_SETTINGS = ("tp", "max_num_seqs", "max_num_batched_tokens")
"""Options that a log of iterations may also give."""
QUANTIZATIONS = {
    "none": "none",
    "fp8": "fp8",
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "mxfp4": "mxfp4",
}
"""Maps vLLM's names of quantizations to those of a fleet file. vLLM also has names for a repository's own config."""
RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")
ANY_MODEL = "llama-3.1-8b"
"""Stands in for the model if only GPU and engine matter."""
WORKLOAD = {"prompt_tokens": 1, "output_tokens": 1, "num_requests": 1, "arrivals": 1.0}
"""Stands in for the workload of a scenario that is used only for its fleet."""


def take(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove the fleet options from a command's flags, and return those that were used."""
    return used_flags({name: flags.pop(name) for name in NAMES})


def used(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The fleet options that were used."""
    return used_flags({name: flags[name] for name in NAMES})


class FoundRun(Struct, frozen=True):
    """A run as an experiment on the pool that was measured."""

    file: Path
    run: MeasuredRun
    experiment: ServingExperiment
    pool: Pool
    coefficients: Coefficients
    """Coefficients of the fleet file, otherwise of the catalog."""


def of_steps(logs: Sequence[StepLog], flags: Mapping[str, Any]) -> tuple[Pool, Coefficients]:
    """The pool whose iterations were logged, from options, otherwise from the logs. Raises HeadwayError if the pool is
    ambiguous."""
    if len({str(each.about.get("model", "")) for each in logs}) > 1:
        raise HeadwayError("logs of iterations of several models: expected those of one; calibrate each on its own")
    told: dict[str, Any] = {}
    entry: dict[str, Any] = {}
    for log in () if "fleet" in flags else logs:
        told |= _options(log.about, flags)
        entry |= _pool_entry(log.about, log.file)
    model = str(logs[0].about.get("model", "")) if logs else ""
    given = {**told, **flags}
    run = MeasuredRun(logs[0].file, model, 0, 0.0, 0.0, 0.0, {}) if logs else None
    fleet = MeasuredFleet(given, entry=entry)
    return fleet.any_pool() if run is None else fleet.pool(run)


def _options(about: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Options that a log gives."""
    if "device" in about and "gpu" not in flags:
        yield "gpu", _gpu(str(about["device"]))
    if release := RELEASE.match(str(about.get("version", ""))):
        yield "engine", f"vllm-{release[0]}"
    for name in STEP_SETTINGS:
        if name in about:
            yield name, int(about[name])


def _pool_entry(about: Mapping[str, Any], file: str) -> Iterator[tuple[str, Any]]:
    """Keys of a fleet file's pool that only the log gives. Raises HeadwayError for a quantization that fleet files do
    not have."""
    if about.get("pp", 1) != 1:
        yield "pp", int(about["pp"])
    if str(about.get("kv_cache_dtype", "")).startswith("fp8"):
        yield "kv_cache_dtype", "fp8"
    called = str(about.get("quantization", "none")).lower()
    if called not in QUANTIZATIONS and "fp8" in str(about.get("model", "")).lower():
        called = "fp8"
    if called not in QUANTIZATIONS:
        raise HeadwayError(f"{file}: weights are {called!r}; expected --fleet with the pool's quantization")
    if called != "none":
        yield "quantization", QUANTIZATIONS[called]


def _gpu(device: str) -> str:
    try:
        return catalog.gpu(device).name
    except HeadwayError as error:
        raise HeadwayError(f"{error}; name it with --gpu") from None


def is_runs(path: Path) -> bool:
    """Whether a path contains runs of a load generator or records, and not a table."""
    return served.is_records(path) or read.is_runs(path)


def found_runs(
    path: Path, flags: Mapping[str, Any], shortened: Callable[[MeasuredRun], MeasuredRun] = lambda run: run
) -> tuple[list[FoundRun], list[str]]:
    """The runs of one file or folder, each `shortened`, and the skipped runs with reasons.

    Raises HeadwayError if the format is unknown, no run can be used, or the fleet is not given.
    """
    if served.is_records(path):
        runs, skipped, text = served.read(path)
        fleet = MeasuredFleet(flags, text, path)
    else:
        runs, skipped = read.read(path)
        fleet = MeasuredFleet(flags)
    proxied = [run for run in runs if run.pool in fleet.proxied]
    skipped += [f"{run.where}: {run.pool} has no gpu, and cannot be simulated" for run in proxied]
    return [fleet.found(path, shortened(run)) for run in runs if run not in proxied], skipped


class MeasuredFleet:
    """The measured pools: from options, the runs' own files, or a fleet file, in this order."""

    def __init__(
        self,
        flags: Mapping[str, Any],
        text: str = "",
        source: Path | None = None,
        entry: Mapping[str, Any] | None = None,
    ) -> None:
        """`text`: the fleet file in the records, used without `--fleet`; `source`: the records' location. `entry`:
        further keys of the pool, if there is no such file."""
        self._flags, self._entry = dict(flags), dict(entry or {})
        path = self._flags.pop("fleet", None)
        self._pool = self._flags.pop("pool", None)
        self._sends_ids = bool(self._flags.pop("token_ids", False))
        self._workload: dict[str, Any] = WORKLOAD | ({"sampling": "greedy"} if self._flags.pop("greedy", False) else {})
        self._base = Path()
        self._document: dict[str, Any] | None = None
        self._places = Places()
        if path is not None:
            self._document, self._places = scenarios.read(path)
            self._base = path.parent
        elif text:
            self._document, self._places = strict_yaml.parse(text, f"{source}: its fleet file")
            self._document = {"name": "served", **self._document}

    def found(self, path: Path, run: MeasuredRun) -> FoundRun:
        given = {name: value for name, value in run.settings.items() if name not in self._flags}
        run = replace(run, settings=given)
        pool, coefficients = self.pool(run)
        one = replace(experiment(run, pool), sends_token_ids=self._sends_ids)
        return FoundRun(path, run, one, pool, coefficients)

    def pool(self, run: MeasuredRun) -> tuple[Pool, Coefficients]:
        """The pool of a run, and its step times. Raises HeadwayError if the pool is ambiguous."""
        flags, document = dict(self._flags), self._document
        if document is None:
            if "gpu" not in flags:
                raise HeadwayError(f"{run.where}: names no GPU; give --gpu, or --fleet")
            if not flags.keys() & {"model", "model_config"}:
                flags["model"] = _model(run)
            document = {
                "name": "measured",
                "workload": {},
                "fleet": [{"engine": {"name": DEFAULT_ENGINE}, **self._entry}],
            }
        pools = document.get("fleet")
        num_pools = len(pools) if isinstance(pools, list) else 0
        document = {**document, "workload": self._sampling_of(document) | self._workload}
        changed = strict_yaml.change(document, self._places, changes(flags, num_pools))
        chosen = scenarios.assemble(*without_proxied(*changed), self._base)
        pool = self._chosen(chosen.fleet.all_pools, run)
        return pool, StepTimes(chosen).coefficients[pool.name]

    @property
    def proxied(self) -> list[str]:
        """Names of the fleet file's pools that cannot be simulated because they name no GPU."""
        return [] if self._document is None or "gpu" in self._flags else proxied_names(self._document)

    @staticmethod
    def _sampling_of(document: Mapping[str, Any]) -> dict[str, Any]:
        """The fleet file's sampling parameters: all of its workload that a measured run does not give."""
        workload = document.get("workload")
        return {"sampling": workload["sampling"]} if isinstance(workload, dict) and "sampling" in workload else {}

    def any_pool(self) -> tuple[Pool, Coefficients]:
        """The pool that options and the fleet file name, without a run. Raises HeadwayError if it is not clear."""
        empty = MeasuredRun("", "", 0, 0.0, 0.0, 0.0, {})
        flags = self._flags
        if self._document is None and not flags.keys() & {"model", "model_config"}:
            return MeasuredFleet({**flags, "model": ANY_MODEL}).pool(empty)
        return self.pool(empty)

    def _chosen(self, pools: tuple[Pool, ...], run: MeasuredRun) -> Pool:
        """The pool named by `--pool` or by the run; otherwise the only pool, or the only pool of the run's model."""
        wanted = self._pool or run.pool
        by_name = [pool for pool in pools if pool.name == wanted]
        if by_name:
            return by_name[0]
        known = ", ".join(pool.name for pool in pools)
        if self._pool:
            raise HeadwayError(f"--pool: {self._pool!r}; expected one of {known}")
        if len(pools) == 1:
            return pools[0]
        of_model = [pool for pool in pools if run.model and run.model in (pool.model.name, *pool.model.names)]
        if len(of_model) != 1:
            raise HeadwayError(f"{run.where}: which pool was measured? Give --pool, one of {known}")
        return of_model[0]


def _model(run: MeasuredRun) -> str:
    """The catalog's name of the run's model."""
    if not run.model:
        raise HeadwayError(f"{run.where}: names no model; give --model")
    try:
        return catalogued_model(run.model).name
    except HeadwayError as error:
        raise HeadwayError(f"{run.where}: {error}; or give --model") from None
