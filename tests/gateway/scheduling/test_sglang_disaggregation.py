"""Pairs of emulated single-phase SGLang engines: dual dispatch, and failures of either engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import processes
from combo_fleets import LONG, STRICT, drained_stream, flight, pair_file, prefills
from headway import records, scenario, serving
from headway.core.errors import HeadwayError
from headway.core.record import Cause, Outcome
from headway.gateway.scheduling import sglang_disaggregation
from headway.gateway.scheduling.in_flight import PrefillLeg
from headway.gateway.upstream.errors import EngineError
from serving import MODEL, Process, all_up, answer_text, chat, closing, emulator, gateway, metric, send, until, up

SLOW = ("--kv-gbps", "0.05")
"""A cache takes a while to be sent."""


def half(mode: str, *options: str) -> Process:
    """An engine for one phase."""
    at = ("--disaggregation-mode", mode, "--disaggregation-bootstrap-port", "0")
    return emulator("--engine", "sglang", *at, *options)


def fails(process: Process, *faults: int | str) -> None:
    """What its next requests get."""
    send(process, "/emulator/failures", list(faults), method="PUT").close()


def idle(*engines: Process) -> None:
    """Wait until nobody is there, and no KV cache is kept."""
    for process in engines:
        for name in ("num_running_reqs", "num_queue_reqs", "token_usage"):
            until(lambda process=process, name=name: metric(process, f"sglang:{name}") == 0)


class Fleet(NamedTuple):
    """Two combos of two, and an engine that does both phases."""

    prefill: tuple[Process, Process]
    decode: tuple[Process, Process]
    gateway: Process
    alone: Process

    @property
    def engines(self) -> tuple[Process, ...]:
        return (*self.prefill, *self.decode)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("halves")
    prefill, decode = (half("prefill"), half("prefill")), (half("decode"), half("decode"))
    front = gateway(pair_file(folder, [each.url for each in prefill], [each.url for each in decode], 2))
    alone = emulator("--engine", "sglang")
    with closing(*prefill, *decode, front, alone):
        all_up(front, 4)
        yield Fleet(prefill, decode, front, alone)
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def streamed(process: Process, **options: Any) -> str:
    return answer_text(list(chat(process, LONG, stream=True, **{"max_tokens": 12, **options}).events()))


# The engines by themselves.


def _complete(process: Process, room: int, port: int, stream: bool = False, host: str = "127.0.0.1") -> Any:
    return chat(
        process, LONG, max_tokens=5, stream=stream, bootstrap_host=host, bootstrap_port=port, bootstrap_room=room
    )


def _port(process: Process) -> int:
    return int(send(process, "/get_server_info").json()["disaggregation_bootstrap_port"])


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_each_engine_waits_for_its_partner(fleet: Fleet, first: str, stream: bool) -> None:
    prefill, decode = fleet.prefill[0], fleet.decode[0]
    port, replies = _port(prefill), {}
    engines = {"prefill": prefill, "decode": decode}
    order = sorted(engines, key=lambda mode: mode != first)

    def complete(mode: str) -> None:
        reply = _complete(engines[mode], 7, port, stream)
        replies[mode] = (
            answer_text(list(reply.events())) if stream else reply.json()["choices"][0]["message"]["content"]
        )

    threads = [threading.Thread(target=complete, args=(mode,)) for mode in order]
    threads[0].start()
    waits = {"prefill": 0, "decode": 1}[first]  # one that waits for its cache counts as waiting in line
    until(lambda: metric(engines[first], "sglang:num_queue_reqs") == waits)
    assert not replies
    threads[1].start()
    for thread in threads:
        thread.join()
    whole = answer_text(list(chat(fleet.alone, LONG, stream=True, max_tokens=5).events()))
    assert replies["decode"] == whole and whole.startswith(replies["prefill"]) and replies["prefill"]
    idle(prefill, decode)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_an_engine_without_a_partner_times_out(mode: str) -> None:
    engine = half(mode, "--disaggregation-timeout-s", "0.3")
    partner = half("prefill", "--disaggregation-timeout-s", "0.3")
    with closing(engine, partner):
        reply = _complete(engine, 1, _port(partner))
        assert reply.status == 500 and "timed out after 0.3s" in reply.json()["message"]
        events = list(_complete(engine, 2, _port(partner), stream=True).events())
        assert "timed out after 0.3s" in events[0]["error"]["message"] and events[-1] == "[DONE]"
        idle(engine)


def test_a_single_phase_engine_serves_nothing_alone(fleet: Fleet) -> None:
    for engine in (fleet.prefill[0], fleet.decode[0]):
        reply = chat(engine, LONG, max_tokens=5)
        assert reply.status == 400 and "bootstrap room" in reply.json()["message"]
        trial = send(engine, "/health_generate")
        assert trial.status == 200
        trial.close()
    nowhere = _complete(fleet.decode[0], 3, processes.ports(1)[0])
    assert nowhere.status == 500 and "could not fetch" in nowhere.json()["message"]


# Through the gateway.


def test_both_engines_get_the_request_and_the_decode_replica_answers(fleet: Fleet) -> None:
    before = prefills(fleet.gateway, "handed over")
    replies = [chat(fleet.gateway, LONG, stream=True, max_tokens=12) for _ in range(2)]
    assert {reply.headers["x-headway-replica"] for reply in replies} == {"pair-decode/1", "pair-decode/3"}
    assert {answer_text(list(reply.events())) for reply in replies} == {streamed(fleet.alone)}
    answer, alone = (chat(each, LONG, max_tokens=12).json() for each in (fleet.gateway, fleet.alone))
    assert answer["choices"] == alone["choices"] and answer["usage"] == alone["usage"]
    one = chat(fleet.gateway, LONG, max_tokens=1).json()
    assert one["usage"]["completion_tokens"] == 1
    assert prefills(fleet.gateway, "handed over") == before + 4
    idle(*fleet.engines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("which", "fault"), [("prefill", 500), ("prefill", "transfer"), ("decode", 503), ("decode", "transfer")]
)
def test_a_request_moves_to_another_pair_after_a_failure(fleet: Fleet, which: str, fault: Any, stream: bool) -> None:
    """And the other half is not left waiting."""
    for engine in getattr(fleet, which):
        fails(engine, fault)
    failed = prefills(fleet.gateway, "failed")
    reply = chat(fleet.gateway, LONG, stream=stream, max_tokens=12)
    assert reply.status == 200, reply.text()
    text = answer_text(list(reply.events())) if stream else reply.json()["choices"][0]["message"]["content"]
    assert text == streamed(fleet.alone)
    assert prefills(fleet.gateway, "failed") - failed == (2 if which == "prefill" else 0)
    for engine in fleet.engines:
        fails(engine)
    idle(*fleet.engines)


def test_the_client_gets_an_engines_refusal(fleet: Fleet) -> None:
    reply = chat(fleet.gateway, LONG, max_tokens=12, messages="no list")
    assert reply.status == 400 and reply.json()["error"]["message"]
    fails(fleet.prefill[0], 404)
    fails(fleet.prefill[1], 404)
    reply = chat(fleet.gateway, LONG, max_tokens=12)
    assert (reply.status, reply.json()["error"]["message"]) == (404, "this failure was asked for")
    reply = send(fleet.gateway, "/v1/embeddings", {"model": MODEL, "input": "hi"})
    assert reply.status == 400 and "chats and completions only" in reply.json()["error"]["message"]
    for engine in fleet.prefill:
        fails(engine)
    idle(*fleet.engines)


def test_a_request_survives_either_engine_of_its_pair(fleet: Fleet, tmp_path: Path) -> None:
    """One that computes the prompt, while its cache is sent; one that answers, in mid-stream."""
    doomed, dying = half("prefill", *SLOW), half("decode")
    path = pair_file(tmp_path, [doomed.url, fleet.prefill[0].url], [dying.url, fleet.decode[0].url], 2)
    front = gateway(path, "--records", str(tmp_path / "ran"))
    with closing(doomed, dying, front):
        all_up(front, 4)
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(streamed(front)))
        reader.start()
        until(lambda: (flight(front, "pair-prefill"), flight(front, "pair-decode")) == (1, 1))
        until(lambda: metric(doomed, "sglang:token_usage") > 0)
        doomed.kill()
        reader.join()
        assert found == [streamed(fleet.alone)]
        idle(dying)
        assert streamed(front) == found[0]  # by the pair that is left whole
        assert prefills(front, "failed") == 1
        doomed = half("prefill")
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        front.stop()
    with closing(doomed):
        _mid_stream(fleet, tmp_path, doomed)


def test_the_other_prefill_replica_of_the_combo_takes_over(fleet: Fleet, tmp_path: Path) -> None:
    """The decode replica reports a failure, too, and is not the one to be blamed."""
    doomed = half("prefill", *SLOW)
    front = gateway(pair_file(tmp_path, [doomed.url, fleet.prefill[0].url], [fleet.decode[0].url]))
    with closing(doomed, front):
        all_up(front, 3)
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(streamed(front)))
        reader.start()
        until(lambda: metric(doomed, "sglang:token_usage") > 0)
        doomed.kill()
        reader.join()
        assert found == [streamed(fleet.alone)] and prefills(front, "failed") == 1
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def _mid_stream(fleet: Fleet, folder: Path, first: Process) -> None:
    dying = half("decode")
    path = pair_file(folder, [first.url, fleet.prefill[0].url], [dying.url, fleet.decode[0].url], 2)
    front = gateway(path, "--records", str(folder / "ran"))
    with closing(dying, front):
        all_up(front, 4)
        reply = chat(front, LONG, stream=True, max_tokens=100)
        assert reply.headers["x-headway-replica"] == "pair-decode/1"
        events = reply.events()
        begun = [next(events) for _ in range(20)]
        dying.kill()
        assert answer_text([*begun, *events]) == streamed(fleet.alone, max_tokens=100)
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        front.stop()
    ran = records.load(folder / "ran")[0]
    assert ran.segments["cause"].tolist() == [Cause.MOVED, Cause.CRASHED, Cause.MOVED, Cause.FINISHED]
    assert ran.segments["replica"].tolist() == [0, 1, 2, 3]
    assert ran.requests["generated_tokens"].tolist() == [100]
    changes = {("workload",): ("", {"trace": str(folder / "ran/requests.parquet")})}
    again = scenario.run(scenario.load(folder / "fleet.yaml", changes)).records
    assert (again.requests["outcome"] == Outcome.FINISHED).all()
    assert again.requests["generated_tokens"].tolist() == [100]


def test_an_engine_without_a_partner_gets_no_requests(fleet: Fleet, tmp_path: Path) -> None:
    """Requests wait for the other one; the halves of two combos are no pair."""
    path = pair_file(tmp_path, [fleet.prefill[0].url], ["http://127.0.0.1:1"], gateway={"hold_s": 0.3})
    with up(gateway(path), 1) as front:
        reply = chat(front, LONG, max_tokens=5)
        assert reply.status == 503
        reply.close()
    dead = "http://127.0.0.1:1"
    path = pair_file(tmp_path, [fleet.prefill[0].url, dead], [dead, fleet.decode[0].url], 2, gateway={"hold_s": 0.3})
    with up(gateway(path), 2) as front:
        reply = chat(front, LONG, max_tokens=5)
        assert reply.status == 503
        reply.close()
    decode = half("decode")
    port = decode.port
    decode.close()
    with up(gateway(pair_file(tmp_path, [fleet.prefill[0].url], [f"http://127.0.0.1:{port}"])), 1) as front:
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(streamed(front)))
        reader.start()
        until(lambda: metric(front, "headway_requests_held") == 1)
        decode = emulator("--engine", "sglang", "--disaggregation-mode", "decode", port=port)
        with closing(decode):
            reader.join()
            assert found == [streamed(fleet.alone)]


def test_a_request_is_at_neither_engine_after_its_client_left(fleet: Fleet, tmp_path: Path) -> None:
    """While the other half is waited for, while the cache is copied, while it is answered."""
    slow = half("prefill", *SLOW)
    front = gateway(pair_file(tmp_path, [slow.url], [fleet.decode[0].url]))
    with closing(slow, front):
        all_up(front, 2)
        for fault, words in (("hang", 1000), ("", 1000)):
            fails(slow, *([fault] if fault else []))
            body = {"model": MODEL, "prompt": "word " * words, "max_tokens": 50, "stream": True}
            with socket.create_connection(("127.0.0.1", front.port)) as client:
                data = json.dumps(body).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
                client.sendall(head.encode() + data)
                until(lambda: (flight(front, "pair-prefill"), flight(front, "pair-decode")) == (1, 1))
                if not fault:
                    until(lambda: metric(slow, "sglang:token_usage") > 0)
            until(lambda: flight(front, "pair-") == 0)
            idle(slow, fleet.decode[0])
    reply = chat(fleet.gateway, LONG, stream=True, max_tokens=5000, ignore_eos=True)
    next(reply.events())
    until(lambda: (flight(fleet.gateway, "pair-prefill"), flight(fleet.gateway, "pair-decode")) == (0, 1))
    reply.close()
    idle(*fleet.engines)
    assert flight(fleet.gateway, "pair-") == 0


def test_a_stream_moves_from_a_draining_replica_to_another_pair(fleet: Fleet, tmp_path: Path) -> None:
    prefill, decode = ([each.url for each in side] for side in (fleet.prefill, fleet.decode))
    path = pair_file(tmp_path, prefill, decode, 2, gateway={"admin_keys": [sha256(b"boss").hexdigest()]})
    front, boss = gateway(path), {"authorization": "Bearer boss"}
    with closing(front):
        all_up(front, 4)
        id, text = drained_stream(front, boss, 120)
        assert text == streamed(fleet.alone, max_tokens=120)
        assert prefills(front, "handed over") == 2
        for _ in range(3):
            reply = chat(front, LONG, max_tokens=3)
            assert reply.headers["x-headway-replica"] == f"pair-decode/{4 - id}"
            reply.close()
        reply = send(front, f"/workers/{id}/role", {"role": "prefill"}, boss)
        assert reply.status == 409 and "was started for decode" in reply.json()["error"]["message"]


def test_several_workers_dispatch_to_both(fleet: Fleet, tmp_path: Path) -> None:
    prefill, decode = ([each.url for each in side] for side in (fleet.prefill, fleet.decode))
    with up(gateway(pair_file(tmp_path, prefill, decode, 2), "--workers", "2"), 4) as front:
        text = streamed(fleet.alone)
        assert {streamed(front) for _ in range(4)} == {text}
        until(lambda: prefills(front, "handed over") == 4)
        for which, fault in (("prefill", 500), ("decode", "transfer")):
            for engine in getattr(fleet, which):
                fails(engine, fault)
            assert streamed(front) == text
            for engine in fleet.engines:
                fails(engine)
        assert prefills(front, "failed") == 2
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
    idle(*fleet.engines)


def test_an_engine_that_was_started_for_the_other_phase_is_not_used(fleet: Fleet, tmp_path: Path) -> None:
    front = gateway(pair_file(tmp_path, [fleet.decode[0].url], [fleet.prefill[0].url], gateway={"hold_s": 0.2}))
    with closing(front):
        reply = chat(front, LONG, max_tokens=3)
        assert reply.status == 503
        reply.close()
        assert send(front, "/health").json()["up"] == 0


# What is sent, and what comes.


def test_the_bootstrap_address_and_a_room_for_each_prompt_are_in_the_body() -> None:
    class Engine:
        url, bootstrap_port = "http://[::1]:8000", 8998

    prefill: Any = Engine()
    made = [sglang_disaggregation.with_bootstrap({"prompt": "hi"}, prefill) for _ in range(100)]
    assert {(each["bootstrap_host"], each["bootstrap_port"]) for each in made} == {("[::1]", 8998)}
    rooms = {each["bootstrap_room"] for each in made}
    assert len(rooms) == 100 and all(0 <= room < 1 << 63 for room in rooms)
    several = sglang_disaggregation.with_bootstrap({"prompt": ["hi", "there"]}, prefill)
    assert several["bootstrap_host"] == ["[::1]"] * 2 and len(set(several["bootstrap_room"])) == 2


@pytest.mark.parametrize(
    ("answer", "kind", "what"),
    [
        (b'data: {"error": {"message": "no"}}\n\n', "text/event-stream", "reported an error"),
        (b'{"choices": [{"finish_reason": "abort"}]}', "application/json", "gave the request up"),
        (b"[1]", "application/json", "no completion"),
    ],
)
def test_an_error_in_a_prefill_answer_is_raised(answer: bytes, kind: str, what: str) -> None:
    with pytest.raises(EngineError, match=what):
        sglang_disaggregation.check_answer(answer, kind)


@pytest.mark.parametrize("message", ["KVTransferError(bootstrap_room=7): broken", "Decode transfer failed for request"])
def test_a_broken_transfer_is_blamed_on_the_prefill_replica_that_reports_it_later(message: str) -> None:
    """As one does on a busy machine."""

    class Client:
        async def request(self, *_: Any) -> None:
            await asyncio.sleep(5 * sglang_disaggregation._GRACE_S)
            raise EngineError("the transfer was broken here")

    class Prefill:
        url, bootstrap_port, client = "http://p:1", 8998, Client()

    class Request:
        connection = None

    async def decode(*_: Any) -> None:
        raise EngineError(message)

    async def dispatched() -> None:
        leg = PrefillLeg(prefill)
        dispatch = sglang_disaggregation.DualDispatch(request, leg, lambda: False, lambda _: None, lambda: False)
        await dispatch.send(decode, prefill, "/v1/completions", "", {"prompt": "hi"})

    prefill: Any = Prefill()
    request: Any = Request()
    with pytest.raises(sglang_disaggregation.PrefillLegError) as found:
        asyncio.run(dispatched())
    assert found.value.replica is prefill and str(found.value) == "the transfer was broken here"


# What cannot be served.


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"policies": {"routing": "cauchy"}}, "cannot do the other, and this router lets an idle replica"),
        ({"policies": {"routing": {"name": "cauchy", "between": "tokens"}}}, "expected another, or `within: strict`"),
        ({"policies": {**STRICT, "migration": "headway"}}, "so no request can move"),
        ({"roles": [{"at_s": 1, "replica": 0, "role": "decode"}]}, "started for one phase and cannot do the other"),
        (
            {"combo": {"decode": {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "endpoints": ["http://x:1"]}}},
            "speaks vllm, and the other part sglang",
        ),
    ],
)
def test_what_single_phase_engines_cannot_serve_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(HeadwayError, match=what):
        serving.load(pair_file(tmp_path, ["http://127.0.0.1:1"], ["http://127.0.0.1:2"], **changes))


@pytest.mark.parametrize("policies", [{"routing": "headway"}, {"preset": "headway"}], ids=str)
def test_headways_policies_serve_them(tmp_path: Path, policies: dict[str, Any]) -> None:
    _, plan = serving.load(pair_file(tmp_path, ["http://127.0.0.1:1"], ["http://127.0.0.1:2"], policies=policies))
    assert plan.policies.migration is None
