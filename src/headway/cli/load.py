"""`headway load`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from headway import __version__, catalog, records
from headway.cli.flags import changes, seed_option, synthetic_options, together, trace_options, used_flags
from headway.cli.output import (
    PATH,
    POSITIVE,
    SECONDS,
    SECONDS_ABOVE_0,
    as_json_option,
    no_progress_option,
    print_json,
    print_table,
    progress,
)
from headway.config import strict_yaml
from headway.core.errors import HeadwayError, unknown
from headway.gateway.server import web_server
from headway.metrics.latency import Distribution
from headway.planning.fleet.document import slo_of
from headway.report.table import seconds
from headway.serving.discover import fleet_file
from headway.serving.discover.pages import fetcher
from headway.serving.discover.pools import FoundPool, pools
from headway.serving.discover.probe import FoundEngine, probe
from headway.workload.atomic_file import write_text
from headway.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from headway.serving.load_generator.run import Load
    from headway.serving.load_generator.warm_up import WarmUp

INTERRUPTED = 130
FAILED = 3
"""Exit code if no request was answered."""
PAGE_S = 10.0
NUM_REQUESTS, CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS = 100, 8, 512, 128
LATENCIES = {
    "ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL, by token", "chunk_gap_s": "gap between chunks", "e2e_s": "E2E",
    "late_s": "sent late",
}  # fmt: skip

_shape_options = together((
    click.option("--spec", type=PATH, help="A YAML file with the `workload` section of a scenario, in place of these."),
    click.option("--cv", type=click.FloatRange(min=0),
                 help="With --rate: spread of the gaps between requests. 1: Poisson; above: bursts; 0: all equal."),
    click.option("--duration", "duration_s", type=SECONDS_ABOVE_0, help="Send no request after this time."),
    click.option("--turns", type=POSITIVE, help="Conversations of so many turns; --rate is that of conversations."),
    click.option("--think", "think_s", type=SECONDS, help="With --turns: pause before the next turn. Default: 1 s."),
))  # fmt: skip
_request_options = together((
    click.option("--model", help="As the engine calls it. Default: the first one that it lists."),
    click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True),
    click.option("--api-key", default="", help="The key that the engine asks for."),
    click.option("--tokenizer", type=PATH, help="A folder with tokenizer.json. Default: the engine counts tokens."),
    click.option("--temperature", type=click.FloatRange(min=0), help="Default: the engine's own sampling. 0: greedy."),
    click.option("--natural-end", is_flag=True, help="Answers may end early. Default: they go on to their length."),
    click.option("--timeout", "timeout_s", type=SECONDS_ABOVE_0, default=600.0, show_default=True,
                 help="Time after which a request is given up."),
    click.option("--no-warm-up", is_flag=True, help="Measure from the first request on."),
))  # fmt: skip
_sweep_options = together((
    click.option("--sweep", "is_sweep", is_flag=True, help="Loads from one client to rates beyond saturation."),
    click.option("--slo", help="ttft=2s,tpot=50ms,e2e=30s. With --sweep: find the highest rate that meets them."),
    click.option("--attainment", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True,
                 help="Share of the requests that must meet --slo."),
    click.option("--page", "page_to", type=PATH, help="With --sweep: write an HTML page, with the prediction if any."),
    click.option("--calibrate", "calibrate_to", type=PATH, metavar="FILE.json",
                 help="Sweep, fit the engine's step times to it, and print the error before and after."),
))  # fmt: skip
_result_options = together((
    click.option("--records", "records_to", type=PATH, help="Write records here, for validate and calibrate."),
    click.option("--save-detailed", type=PATH, help="Write JSON as vllm bench serve --save-detailed does."),
    click.option("--gpu", help="The engine's GPU, for predictions. Default: guessed from its KV cache and speed."),
    click.option("--fleet", type=PATH, help="A fleet file with the engine, for predictions. Default: as discovered."),
    as_json_option("Print JSON: `engine`, `warm_up`, `measured` (a sweep: `points`, `knee_rps`, `highest`), `notes`."),
    no_progress_option,
))  # fmt: skip


@click.command()
@click.argument("url", metavar="URL")
@synthetic_options
@trace_options
@_shape_options
@seed_option
@_request_options
@_sweep_options
@_result_options
def command(url: str, **flags: Any) -> int:
    """Send requests to a running engine, and measure its answers.

    URL is the address of one engine, or of a gateway. Requests come in a closed loop (--concurrency), at a rate
    (--rate), or as a trace or a built-in workload says. Without any of these, 8 clients send 100 requests of 512
    tokens for 128. Prompts have exactly the tokens that are asked for, by the engine's own count. Ctrl-C ends the load
    and keeps what was measured.
    """
    try:
        import headway.serving.load_generator.engine as _  # noqa: F401
    except ModuleNotFoundError as error:
        raise web_server.not_installed(str(error.name)) from None
    return asyncio.run(Session(url, flags).run())


class Session:
    """One use of the command."""

    def __init__(self, url: str, flags: dict[str, Any]) -> None:
        from headway.serving.load_generator.engine import Options, Target
        from headway.serving.load_generator.prompts import Vocabulary
        from headway.serving.load_generator.results import Slo

        if flags["gpu"] is not None:
            flags["gpu"] = catalog.gpu(flags["gpu"]).name
        self.flags, self.seed = flags, flags["seed"] or 0
        _check_results(flags)
        if flags["fleet"] is not None:
            strict_yaml.read(flags["fleet"])  # its errors come before the load
        self.slo = None if flags["slo"] is None else Slo(**slo_of(flags["slo"]))
        self.spec, self.base_dir = _workload(flags)
        self.found = probe(_address(url), fetcher(_address(url), flags["api_key"] or None, PAGE_S))
        model = flags["model"] or self.found.model
        names = [self.found.model, *self.found.other_models, *self.found.adapters]
        if model not in names:
            raise unknown("model", model, names, f"{self.found.url}: --model")
        options = Options(
            flags["endpoint"], flags["temperature"], not flags["natural_end"], flags["timeout_s"]
        )  # fmt: skip
        self.target = Target(self.found, model, options, flags["api_key"])
        self.began = datetime.now()
        self.words = Vocabulary(())
        self.warmed: WarmUp | None = None

    async def run(self) -> int:
        from headway.cli import load_sweep
        from headway.gateway.kv_events import local_tokenizer
        from headway.serving.load_generator.prompts import vocabulary

        flags = self.flags
        tokenizer = None if flags["tokenizer"] is None else local_tokenizer.read(flags["tokenizer"])
        try:
            self.words = await vocabulary(await self.target.counter(tokenizer))
            self.warmed = None if flags["no_warm_up"] else await self._warm_up(self.words)
            if self.is_sweep:
                return await load_sweep.run(self)
            with progress("sending", wanted=not flags["no_progress"]) as report:
                done = await self.load(self.spec, report)
        finally:
            self.target.close()
        self._save(done)
        notes = [*self.notes(), *done.notes()]
        if flags["as_json"]:
            print_json({
                "engine": self.found, "model": self.target.model, "warm_up": self.warmed, "measured": done.measured,
                "notes": notes, "is_stopped": done.is_stopped,
            })  # fmt: skip
        else:
            _print(done, self)
            for note in notes:
                click.echo(f"note: {note}")
        if done.is_stopped:
            return INTERRUPTED
        return 0 if done.measured.num_completed else FAILED

    @property
    def is_sweep(self) -> bool:
        return bool(self.flags["is_sweep"] or self.flags["calibrate_to"])

    async def load(self, spec: WorkloadSpec, report: Callable[[float], None] | None) -> Load:
        """One load, with the options of all."""
        from headway.serving.load_generator.run import load

        duration_s = self.flags["duration_s"]
        return await load(self.target, spec, self.words, self.seed, self.base_dir, duration_s, self.slo, report)

    def notes(self) -> Iterator[str]:
        """On prompts and the warm-up."""
        if self.words.note:
            yield self.words.note
        yield from _warm_up_notes(self.warmed)

    async def _warm_up(self, words: Any) -> WarmUp:
        from headway.serving.load_generator.run import typical_lengths
        from headway.serving.load_generator.warm_up import warm_up

        prompt, output = typical_lengths(self.spec, self.seed, self.base_dir)
        return await warm_up(self.target, words, prompt, output, min(self.spec.concurrency or 4, 4), self.seed)

    def _save(self, done: Load) -> None:
        from headway.serving.load_generator import saved

        flags = self.flags
        if flags["save_detailed"] is not None:
            result = saved.vllm_bench(
                done.sent, self.target.model, self.began, rate_rps=_rate(self.spec), burstiness=_burstiness(flags),
                concurrency=self.spec.concurrency, temperature=flags["temperature"], endpoint=flags["endpoint"],
            )  # fmt: skip
            write_text(flags["save_detailed"], msgspec.json.encode(result).decode())
        if flags["records_to"] is not None:
            self.save_records(done, flags["records_to"])

    def save_records(self, done: Load, folder: Path) -> None:
        from headway.serving.load_generator import saved

        pool = self.pool()
        table = saved.records(done.sent, done.table, _replica(pool, self.found))
        records.save(table, folder, {"version": __version__, "fleet": self.fleet_text(pool), "load": self._about(done)})
        click.echo(f"wrote {folder}: {len(table.requests['request']):,} requests", err=True)

    def fleet_text(self, pool: FoundPool) -> str:
        """The fleet file that is given, else one of the engine that was found."""
        given: Path | None = self.flags["fleet"]
        return fleet_file.text([pool], "fleet.yaml") if given is None else given.read_text(encoding="utf-8")

    def pool(self) -> FoundPool:
        """The engine as a pool of a fleet file."""
        token_s = None if self.warmed is None else self.warmed.token_s
        (pool,) = pools([self.found], self.flags["gpu"], {} if token_s is None else {self.found.url: token_s})
        return pool

    def _about(self, done: Load) -> dict[str, Any]:
        """What the records say of the load."""
        return {
            "url": self.found.url, "model": self.target.model, "began": self.began.isoformat(timespec="seconds"),
            "temperature": self.flags["temperature"], "endpoint": self.flags["endpoint"], "seed": self.seed,
            "concurrency": self.spec.concurrency, "first_uses": done.first_uses, "num_left_out": done.num_left_out,
        }  # fmt: skip


def _check_results(flags: Mapping[str, Any]) -> None:
    """HeadwayError for options on results that the load does not have."""
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
    """The requests that the options ask for, and the folder of the paths in them."""
    shape = {name: flags[name] for name in (
        "workload", "rate", "num_requests", "prompt_tokens", "output_tokens", "trace", "limit", "rate_scale",
        "concurrency",
    )}  # fmt: skip
    used = used_flags(shape)
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
    """With what a synthetic workload needs beside the options given."""
    from headway.serving.load_generator.run import ENDLESS

    full = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, **used}
    if "rate" not in used and flags["turns"] is None:
        full = {"concurrency": CONCURRENCY, **full}
    if flags["turns"] is not None and "rate" not in used:
        raise HeadwayError("--turns: goes with --rate, that of conversations")
    if "num_requests" not in used and (flags["duration_s"] is None or "concurrency" in full):
        full["num_requests"] = NUM_REQUESTS if flags["duration_s"] is None else ENDLESS
    return full


def _further(used: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of the workload that other commands have no options for."""
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
    """vLLM's: the shape of the gamma distribution of the gaps."""
    cv = flags["cv"]
    return 1.0 if cv is None else float("inf") if cv == 0 else 1 / cv**2


def _replica(pool: FoundPool, found: FoundEngine) -> Any:
    from headway.core.record import ReplicaRecord

    entry = pool.entry
    return ReplicaRecord(
        id=0, pool=entry["name"], model=str(entry["model"]), gpu=entry.get("gpu", ""), region="",
        num_gpus=(found.tp or 1) * (found.pp or 1), usd_per_hour=0.0, watts=0.0,
        kv_capacity_tokens=found.kv_capacity_tokens or 0, max_num_seqs=found.settings.get("max_num_seqs", 0), up=(),
    )  # fmt: skip


def _warm_up_notes(warmed: WarmUp | None) -> Iterator[str]:
    if warmed is None:
        return
    if warmed.stalls_s:
        waits = ", ".join(f"{each:.1f} s" for each in warmed.stalls_s)
        yield f"the engine stood still in the warm-up ({waits}), at first uses, which are left out"
    if not warmed.is_steady:
        yield f"after {warmed.num_requests} requests of warm-up, waits were still unsteady"


def _print(done: Load, session: Session) -> None:
    values, found, concurrency = done.measured, session.found, session.spec.concurrency
    version = f" {found.version}" if found.version else ""
    click.echo(f"{session.target.model} at {found.url} ({found.product or found.api}{version})")
    rows = [
        ("requests", f"{values.num_completed:,} of {values.num_requests:,} in {values.duration_s:.1f} s"),
        ("requests/s", f"{values.throughput_rps:.4g}"
         + (f" ({values.offered_rps:.4g} sent)" if values.offered_rps is not None and concurrency is None else "")),
        ("output tokens/s", f"{values.output_tokens_per_s:,.4g}"),
        ("tokens/s, prompts too", f"{values.total_tokens_per_s:,.4g}"),
        ("in flight, mean", f"{values.concurrency:.3g}"),
        *([] if values.slo_attainment is None else [("within the SLOs", f"{values.slo_attainment:.1%}")]),
        ("tokens a chunk", "-" if values.tokens_per_chunk is None else f"{values.tokens_per_chunk:.3g}"),
    ]  # fmt: skip
    print_table(("", ""), rows)
    click.echo()
    columns = ("mean", "p50", "p90", "p99", "max")
    print_table(("", *columns), [
        (title, *("-" if one is None else seconds(getattr(one, name)) for name in columns))
        for key, title in LATENCIES.items()
        for one in [_distribution(values, key)]
    ])  # fmt: skip


def _distribution(values: Any, key: str) -> Distribution | None:
    found: Distribution | None = getattr(values, key)
    return found
