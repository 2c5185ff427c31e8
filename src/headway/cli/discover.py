"""`headway discover`: queries running engines and writes a fleet file; the work is in `serving.discover`."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import click

from headway import catalog
from headway.cli.output import PATH, SECONDS_ABOVE_0, as_json_option, print_json
from headway.core.errors import HeadwayError
from headway.serving.discover import fleet_file
from headway.serving.discover.pages import MOST_BYTES, fetcher, request
from headway.serving.discover.pools import FoundPool, grouped, pools
from headway.serving.discover.probe import Fetch, FoundEngine, probe
from headway.workload.atomic_file import write_text

AT_ONCE = 16
"""Engines that are queried at a time."""
TOKENS = 32
"""Tokens of the request that measures an idle engine's speed."""


@click.command()
@click.argument("addresses", metavar="URL...", nargs=-1, required=True)
@click.option("--out", type=PATH, default="fleet.yaml", show_default=True, help="The file to write, or to compare.")
@click.option("--write", "is_written", is_flag=True, help="Add what is new to a file that exists already.")
@click.option("--gpu", help="The engines' GPU. Default: guessed from their KV cache and speed, and marked as a guess.")
@click.option("--api-key", help="The key that the engines ask for.")
@click.option("--no-measure", is_flag=True, help="Send no request. Else one idle engine of each pool gets three.")
@click.option("--timeout", "timeout_s", type=SECONDS_ABOVE_0, default=5.0, show_default=True, help="For each page.")
@as_json_option("Print JSON: `engines`, `pools`, `silent`, `changes` of an existing file.")
def command(
    addresses: tuple[str, ...],
    out: Path,
    is_written: bool,
    gpu: str | None,
    api_key: str | None,
    no_measure: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Read the properties of running engines, and write a fleet file.

    URL is the address of an engine (vLLM, SGLang, TensorRT-LLM, llama.cpp, Ollama, or any with OpenAI's API), a
    Kubernetes Service whose addresses are all read, or a file with one address per line. The file can be served
    unchanged, and simulated if models and GPUs are known; comments mark what the engines did not report. An existing
    file is only compared with the engines; --write adds the differences.
    """
    if gpu is not None:
        gpu = catalog.gpu(gpu).name
    urls = list(dict.fromkeys(url for each in addresses for url in _urls(each)))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = list(threads.map(lambda url: _asked(url, fetcher(url, api_key, timeout_s)), urls))
    engines = [each for each in asked if isinstance(each, FoundEngine)]
    silent = {url: each for url, each in zip(urls, asked, strict=True) if isinstance(each, str)}
    for url, why in silent.items():
        click.echo(f"{url}: {why}", err=True)
    if not engines and not out.exists():
        raise HeadwayError("no engine has answered")
    speeds = {} if gpu or no_measure else dict(_speeds(engines, api_key))
    found = pools(engines, gpu, speeds)
    changes = fleet_file.changes(out, found, list(silent)) if out.exists() else None
    if as_json:
        print_json({"engines": engines, "pools": [each.entry for each in found], "silent": silent, "changes": changes})
    elif changes is not None:
        _print_changes(changes, out, is_written)
    else:
        _print_found(found, out)
    if changes is None:
        write_text(out, fleet_file.text(found, out.name))
    elif is_written and any(each.is_added for each in changes):
        write_text(out, fleet_file.updated(out, found))
    return 0


def _urls(address: str) -> Iterator[str]:
    """The addresses that one argument stands for."""
    if not Path(address).is_file():
        yield from _behind(address)
        return
    try:
        lines = Path(address).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{address}: cannot be read as text: {error}") from None
    for line in lines:
        if word := line.partition("#")[0].strip():
            yield from _behind(word)


def _behind(address: str) -> Iterator[str]:
    """The addresses of the engines behind one address."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HeadwayError(f"{address}: expected an address such as http://host:8000, or a file with one a line")
    plain = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"), "", ""))
    if parts.scheme == "https":
        yield plain  # a certificate is valid for the name
        return
    try:
        port = parts.port or 80
    except ValueError:
        raise HeadwayError(f"{address}: expected a port from 1 to 65535") from None
    behind = _hosts(parts.hostname, port)
    if len(behind) < 2:
        yield plain
    for host in behind if len(behind) > 1 else ():
        yield urlunsplit((parts.scheme, f"{host}:{port}", parts.path.rstrip("/").removesuffix("/v1"), "", ""))


def _hosts(name: str, port: int) -> list[str]:
    """The IPv4 addresses behind a name, such as a headless Service; empty for an address."""
    try:
        ipaddress.ip_address(name)
        return []
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(each[4][0]) for each in found})


def _asked(url: str, fetch: Fetch) -> FoundEngine | str:
    try:
        return probe(url, fetch)
    except HeadwayError as error:
        return str(error).removeprefix(f"{url}: ")


def _speeds(engines: Sequence[FoundEngine], api_key: str | None) -> Iterator[tuple[str, float]]:
    """Seconds per token of one idle engine of each pool."""
    for group in grouped(engines):
        engine = next((each for each in group if each.is_idle), None)
        if engine is not None:
            try:
                yield engine.url, _token_s(engine, api_key)
            except (OSError, ValueError, KeyError, TypeError) as error:
                click.echo(f"{engine.url}: its speed is unknown: {error}", err=True)


def _token_s(engine: FoundEngine, api_key: str | None) -> float:
    """Seconds per token by the engine's own clock (llama.cpp), else the time of an answer of `TOKENS` tokens minus the
    time of a one-token answer."""
    taken = []
    for tokens in (1, 1, TOKENS + 1):  # the first one includes one-time work
        body = {
            "model": engine.model,
            "prompt": "Count on: one two three",
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        begun = time.perf_counter()
        with urllib.request.urlopen(request(engine.url + "/v1/completions", api_key, body), timeout=60) as answer:
            said = json.loads(answer.read(MOST_BYTES))
        taken.append((time.perf_counter() - begun, said["usage"]["completion_tokens"]))
    if isinstance(own_ms := said.get("timings", {}).get("predicted_per_token_ms"), int | float) and own_ms > 0:
        return own_ms / 1e3
    (_, _), (one_s, one), (all_s, made) = taken
    return float((all_s - one_s) / (made - one))


def _print_found(found: Sequence[FoundPool], out: Path) -> None:
    for pool in found:
        entry = pool.entry
        num = len(entry["endpoints"])
        gpu = f" on {entry['gpu']} ({pool.notes['gpu']})" if "gpu" in entry else ""
        click.echo(f"{entry['name']}: {num} engine{'s' if num > 1 else ''} with {pool.model}{gpu}")
        if pool.unknown:
            click.echo(f"  not said: {', '.join(pool.unknown)}")
    click.echo(f"wrote {out}; try: headway serve {out}")


def _print_changes(changes: Sequence[fleet_file.Change], out: Path, is_written: bool) -> None:
    for each in changes:
        click.echo(f"{each.pool}: {each.what}")
    added = sum(each.is_added for each in changes)
    if not changes:
        click.echo(f"{out}: as the engines are")
    elif not added:
        click.echo(f"{out}: nothing to add; what else differs is yours to change")
    else:
        click.echo(f"added to {out}" if is_written else f"{out} is as it was; --write adds what is new")
