"""`headway measure`: the operators of a model timed on a local GPU; the work is in `calibration.measure`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from headway import catalog
from headway.cli.flags import assume_option, one_model
from headway.cli.output import ABOVE_0, PATH, no_progress_option, print_table, progress
from headway.core.errors import HeadwayError

UNTRIED = (
    "kernels of experts and of latent attention, FlashInfer's, and all-reduces in CUDA graphs were not tried on a GPU"
    " by Headway's developers, only on a CPU or with stand-ins: compare with served runs"
)


@click.command()
@click.option("--model", help="A model of the catalog, whose shapes are timed.")
@click.option("--model-config", type=PATH, help="A Hugging Face config.json or a GGUF file instead of --model.")
@assume_option
@click.option("--gpu", help="A GPU of the catalog. Default: the GPU that PyTorch reports.")
@click.option("--out", type=PATH, help="File to write or continue. Default: measured-GPU.csv.")
@click.option("--dry-run", is_flag=True, help="Only print the shapes and the expected time. Needs no PyTorch.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="cpu is for trials."
)
@click.option(
    "--minutes",
    type=ABOVE_0,
    help="Stop after this time; run the command again to continue.",
)
@no_progress_option
def command(gpu: str | None, out: Path | None, dry_run: bool, device: str, minutes: float | None, **flags: Any) -> None:
    """Time the operators of a model on a local GPU, for headway calibrate.

    The operators are matrix products by number of tokens, attention of prompts and of decoding sequences, experts, the
    sampler, copies, and, with several GPUs, all-reduces. Kernels of vLLM, FlashAttention and FlashInfer are timed where
    installed, else PyTorch's. The file is complete at any time; a stopped sweep continues where it stopped.
    """
    from headway.calibration.measure import plan, sweep

    model = one_model(flags["model"], flags["model_config"], bool(flags["assume"]))
    accelerator = None if gpu is None else catalog.gpu(gpu)
    if dry_run and accelerator is None and device == "cuda":
        raise HeadwayError("--dry-run does not detect a GPU: give --gpu, or --device cpu")
    kernels = None
    if not dry_run:
        from headway.calibration.measure.torch_kernels import TorchKernels

        kernels = TorchKernels(device)
        if accelerator is None and device == "cuda":
            accelerator = _catalog_gpu(kernels.gpu_name)
    num_gpus = kernels.num_gpus if kernels else (accelerator.gpus_per_node if accelerator and device == "cuda" else 1)
    on = plan.CPU if device == "cpu" or accelerator is None else replace(accelerator, gpus_per_node=num_gpus)
    operations, notes = plan.sweep(model, on)
    name = accelerator.name if accelerator is not None else "cpu"
    _print_plan(operations, notes, plan.seconds(operations, on), f"{model.name} on {name}")
    if kernels is None:
        return
    path = out or Path(f"measured-{name}.csv")
    limit_s = None if minutes is None else 60 * minutes
    try:
        with progress("measuring", wanted=not flags["no_progress"]) as report:
            swept = sweep.run(
                operations,
                kernels,
                time.perf_counter,
                path,
                gpu=name,
                software=kernels.software,
                limit_s=limit_s,
                progress=report,
                warm_up_s=lambda operation: plan.warm_up_s(operation, on),
            )
    finally:
        kernels.close()
    for note in kernels.notes:
        click.echo(f"* {note}")
    for reason, num in swept.failures.items():
        click.echo(f"* {num} could not be timed: {reason}")
    rest = f", {swept.num_left} left: the same command goes on" if swept.num_left else ""
    click.echo(f"{swept.num_timed} timed, {swept.num_known} were there{rest}; {path}")


def _catalog_gpu(name: str) -> Any:
    try:
        return catalog.gpu(name)
    except HeadwayError as error:
        raise HeadwayError(f"{error}; name it with --gpu") from None


def _print_plan(operations: Any, notes: list[str], seconds: float, title: str) -> None:
    counted = Counter((each.kind, each.dtype or None) for each in operations)
    print_table(("operator", "dtype", "shapes"), [(*key, num) for key, num in counted.items()], title)
    for note in [*notes, UNTRIED]:
        click.echo(f"* {note}")
    click.echo(f"{len(operations)} shapes, about {seconds / 60:.1f} minutes")
