"""Common parts of the commands that run a gateway: options, the fleet file, and a run's input and output."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import click
from msgspec import Struct
from msgspec.structs import replace

from headway import scenario
from headway.cli.output import PATH, decisions_option
from headway.config.policy_preset import explained
from headway.config.scenario import Scenario
from headway.core.errors import HeadwayError
from headway.gateway import descriptors
from headway.gateway.fleet.specs import InferencePool, Kubernetes, Processes, ServedPool, ServingPlan
from headway.gateway.server import web_server
from headway.gateway.telemetry.logs import Level, LogOptions
from headway.planning.cascade import replan
from headway.records.json_lines import BackgroundJsonLines, JsonLinesFile
from headway.records.part_writer import PartWriter
from headway.serving import demand_history, pools
from headway.serving.reload import FleetFile
from headway.serving.supervision import MAX_RESTARTS, supervise

log = logging.getLogger("headway.gateway")
if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway
    from headway.gateway.reload import Reloader


class LiveOptions(Struct, frozen=True):
    """The options for listening and recording."""

    port: int
    host: str
    restarts: int
    reload: bool
    records: Path | None
    decisions: Path | None
    certfile: Path | None
    keyfile: Path | None
    log_level: Level
    log_format: Literal["text", "json"]

    @property
    def log(self) -> LogOptions:
        return LogOptions(self.log_level, self.log_format)

    def tls(self) -> web_server.Tls | None:
        """The certificate, after a check; None without TLS."""
        return web_server.tls_of(self.certfile, self.keyfile)


_FLEET_OPTIONS = (
    click.option("--variant", help="One of the file's sets of policies, if it has several."),
    click.option("--emulated", "is_emulated", is_flag=True, help="Emulate every engine, whatever the file says."),
    click.option("--emulate-with", default="", help="Further options of headway emulate, for all engines."),
)
_LIVE_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True,
                 help="0.0.0.0 accepts connections from other machines."),
    click.option("--restarts", type=click.IntRange(0, 1000), default=MAX_RESTARTS, show_default=True,
                 help="Restarts in a row if the process is killed or crashes. 0: it is not started again."),
    click.option("--reload/--no-reload", default=True, show_default=True,
                 help="Reload the FLEET file when it has changed. SIGHUP reloads it in any case."),
    click.option("--records", type=PATH, help="Write records of the requests to this folder, as the run goes."),
    decisions_option,
    click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
                 show_default=True, help="Least severe messages in the log, which is on stderr."),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True),
    click.option("--certfile", type=PATH, help="Certificate (PEM): connections are by TLS."),
    click.option("--keyfile", type=PATH, help="Private key (PEM), if it is not in the same file."),
)  # fmt: skip


def fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `read_fleet`."""
    return _with(command, _FLEET_OPTIONS)


def live_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `LiveOptions`, except the port, which each command defines."""
    return _with(command, _LIVE_OPTIONS)


def _with(command: Callable[..., Any], options: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def require_installed() -> None:
    """Raises HeadwayError if the gateway's libraries are missing."""
    try:
        from headway.gateway.server import app as _  # noqa: F401
    except ModuleNotFoundError as error:
        raise web_server.not_installed(str(error.name)) from None


def read_fleet(
    path: Path,
    variant: str | None,
    is_emulated: bool,
    emulate_with: str,
    check: Callable[[Scenario], None] = lambda read: None,
) -> FleetFile:
    """The fleet file, with one of its variants and, if requested, emulated engines.

    `check` raises HeadwayError for settings that the command does not support. Raises HeadwayError for an invalid file
    or option.
    """
    from headway.serving import emulated_fleet

    if emulate_with and not is_emulated:
        raise HeadwayError("--emulate-with: needs --emulated")

    def changed(read: Scenario) -> Scenario:
        read = read if variant is None else scenario.variant(read, variant)
        check(read)
        return emulated_fleet.emulated(read, path, shlex.split(emulate_with)) if is_emulated else read

    return FleetFile(path, changed, is_fleet_fixed=is_emulated)


def allow_clients(plan: ServingPlan, num_clients: int, per_client: int) -> None:
    """Raise the limit on file descriptors for this many clients, or warn that the system does not permit it."""
    num_replicas = sum(max(len(served.endpoints), served.num_initial) for served in plan.pools)
    if why := descriptors.allow(num_clients, per_client, num_replicas):
        log.warning("%s", why)


def run_restarted(run: Callable[[ServingPlan, bool], None], file: FleetFile, plan: ServingPlan, restarts: int) -> None:
    """Call `run` with the plan, in a process that is restarted with the file's latest plan if it is killed."""
    if restarts:
        supervise(lambda is_restart: run(_latest(file, plan) if is_restart else plan, is_restart), restarts)
    else:
        run(plan, False)


def _latest(file: FleetFile, plan: ServingPlan) -> ServingPlan:
    """The plan of the current file; the original plan if the file cannot be served."""
    try:
        return file.read_again(plan)
    except HeadwayError as error:
        log.error("the fleet file was not reloaded: %s", error)
        return plan


class Companion(Protocol):
    """A task that runs in a gateway's event loop."""

    def start(self) -> None: ...
    def close(self) -> None: ...


class LiveRun:
    """One process's run. The records contain the fleet file's text."""

    def __init__(
        self,
        plan: ServingPlan,
        file: FleetFile,
        options: LiveOptions,
        is_restart: bool,
        companions: Callable[[Gateway], Sequence[Companion]] = lambda gateway: (),
    ) -> None:
        """`companions` run in parallel to the gateway."""
        self._plan, self._file, self._reload = _with_history(plan, file, is_restart), file, options.reload
        self._decisions, self._records = None, None
        if options.decisions is not None:
            max_bytes = plan.settings.max_decisions_bytes
            written = JsonLinesFile(options.decisions, max_bytes, is_continued=True)
            self._decisions = BackgroundJsonLines(written)
        if options.records is not None:
            self._records = PartWriter(options.records, {"fleet": file.path.read_text(encoding="utf-8")})
        self._reloader: Reloader | None = None
        self._make_companions, self._companions = companions, list[Companion]()

    def make(self) -> Gateway:
        """The gateway; must be called in its event loop."""
        from headway.gateway.gateway import Gateway
        from headway.gateway.reload import Reloader
        from headway.gateway.telemetry.recording import Recording

        write = None if self._records is None else self._records.write
        recording = Recording(self._records is not None, write, bool(self._plan.fallbacks.models))
        gateway = Gateway(self._plan, recording, None if self._decisions is None else self._decisions.write)
        self._reloader = Reloader(gateway, self._file.read_again, self._file.signature if self._reload else None)
        self._reloader.start()
        self._companions += self._make_companions(gateway)
        for each in self._companions:
            each.start()
        return gateway

    def stopped(self, gateway: Gateway) -> None:
        """Write the remaining output, once the gateway has stopped."""
        for each in self._companions:
            each.close()
        if self._reloader is not None:
            self._reloader.close()
        if self._decisions is not None:
            self._decisions.close()
        if self._records is not None:
            gateway.telemetry.flush()
            click.echo(self._records.finish(), err=True)


def _with_history(plan: ServingPlan, file: FleetFile, is_restart: bool) -> ServingPlan:
    """The plan with the demand from before the start, if the file names its source; prints a line about it.

    Raises HeadwayError if it cannot be read; a restarted process continues without it.
    """
    if plan.settings.demand_history is None:
        return plan
    try:
        past, line = demand_history.load(file.scenario, plan)
    except HeadwayError as error:
        if not is_restart:
            raise
        log.error("forecast: demand from before the start is unknown: %s", error)
        return plan
    click.echo(f"  {line}", err=True)
    return replace(plan, past_demand=past)


def _where(served: ServedPool) -> str:
    """The location of a pool's replicas, or how they are started."""
    if isinstance(served.start, Processes):
        first, last = served.start.ports
        return f"{served.num_initial} started here at first, on ports {first} to {last}"
    if isinstance(served.start, Kubernetes):
        return f"the pods of {served.start.kind} {served.start.namespace}/{served.start.name}"
    if isinstance(served.start, InferencePool):
        return f"the pods of InferencePool {served.start.namespace}/{served.start.name}"
    return ", ".join(served.endpoints)


def show_fleet(chosen: Scenario, plan: ServingPlan) -> None:
    """Print the engines' locations and the policies."""
    for line in explained(chosen.spec.policies, chosen.fleet):
        click.echo(f"  {line}")
    for served in plan.pools:
        pool = served.pool
        if not (pool.replicas or served.endpoints):
            continue  # a shape for later plans
        click.echo(f"  {pool.name}: {pool.model.name} on {pool.gpu.name}, {served.api}: {_where(served)}")
    if unnamed := pools.without_engine(chosen):
        click.echo(f"  {', '.join(unnamed)}: no `engine` is given (vllm, sglang, ...), so its metrics are not read")
    for model, others in plan.fallbacks.models.items():
        when = ", ".join(plan.policies.fallback.when) or "never"
        click.echo(f"  {model} falls back to {', then '.join(others)}: {when}")
    at = plan.policies.ordering_at
    where = f" at the {at}" if at != "both" else " at gateway and replica"
    window = plan.policies.window
    held = f", at most {window} requests at a replica" if window is not None else ""
    click.echo(f"  routing {plan.policies.router}, ordering {plan.policies.ordering}{where}{held}")
    if plan.policies.admission is not None:
        click.echo(f"  admission {plan.policies.admission}")
    if plan.policies.scaler is not None:
        click.echo(f"  scaling {plan.policies.scaler}")
    if plan.policies.migration is not None:
        click.echo(f"  migration {plan.policies.migration}, by going on from the tokens so far")
    cascade = plan.policies.cascade
    if cascade is not None and plan.judge is not None:
        criterion = "by confidence" if plan.judge.by == "confidence" else f"by {plan.judge.model} at {plan.judge.url}"
        click.echo(f"  {cascade.name}: {' -> '.join(cascade.models)}, {cascade.policy}, judged {criterion}")
    for line in replan.start_notes(chosen.spec, chosen.fleet):
        click.echo(f"  {line}")
    if plan.settings.batches is not None:
        click.echo(f"  batches in {plan.settings.batches.store.rpartition('@')[2]}")
