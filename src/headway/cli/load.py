"""`headway load`: sends requests to a running engine and reports its latencies; the work is in
`serving.load_generator`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from headway.cli.flags import seed_option, synthetic_options, together, trace_options
from headway.cli.output import (
    PATH,
    POSITIVE,
    SECONDS,
    SECONDS_ABOVE_0,
    as_json_option,
    no_progress_option,
    print_json,
    print_table,
    progress,
)
from headway.gateway.server import web_server
from headway.metrics.latency import Distribution
from headway.report.blocks import or_dash
from headway.report.table import seconds

if TYPE_CHECKING:
    from headway.cli.load_session import Session
    from headway.serving.load_generator.run import Load

INTERRUPTED = 130
FAILED = 3
"""Exit code if no request was answered."""
LATENCIES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "ITL, by token",
    "chunk_gap_s": "gap between chunks",
    "e2e_s": "E2E",
    "late_s": "sent late",
}

_shape_options = together(
    (
        click.option(
            "--spec", type=PATH, help="A YAML file with the `workload` section of a scenario, in place of these."
        ),
        click.option(
            "--cv",
            type=click.FloatRange(min=0),
            help="With --rate: spread of the gaps between requests. 1: Poisson; above: bursts; 0: all equal.",
        ),
        click.option("--duration", "duration_s", type=SECONDS_ABOVE_0, help="Send no request after this time."),
        click.option("--turns", type=POSITIVE, help="Conversations of so many turns; --rate is that of conversations."),
        click.option(
            "--think", "think_s", type=SECONDS, help="With --turns: pause before the next turn. Default: 1 s."
        ),
    )
)
_request_options = together((
    click.option("--model", help="As the engine calls it. Default: the first one that it lists."),
    click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True),
    click.option("--api-key", default="", help="The key that the engine asks for."),
    click.option("--tokenizer", type=PATH, help="A folder with tokenizer.json. Default: the engine counts tokens."),
    click.option("--temperature", type=click.FloatRange(min=0), help="Default: the engine's own sampling. 0: greedy."),
    click.option("--natural-end", is_flag=True, help="Answers may end early. Default: they go on to their length."),
    click.option("--timeout", "timeout_s", type=SECONDS_ABOVE_0, default=600.0, show_default=True,
                 help="Time after which a request is given up."),
    click.option("--no-warm-up", is_flag=True, help="Measure from the first request on."),
))  # fmt: skip
_sweep_options = together((
    click.option("--sweep", "is_sweep", is_flag=True, help="Loads from one client to rates beyond saturation."),
    click.option("--slo", help="ttft=2s,tpot=50ms,e2e=30s. With --sweep: find the highest rate that meets them."),
    click.option("--attainment", type=click.FloatRange(0, 1, min_open=True), default=0.9, show_default=True,
                 help="Share of the requests that must meet --slo."),
    click.option("--page", "page_to", type=PATH, help="With --sweep: write an HTML page, with the prediction if any."),
    click.option("--calibrate", "calibrate_to", type=PATH, metavar="FILE.json",
                 help="Sweep, fit the engine's step times to it, and print the error before and after."),
    click.option("--write", "is_written", is_flag=True,
                 help="With --calibrate and --fleet: name FILE.json in the engine's pool of the fleet file, if it "
                 "predicts loads that the fit has not seen better."),
))  # fmt: skip
_result_options = together(
    (
        click.option("--records", "records_to", type=PATH, help="Write records here, for validate and calibrate."),
        click.option("--save-detailed", type=PATH, help="Write JSON as vllm bench serve --save-detailed does."),
        click.option("--gpu", help="The engine's GPU, for predictions. Default: guessed from its KV cache and speed."),
        click.option(
            "--fleet", type=PATH, help="A fleet file with the engine, for predictions. Default: as discovered."
        ),
        click.option("--pool", help="With --fleet: the engine's pool. Default: the one with this address, or model."),
        as_json_option(
            "Print JSON: `engine`, `warm_up`, `measured` (a sweep: `points`, `knee_rps`, `highest`), `notes`."
        ),
        no_progress_option,
    )
)


@click.command()
@click.argument("url", metavar="URL")
@synthetic_options
@trace_options
@_shape_options
@seed_option
@_request_options
@_sweep_options
@_result_options
def command(url: str, **flags: Any) -> int:
    """Send requests to a running engine, and measure its answers.

    URL is the address of one engine, or of a gateway. Requests are sent in a closed loop (--concurrency), at a rate
    (--rate), or from a trace or a built-in workload. Without any of these options, 8 clients send 100 requests with 512
    prompt and 128 output tokens. Prompts have exactly the requested number of tokens, by the engine's own count. Ctrl-C
    ends the load and keeps what was measured.
    """
    try:
        from headway.cli.load_session import Session
    except ModuleNotFoundError as error:
        raise web_server.not_installed(str(error.name)) from None
    return asyncio.run(_run(Session(url, flags)))


async def _run(session: Session) -> int:
    from headway.calibration.solve import least_squares
    from headway.cli import load_sweep

    flags = session.flags
    if flags["calibrate_to"] is not None:
        least_squares()  # without SciPy an error, before anything is sent
    try:
        await session.prepare()
        if session.is_sweep:
            return await load_sweep.run(session)
        with progress("sending", wanted=not flags["no_progress"]) as report:
            done = await session.load(session.spec, report)
    finally:
        session.target.close()
    session.save(done)
    notes = [*session.notes(), *done.notes()]
    if flags["as_json"]:
        print_json(
            {
                "engine": session.found,
                "model": session.target.model,
                "warm_up": session.warmed,
                "measured": done.measured,
                "notes": notes,
                "is_stopped": done.is_stopped,
            }
        )
    else:
        _print(done, session)
        for note in notes:
            click.echo(f"note: {note}")
    if done.is_stopped:
        return INTERRUPTED
    return 0 if done.measured.num_completed else FAILED


def _print(done: Load, session: Session) -> None:
    values, found, concurrency = done.measured, session.found, session.spec.concurrency
    version = f" {found.version}" if found.version else ""
    click.echo(f"{session.target.model} at {found.url} ({found.product or found.api}{version})")
    rows = [
        ("requests", f"{values.num_completed:,} of {values.num_requests:,} in {values.duration_s:.1f} s"),
        (
            "requests/s",
            f"{values.throughput_rps:.4g}"
            + (f" ({values.offered_rps:.4g} sent)" if values.offered_rps is not None and concurrency is None else ""),
        ),
        ("output tokens/s", f"{values.output_tokens_per_s:,.4g}"),
        ("tokens/s, prompts too", f"{values.total_tokens_per_s:,.4g}"),
        ("in flight, mean", f"{values.concurrency:.3g}"),
        *([] if values.slo_attainment is None else [("within the SLOs", f"{values.slo_attainment:.1%}")]),
        ("tokens a chunk", or_dash(values.tokens_per_chunk, "{:.3g}")),
    ]
    print_table(("", ""), rows)
    click.echo()
    columns = ("mean", "p50", "p90", "p99", "max")
    print_table(
        ("", *columns),
        [
            (title, *(or_dash(one and getattr(one, name), seconds) for name in columns))
            for key, title in LATENCIES.items()
            for one in [_distribution(values, key)]
        ],
    )


def _distribution(values: Any, key: str) -> Distribution | None:
    found: Distribution | None = getattr(values, key)
    return found
