"""`headway export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway import catalog, scenario
from headway.config.scenario import read
from headway.core.errors import HeadwayError
from headway.serving.export.kubernetes import ExportOptions, manifests
from headway.workload.atomic_file import write_text

NO_WORKLOAD = {"builtin": "chat"}
"""Stands in where a fleet file has none."""


@click.group()
def command() -> None:
    """Write a fleet as other systems want it."""


@command.command()
@click.argument("fleet", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder for the manifests.")
@click.option("--namespace", default="default", show_default=True)
@click.option("--image", default="", help="Of the engines. Without: of the version that was measured.")
@click.option("--gateway-image", default="headway:latest", show_default=True, help="One with headway[kubernetes].")
@click.option("--kind", type=click.Choice(["Deployment", "StatefulSet"]), help="Of the pools' workloads.")
@click.option("--gpu-product", multiple=True, metavar="GPU=LABEL", help="Node label, if not NVIDIA's name. Repeatable.")
@click.option("--token-secret", default="", help="A Secret whose key `token` is for Hugging Face.")
@click.option("--kv-connector", default="NixlConnector", show_default=True, help="Of combos, to hand KV caches over.")
@click.option("--autoscale", is_flag=True, help="A HorizontalPodAutoscaler for pools with max_replicas.")
def kubernetes(fleet: Path, out: Path, gpu_product: tuple[str, ...], kv_connector: str, **given: Any) -> None:
    """Write manifests of vLLM or SGLang and of the gateway for a FLEET: a plan, a fleet file or a scenario.

    Each pool, and each side of a combo, becomes a workload and a Service. The gateway gets its fleet file as a
    ConfigMap: pods of a StatefulSet are its endpoints; those of a Deployment it asks the cluster for, and where
    `policies` has `scaling`, it says how many there are. Apply them with `kubectl apply -k DIR`.
    """
    data, places = read(fleet)
    data.setdefault("workload", NO_WORKLOAD)
    chosen = scenario.assemble(data, places, fleet.parent)
    options = ExportOptions(**given, products=dict(map(_product, gpu_product)), connector=kv_connector)
    for name, text in manifests(chosen, options).items():
        write_text(out / name, text)
        click.echo(str(out / name))


def _product(said: str) -> tuple[str, str]:
    gpu, marker, label = said.partition("=")
    if not marker or not label:
        raise HeadwayError(f"--gpu-product {said}: expected GPU=LABEL, such as h100=NVIDIA-H100-80GB-HBM3")
    return catalog.gpu(gpu).name, label
