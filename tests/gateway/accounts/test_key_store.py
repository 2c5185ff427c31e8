"""Keys in a database, from `headway keys` to what a client is told, with several workers and several gateways."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

import postgres
import serving
from headway.cli import main
from keys import bearer, digest
from serving import chat, metric, send, until

pytest.importorskip("httptools")
pytest.importorskip("sqlalchemy")
PRICES = {"usd_per_million_input_tokens": 1e4, "usd_per_million_output_tokens": 1e5}
"""A cent and ten cents a token."""


def keys(location: str, *args: str) -> str:
    """`headway keys` on this store; what it prints."""
    printed = BytesIO()  # JSON is written as bytes
    with redirect_stdout(TextIOWrapper(printed, write_through=True)):
        assert main(["keys", "--store", location, *args]) == 0
        return printed.getvalue().decode().strip()


def listed(location: str) -> dict[str, Any]:
    return {key["name"]: key for key in json.loads(keys(location, "list", "--json"))["keys"]}


def gateway(engine: serving.Process, folder: Path, location: str, *options: str, **store: Any) -> serving.Process:
    """One on the store, with a key `own` of its own."""
    settings = {"api_keys": [digest("own")], "key_store": {"store": location, "refresh_s": 0.2, **store}}
    folder.mkdir(exist_ok=True)
    return serving.gateway(serving.fleet_file(folder, [engine.url], pool=PRICES, gateway=settings), *options)


def status(made: serving.Process, key: str, **options: Any) -> int:
    reply = chat(made, headers=bearer(key), **{"max_tokens": 1, **options})
    reply.close()
    return reply.status


def accepts(made: serving.Process, key: str) -> bool:
    return status(made, key) == 200


def knows(made: serving.Process, key: str) -> bool:
    """That all of its workers know a key: requests for an unknown model, which cost nothing, reach it."""
    return {status(made, key, model="unknown") for _ in range(8)} == {404}


@pytest.fixture(scope="module", params=["1", "2"])
def front(
    request: pytest.FixtureRequest, engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[serving.Process, str]]:
    folder = tmp_path_factory.mktemp("fleet")
    location = str(folder / "keys.sqlite")
    made = gateway(engines[0], folder, location, "--workers", request.param)
    with serving.closing(made):
        serving.all_up(made, 1)
        until(lambda: metric(made, "headway_key_store_up") == 1)
        yield made, location


def test_keys_are_added_changed_rotated_and_revoked_while_it_runs(front: tuple[serving.Process, str]) -> None:
    made, location = front
    assert status(made, "own") == 200 and status(made, "nobody's") == 401
    assert knows(made, "own") and not knows(made, "nobody's")
    key = keys(location, "add", "search", "--requests-per-minute", "500", "--tier", "1")
    until(lambda: knows(made, key))
    assert accepts(made, key)
    reply = chat(made, headers=bearer(key), max_tokens=1)
    assert reply.headers["x-ratelimit-limit-requests"] == "500"
    reply.close()
    new = keys(location, "rotate", "search", "--keep-days", "1")
    until(lambda: knows(made, new))
    assert accepts(made, key)  # for one more day
    keys(location, "revoke", listed(location)["search"]["key"])
    until(lambda: status(made, new) == 401)
    assert Path(location).stat().st_mode & 0o077 == 0 and key.encode() not in Path(location).read_bytes()


def test_a_budget_in_tokens_is_enforced_and_reported(front: tuple[serving.Process, str]) -> None:
    made, location = front
    key = keys(location, "add", "small", "--budget-tokens", "100", "--period", "day")
    until(lambda: knows(made, key))
    assert status(made, key, max_tokens=200) == 429  # would be too much
    used, refused = 0, 0
    for _ in range(40):
        reply = chat(made, headers=bearer(key), max_tokens=5)
        body = reply.json()
        if reply.status == 429:
            refused += 1
            assert body["error"]["type"] == body["error"]["code"] == "insufficient_quota"
            assert int(reply.headers["retry-after"]) <= 86_400
            break
        used += body["usage"]["total_tokens"]
    assert refused and 70 < used <= 100
    until(lambda: listed(location)["small"]["spent_tokens"] > 90 - 20)
    until(lambda: metric(made, "headway_key_store_up") == 1)
    page = send(made, "/metrics").text()
    assert f'key="{digest(key)[:12]}",reason="key_budget"' in page


def test_no_shape_of_a_request_passes_a_budget(front: tuple[serving.Process, str]) -> None:
    """Each of them would cost more than is left, and is refused before an engine begins it."""
    made, location = front
    key = keys(location, "add", "shapes", "--budget-tokens", "2000", "--period", "total")
    until(lambda: knows(made, key))
    text = [{"role": "user", "content": "hello"}]
    shapes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": text, **fields})
        for fields in (
            {"n": 50, "max_tokens": 50},
            {"max_tokens": 2100},
            {"max_completion_tokens": 1, "max_tokens": 2100},
            {"max_tokens": 5, "min_tokens": 2100},
            {"max_tokens": 5, "reasoning": {"max_tokens": 2100}},
            {"max_tokens": 5, "tools": [{"type": "function", "function": {"name": "f", "description": "x" * 9000}}]},
        )
    ]
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    shapes += [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}], "max_tokens": 5}),
        ("/v1/completions", {"prompt": "hello", "best_of": 50, "max_tokens": 50}),
        ("/v1/completions", {"prompt": [5] * 1200, "echo": True, "max_tokens": 5}),
        ("/v1/completions", {"prompt": [[5] * 1100, [6] * 1100], "max_tokens": 5}),
    ]
    for path, body in shapes:
        reply = send(made, path, {"model": serving.MODEL, **body}, bearer(key))
        assert (reply.status, reply.json()["error"]["code"]) == (429, "insufficient_quota"), body
    assert accepts(made, key)


def test_a_teams_dollars_are_spent_at_the_pools_prices(front: tuple[serving.Process, str]) -> None:
    made, location = front
    keys(location, "team", "ml", "--budget-usd", "3")
    first, second = (keys(location, "add", name, "--team", "ml") for name in ("one", "two"))
    until(lambda: knows(made, first) and knows(made, second))
    assert accepts(made, first) and accepts(made, second)
    reply = chat(made, headers=bearer(first), max_tokens=10)
    usage = reply.json()["usage"]
    cost = usage["prompt_tokens"] * 0.01 + usage["completion_tokens"] * 0.1

    def spent() -> dict[str, float]:
        rows = json.loads(keys(location, "spend", "--by", "team", "--by", "key", "--json"))["rows"]
        return {row["name"]: row["usd"] for row in rows if row["team"] == "ml"}

    until(lambda: len(spent()) == 2 and spent()["one"] >= cost)
    one = spent()["one"]
    assert status(made, second, max_tokens=28) == 429 and accepts(made, second)
    rows = json.loads(keys(location, "spend", "--by", "model", "--json"))["rows"]
    assert rows[0]["model"] == serving.MODEL and rows[0]["requests"] >= 3
    assert "one" in keys(location, "spend") and one < 3
    assert "nothing was spent" in keys(location, "spend", "--since", "2020-01-01", "--until", "2020-01-02")


def test_a_store_that_is_replaced_by_a_backup_is_used(front: tuple[serving.Process, str], tmp_path: Path) -> None:
    """A key that the backup does not have is refused; without any file, the keys that are known serve on."""
    made, location = front
    old, backup = keys(location, "add", "before"), tmp_path / "backup.sqlite"
    with closing(sqlite3.connect(location)) as source, closing(sqlite3.connect(backup)) as copy:
        source.backup(copy)
    backup.chmod(0o600)  # as the store
    new = keys(location, "add", "after")
    until(lambda: knows(made, old) and knows(made, new))
    shutil.copy(backup, tmp_path / "restored.sqlite")  # with its mode
    os.replace(tmp_path / "restored.sqlite", location)
    until(lambda: status(made, new) == 401)
    until(lambda: metric(made, "headway_key_store_up") == 1)
    assert accepts(made, old) and "before" in listed(location)
    os.unlink(location)
    until(lambda: metric(made, "headway_key_store_up") == 0)
    assert accepts(made, old) and not Path(location).exists()
    os.replace(backup, location)
    until(lambda: metric(made, "headway_key_store_up") == 1)
    later = keys(location, "add", "later")
    until(lambda: knows(made, later))
    assert accepts(made, old) and set(listed(location)) >= {"before", "later"}


def test_gateways_on_one_database_agree_and_go_on_without_it(engines: list[serving.Process], tmp_path: Path) -> None:
    if postgres.missing():
        pytest.skip(postgres.missing())
    pytest.importorskip("asyncpg")
    with postgres.server() as database:
        key = keys(database.url, "add", "shared", "--budget-tokens", "400", "--period", "total")
        serve = gateway(engines[0], tmp_path / "a", database.url)
        refuse = gateway(engines[1], tmp_path / "b", database.url, "--workers", "2", on_failure="refuse")
        with serving.closing(serve, refuse):
            serving.all_up(serve, 1)
            serving.all_up(refuse, 1)
            until(lambda: knows(serve, key) and knows(refuse, key))
            assert chat(serve, headers=bearer(key), max_tokens=300, ignore_eos=True).json()["usage"]
            until(lambda: listed(database.url)["shared"]["spent_tokens"] >= 300)
            later = keys(database.url, "add", "later")
            until(lambda: all(knows(refuse, later) for _ in range(3)))  # workers that know it have read what was spent
            assert status(refuse, key, max_tokens=150) == 429
            database.stop()
            until(lambda: status(refuse, key) == 503)
            assert metric(refuse, "headway_key_store_up") == 0 and metric(refuse, "headway_key_store_errors_total") >= 1
            assert accepts(serve, key) and status(refuse, "own") == 200 and status(serve, key, max_tokens=150) == 429
            during = metric(serve, "headway_key_requests_total")
            database.start()
            until(lambda: knows(refuse, key))
            until(lambda: metric(serve, "headway_key_store_up") == 1)

            def requests() -> float:
                rows = json.loads(keys(database.url, "spend", "--by", "model", "--json"))["rows"]
                return sum(row["requests"] for row in rows)

            until(lambda: requests() >= during + metric(refuse, "headway_key_requests_total"))


def test_a_store_that_was_never_there_admits_only_the_files_keys(
    engines: list[serving.Process], tmp_path: Path
) -> None:
    made = gateway(engines[0], tmp_path, "postgresql://nobody@127.0.0.1:1/none")
    with serving.closing(made):
        serving.all_up(made, 1)
        assert status(made, "own") == 200 and status(made, "unknown") == 503
        assert send(made, "/v1/chat/completions", {"model": serving.MODEL}).json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("add", "x", "--sha256", "12"), "expected 64 hexadecimal digits"),
        (("add", "x", "--budget-usd", "-1"), "--budget-usd"),
        (("add", "x", "--team", "none of them"), "unknown team"),
        (("revoke", "nobody"), "unknown key"),
        (("spend", "--by", "colour"), "--by"),
        (("--store", "/nothing/keys.sqlite", "list"), "/nothing/keys.sqlite: the key store cannot be used"),
        (("--store", "mysql://a/b", "list"), "not a database address"),
    ],
)
def test_mistakes_are_one_line(
    args: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "--store", str(tmp_path / "k.sqlite"), *args]) == 2
    output = capsys.readouterr().err
    assert message in output and len(output.strip().splitlines()) == 1
