"""The numbers of SECURITY.md are those of the code, and the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("httptools")

from headway.gateway import descriptors, errors, framing, names
from headway.gateway.kv_events import engine_blocks, feeds, subscriber
from headway.gateway.relay import json_body, request
from headway.gateway.server import access_log, bodies, http_cycle, http_protocol
from headway.gateway.settings import Settings
from headway.gateway.telemetry import metrics
from headway.gateway.upstream import client

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
KIB, MIB = 1 << 10, 1 << 20
DEFAULT = Settings()
_ALL_BODIES = f"all bodies over {bodies._SHORT_BYTES // KIB} KiB together, and the shorter ones"
ROWS = {
    "first line and headers": f"{framing.MAX_HEAD_BYTES // KIB} KiB, {framing.MAX_HEADERS} headers, "
    f"{http_protocol._HEAD_TIMEOUT_S:g} s",
    "chunk headers and trailers": f"{framing.MAX_FRAMING_BYTES // KIB} KiB and an eighth of the body, sizes of "
    f"{framing._MAX_SIZE_DIGITS} digits; trailers are dropped",
    "body": f"{DEFAULT.max_body_bytes // MIB} MiB, {DEFAULT.body_timeout_s:g} s",
    _ALL_BODIES: f"{DEFAULT.max_bodies_bytes // MIB} MiB each for each process, then 503; half of it for a key",
    "values of a body": f"{json_body.MAX_PARTS:,} arrays, objects and strings, {json_body.MAX_VALUES:,} values, "
    f"{json_body.MAX_DEPTH} levels",
    "rest of a request that is answered early": f"{http_protocol._LINGER_BYTES // MIB} MiB, "
    f"{http_protocol._LINGER_S:g} s, dropped unread",
    "requests sent ahead on a connection": f"{http_cycle.MAX_HELD_BYTES // KIB} KiB and one read "
    f"({http_cycle.READ_BYTES // KIB} KiB)",
    "answers that their client does not read": f"{http_cycle.MAX_UNREAD_BYTES // KIB} KiB and one answer; then "
    "no further request is begun",
    "a client that does not read": f"closed unless it reads {http_protocol._LEAST_READ_BYTES // KIB} KiB in each "
    f"{http_protocol._UNREAD_TIMEOUT_S:g} s",
    "time until the answer is complete": f"{DEFAULT.timeout_s:g} s",
    "held requests of a model": f"{DEFAULT.max_held:,}",
    "what an error message repeats": f"{errors._MAX_MESSAGE_CHARS:,} characters, 64 of a model's name",
    "tiers kept apart in `/metrics` and on the dashboard": f"{metrics.LAST_TIER + 1}",
    "tenants kept apart in `/metrics`": f"{metrics.MAX_TENANTS:,}, then `{names.OTHER}`",
    "names from clients, wherever they are kept": f"{names.MAX_CHARS} characters; a model's {request.MAX_NAME_CHARS}, "
    f"a path in the access log {access_log._MAX_PATH_CHARS:,}",
    "idle connections to an engine": f"{client._MAX_IDLE_CONNECTIONS}",
    "connections of clients": f"half of the file descriptors but {descriptors.RESERVED}; others wait",
}


def test_the_table_has_the_limits_of_the_code() -> None:
    table = PAGE.split("| what | limit | setting |\n")[1].split("\n\n")[0]
    rows = dict([cell.strip() for cell in line.strip("|").split("|")][:2] for line in table.splitlines()[1:])
    assert rows == ROWS


def test_the_text_has_the_limits_of_the_code() -> None:
    text = re.sub(r"\s+", " ", PAGE)
    for part in (
        f"{subscriber.MAX_WAITING_BYTES // MIB} MiB wait here at most, in batches of "
        f"{subscriber.MAX_BATCH_BYTES // MIB} MiB; names of blocks over "
        f"{engine_blocks.MAX_HASH_BYTES} bytes are refused",
        f"requests sent ahead, and a body until it is read {http_cycle.MAX_HELD_BYTES // KIB} KiB and one read "
        f"of {http_cycle.READ_BYTES // KIB} KiB",
        f"at most eight blocks for one of an engine's GPU ({feeds._LEAST_BLOCKS:,} blocks at least)",
        f"the head of the present request 6 x {framing.MAX_HEAD_BYTES // KIB} KiB",
    ):
        assert part in text


def test_the_tests_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE)) | set(re.findall(r"\]\((tests/[\w/]+)\)", PAGE))
    assert named and not [each for each in named if not (ROOT / each).exists()]
