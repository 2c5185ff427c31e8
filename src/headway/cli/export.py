"""`headway export`: a fleet as another system's manifests; the work is in `serving.export`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from headway import catalog, scenario
from headway.cli.output import PATH, SubCommands
from headway.config.scenario import Scenario, read
from headway.core.errors import HeadwayError
from headway.serving.export.kubernetes import (
    DEPLOYED_ENGINE,
    SECRET,
    ExportOptions,
    chart_values,
    deployed_models,
    manifests,
    secrets,
    with_engines,
)
from headway.workload.atomic_file import write_text

NO_WORKLOAD = {"builtin": "chat"}
"""The workload of a fleet file without one."""
_OPTIONS = (
    click.option(
        "--namespace", default="default", show_default=True, help="Namespace of all manifests; it has to exist."
    ),
    click.option(
        "--image", default="", help="Image of the engines of pools without one. Default: that of the measured version."
    ),
    click.option(
        "--gateway-image",
        default="headway:latest",
        show_default=True,
        help="Image of the gateway, with headway[kubernetes].",
    ),
    click.option("--kind", type=click.Choice(["Deployment", "StatefulSet"]), help="Kind of the pools' workloads."),
    click.option(
        "--gpu-product",
        multiple=True,
        metavar="GPU=LABEL",
        help="Node label of a GPU, if it is not NVIDIA's name. Repeatable.",
    ),
    click.option("--token-secret", default="", help="A Secret whose key `token` is a Hugging Face token."),
    click.option(
        "--kv-connector", default="NixlConnector", show_default=True, help="Connector for KV transfers within combos."
    ),
    click.option("--autoscale", is_flag=True, help="Write a HorizontalPodAutoscaler for pools with max_replicas."),
    click.option(
        "--inference-pool",
        is_flag=True,
        help="Write an InferencePool for each pool, and headway epp in place of the gateway.",
    ),
)


def _fleet_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options for settings that a fleet file lacks, shared by the Kubernetes formats."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group(cls=SubCommands)
def command() -> None:
    """Write a fleet in the format of another system."""


@command.command()
@click.argument("fleet", type=PATH)
@click.option("-o", "--out", type=PATH, required=True, help="File for the values.")
@_fleet_options
def helm(fleet: Path, out: Path, **flags: Any) -> None:
    """Write values of Headway's Helm chart for a FLEET: a plan, a fleet file or a scenario.

    The chart creates a workload and a Service per pool, the gateway with its fleet file, and the objects that its other
    values request: volumes, monitors, network policies. The objects are the same as those of `headway export
    kubernetes`.
    """
    chosen, options, without_engine = _chosen(fleet, flags)
    made = chart_values(chosen, options)
    _tell(chosen, options, without_engine)
    write_text(out, made)
    click.echo(str(out))
    created = "" if options.namespace == "default" else f" -n {options.namespace}"
    click.echo(f"then: helm upgrade --install headway CHART{created} -f {out}", err=True)


@command.command()
@click.argument("fleet", type=PATH)
@click.option("-o", "--out", type=PATH, required=True, help="Folder for the manifests.")
@_fleet_options
def kubernetes(fleet: Path, out: Path, **flags: Any) -> None:
    """Write manifests of vLLM or SGLang and of the gateway for a FLEET: a plan, a fleet file or a scenario.

    Each pool, and each role of a combo, becomes a workload and a Service. The gateway gets its fleet file as a
    ConfigMap. The fleet file lists the pods of a StatefulSet as endpoints; the gateway finds the pods of a Deployment
    in the cluster, and sets their number if `policies` has `scaling`. With --inference-pool, a gateway of the Gateway
    API serves the pools, and headway epp picks their endpoints. Apply them with `kubectl apply -k DIR`.
    """
    chosen, options, without_engine = _chosen(fleet, flags)
    made = manifests(chosen, options)
    _tell(chosen, options, without_engine)
    for name, text in made.items():
        write_text(out / name, text)
        click.echo(str(out / name))


def _chosen(fleet: Path, flags: dict[str, Any]) -> tuple[Scenario, ExportOptions, list[str]]:
    """The fleet, the options, and the names of the pools that use the default engine of deployments."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", flags["namespace"]):
        raise HeadwayError(f"--namespace {flags['namespace']!r}: expected small letters, digits and dashes, 63 at most")
    data, places = read(fleet)
    data.setdefault("workload", NO_WORKLOAD)
    data, without_engine = with_engines(data)
    chosen = scenario.assemble(data, places, fleet.parent)
    products, connector = dict(map(_product, flags.pop("gpu_product"))), flags.pop("kv_connector")
    return chosen, ExportOptions(**flags, products=products, connector=connector), without_engine


def _tell(chosen: Scenario, options: ExportOptions, without_engine: Sequence[str]) -> None:
    """Print what is deployed, and what must exist first."""
    told = [f"{name}: deployed with {DEPLOYED_ENGINE}, as it has no `engine`" for name in without_engine]
    told += [*deployed_models(chosen), *(f"before: kubectl {line}" for line in _needed(options, secrets(chosen)))]
    for line in told:
        click.echo(line, err=True)


def _needed(options: ExportOptions, keys: Sequence[str]) -> Iterator[str]:
    """Arguments of kubectl that create objects to which the manifests refer."""
    create = f"-n {options.namespace} create secret generic"
    if options.namespace != "default":
        yield f"create namespace {options.namespace}"
    if options.token_secret:
        yield f"{create} {options.token_secret} --from-literal=token=..."
    if keys:
        yield f"{create} {SECRET} {' '.join(f'--from-literal={name}=...' for name in keys)}"


def _product(text: str) -> tuple[str, str]:
    gpu, marker, label = text.partition("=")
    if not marker or not label:
        raise HeadwayError(f"--gpu-product {text}: expected GPU=LABEL, such as h100=NVIDIA-H100-80GB-HBM3")
    return catalog.gpu(gpu).name, label
