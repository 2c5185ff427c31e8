"""The gateway with two real engines and a small model: clients get the engines' own tokens, whatever engine fails."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import serving
from engines import ADMIN, KINDS, Kind, gateways, words
from engines import STREAM as STREAMED
from headway import records
from serving import Process, answer_text, chat, metric, send, until

pytest.importorskip("httptools")
GREEDY = {"temperature": 0, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
STREAM = {**STREAMED, **GREEDY}
WINDOW = {"window": 4}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def engines(kind: Kind) -> Iterator[list[Process]]:
    """Two engines for all tests of the module."""
    pair = [kind.start(), kind.start()]
    with serving.closing(*pair):
        yield pair


@pytest.fixture
def serve(kind: Kind, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """A function that starts gateways."""
    with gateways(tmp_path, engine=kind.name) as start:
        yield lambda engines, *options, policies=WINDOW: start(engines, *options, policies=policies)


def _check_stream(events: list[Any], tokens: int) -> str:
    """The text of a stream, which must be complete."""
    assert events[-1] == "[DONE]" and not any("error" in event for event in events[:-1])
    assert len({event["id"] for event in events[:-1]}) == 1
    assert events[-2]["usage"]["completion_tokens"] == tokens
    return answer_text(events)


def _text(events: list[Any]) -> str:
    """The reasoning and the answer."""
    return "|".join(answer_text(events, name) for name in ("reasoning", "reasoning_content", "content"))


def _replica(reply: serving.Reply) -> int:
    assert reply.status == 200, reply.text()
    return int(reply.headers["x-headway-replica"].removeprefix("pool/"))


def _idle(kind: Kind, front: Process, engines: list[Process]) -> None:
    until(lambda: not any(kind.busy(engine) for engine in engines))
    until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_answers_are_the_engines_own(engines: list[Process], serve: Callable[..., Process]) -> None:
    front = serve(engines)
    alone = chat(engines[0], max_tokens=50, **GREEDY).json()
    through = chat(front, max_tokens=50, **GREEDY).json()
    for answer in (alone, through):
        for name in ("id", "created", "timings", "system_fingerprint"):
            answer.pop(name, None)
        answer["usage"].pop("prompt_tokens_details", None)
    assert through == alone
    streamed = list(chat(front, max_tokens=50, **STREAM).events())
    assert _check_stream(streamed, 50) == alone["choices"][0]["message"]["content"]
    assert streamed[-2]["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    prompted = {"model": serving.MODEL, "prompt": "hello there", "max_tokens": 7, **GREEDY}
    texts = [send(each, "/v1/completions", prompted).json()["choices"][0]["text"] for each in (front, engines[1])]
    assert texts[0] == texts[1] and len(words(texts[0])) == 7


def test_openais_client(engines: list[Process], serve: Callable[..., Process]) -> None:
    openai = pytest.importorskip("openai")
    front = serve(engines)
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="any", max_retries=0) as client:
        asked = {
            "model": serving.MODEL,
            "messages": [{"role": "user", "content": "hello there"}],
            "max_tokens": 40,
            "temperature": 0,
            "extra_body": {name: GREEDY[name] for name in ("ignore_eos", "chat_template_kwargs")},
        }
        whole = client.chat.completions.create(**asked)
        parts = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
        assert whole.usage.completion_tokens == 40 and parts[-1].choices[0].finish_reason == "length"


def test_many_streams_at_once_are_not_mixed_up(
    kind: Kind, engines: list[Process], serve: Callable[..., Process]
) -> None:
    """Three times as many streams as run at once. Each has the tokens that it has alone."""
    front = serve(engines)
    prompts = [f"{i} hellos" for i in range(24)]
    alone = [chat(engines[i % 2], text, max_tokens=80, **GREEDY).json() for i, text in enumerate(prompts)]

    def stream(text: str) -> tuple[int, list[Any]]:
        reply = chat(front, text, max_tokens=80, **STREAM)
        return _replica(reply), list(reply.events())

    with ThreadPoolExecutor(len(prompts)) as threads:
        received = list(threads.map(stream, prompts))
    assert [_check_stream(events, 80) for _, events in received] == [
        one["choices"][0]["message"]["content"] for one in alone
    ]
    assert {replica for replica, _ in received} == {0, 1}
    assert len({events[0]["id"] for _, events in received}) == len(prompts)
    _idle(kind, front, engines)


def test_a_disconnect_frees_the_engine(kind: Kind, engines: list[Process], serve: Callable[..., Process]) -> None:
    front = serve(engines)
    replies = [chat(front, max_tokens=3900, **STREAM) for _ in range(4)]
    for reply in replies:
        next(reply.events())
    until(lambda: sum(kind.busy(engine) for engine in engines) == 4)
    until(lambda: sum(one["engine"]["running"] for one in send(front, "/workers", headers=ADMIN).json()["data"]) == 4)
    for reply in replies:
        reply.close()
    _idle(kind, front, engines)
    outcomes = re.findall(r'^headway_requests_total{.*outcome="(\w+)".* (\d+)', send(front, "/metrics").text(), re.M)
    assert outcomes == [("cancelled", "4")]


def test_reasoning_and_answer_are_metered_apart(
    kind: Kind, engines: list[Process], serve: Callable[..., Process], tmp_path: Path
) -> None:
    front = serve(engines, "--records", str(tmp_path / "records"))
    options = {**STREAM, **kind.thinks, "max_tokens": 200}
    alone = list(chat(engines[0], **options).events())
    events = list(chat(front, **options).events())
    assert _text(events) == _text(alone) and len(answer_text(events)) > 100
    thought = answer_text(events, "reasoning_content") or answer_text(events, "reasoning")
    assert thought and "think>" not in thought
    lines = re.findall(r'inter_token_seconds_count{.*phase="(\w+)".* (\d+)', send(front, "/metrics").text())
    counted = {phase: int(tokens) for phase, tokens in lines}
    assert counted["answering"] > 0 and sum(counted.values()) < 200, "the tokens of one read count in one phase"
    front.stop()
    ran, _ = records.load(tmp_path / "records")
    assert list(ran.requests["generated_tokens"]) == [200]
    times = [ran.requests[name][0] for name in ("first_token_s", "reasoning_end_s", "answer_s", "end_s")]
    assert times == sorted(times) and times[1] == times[2] < times[3], "the phase changed as the tokens came"


@pytest.mark.parametrize("thinks", [False, True], ids=["answer", "reasoning"])
def test_streams_survive_an_engine_that_is_killed(
    thinks: bool, kind: Kind, engines: list[Process], serve: Callable[..., Process]
) -> None:
    """Each stream has the tokens of an uninterrupted one: none lost, repeated or changed."""
    doomed = kind.start()
    options = {**STREAM, "max_tokens": 600}
    if thinks:
        options["chat_template_kwargs"] = kind.thinks["chat_template_kwargs"]
    alone = [_text(list(chat(engines[0], f"{i} hellos", **options).events())) for i in range(4)]
    with serving.closing(doomed):
        front = serve([engines[0], doomed])
        far, hit = threading.Barrier(5), []

        def stream(i: int) -> list[Any]:
            reply = chat(front, f"{i} hellos", **options)
            received = []
            for event in reply.events():
                received.append(event)
                if len(received) == 100:
                    hit.append(_replica(reply))
                    far.wait(20)
            return received

        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(stream, i) for i in range(4)]
            until(lambda: far.n_waiting == 4)
            doomed.kill()
            far.wait(20)
            received = [one.result() for one in running]
    assert {0, 1} == set(hit)
    for events, text in zip(received, alone, strict=True):
        _check_stream(events, 600)
        assert _text(events) == text


def test_streams_of_a_drained_replica_move(
    kind: Kind, engines: list[Process], serve: Callable[..., Process], tmp_path: Path
) -> None:
    front = serve(engines, "--records", str(tmp_path / "records"))
    alone = answer_text(list(chat(engines[0], max_tokens=1200, **STREAM).events()))
    reply = chat(front, max_tokens=1200, **STREAM)
    left = _replica(reply)
    events = []
    for event in reply.events():
        events.append(event)
        if len(events) == 100:
            assert send(front, f"/workers/{left}/drain", {}, ADMIN).json()["status"] == "draining"
            until(lambda: not kind.busy(engines[left]))
    assert _check_stream(events, 1200) == alone
    reply = chat(front, max_tokens=1, **STREAM)
    assert _check_stream(list(reply.events()), 1) == alone[:3] and _replica(reply) == 1 - left
    front.stop()
    ran, _ = records.load(tmp_path / "records")
    assert list(ran.requests["moves"]) == [1, 0] and list(ran.requests["attempts"]) == [1, 1]


@pytest.mark.ci
def test_an_urgent_request_overtakes_in_the_engines_queue(
    kind: Kind, engines: list[Process], serve: Callable[..., Process]
) -> None:
    """The engine has twice as many requests as it runs at once when an urgent one comes."""
    if kind.name != "vllm-0.15":
        pytest.skip("its queue has no priorities")
    front = serve(engines[:1], policies={"ordering": "priority", "ordering_at": "replica"})
    begun: list[tuple[int, serving.Reply]] = []

    def begin(tier: int) -> None:
        begun.append((tier, chat(front, f"tier {tier}", {"x-headway-tier": str(tier)}, max_tokens=3900, **STREAM)))

    def waiting(num: int) -> Callable[[], bool]:
        return lambda: metric(engines[0], "vllm:num_requests_waiting") == num

    with ThreadPoolExecutor(9) as threads:
        asked = [threads.submit(begin, 1) for _ in range(8)]
        until(waiting(4))
        until(lambda: len(begun) == 4)
        asked.append(threads.submit(begin, 0))
        until(waiting(5))
        for i in range(9):  # each disconnect makes room for one request
            begun[i][1].close()
            until(lambda i=i: len(begun) == min(5 + i, 9))
        for one in asked:
            one.result()
    assert [tier for tier, _ in begun] == [1, 1, 1, 1, 0, 1, 1, 1, 1]
    _idle(kind, front, engines)
