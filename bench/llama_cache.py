"""Prefix caches of real engines: `python bench/llama_cache.py [ROUTER ...]`. Needs xllamacpp.

Two llama.cpp servers behind a gateway answer conversations, each turn of which has all turns before it in its prompt.
For each router, the engines' own counters say which share of the prompts' tokens was not computed again.
"""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen

import yaml
from click import echo

ROOT = Path(__file__).parents[1]
ROUTERS = ("round-robin", "least-loaded", "lmetric", "headway")
NUM_ENGINES, NUM_CONVERSATIONS, NUM_TURNS = 2, 6, 5
NUM_CLIENTS = 3
WORDS = "the of and to in is that it was for on are with as his they at be this from have or by one had not".split()
WORDS_PER_TURN = 90


@contextmanager
def process(*args: str) -> Iterator[int]:
    """A Python process that listens on a port that was free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    with Popen(
        [sys.executable, *(each.replace("PORT", str(port)) for each in args)], stdout=DEVNULL, stderr=DEVNULL
    ) as run:
        try:
            yield port
        finally:
            run.kill()


def fetch(port: int, path: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return bytes(reply.read())


def wait_for(port: int, path: str) -> None:
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        try:
            fetch(port, path)
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"port {port} does not answer")


def computed_tokens(port: int) -> int:
    """Prompt tokens that an engine has computed."""
    found = re.search(rb"^llamacpp:prompt_tokens_total ([0-9.e+]+)", fetch(port, "/metrics"), re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def converse(port: int, seed: int) -> int:
    """One conversation. Returns the tokens of all prompts."""
    chance, messages, total = random.Random(seed), [], 0
    for _ in range(NUM_TURNS):
        messages.append({"role": "user", "content": " ".join(chance.choices(WORDS, k=WORDS_PER_TURN))})
        body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = json.loads(fetch(port, "/v1/chat/completions", body))
        total += answer["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "yes"})
    return total


def hit_rate(router: str) -> float:
    """The share of the prompts' tokens that fresh engines did not compute."""
    with ExitStack() as stack:
        llama = str(ROOT / "examples" / "tiny_llama.py")
        engines = [stack.enter_context(process(llama, "PORT")) for _ in range(NUM_ENGINES)]
        for engine in engines:
            wait_for(engine, "/health")
        before = sum(computed_tokens(engine) for engine in engines)
        pool = {
            "model": "tiny", "api": "llama.cpp", "endpoints": [f"http://127.0.0.1:{port}" for port in engines],
        }  # fmt: skip
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = folder / "fleet.yaml"
        fleet.write_text(yaml.safe_dump({"fleet": [pool], "policies": {"routing": router}}))
        front = stack.enter_context(process("-m", "headway", "serve", str(fleet), "--port", "PORT"))
        wait_for(front, "/health")
        time.sleep(1.0)  # both engines have been probed
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            total = sum(clients.map(lambda seed: converse(front, seed), range(NUM_CONVERSATIONS)))
        return 1 - (sum(computed_tokens(engine) for engine in engines) - before) / total


def main() -> None:
    for router in sys.argv[1:] or ROUTERS:
        echo(f"{router}: {100 * hit_rate(router):.0f}% of the prompts' tokens were cached")


if __name__ == "__main__":
    main()
