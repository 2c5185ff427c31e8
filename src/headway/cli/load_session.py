"""One use of `headway load`: the engine, the requests of the options, and the output."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from headway import __version__, catalog, records
from headway.cli.flags import changes, slo_of, used_flags
from headway.config import strict_yaml
from headway.core.errors import HeadwayError, unknown
from headway.core.record import ReplicaRecord
from headway.serving.discover import fleet_file
from headway.serving.discover.pages import fetcher
from headway.serving.discover.pools import FoundPool, pools
from headway.serving.discover.probe import FoundEngine, probe
from headway.serving.load_generator import run, saved
from headway.serving.load_generator.engine import Options, Target
from headway.serving.load_generator.prompts import Prompts, Vocabulary, vocabulary
from headway.serving.load_generator.results import Slo
from headway.serving.load_generator.run import Load
from headway.serving.load_generator.warm_up import WarmUp, warm_up
from headway.workload.atomic_file import write_text
from headway.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from headway.gateway.kv_events.local_tokenizer import LocalTokenizer

PAGE_S = 10.0
"""Timeout of each page that describes the engine."""
NUM_REQUESTS, CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 100, 8, 512, 128


class Session:
    """One use of the command."""

    def __init__(self, url: str, flags: dict[str, Any]) -> None:
        if flags["gpu"] is not None:
            flags["gpu"] = catalog.gpu(flags["gpu"]).name
        self.flags, self.seed = flags, flags["seed"] or 0
        self._text_seed = secrets.randbits(63) if flags["seed"] is None else self.seed
        self._num_loads = 0
        _check_results(flags)
        if flags["pool"] is not None and flags["fleet"] is None:
            raise HeadwayError("--pool: goes with --fleet")
        if flags["fleet"] is not None:
            strict_yaml.read(flags["fleet"])  # its errors must come before the load
        self.slo = None if flags["slo"] is None else Slo(**slo_of(flags["slo"]))
        self.spec, self.base_dir = _workload(flags)
        self.found = probe(_address(url), fetcher(_address(url), flags["api_key"] or None, PAGE_S))
        model = flags["model"] or self.found.model
        names = [self.found.model, *self.found.other_models, *self.found.adapters]
        if model not in names:
            raise unknown("model", model, names, f"{self.found.url}: --model")
        options = Options(flags["endpoint"], flags["temperature"], not flags["natural_end"], flags["timeout_s"])
        self.target = Target(self.found, model, options, flags["api_key"])
        self.began = datetime.now()
        self.words = Vocabulary(())
        self.warmed: WarmUp | None = None

    async def prepare(self) -> None:
        """Prepare the prompts, and warm the engine up."""
        file = self.flags["tokenizer"]
        self.words = await vocabulary(await self.target.counter(None if file is None else _tokenizer(file)))
        self.warmed = None if self.flags["no_warm_up"] else await self._warm_up()

    @property
    def is_sweep(self) -> bool:
        return bool(self.flags["is_sweep"] or self.flags["calibrate_to"])

    async def load(self, spec: WorkloadSpec, report: Callable[[float], None] | None) -> Load:
        """One load, with the common options."""
        prompts = Prompts(self.words, self._text_seed, self.target.is_chat, self._num_loads)
        self._num_loads += 1
        duration_s = self.flags["duration_s"]
        return await run.load(self.target, spec, prompts, self.seed, self.base_dir, duration_s, self.slo, report)

    def notes(self) -> Iterator[str]:
        """Notes on prompts and the warm-up."""
        if self.words.note:
            yield self.words.note
        yield from _warm_up_notes(self.warmed)

    async def _warm_up(self) -> WarmUp:
        prompt, output = run.typical_lengths(self.spec, self.seed, self.base_dir)
        return await warm_up(
            self.target, self.words, prompt, output, min(self.spec.concurrency or 4, 4), self._text_seed
        )

    def save(self, done: Load) -> None:
        flags = self.flags
        if flags["save_detailed"] is not None:
            result = saved.vllm_bench(
                done.sent,
                self.target.model,
                self.began,
                rate_rps=_rate(self.spec),
                burstiness=_burstiness(flags),
                concurrency=self.spec.concurrency,
                temperature=flags["temperature"],
                endpoint=flags["endpoint"],
            )
            write_text(flags["save_detailed"], msgspec.json.encode(result).decode())
        if flags["records_to"] is not None:
            self.save_records(done, flags["records_to"])

    def save_records(self, done: Load, folder: Path) -> None:
        pool = self.pool()
        table = saved.records(done.sent, done.table, _replica(pool, self.found))
        records.save(table, folder, {"version": __version__, "fleet": self.fleet_text(pool), "load": self._about(done)})
        click.echo(f"wrote {folder}: {len(table.requests['request']):,} requests", err=True)

    def fleet_text(self, pool: FoundPool) -> str:
        """The given fleet file, otherwise one for the discovered engine."""
        given: Path | None = self.flags["fleet"]
        return fleet_file.text([pool], "fleet.yaml") if given is None else given.read_text(encoding="utf-8")

    def pool(self) -> FoundPool:
        """The engine as a pool of a fleet file."""
        token_s = None if self.warmed is None else self.warmed.token_s
        (pool,) = pools([self.found], self.flags["gpu"], {} if token_s is None else {self.found.url: token_s})
        return pool

    def _about(self, done: Load) -> dict[str, Any]:
        """Facts about the load for the records."""
        return {
            "url": self.found.url,
            "model": self.target.model,
            "began": self.began.isoformat(timespec="seconds"),
            "temperature": self.flags["temperature"],
            "endpoint": self.flags["endpoint"],
            "seed": self.seed,
            "concurrency": self.spec.concurrency,
            "first_uses": done.first_uses,
            "num_left_out": done.num_left_out,
        }


def _tokenizer(path: Path) -> LocalTokenizer:
    """The tokenizer in a folder. Raises HeadwayError if there is none, or its libraries are not installed."""
    try:
        from headway.gateway.kv_events import local_tokenizer
    except ModuleNotFoundError as error:
        raise HeadwayError(f"--tokenizer: needs {error.name}; pip install 'headway[tokenizers]'") from None
    return local_tokenizer.read(path)


def _check_results(flags: Mapping[str, Any]) -> None:
    """Raises HeadwayError for output options that the load does not support."""
    if flags["is_written"] and (flags["calibrate_to"] is None or flags["fleet"] is None):
        raise HeadwayError("--write: goes with --calibrate and --fleet")
    if flags["is_sweep"] or flags["calibrate_to"]:
        if flags["save_detailed"] is not None:
            raise HeadwayError("--save-detailed: not with a sweep; --records has each of its loads")
        for name in ("rate", "cv", "turns", "spec"):
            if flags[name] is not None:
                raise HeadwayError(f"--{name}: not with a sweep, which sends Poisson arrivals at rates of its own")
    elif flags["page_to"] is not None:
        raise HeadwayError("--page: goes with --sweep")


def _address(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def _workload(flags: Mapping[str, Any]) -> tuple[WorkloadSpec, Path]:
    """The requests of the options, and the base folder of their paths."""
    shape = {name: flags[name] for name in (
        "workload", "rate", "num_requests", "prompt_tokens", "output_tokens", "trace", "limit", "rate_scale",
        "concurrency",
    )}  # fmt: skip
    used = used_flags(shape)
    if "trace" in used and (flags["is_sweep"] or flags["calibrate_to"]):
        used.pop("num_requests", None)  # applies to each load, whose arrivals are not the trace's
    if flags["spec"] is not None:
        if used or flags["cv"] is not None or flags["turns"] is not None:
            raise HeadwayError("--spec: expected no other options on the requests")
        data, places = strict_yaml.read(flags["spec"])
        spec = strict_yaml.convert(data, WorkloadSpec, places)
        return spec, flags["spec"].parent
    for name in ("limit", "rate_scale"):
        if name in used and "trace" not in used:
            raise HeadwayError(f"--{name.replace('_', '-')}: goes with --trace")
    if flags["cv"] is not None and "rate" not in used:
        raise HeadwayError("--cv: goes with --rate")
    if flags["think_s"] is not None and flags["turns"] is None:
        raise HeadwayError("--think: goes with --turns")
    if not used.keys() & {"trace", "workload"}:
        used = _completed(used, flags)
    document, places = strict_yaml.change({"workload": {}}, strict_yaml.Places(), changes(used))
    data = document["workload"] | dict(_further(used, flags))
    return strict_yaml.convert(data, WorkloadSpec, places), Path()


def _completed(used: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options, completed to a valid synthetic workload."""
    full = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, **used}
    if "rate" not in used and flags["turns"] is None:
        full = {"concurrency": CONCURRENCY, **full}
    if flags["turns"] is not None and "rate" not in used:
        raise HeadwayError("--turns: goes with --rate, that of conversations")
    if "num_requests" not in used and (flags["duration_s"] is None or "concurrency" in full):
        full["num_requests"] = NUM_REQUESTS if flags["duration_s"] is None else run.ENDLESS
    return full


def _further(used: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of the workload that have no options in other commands."""
    if flags["duration_s"] is not None and "concurrency" not in used and "trace" not in used:
        yield "duration_s", flags["duration_s"]
    if flags["turns"] is not None:
        think_s = 1.0 if flags["think_s"] is None else flags["think_s"]
        yield "sessions", {"turns": flags["turns"], "think_s": think_s, "think_cv": 0.0}
    cv, rate = flags["cv"], used.get("rate")
    if cv is not None and cv != 1:
        yield "arrivals", {"kind": "gamma", "rate": rate, "cv": cv} if cv else {"kind": "deterministic", "rate": rate}


def _rate(spec: WorkloadSpec) -> float | None:
    arrivals = spec.arrivals
    if spec.concurrency is not None or arrivals is None:
        return None
    return float(arrivals) if isinstance(arrivals, int | float) else getattr(arrivals, "rate", None)


def _burstiness(flags: Mapping[str, Any]) -> float:
    """vLLM's burstiness: the shape of the gaps' gamma distribution."""
    cv = flags["cv"]
    return 1.0 if cv is None else float("inf") if cv == 0 else 1 / cv**2


def _replica(pool: FoundPool, found: FoundEngine) -> ReplicaRecord:
    entry = pool.entry
    return ReplicaRecord(
        id=0,
        pool=entry["name"],
        model=pool.model,
        gpu=entry.get("gpu", ""),
        region="",
        num_gpus=(found.tp or 1) * (found.pp or 1),
        usd_per_hour=0.0,
        watts=0.0,
        kv_capacity_tokens=found.kv_capacity_tokens or 0,
        max_num_seqs=found.settings.get("max_num_seqs", 0),
        up=(),
    )


def _warm_up_notes(warmed: WarmUp | None) -> Iterator[str]:
    if warmed is None:
        return
    if warmed.stalls_s:
        waits = ", ".join(f"{each:.1f} s" for each in warmed.stalls_s)
        yield f"the engine stood still in the warm-up ({waits}), at first uses, which are left out"
    if not warmed.is_steady:
        yield f"after {warmed.num_requests} requests of warm-up, waits were still unsteady"
