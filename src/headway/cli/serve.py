"""`headway serve`."""

from __future__ import annotations

import logging
import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from msgspec import Struct
from msgspec.structs import replace

from headway import scenario
from headway.cli.flags import scenario_file
from headway.cli.output import PATH, PORT, decisions_option
from headway.config.scenario import Scenario
from headway.core.errors import HeadwayError
from headway.gateway.fleet.specs import Kubernetes, Processes
from headway.gateway.server import web_server
from headway.gateway.telemetry.logs import Level, LogOptions
from headway.records.json_lines import BackgroundJsonLines, JsonLinesFile
from headway.records.part_writer import PartWriter
from headway.scenario import replan
from headway.serving.reload import FleetFile
from headway.serving.supervision import MAX_RESTARTS, supervise

log = logging.getLogger("headway.gateway")
if TYPE_CHECKING:
    from headway.gateway.fleet.specs import ServedPool, ServingPlan

_SCHEDULER_S = 1.0
"""Shutdown time of the scheduler; its workers have ended by then."""


class ServeOptions(Struct, frozen=True):
    """The options on listening and on what is recorded."""

    port: int
    host: str
    workers: int
    restarts: int
    reload: bool
    records: Path | None
    decisions: Path | None
    certfile: Path | None
    keyfile: Path | None
    access_log: Path | None
    log_level: Level
    log_format: Literal["text", "json"]

    @property
    def log(self) -> LogOptions:
        return LogOptions(self.log_level, self.log_format)

    def tls(self) -> web_server.Tls | None:
        """The certificate, after a check; None: serve HTTP."""
        if self.certfile is None:
            if self.keyfile is not None:
                raise HeadwayError("--keyfile: needs --certfile")
            return None
        tls = web_server.Tls(self.certfile, self.keyfile)
        tls.check()
        return tls


@click.command()
@click.argument("fleet", required=False, type=PATH)
@click.option("--builtin", "preset", help="A scenario that comes with Headway, instead of a file: headway.")
@click.option("--variant", help="One of the file's sets of policies, if it has several.")
@click.option("--emulated", "is_emulated", is_flag=True, help="Emulate every engine, whatever the file says.")
@click.option("--emulate-with", default="", help="Further options of headway emulate, for all engines.")
@click.option("--port", type=PORT, default=8080, show_default=True, help="0: any free port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 accepts connections from other machines.")
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, show_default=True,
    help="Worker processes that relay requests and answers. With several, one more process schedules for all of them.",
)  # fmt: skip
@click.option(
    "--restarts", type=click.IntRange(0, 1000), default=MAX_RESTARTS, show_default=True,
    help="Restarts in a row if the gateway's process is killed or crashes. 0: it is not started again.",
)  # fmt: skip
@click.option(
    "--reload/--no-reload", default=True, show_default=True,
    help="Reload the FLEET file when it has changed. SIGHUP reloads it in any case.",
)  # fmt: skip
@click.option("--records", type=PATH, help="Write records of the requests to this folder, as the run goes.")
@decisions_option
@click.option("--access-log", type=PATH, help="Write one line of JSON for each request to this file; - for stdout.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True,
    help="Least severe messages in the gateway's log, which is on stderr.",
)  # fmt: skip
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--certfile", type=PATH, help="Certificate (PEM): serve HTTPS.")
@click.option("--keyfile", type=PATH, help="Private key (PEM), if it is not in the same file.")
def command(
    fleet: Path | None, preset: str | None, variant: str | None, is_emulated: bool, emulate_with: str, **flags: Any
) -> None:
    """Serve the engines of the FLEET file as one OpenAI-compatible endpoint.

    FLEET is a scenario whose pools list the addresses of their replicas (`endpoints`). Its policies are those that
    `headway simulate` runs. With --emulated, any scenario is served, by emulated engines without GPUs.
    """
    try:
        from headway.gateway.server import app as _  # noqa: F401
        from headway.serving import emulated_fleet
    except ModuleNotFoundError as error:
        raise web_server.not_installed(str(error.name)) from None
    file = scenario_file(fleet, preset)
    if file is None:
        raise HeadwayError("FLEET is missing; expected a file, or --builtin")
    if emulate_with and not is_emulated:
        raise HeadwayError("--emulate-with: needs --emulated")

    def changed(read: Scenario) -> Scenario:
        read = read if variant is None else scenario.variant(read, variant)
        return emulated_fleet.emulated(read, file, shlex.split(emulate_with)) if is_emulated else read

    _serve(FleetFile(file, changed, is_fleet_fixed=is_emulated), ServeOptions(**flags))


def _serve(file: FleetFile, options: ServeOptions) -> None:
    """Serve until a signal, in a process that is started again if it is killed."""
    host, port, workers, tls = options.host, options.port, options.workers, options.tls()
    plan = file.plan
    plan = replace(plan, settings=replace(plan.settings, hosts=(*plan.settings.hosts, host)))
    options.log.apply()
    if options.access_log is not None:
        options = replace(options, access_log=_access_log_file(options.access_log))
    listeners = [web_server.listen(host, port)] if workers == 1 else web_server.listen_shared(host, port, workers)
    _show(file.scenario, plan, f"{'http' if tls is None else 'https'}://{web_server.address(listeners[0])}", workers)

    def run(is_restart: bool) -> None:
        _run(_latest(file, plan) if is_restart else plan, options, file, listeners, tls, is_restart)

    if options.restarts:
        supervise(run, options.restarts)
    else:
        run(False)


def _latest(file: FleetFile, plan: ServingPlan) -> ServingPlan:
    """What the file says now; the plan of the start if it cannot be served."""
    try:
        return file.read_again(plan)
    except HeadwayError as error:
        log.error("the fleet file was not reloaded: %s", error)
        return plan


def _run(
    plan: ServingPlan,
    options: ServeOptions,
    file: FleetFile,
    listeners: list[socket.socket],
    tls: web_server.Tls | None,
    is_restart: bool,
) -> None:
    """Serve until a signal, at these sockets. The records hold the fleet file's text."""
    from headway.gateway.gateway import Gateway
    from headway.gateway.reload import Reloader
    from headway.gateway.server.app import application
    from headway.gateway.server.middleware import with_middleware
    from headway.gateway.telemetry.recording import Recording
    from headway.gateway.workers.supervisor import WorkerSupervisor

    supervisor = None
    if options.workers > 1:
        supervisor = WorkerSupervisor(listeners, tls, options.log, options.access_log)
    decision_writer = None
    if options.decisions is not None:
        max_bytes = plan.settings.max_decisions_bytes
        decision_writer = BackgroundJsonLines(JsonLinesFile(options.decisions, max_bytes, is_continued=is_restart))

    records_writer = None
    if options.records is not None:
        records_writer = PartWriter(options.records, {"fleet": file.path.read_text(encoding="utf-8")})

    reloaders: list[Reloader] = []

    def make() -> Gateway:
        write = None if records_writer is None else records_writer.write
        recording = Recording(records_writer is not None, write, bool(plan.fallbacks.models))
        gateway = Gateway(plan, recording, None if decision_writer is None else decision_writer.write)
        if supervisor is not None:
            supervisor.start(gateway)
        reloaders.append(Reloader(gateway, file.read_again, file.signature if options.reload else None))
        reloaders[0].start()
        return gateway

    def stopped(gateway: Gateway) -> None:
        reloaders[0].close()
        if decision_writer is not None:
            decision_writer.close()
        if records_writer is not None:
            gateway.flush_records()
            click.echo(records_writer.finish(), err=True)

    if supervisor is None:
        hosts = web_server.expected_hosts(plan.settings, listeners[0])
        app = application(make, stopped)
        served = with_middleware(app, plan.settings, options.access_log)
        web_server.serve(served, listeners[0], plan.settings.drain_s + 1, tls, app.drain, hosts)
    else:
        web_server.serve(
            application(make, stopped), supervisor.http, _SCHEDULER_S, on_shutdown=supervisor.stop,
            take_stop=supervisor.take_stop,
        )  # fmt: skip
        if supervisor.failure:
            raise HeadwayError(supervisor.failure)


def _access_log_file(path: Path) -> Path:
    """The file, which can be written. HeadwayError if it cannot."""
    path = Path("/dev/stdout") if path == Path("-") else path.absolute()
    JsonLinesFile(path, is_shared=True).close()
    return path


def _where(served: ServedPool) -> str:
    """Where the replicas of a pool are, or how they are started."""
    if isinstance(served.start, Processes):
        first, last = served.start.ports
        return f"{served.num_initial} started here at first, on ports {first} to {last}"
    if isinstance(served.start, Kubernetes):
        return f"the pods of {served.start.kind} {served.start.namespace}/{served.start.name}"
    return ", ".join(served.endpoints)


def _show(chosen: Scenario, plan: ServingPlan, address: str, workers: int) -> None:
    click.echo(f"headway serves {chosen.spec.name} on {address}")
    if workers > 1:
        click.echo(f"  {workers} workers, and a scheduler for all of them")
    for served in plan.pools:
        pool = served.pool
        if not (pool.replicas or served.endpoints):
            continue  # a shape for later plans
        click.echo(f"  {pool.name}: {pool.model.name} on {pool.gpu.name}, {served.api}: {_where(served)}")
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
    if plan.settings.has_dashboard:
        click.echo(f"  dashboard {address}/dashboard")
