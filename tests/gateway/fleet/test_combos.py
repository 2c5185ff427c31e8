"""Combos of emulated vLLM engines: handover from prefill to decode replicas, failures, and changes of roles."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from combo_fleets import LONG, combo_file, drained_stream, flight, prefills
from headway import records, scenario, serving
from headway.core.errors import HeadwayError
from headway.core.record import Cause, Outcome
from headway.gateway.fleet.combos import in_order
from serving import MODEL, Process, all_up, answer_text, chat, closing, emulator, gateway, metric, send, until, up


def streamed(process: Process, content: str = LONG, **options: Any) -> list[Any]:
    """A chat's events."""
    return list(chat(process, content, stream=True, **{"max_tokens": 12, **options}).events())


def idle(*processes: Process) -> None:
    """Wait until engines keep no KV cache and the gateway has nobody anywhere."""
    for process in processes:
        until(lambda process=process: metric(process, "vllm:kv_cache_usage_perc") == 0)


class Fleet(NamedTuple):
    """1P2D."""

    prefill: Process
    decode: tuple[Process, Process]
    gateway: Process


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("combos")
    prefill, decode = emulator(), (emulator(), emulator())
    front = gateway(combo_file(folder, [prefill.url], [each.url for each in decode]))
    with closing(prefill, *decode, front):
        all_up(front, 3)
        yield Fleet(prefill, decode, front)
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_the_prefill_replica_computes_prompts_and_decode_replicas_answer_in_turn(fleet: Fleet) -> None:
    before = prefills(fleet.gateway, "handed over")
    replies = [chat(fleet.gateway, LONG, stream=True, max_tokens=12) for _ in range(2)]
    names = {reply.headers["x-headway-replica"] for reply in replies}
    texts = {answer_text(list(reply.events())) for reply in replies}
    assert names == {"pair-decode/1", "pair-decode/2"}
    assert texts == {answer_text(streamed(fleet.prefill))}
    assert prefills(fleet.gateway, "handed over") == before + 2
    idle(fleet.prefill, *fleet.decode)


def test_an_unstreamed_answer_and_its_usage_are_the_decode_replicas(fleet: Fleet) -> None:
    alone = chat(fleet.prefill, LONG, max_tokens=12).json()
    answer = chat(fleet.gateway, LONG, max_tokens=12).json()
    assert answer["choices"] == alone["choices"] and answer["usage"] == alone["usage"]


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"n": 1, "max_tokens": 1, "stream": True}])
def test_a_request_for_one_token_is_not_handed_over(fleet: Fleet, options: dict[str, Any]) -> None:
    before = prefills(fleet.gateway, "handed over")
    reply = chat(fleet.gateway, LONG, **options)
    assert reply.status == 200 and reply.headers["x-headway-replica"] == "pair-prefill/0"
    reply.close()
    assert prefills(fleet.gateway, "handed over") == before


def test_a_clients_own_kv_transfer_params_are_removed(fleet: Fleet) -> None:
    theirs = {
        "do_remote_prefill": True,
        "remote_engine_id": "x",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_request_id": "y",
    }
    for max_tokens in (1, 12):
        answer = chat(fleet.gateway, LONG, max_tokens=max_tokens, kv_transfer_params=theirs).json()
        assert answer["usage"]["completion_tokens"] == max_tokens


def test_the_decode_replica_computes_the_prompt_after_a_failed_prefill(fleet: Fleet) -> None:
    before, failed = prefills(fleet.gateway, "handed over"), prefills(fleet.gateway, "failed")
    send(fleet.prefill, "/emulator/failures", [500], method="PUT").close()
    reply = chat(fleet.gateway, LONG, stream=True, max_tokens=12)
    assert reply.headers["x-headway-replica"].startswith("pair-decode/")
    assert answer_text(list(reply.events())) == answer_text(streamed(fleet.prefill))
    assert (prefills(fleet.gateway, "handed over"), prefills(fleet.gateway, "failed")) == (before, failed + 1)


def test_a_refusing_decode_replica_leaves_the_cache_to_another_one(fleet: Fleet) -> None:
    before = prefills(fleet.gateway, "handed over")
    for each in fleet.decode:
        send(each, "/emulator/failures", [503], method="PUT").close()
    assert answer_text(streamed(fleet.gateway)) == answer_text(streamed(fleet.prefill))
    assert prefills(fleet.gateway, "handed over") == before + 1
    idle(fleet.prefill, *fleet.decode)


def test_the_client_gets_an_engines_refusal(fleet: Fleet) -> None:
    reply = chat(fleet.gateway, LONG, max_tokens=12, n=1, messages="no list")
    assert reply.status == 400
    reply.close()


def test_a_stream_continues_after_its_decode_replica_died(fleet: Fleet, tmp_path: Path) -> None:
    dying = emulator()
    path = combo_file(tmp_path, [fleet.prefill.url], [dying.url, fleet.decode[0].url])
    front = gateway(path, "--records", str(tmp_path / "ran"))
    with closing(dying, front):
        all_up(front, 3)
        reply = chat(front, LONG, stream=True, max_tokens=100)
        assert reply.headers["x-headway-replica"] == "pair-decode/1"
        events = reply.events()
        first = [next(events) for _ in range(20)]
        dying.kill()
        assert answer_text([*first, *events]) == answer_text(streamed(fleet.prefill, max_tokens=100))
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        front.stop()
    _replays(tmp_path, num_tokens=100)


def _replays(folder: Path, num_tokens: int) -> None:
    """What ran has both parts of each request, and can be simulated."""
    ran = records.load(folder / "ran")[0]
    rows = ran.segments
    assert rows["cause"][rows["request"] == 0].tolist() == [Cause.MOVED, Cause.CRASHED, Cause.MOVED, Cause.FINISHED]
    assert rows["replica"][rows["request"] == 0].tolist()[::2] == [0, 0]
    assert ran.requests["generated_tokens"][0] == num_tokens and ran.requests["moves"][0] == 2
    assert [bool(each.for_prefill) for each in ran.replicas] == [True, False, False]
    changes = {("workload",): ("", {"trace": str(folder / "ran/requests.parquet")})}
    again = scenario.run(scenario.load(folder / "fleet.yaml", changes)).records
    assert (again.requests["outcome"] == Outcome.FINISHED).all()
    assert again.requests["generated_tokens"].tolist() == ran.requests["generated_tokens"].tolist()
    assert len(again.moves["request"]) == len(again.requests["request"])


def test_the_rest_of_a_combo_serves_both_phases(fleet: Fleet, tmp_path: Path) -> None:
    prefill, decode = emulator(), emulator()
    front = gateway(combo_file(tmp_path, [prefill.url], [decode.url]))
    with closing(prefill, decode, front):
        all_up(front, 2)
        alone = answer_text(streamed(fleet.prefill, max_tokens=100))
        events = chat(front, LONG, stream=True, max_tokens=100).events()
        first = next(events)
        decode.kill()
        assert answer_text([first, *events]) == alone  # on the prefill replica
        prefill.kill()
        all_up(front, 0)
        decode = emulator(port=decode.port)
        with closing(decode):
            all_up(front, 1)
            reply = chat(front, LONG, stream=True, max_tokens=100)
            assert reply.headers["x-headway-replica"] == "pair-decode/1"
            assert answer_text(list(reply.events())) == alone
        until(lambda: metric(front, "headway_requests_in_flight") == 0)


def test_a_prompt_is_recomputed_if_its_cache_is_gone(fleet: Fleet, tmp_path: Path) -> None:
    """By who decodes, if it does that; else the request fails there, and is placed anew: with who is left."""
    forgetful, able = emulator("--kv-keep-s", "0"), emulator("--kv-load-failure-policy", "recompute")
    text = answer_text(streamed(fleet.prefill))
    with closing(forgetful, able):
        for decode, by in ((fleet.decode[0], "pair-prefill/0"), (able, "pair-decode/1")):
            with up(gateway(combo_file(tmp_path, [forgetful.url], [decode.url])), 2) as front:
                reply = chat(front, LONG, stream=True, max_tokens=12)
                assert reply.headers["x-headway-replica"] == by
                assert answer_text(list(reply.events())) == text
                answer = chat(front, LONG, max_tokens=12).json()
                assert answer["choices"][0]["message"]["content"] == text
                assert prefills(front, "handed over") == 2
                until(lambda: metric(front, "headway_requests_in_flight") == 0)  # called at once
            idle(forgetful, decode)


def test_several_workers_hand_over(fleet: Fleet, tmp_path: Path) -> None:
    path = combo_file(tmp_path, [fleet.prefill.url], [each.url for each in fleet.decode])
    with up(gateway(path, "--workers", "2"), 3) as front:
        text = answer_text(streamed(fleet.prefill))
        assert {answer_text(streamed(front)) for _ in range(4)} == {text}
        assert prefills(front, "handed over") == 4
        send(fleet.prefill, "/emulator/failures", [500], method="PUT").close()
        assert answer_text(streamed(front)) == text and prefills(front, "failed") == 1
        for each in fleet.decode:
            send(each, "/emulator/failures", [503], method="PUT").close()
        assert answer_text(streamed(front)) == text and prefills(front, "handed over") == 5
        reply = chat(front, LONG, max_tokens=1)
        assert reply.headers["x-headway-replica"] == "pair-prefill/0"
        reply.close()
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
    idle(fleet.prefill, *fleet.decode)


def test_control_chooses_the_decode_replica_if_the_router_does_not(fleet: Fleet, tmp_path: Path) -> None:
    decode = [each.url for each in fleet.decode]
    with up(
        gateway(combo_file(tmp_path, [fleet.prefill.url], decode, policies={"routing": "least-loaded"})), 3
    ) as front:
        assert {answer_text(streamed(front)) for _ in range(3)} == {answer_text(streamed(fleet.prefill))}
        assert prefills(front, "handed over") == 3


def test_an_idle_replica_serves_the_whole_request(fleet: Fleet, tmp_path: Path) -> None:
    """While the only decode replica writes, a prompt stays where it is computed."""
    path = combo_file(tmp_path, [fleet.prefill.url], [fleet.decode[0].url], policies={"routing": "cauchy"})
    with up(gateway(path), 2) as front:
        first = chat(front, LONG, stream=True, max_tokens=5000, ignore_eos=True)
        events = first.events()
        next(events)
        assert first.headers["x-headway-replica"] == "pair-decode/1"

        def stays() -> bool:  # once the gateway has heard that the prefill replica is idle again
            before = prefills(front, "handed over")
            reply = chat(front, LONG, stream=True, max_tokens=12)
            list(reply.events())
            is_there = reply.headers["x-headway-replica"] == "pair-prefill/0"
            assert prefills(front, "handed over") == before + (not is_there)
            return is_there

        until(stays)
        first.close()
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
    idle(fleet.prefill, *fleet.decode)


def test_a_request_is_at_no_replica_after_its_client_left(tmp_path: Path) -> None:
    """While its prompt is computed, while its cache is copied (which takes 20 s here), and while it is answered."""
    prefill, slow = emulator(), emulator("--kv-gbps", "0.05")  # of its own, as the first keeps what nobody comes for
    front = gateway(combo_file(tmp_path, [prefill.url], [slow.url]))
    with closing(prefill, slow, front):
        all_up(front, 2)
        for words in (20_000, 1000):
            body = {"model": MODEL, "prompt": "word " * words, "max_tokens": 50, "stream": True}
            with socket.create_connection(("127.0.0.1", front.port)) as client:
                data = json.dumps(body).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
                client.sendall(head.encode() + data)
                at = "pair-decode" if words == 1000 else "pair-prefill"
                until(lambda at=at: flight(front, at) == 1)
            until(lambda: flight(front, "pair-") == 0)
        assert prefills(front, "handed over") == 1
        idle(slow)


def test_a_stream_moves_from_a_draining_replica_by_a_new_prefill(fleet: Fleet, tmp_path: Path) -> None:
    decode = [each.url for each in fleet.decode]
    path = combo_file(tmp_path, [fleet.prefill.url], decode, gateway={"admin_keys": [sha256(b"boss").hexdigest()]})
    front, boss = gateway(path), {"authorization": "Bearer boss"}
    with closing(front):
        all_up(front, 3)
        assert drained_stream(front, boss, 120)[1] == answer_text(streamed(fleet.prefill, max_tokens=120))
        assert prefills(front, "handed over") == 2


def test_an_admin_changes_roles(fleet: Fleet, tmp_path: Path) -> None:
    path = combo_file(
        tmp_path, [fleet.prefill.url], [fleet.decode[0].url], gateway={"admin_keys": [sha256(b"boss").hexdigest()]}
    )
    front, boss = gateway(path), {"authorization": "Bearer boss"}
    with closing(front):
        all_up(front, 2)
        for id, role, status in ((1, "prefill", 200), (0, "decode", 200), (0, "neither", 400), (7, "decode", 404)):
            reply = send(front, f"/workers/{id}/role", {"role": role}, boss)
            assert reply.status == status
            reply.close()
        workers = send(front, "/workers", None, boss).json()["data"]
        assert [worker["role"] for worker in workers] == ["decode", "prefill"]
        reply = chat(front, LONG, stream=True, max_tokens=12)
        assert reply.headers["x-headway-replica"] == "pair-prefill/0"
        assert list(reply.events())[-1] == "[DONE]"


def test_roles_change_at_scheduled_times(fleet: Fleet, tmp_path: Path) -> None:
    changes = [{"at_s": 0.5, "replica": 0, "role": "decode"}, {"at_s": 0.5, "replica": 1, "role": "prefill"}]
    path = combo_file(tmp_path, [fleet.prefill.url], [fleet.decode[0].url], roles=changes)
    with up(gateway(path, "--records", str(tmp_path / "ran")), 2) as front:

        def answers() -> str:
            reply = chat(front, LONG, stream=True, max_tokens=12)
            list(reply.events())
            return reply.headers["x-headway-replica"]

        until(lambda: answers() == "pair-prefill/0")  # which is what the pool is called, not what it does
        front.stop()
    first, second = records.load(tmp_path / "ran")[0].replicas
    assert first.for_decode[-1][1] == second.for_prefill[-1][1] > first.for_decode[-1][0]
    assert first.for_prefill and second.for_decode


# What cannot be served.


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"engine": "sglang"}, "speaks sglang, and the other part vllm"),
        ({"engine": "llama.cpp"}, "cannot transfer its KV cache"),
        ({"api": "openai"}, "cannot transfer a KV cache"),
        ({"kubernetes": {"name": "x"}, "endpoints": []}, "expected the same for both"),
        ({"endpoints": []}, "missing"),
    ],
)
def test_a_combo_that_cannot_hand_over_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    side = {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "endpoints": ["http://127.0.0.1:1"]}
    path = combo_file(tmp_path, [], [], combo={"prefill": side, "decode": {**side, **changes}})
    with pytest.raises(HeadwayError, match=what):
        serving.load(path)


def test_endpoints_are_assigned_to_several_combos_in_order(tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{port}" for port in range(1, 7)]
    path = combo_file(tmp_path, urls[:2], urls[2:], combo={"replicas": 2})
    _, plan = serving.load(path)
    assert [url[-1] for _, url in in_order(plan.pools)] == ["1", "3", "4", "2", "5", "6"]
    path = combo_file(tmp_path, urls[:1], urls[2:], combo={"replicas": 2})
    with pytest.raises(HeadwayError, match="as many for each of the combo's"):
        serving.load(path)
