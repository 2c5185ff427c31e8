"""The gateway in front of two real engines: llama.cpp servers with a model that the test makes."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

import serving
from serving import chat, metric, said, until

pytest.importorskip("httptools")
if find_spec("xllamacpp") is None or find_spec("gguf") is None:
    pytest.skip("needs a llama.cpp server: pip install xllamacpp gguf", allow_module_level=True)


def _engine(folder: Path) -> serving.Process:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return serving.Process(str(Path(__file__).parent / "llama_server.py"), str(folder), str(port))


def test_two_llama_cpp_servers(tmp_path: Path) -> None:
    """Streams, whole answers, clients that leave, and a server killed in the middle of an answer."""
    engines = [_engine(tmp_path), _engine(tmp_path)]
    path = serving.fleet_file(
        tmp_path, [engine.url for engine in engines], pool={"engine": "llama.cpp"}, policies={"window": 4}
    )
    front = serving.gateway(path)
    with serving.closing(*engines, front):
        serving.all_up(front, 2)
        options = {"temperature": 0, "ignore_eos": True}
        whole = chat(engines[1], max_tokens=2500, **options).json()
        text = whole["choices"][0]["message"]["content"]
        assert chat(front, max_tokens=50, **options).json()["usage"]["completion_tokens"] == 50

        reply = chat(front, max_tokens=3500, stream=True, **options)
        next(reply.events())
        reply.close()
        until(lambda: not any(metric(engine, "llamacpp:requests_processing") for engine in engines))
        until(lambda: metric(front, "headway_requests_in_flight") == 0)

        reply = chat(front, max_tokens=2500, stream=True, stream_options={"include_usage": True}, **options)
        doomed = engines[int(reply.headers["x-headway-replica"].removeprefix("pool/"))]
        events = []
        for i, event in enumerate(reply.events()):
            if i == 300:
                doomed.kill()
            events.append(event)
        assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1])
        assert events[-2]["usage"]["completion_tokens"] == 2500
        assert len({event["id"] for event in events[:-1]}) == 1
        # A prompt computed at once differs in the last bits from one computed token by token, so later words may too.
        assert len(said(events).split()) == 2500 and said(events).split()[:300] == text.split()[:300]
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
