"""`headway catalog`: tables of GPUs, models and engines, and the memory of a model on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from headway import catalog
from headway.catalog.errors import LEVEL, METRICS, Coverage, coverage, error_file
from headway.cli.flags import assume_option
from headway.cli.output import ABOVE_0, PATH, POSITIVE, SubCommands, json_option, print_json, print_table
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf.memory import plan
from headway.perf.params import active_params, num_params, state_bytes

GIB = 2**30


def _gpu_row(gpu: Gpu) -> dict[str, object]:
    peaks = {dtype: gpu.peak_flops.get(dtype) for dtype in ("bf16", "fp8")}
    return {
        "GPU": gpu.name,
        "memory GiB": round(gpu.memory_bytes / GIB),
        "TB/s": gpu.bandwidth_bytes_per_s / 1e12,
        **{f"{dtype} TFLOP/s": None if peak is None else peak / 1e12 for dtype, peak in peaks.items()},
        "link GB/s": gpu.link_bytes_per_s / 1e9,
        "W": gpu.watts,
        "$/h": gpu.usd_per_hour,
    }


def _model_row(model: Model) -> dict[str, object]:
    return {
        "model": model.name,
        "10^9 parameters": num_params(model) / 1e9,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "KV heads": model.num_kv_heads,
        "context": model.max_context_tokens,
        "weights": model.dtype,
    }


def _engine_row(engine: Engine) -> dict[str, object]:
    return {
        "engine": engine.name,
        "batching": engine.batching,
        "sequences": engine.max_num_seqs,
        "token budget": engine.max_num_batched_tokens,
        "prefix cache": engine.prefix_caching,
        "orderings at the replica": "any" if engine.orderings is None else ", ".join(engine.orderings),
    }


class Listing(NamedTuple):
    """A list of the catalog."""

    entries: Callable[[], Sequence[Any]]
    find: Callable[[str], Any]
    row: Callable[[Any], dict[str, object]]


KINDS = {
    "gpus": Listing(catalog.gpus, catalog.gpu, _gpu_row),
    "models": Listing(catalog.models, catalog.find_model, _model_row),
    "engines": Listing(catalog.engines, catalog.engine, _engine_row),
}


@click.group(cls=SubCommands, invoke_without_command=True)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List GPUs, models and engines, or show one of them; plan the memory of a model on a GPU."""
    if ctx.invoked_subcommand is not None:
        return
    if as_json:
        print_json({name: kind.entries() for name, kind in KINDS.items()})
        return
    for kind in KINDS.values():
        _print(kind)
        click.echo()


def _print(kind: Listing) -> None:
    rows = [kind.row(entry) for entry in kind.entries()]
    print_table(list(rows[0]), [list(row.values()) for row in rows])


def _add(name: str, kind: Listing) -> None:
    @command.command(name, help=f"List {name}, or show all values of one.")
    @click.argument("name", required=False)
    @json_option
    def show(name: str | None, as_json: bool) -> None:
        entries = kind.entries() if name is None else kind.find(name)
        if as_json:
            print_json(entries)
        elif name is None:
            _print(kind)
        else:
            print_table(("key", "value"), msgspec.to_builtins(entries).items())


for _name, _kind in KINDS.items():
    _add(_name, _kind)


@command.command("coefficients")
@click.option("--gpu", required=True, help="A GPU of the catalog.")
@click.option("--engine", default="vllm", show_default=True, help="An engine profile of the catalog.")
@click.option("--version", help="The engine's version. Default: the profile's.")
@json_option
def coefficients(gpu: str, engine: str, version: str | None, as_json: bool) -> None:
    """Print the measurements behind the step times of an engine on a GPU."""
    profile, accelerator = catalog.engine(engine, version or ""), catalog.gpu(gpu)
    used = catalog.coefficients(accelerator.name, profile.name, profile.version)
    rows = {
        "GPU": accelerator.name,
        "engine": profile.name,
        "version": profile.version or None,
        "measured_version": used.overhead.version or None,
        "calibrated": used.calibrated,
        "estimated": list(used.estimated),
        "kernels": used.kernels.source,
        "overhead": used.overhead.source,
        "experts": used.experts.source if used.experts is not None else None,
    }
    if as_json:
        print_json(rows)
    else:
        print_table(("key", "value"), rows.items())


@command.command("errors")
@json_option
def errors(as_json: bool) -> None:
    """Print the errors of predictions against measured runs, and how often runs were within their bands.

    Runs are classed by how well the GPU and the engine's version were measured, by weights and by load. A band comes
    from the errors of the runs of other models, or of all other runs; 90% of the runs should be within it. Where a
    class (weights and load) has fewer than 9 runs or 3 models, the band contains all runs of all models.
    """
    file = error_file()
    by_model, by_run = coverage(file.runs, "model"), coverage(file.runs, "run")
    if as_json:
        found = {"level": LEVEL, "coverage": by_model, "coverage_by_run": by_run}
        print_json({**found, **msgspec.to_builtins(file)})
        return
    for left_out, rows in (("models", by_model), ("runs", by_run)):
        title = f"Measured runs within bands of a nominal {LEVEL:.0%} from other {left_out}; and the bands"
        print_table(
            ["class", "runs", "models", "own band", "all", *METRICS], [_coverage_row(each) for each in rows], title
        )
    click.echo(file.source)


def _coverage_row(one: Coverage) -> list[object]:
    shares = (f"{one.covered[m]:.0%} of ±{one.width[m]:.0%}" if m in one.covered else "-" for m in METRICS)
    return [one.of.label, one.num_runs, one.num_models, one.num_own_band, f"{one.covered_all:.0%}", *shares]


@command.command("memory")
@click.option("--model", help="A model of the catalog.")
@click.option("--model-config", type=PATH, help="A Hugging Face config.json or a GGUF file instead of --model.")
@click.option("--gpu", required=True, help="A GPU of the catalog.")
@click.option("--tp", type=POSITIVE, default=1, show_default=True, help="Tensor parallel ranks.")
@click.option("--pp", type=POSITIVE, default=1, show_default=True, help="Pipeline stages.")
@click.option("--engine", default="simulated", show_default=True, help="An engine profile of the catalog.")
@click.option("--sequence-tokens", type=ABOVE_0, help="Mean length of sequences, of which windowed layers keep a part.")
@assume_option
@json_option
def memory(
    model: str | None,
    model_config: Path | None,
    gpu: str,
    tp: int,
    pp: int,
    engine: str,
    sequence_tokens: float | None,
    assume: bool,
    as_json: bool,
) -> None:
    """Plan the GPU memory of one replica: weights, activations, and how many tokens the KV cache holds."""
    if model_config is not None and model is None:
        shape = catalog.model_from_config(model_config, assume=assume)
    elif model is not None and model_config is None:
        shape = catalog.find_model(model, assume=assume)
    else:
        raise HeadwayError("--model, --model-config: expected one of them")
    accelerator = catalog.gpu(gpu)
    profile = catalog.engine_on(catalog.engine(engine), accelerator)
    planned = plan(shape, accelerator, profile, Parallel(tp=tp, pp=pp), sequence_tokens)
    if as_json:
        print_json(planned)
        return
    print_table(
        (f"{shape.name} on {tp * pp} x {gpu}, {engine}", ""),
        [
            ("weights, GiB a GPU", f"{planned.weights_bytes / GIB:.1f}"),
            ("activations and runtime, GiB a GPU", f"{planned.activation_bytes / GIB:.1f}"),
            ("KV cache, KiB a token and GPU", f"{planned.kv_bytes_per_token_gpu / 1024:.1f}"),
            ("KV cache of the replica, tokens", f"{planned.kv_capacity_tokens:,}"),
            ("parameters, 10^9", f"{num_params(shape) / 1e9:.2f}"),
            ("parameters for one token, 10^9", f"{active_params(shape) / 1e9:.2f}"),
            *([("state of a sequence, MiB", f"{states / 2**20:.1f}")] if (states := state_bytes(shape)) else []),
        ],
    )
    for note in shape.unmodelled:
        click.echo(f"* {note}")
