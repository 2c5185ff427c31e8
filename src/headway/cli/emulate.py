"""`headway emulate`: an engine without a GPU behind an HTTP API; the work is in `emulator`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec
from msgspec.structs import replace

from headway.catalog import engine, engine_on, gpu
from headway.cli.flags import assume_option, one_model
from headway.cli.output import ABOVE_0, PATH, PORT, POSITIVE, SECONDS, SECONDS_ABOVE_0
from headway.core.duration import seconds
from headway.core.errors import HeadwayError
from headway.core.fleet import LoraAdapter, LoraConfig, Parallel, Pool
from headway.core.policy import Ordering
from headway.gateway.server import web_server
from headway.gateway.termination import exit_at_sigterm
from headway.gateway.upstream.dialects import api_of
from headway.perf import memory
from headway.perf.lora import slots_bytes
from headway.policies import resolve
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.tiers import PriorityOrdering
from headway.sim.replica_resources import Line

if TYPE_CHECKING:
    from headway.emulator.kv_events import KvEventsConfig
    from headway.emulator.vllm import VllmSurface


class _Confidence(click.ParamType[tuple[float, float]]):
    """A probability, `0.7`, or a range, `0.5:0.9`."""

    name = "confidence"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        least, colon, most = str(value).partition(":")
        with suppress(ValueError):
            bounds = float(least), float(most if colon else least)
            if 0 <= bounds[0] <= bounds[1] <= 1 and bounds[1] > 0:
                return bounds
        self.fail(f"{value!r}; expected a probability above 0, or two as in 0.5:0.9", param, ctx)


class _Throttle(click.ParamType[tuple[float, float]]):
    """A start time and a factor, such as `60:2`."""

    name = "seconds:factor"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        at_s, _, factor = str(value).partition(":")
        with suppress(ValueError, HeadwayError):
            found = seconds(at_s), float(factor)
            if 0 < found[1] < inf:
                return found
        self.fail(f"{value!r}; expected seconds and a factor, as in 60:2", param, ctx)


@click.command()
@click.option("--scenario", type=PATH, help="A scenario with the pool to emulate, instead of --model.")
@click.option("--pool", "pool_name", help="Name of the pool in the scenario.")
@click.option("--model", "model_name", help="A model of the catalog, of a local folder, or of the hub's cache.")
@click.option("--model-config", type=PATH, help="A Hugging Face config.json instead, its folder, or a GGUF file.")
@assume_option
@click.option("--gpu", "gpu_name", help="A GPU of the catalog.")
@click.option("--tp", type=POSITIVE, help="Tensor parallel ranks.")
@click.option("--engine", "engine_name", help="An engine profile of the catalog. Default: vllm, the newest measured.")
@click.option("--max-num-seqs", type=POSITIVE, help="Most requests that run at once.")
@click.option("--port", type=PORT, default=8000, show_default=True, help="0: any free port.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--speed", type=ABOVE_0, default=1.0, help="2 runs twice as fast as real time.")
@click.option(
    "--throttle",
    type=_Throttle(),
    help="60:2: from 60 s after the start on, iterations take twice as long, as on a throttled GPU.",
)
@click.option("--output-tokens", type=POSITIVE, default=128, show_default=True, help="Length of an answer.")
@click.option(
    "--reasoning-tokens", type=click.IntRange(min=0), default=0, help="Reasoning tokens at the begin of an answer."
)
@click.option(
    "--confidence",
    type=_Confidence(),
    default="1",
    show_default=True,
    help="Probability that logprobs report for each token. LOW:HIGH: another one for each prompt.",
)
@click.option(
    "--kv-gbps",
    type=ABOVE_0,
    help="Gbit/s of KV transfers from other engines. Default: the pool's, or 100.",
)
@click.option(
    "--kv-keep-s",
    type=SECONDS,
    default=480.0,
    show_default=True,
    help="Time that a KV cache is kept for another engine.",
)
@click.option(
    "--kv-load-failure-policy",
    type=click.Choice(["recompute", "fail"]),
    default="fail",
    show_default=True,
    help="What to do with a request whose KV cache is gone.",
)
@click.option("--disaggregation-mode", type=click.Choice(["prefill", "decode"]), help="SGLang only: serve one phase.")
@click.option(
    "--disaggregation-bootstrap-port",
    type=PORT,
    help="SGLang only: port of a prefill engine for KV caches. Default: 8998, or with --scenario any free port (0).",
)
@click.option(
    "--disaggregation-timeout-s",
    type=SECONDS_ABOVE_0,
    default=300.0,
    show_default=True,
    help="SGLang only: time that one half of a request waits for the other.",
)
@click.option("--lora", "loras", multiple=True, help="Name of a LoRA adapter of the engine; may be repeated.")
@click.option("--max-loras", type=POSITIVE, help="Slots for LoRA adapters. Default: the pool's, or 1 with --lora.")
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=None,
    help="Prompts share the KV of their leading blocks. Default: as the engine's profile says.",
)
@click.option(
    "--kv-events-config",
    help="JSON as vLLM's: publish what the prefix cache stores and removes. Example: "
    '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}',
)
@click.option(
    "--enable-prompt-tokens-details",
    "--enable-cache-report",
    "reports_cached_tokens",
    is_flag=True,
    help="Answers' usage says how many of the prompt's tokens were in the prefix cache.",
)
@click.option("--ordering", help="The ordering of the queue, as vLLM with headway.vllm.Scheduler runs it: pascal.")
@click.option("--scheduling-policy", type=click.Choice(["fcfs", "priority"]), default="fcfs", show_default=True)
def command(
    scenario: Path | None, host: str, port: int, speed: float, throttle: tuple[float, float] | None, **flags: Any
) -> None:
    """Emulate an engine with vLLM's HTTP API (with --engine sglang: SGLang's), in real time, without a GPU.

    It batches as the simulator does, and each step takes its predicted time. Answers are made-up words.
    """
    try:
        from headway.emulator.completion import SurfaceConfig
        from headway.emulator.engine import EmulatedEngine
        from headway.emulator.kv_exchange import KvLink
        from headway.emulator.sglang import BOOTSTRAP_PORT, as_sglang
        from headway.emulator.vllm import application
    except ModuleNotFoundError as error:
        raise web_server.not_installed(str(error.name)) from None
    pool, line, events = _pool(scenario, flags)
    orders, ordering_name = _ordering(pool, flags["ordering"], flags["scheduling_policy"])
    own_bytes_per_s = pool.network_bytes_per_s or KvLink().bytes_per_s
    bytes_per_s = own_bytes_per_s if flags["kv_gbps"] is None else flags["kv_gbps"] * 1e9 / 8
    link = KvLink(bytes_per_s, flags["kv_keep_s"], flags["kv_load_failure_policy"] == "recompute")
    exit_at_sigterm()
    listener = web_server.listen(host, port)
    own_host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    address = (own_host, int(listener.getsockname()[1]))
    config = SurfaceConfig(
        pool.model.name,
        flags["output_tokens"],
        min(flags["reasoning_tokens"], flags["output_tokens"]),
        flags["confidence"],
        address,
        ordering=ordering_name,
        reports_cached_tokens=flags["reports_cached_tokens"],
    )
    usual_port, given_port = BOOTSTRAP_PORT if scenario is None else 0, flags["disaggregation_bootstrap_port"]
    bootstrap_port = usual_port if given_port is None else given_port
    surface = _surface(pool, flags["disaggregation_mode"], host, bootstrap_port, flags["disaggregation_timeout_s"])
    click.echo(f"emulates {pool.engine.name} with {pool.model.name} on {pool.parallel.num_gpus} x {pool.gpu.name}")
    click.echo(f"listens on http://{web_server.address(listener)}")
    web_server.serve(
        application(
            lambda: EmulatedEngine(pool, orders, speed, link, line, events, throttle),
            as_sglang(config) if _is_sglang(pool) else config,
            surface,
        ),
        listener,
        shutdown_s=1,
    )


def _pool(scenario: Path | None, flags: Mapping[str, Any]) -> tuple[Pool, Line | None, KvEventsConfig | None]:
    """The pool of which one engine is emulated, with the settings of the options. HeadwayError if it does not fit."""
    of_pool = {
        "--model": flags["model_name"],
        "--model-config": flags["model_config"],
        "--assume": flags["assume"],
        "--gpu": flags["gpu_name"],
        "--tp": flags["tp"],
        "--engine": flags["engine_name"],
    }
    named = flags["pool_name"]
    pool, line = _of_flags(of_pool, named) if scenario is None else _of_scenario(scenario, named, of_pool)
    events = None if flags["kv_events_config"] is None else _kv_events(flags["kv_events_config"])
    prefix_caching = flags["enable_prefix_caching"]
    if prefix_caching is None and events is not None and events.is_on(_is_sglang(pool)):
        prefix_caching = True
    pool = _with_adapters(_with_engine(pool, flags["max_num_seqs"], prefix_caching), flags["loras"], flags["max_loras"])
    if pool.hosted is None:
        memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel, adapter_bytes=slots_bytes(pool))
    return pool, line, events


def _is_sglang(pool: Pool) -> bool:
    return api_of(pool.engine.name) == "sglang"


def _ordering(pool: Pool, spec: str | None, scheduling_policy: str) -> tuple[Ordering, str]:
    """The ordering of the engine's queue, and its name if it is one of Headway's. Raises HeadwayError if the engine
    cannot run it."""
    if spec is None:
        return FcfsOrdering() if scheduling_policy == "fcfs" else PriorityOrdering(preemptive=False), ""
    choice = resolve.ordering(spec)
    if api_of(pool.engine.name) != "vllm":
        raise HeadwayError(f"--ordering: {pool.engine.name} runs no ordering of Headway's; expected vLLM")
    return choice(), resolve.identity(choice)


def _surface(
    pool: Pool, mode: Literal["prefill", "decode"] | None, host: str, bootstrap_port: int, timeout_s: float
) -> VllmSurface:
    """The engine's HTTP API; SGLang's may serve a single phase. Raises HeadwayError if the engine cannot."""
    from headway.emulator.sglang import SglangSurface, SinglePhase
    from headway.emulator.vllm import VllmSurface

    if not _is_sglang(pool):
        if mode is not None:
            raise HeadwayError(f"--disaggregation-mode: {pool.engine.name} has none; expected --engine sglang")
        return VllmSurface()
    phase = mode or pool.role
    if phase == "mixed":
        return SglangSurface(None)
    listener = web_server.listen(host, bootstrap_port) if phase == "prefill" else None
    return SglangSurface(SinglePhase(phase, listener, timeout_s))


def _kv_events(text: str) -> KvEventsConfig:
    """The value of --kv-events-config. Raises HeadwayError if it is invalid."""
    from headway.emulator.kv_events import KvEventsConfig

    try:
        return msgspec.json.decode(text, type=KvEventsConfig)
    except msgspec.MsgspecError as error:
        raise HeadwayError(f"--kv-events-config: {error}; expected JSON as for vLLM") from None


def _with_engine(pool: Pool, max_num_seqs: int | None, prefix_caching: bool | None) -> Pool:
    """The pool with settings of its engine. None: as they are."""
    settings = {"max_num_seqs": max_num_seqs, "prefix_caching": prefix_caching}
    changed = {name: value for name, value in settings.items() if value is not None}
    return replace(pool, engine=replace(pool.engine, **changed))


def _with_adapters(pool: Pool, loras: tuple[str, ...], max_loras: int | None) -> Pool:
    """The pool with further LoRA adapters, and another number of slots."""
    if not loras and max_loras is None:
        return pool
    known = pool.lora or LoraConfig()
    adapters = (*known.adapters, *(LoraAdapter(name=name) for name in loras))
    try:
        chosen = replace(known, adapters=adapters, max_loras=max_loras or known.max_loras)
    except ValueError as error:
        raise HeadwayError(f"--lora: {error}") from None
    return replace(pool, lora=chosen)


def _of_flags(flags: dict[str, Any], pool_name: str | None) -> tuple[Pool, Line | None]:
    """The pool described by the options, with the catalog's step times."""
    if pool_name is not None:
        raise HeadwayError("--pool: goes with --scenario")
    for name in ("--model", "--gpu"):
        if flags[name] is None and not (name == "--model" and flags["--model-config"]):
            raise HeadwayError(f"{name} is missing; expected it, or --scenario")
    parallel = Parallel(flags["--tp"] or 1)
    accelerator = gpu(flags["--gpu"])
    profile = engine_on(engine(flags["--engine"] or "vllm"), accelerator)
    model = one_model(flags["--model"], flags["--model-config"], bool(flags["--assume"]))
    return Pool("emulated", model, accelerator, profile, parallel), None


def _of_scenario(file: Path, pool_name: str | None, flags: dict[str, Any]) -> tuple[Pool, Line | None]:
    """The pool of a scenario."""
    for name, value in flags.items():
        if value is not None:
            raise HeadwayError(f"{name}: --scenario sets it; expected one of them")
    from headway import serving
    from headway.config.scenario import StepTimes
    from headway.serving import emulated_fleet

    chosen = serving.read_engines(file)
    pool = emulated_fleet.pool_of(chosen, pool_name)
    return pool, StepTimes(chosen)(pool)
