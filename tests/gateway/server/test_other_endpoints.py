"""Endpoints besides chats and completions that engines answer, one model by its name, and compressed bodies."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

import serving
from headway.gateway.errors import ApiError
from headway.gateway.server.bodies import decompressed
from serving import MODEL, metric, send

pytest.importorskip("httptools")


@pytest.fixture(scope="module", params=[1, 2])
def front(
    request: pytest.FixtureRequest, engines: list[serving.Process], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[serving.Process]:
    settings = {"max_body_bytes": 1 << 20}
    path = serving.fleet_file(tmp_path_factory.mktemp("fleet"), [each.url for each in engines], gateway=settings)
    with serving.up(serving.gateway(path, "--workers", str(request.param)), 2) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/rerank", {"query": "a cat", "documents": ["the moon", "a cat sat"]}, "results"),
        ("/rerank", {"query": "a cat", "documents": ["the moon"]}, "results"),
        ("/v1/score", {"text_1": "a cat", "text_2": ["a cat", "the moon"]}, "data"),
        ("/score", {"text_1": "a cat", "text_2": "the moon"}, "data"),
        ("/tokenize", {"prompt": "a cat sat"}, "tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}, "tokens"),
        ("/detokenize", {"tokens": [7, 8]}, "prompt"),
    ],
)
def test_an_engine_answers(path: str, body: dict[str, Any], key: str, front: serving.Process) -> None:
    reply = send(front, path, {"model": MODEL, **body})
    assert reply.status == 200 and reply.json()[key]
    assert reply.headers["x-headway-replica"].startswith("pool/")
    serving.until(lambda: metric(front, "headway_requests_in_flight") == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/rerank", {"query": "a"}), ("/v1/score", {"text_1": 3, "text_2": "a"}), ("/tokenize", {})],
)
def test_an_invalid_body_is_refused_by_the_engine(path: str, body: dict[str, Any], front: serving.Process) -> None:
    reply = send(front, path, {"model": MODEL, **body})
    assert reply.status == 400 and reply.json()["error"]["message"] and "x-headway-replica" in reply.headers


def test_one_model_by_its_name(front: serving.Process) -> None:
    assert send(front, f"/v1/models/{MODEL}", None).json()["id"] == MODEL
    assert send(front, "/v1/models/Qwen/Qwen3-8B", None).json()["id"] == "Qwen/Qwen3-8B"
    missing = send(front, "/v1/models/qwen3-9b", None)
    assert missing.status == 404 and MODEL in missing.json()["error"]["message"]


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_body_may_be_compressed(encoding: str, pack: Any, front: serving.Process) -> None:
    body = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "hello " * 2000}]}
    reply = send(front, "/v1/chat/completions", pack(json.dumps(body).encode()), {"Content-Encoding": encoding})
    assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("br", b"{}", 415),
        ("gzip", b"no gzip", 400),
        ("gzip", gzip.compress(b"{}")[:-4], 400),
        ("gzip", gzip.compress(b"{}") + b"{}", 400),
        ("gzip", gzip.compress(b" " * (1 << 24)), 413),
    ],
    ids=["unknown", "no gzip", "cut off", "more than one stream", "too long"],
)
def test_bodies_that_cannot_be_decompressed(encoding: str, body: bytes, status: int, front: serving.Process) -> None:
    reply = send(front, "/v1/chat/completions", body, {"Content-Encoding": encoding})
    assert reply.status == status and reply.json()["error"]["message"]


def test_no_more_is_decompressed_than_may_be() -> None:
    with pytest.raises(ApiError) as error:
        decompressed(gzip.compress(b"x" * 100), "gzip", 99)
    assert error.value.status == 413
    assert decompressed(gzip.compress(b"x" * 100), "gzip", 100) == b"x" * 100
