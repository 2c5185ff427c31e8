"""`headway epp`: the endpoint picker of Envoy's ext_proc protocol; the work is in `gateway.picker`."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from headway.cli.live_run import (
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
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.server import web_server
from headway.gateway.termination import exit_at_sigterm
from headway.serving import picker as picking
from headway.serving.reload import FleetFile

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway
    from headway.gateway.picker.server import Picker


_NUM_CLIENTS = 256
"""Connections of Envoys, each with many requests, and of metrics readers."""


class PickerOptions(LiveOptions, frozen=True):
    """The options of a live run, and the HTTP port."""

    http_port: int


@click.command()
@click.argument("fleet", type=PATH)
@fleet_options
@click.option("--port", type=PORT, default=9002, show_default=True, help="For Envoy, by gRPC. 0: any free port.")
@click.option(
    "--http-port",
    type=PORT,
    default=9090,
    show_default=True,
    help="For metrics, health, the dashboard and administrators, without TLS. 0: any free port.",
)
@live_options
def command(fleet: Path, variant: str | None, is_emulated: bool, emulate_with: str, **flags: Any) -> None:
    """Choose the endpoints of the FLEET file's engines for Envoy.

    Envoy's ext_proc filter sends each request's headers and body to the picker, which answers with the address of the
    engine that should serve it: the endpoint picker protocol of the Kubernetes Gateway API Inference Extension. FLEET,
    policies, records and metrics are as in `headway serve`.
    """
    require_installed()
    picking.check_installed()
    _serve(read_fleet(fleet, variant, is_emulated, emulate_with, picking.check), PickerOptions(**flags))


def _serve(file: FleetFile, options: PickerOptions) -> None:
    """Pick until a signal, in a process that is restarted if it is killed."""
    plan, tls = file.plan, options.tls()
    plan = replace(plan, settings=replace(plan.settings, hosts=(*plan.settings.hosts, options.host)))
    options.log.apply()
    exit_at_sigterm()
    allow_clients(plan, _NUM_CLIENTS, 1)
    reserved = web_server.reserve(options.host, options.port)
    listener = web_server.listen(options.host, options.http_port)
    where = web_server.address(reserved)
    click.echo(f"headway picks for {file.scenario.spec.name} on {'grpc' if tls is None else 'grpcs'}://{where}")
    show_fleet(file.scenario, plan)
    click.echo(f"  metrics, health and administration on http://{web_server.address(listener)}")

    def run(plan: ServingPlan, is_restart: bool) -> None:
        _run(plan, options, file, where, listener, tls, is_restart)

    run_restarted(run, file, plan, options.restarts)


def _run(
    plan: ServingPlan,
    options: PickerOptions,
    file: FleetFile,
    where: str,
    listener: socket.socket,
    tls: web_server.Tls | None,
    is_restart: bool,
) -> None:
    """Serve the endpoint picker until a signal ends it."""
    from headway.gateway.picker.server import Picker
    from headway.gateway.server.app import application

    live = LiveRun(plan, file, options, is_restart)
    pickers: list[Picker] = []

    def beside(gateway: Gateway) -> AbstractAsyncContextManager[None]:
        pickers.append(Picker(gateway, tls))
        pickers[0].listen(where)
        return pickers[0].running()

    async def stop() -> None:
        if pickers:
            await pickers[0].stop()

    hosts = web_server.expected_hosts(plan.settings, listener)
    app = application(live.make, live.stopped, beside)
    web_server.serve(app, listener, plan.settings.drain_s + 1, None, stop, hosts)
