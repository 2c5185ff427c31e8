"""`headway serve`: the gateway, in one process or with workers; the work is in `gateway`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from headway.cli.flags import scenario_file
from headway.cli.live_run import (
    Companion,
    LiveOptions,
    LiveRun,
    allow_clients,
    fleet_options,
    live_options,
    read_fleet,
    require_installed,
    run_restarted,
    show_fleet,
)
from headway.cli.output import PATH, PORT
from headway.core.errors import HeadwayError
from headway.gateway.server import web_server
from headway.gateway.termination import exit_at_sigterm
from headway.records.json_lines import JsonLinesFile
from headway.serving.autopilot import Autopilot
from headway.serving.reload import FleetFile
from headway.serving.shadow_comparison import ShadowComparison

if TYPE_CHECKING:
    from headway.gateway.fleet.specs import ServingPlan
    from headway.gateway.gateway import Gateway

_SCHEDULER_S = 1.0
"""Shutdown time of the scheduler, whose workers have ended by then."""


class ServeOptions(LiveOptions, frozen=True):
    """The live options, and those for workers and requests."""

    workers: int
    access_log: Path | None
    shadow: Path | None = None
    autopilot: bool = False


@click.command()
@click.argument("fleet", required=False, type=PATH)
@click.option("--builtin", "preset", help="A scenario that comes with Headway, instead of a file: headway.")
@fleet_options
@click.option("--port", type=PORT, default=8080, show_default=True, help="0: any free port.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Worker processes that relay requests and answers. With several, one more process schedules for all of them.",
)
@live_options
@click.option(
    "--shadow",
    type=PATH,
    metavar="CANDIDATE",
    help="Have the policies of this fleet file decide beside the real ones, without effect, and compare.",
)
@click.option(
    "--autopilot",
    is_flag=True,
    help="Try the changes that the file's section autopilot allows, and keep or take back each by what it does.",
)
@click.option("--access-log", type=PATH, help="Write one line of JSON for each request to this file; - for stdout.")
def command(
    fleet: Path | None, preset: str | None, variant: str | None, is_emulated: bool, emulate_with: str, **flags: Any
) -> None:
    """Serve the engines of the FLEET file as one OpenAI-compatible endpoint.

    FLEET is a scenario whose pools list the addresses of their replicas (`endpoints`). Its policies are those that
    `headway simulate` runs. With --emulated, any scenario is served, by emulated engines without GPUs.
    """
    require_installed()
    file = scenario_file(fleet, preset)
    if file is None:
        raise HeadwayError("FLEET is missing; expected a file, or --builtin")
    _serve(read_fleet(file, variant, is_emulated, emulate_with), ServeOptions(**flags))


def _serve(file: FleetFile, options: ServeOptions) -> None:
    """Serve until a signal, in a process that is restarted if it is killed."""
    host, port, workers, tls = options.host, options.port, options.workers, options.tls()
    plan = file.plan
    plan = replace(plan, settings=replace(plan.settings, hosts=(*plan.settings.hosts, host)))
    if options.autopilot:
        _check_autopilot(file, options)
    if options.shadow is not None:
        shadow, notes = file.candidate(options.shadow)
        plan = replace(plan, shadow=shadow)
    options.log.apply()
    exit_at_sigterm()
    allow_clients(plan, _num_clients(plan), 2)
    if options.access_log is not None:
        options = replace(options, access_log=_access_log_file(options.access_log))
    listeners = [web_server.listen(host, port)] if workers == 1 else web_server.listen_shared(host, port, workers)
    where = f"{'http' if tls is None else 'https'}://{web_server.address(listeners[0])}"
    click.echo(f"headway serves {file.scenario.spec.name} on {where}")
    if workers > 1:
        click.echo(f"  {workers} workers, and a scheduler for all of them")
    show_fleet(file.scenario, plan)
    if plan.shadow is not None:
        click.echo(f"  beside, without effect: {', '.join(plan.shadow.kinds)} of {plan.shadow.name}")
        for note in notes:
            click.echo(f"  {note}")
    if plan.settings.has_dashboard:
        click.echo(f"  dashboard {where}/dashboard")

    def run(plan: ServingPlan, is_restart: bool) -> None:
        _run(plan, options, file, listeners, tls, is_restart)

    run_restarted(run, file, plan, options.restarts)


def _check_autopilot(file: FleetFile, options: ServeOptions) -> None:
    """Raises HeadwayError if the autopilot cannot work with these options."""
    if file.scenario.spec.autopilot is None:
        raise HeadwayError(
            f"--autopilot: {file.path} has no section autopilot; expected autopilot: {{allow: [routing]}}"
        )
    if options.records is None:
        raise HeadwayError("--autopilot: needs --records, from which it chooses changes")
    if file.plan.settings.peers is not None:
        raise HeadwayError("--autopilot: several gateways of one fleet (gateway.peers) would each change it")


def _companions(gateway: Gateway, file: FleetFile, options: ServeOptions) -> list[Companion]:
    """Tasks that run in parallel to the gateway and use its records."""
    found: list[Companion] = []
    if options.records is not None and options.autopilot:
        found.append(Autopilot(gateway, file, options.records))
    if options.records is not None and options.shadow is not None:
        found.append(ShadowComparison(gateway, file.path, options.shadow, options.records))
    return found


def _num_clients(plan: ServingPlan) -> int:
    """Clients whose requests may run at engines or be held by the gateway at a time."""
    running = sum(each.pool.engine.max_num_seqs * max(len(each.endpoints), each.num_initial) for each in plan.pools)
    return running + plan.settings.max_held * len(plan.names)


def _run(
    plan: ServingPlan,
    options: ServeOptions,
    file: FleetFile,
    listeners: list[socket.socket],
    tls: web_server.Tls | None,
    is_restart: bool,
) -> None:
    """Serve at these sockets until a signal."""
    from headway.gateway.server.app import application
    from headway.gateway.server.middleware import with_middleware
    from headway.gateway.workers.supervisor import WorkerSupervisor

    supervisor = None
    if options.workers > 1:
        supervisor = WorkerSupervisor(listeners, tls, options.log, options.access_log)
    live = LiveRun(plan, file, options, is_restart, lambda gateway: _companions(gateway, file, options))

    def make() -> Gateway:
        gateway = live.make()
        if supervisor is not None:
            supervisor.start(gateway)
        return gateway

    if supervisor is None:
        hosts = web_server.expected_hosts(plan.settings, listeners[0])
        app = application(make, live.stopped)
        served = with_middleware(app, plan.settings, options.access_log)
        web_server.serve(
            served,
            listeners[0],
            plan.settings.drain_s + 1,
            tls,
            app.drain,
            hosts,
            relays=True,
            count_refused=app.completions.count_refused,
        )
    else:
        web_server.serve(
            application(make, live.stopped),
            supervisor.http,
            _SCHEDULER_S,
            on_shutdown=supervisor.stop,
            take_stop=supervisor.take_stop,
        )
        if supervisor.failure:
            raise HeadwayError(supervisor.failure)


def _access_log_file(path: Path) -> Path:
    """The access log's file. Raises HeadwayError if it cannot be written."""
    path = Path("/dev/stdout") if path == Path("-") else path.absolute()
    JsonLinesFile(path, is_shared=True).close()
    return path
