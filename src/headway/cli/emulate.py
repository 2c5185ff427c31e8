"""`headway emulate`."""

from __future__ import annotations

import socket

import click

from headway import webserver
from headway.catalog import engine, gpu, model
from headway.core.fleet import Parallel, Pool
from headway.perf import memory
from headway.policies.ordering.fcfs import Fcfs
from headway.policies.ordering.priority import Priority

_positive = click.IntRange(min=1)


@click.command()
@click.option("--model", "model_name", required=True, help="A name that headway catalog models lists.")
@click.option("--gpu", "gpu_name", required=True, help="A name that headway catalog gpus lists.")
@click.option("--tp", type=_positive, default=1, help="GPUs over which the model is split.")
@click.option("--engine", "engine_name", default="vllm-v1", show_default=True, help="Whose batching and settings.")
@click.option("--max-num-seqs", type=_positive, help="Most requests that run at a time.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, help="2: twice as fast.")
@click.option("--output-tokens", type=_positive, default=128, show_default=True, help="Of a chat's answer.")
@click.option("--reasoning-tokens", type=click.IntRange(min=0), default=0, help="With which a chat's answer begins.")
@click.option("--confidence", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Of each token, if asked.")
@click.option(
    "--kv-gbps",
    type=click.FloatRange(min=0, min_open=True),
    default=100.0,
    show_default=True,
    help="Gbit/s at which KV caches are fetched from other engines.",
)
@click.option(
    "--kv-keep-s",
    type=click.FloatRange(min=0),
    default=480.0,
    show_default=True,
    help="How long a KV cache is kept for another engine.",
)
@click.option(
    "--kv-load-failure-policy",
    type=click.Choice(["recompute", "fail"]),
    default="fail",
    show_default=True,
    help="What becomes of a request whose KV cache is gone.",
)
@click.option("--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs", show_default=True)
def command(
    model_name: str, gpu_name: str, tp: int, engine_name: str, max_num_seqs: int | None, port: int, host: str,
    speed: float, output_tokens: int, reasoning_tokens: int, confidence: float, kv_gbps: float, kv_keep_s: float,
    kv_load_failure_policy: str, scheduling_policy: str,
) -> None:  # fmt: skip
    """Pretend to be an engine: vLLM's HTTP surface, in real time, without a GPU.

    It batches as the simulator does and takes as long as a step is predicted to take; what it says are made-up words.
    """
    try:
        from headway.emulator.api import Config, application
        from headway.emulator.caches import Link
        from headway.emulator.engine import Engine
    except ModuleNotFoundError as error:
        raise webserver.needed(str(error.name)) from None
    from msgspec.structs import replace

    profile = engine(engine_name)
    if max_num_seqs is not None:
        profile = replace(profile, max_num_seqs=max_num_seqs)
    pool = Pool("emulated", model(model_name), gpu(gpu_name), profile, Parallel(tp))
    memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel)
    ordering = Fcfs() if scheduling_policy == "fcfs" else Priority(preemptive=False)
    link = Link(kv_gbps * 1e9 / 8, kv_keep_s, kv_load_failure_policy == "recompute")
    made = webserver.listen(host, port)
    there = socket.gethostname() if host in ("0.0.0.0", "::") else host
    at = (there, int(made.getsockname()[1]))
    config = Config(pool.model.name, output_tokens, min(reasoning_tokens, output_tokens), confidence, at)
    click.echo(f"emulates {profile.name} with {pool.model.name} on {tp} x {pool.gpu.name}")
    click.echo(f"listens on http://{webserver.address(made)}")
    webserver.serve(application(lambda: Engine(pool, ordering, speed, link), config), made, shutdown_s=1)
