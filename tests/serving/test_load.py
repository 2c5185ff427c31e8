"""A load on a running engine: what is sent, what is measured of the answers, and what others read of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines
import serving
from headway import records
from headway.calibration.runs import read as runs
from headway.calibration.runs import served
from headway.cli import main
from headway.core.record import Outcome
from headway.core.request import Request, Segment
from headway.gateway.upstream.errors import EngineError
from headway.serving.load_generator import prompts, results, saved, warm_up
from headway.serving.load_generator.answer import Answer, StreamReader
from headway.serving.load_generator.drive import Driver, Sent
from headway.workload.sources import ClosedLoop, TraceSource
from headway.workload.table import Workload
from scripted import Exchange, ScriptedEngine

SHORT = ("--prompt-tokens", "60", "--output-tokens", "12")


@pytest.fixture(scope="module")
def emulator() -> Iterator[serving.Process]:
    started = serving.emulator("--speed", "4", "--enable-prompt-tokens-details")
    with serving.closing(started):
        yield started


def loaded(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """What the command prints as JSON."""
    assert main(["load", *words, "--json", "--no-progress"]) == code
    return dict(json.loads(capsys.readouterr().out))


# Whole loads on an emulated engine.


def test_a_closed_loop_is_measured_and_read_by_others(
    emulator: serving.Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "ran", tmp_path / "out.json"
    num = 120  # six times what a run needs of streams: a busy machine reads some answers at once
    found = loaded(
        capsys, emulator.url, "--concurrency", "4", "--num-requests", str(num), *SHORT, "--records", str(folder),
        "--save-detailed", str(file), "--gpu", "h100", "--temperature", "0",
    )  # fmt: skip
    values = found["measured"]
    assert (values["num_requests"], values["num_completed"], values["errors"]) == (num, num, {})
    assert (values["prompt_tokens"], values["output_tokens"]) == (num * 60, num * 12)
    assert (values["num_unlike_prompts"], values["num_short"], values["num_merged"]) == (0, 0, 0)
    assert values["itl_s"]["count"] <= num * 11 and values["e2e_s"]["count"] == num
    table, provenance = records.load(folder)
    assert (table.workload["prompt_tokens"] == 60).all() and (table.requests["generated_tokens"] == 12).all()
    assert (table.requests["first_token_s"] >= table.requests["placed_s"]).all()
    assert provenance["load"]["temperature"] == 0 and "h100-80gb-sxm" in provenance["fleet"]
    assert main(["validate", str(folder), "--json"]) == 0
    (experiment,) = json.loads(capsys.readouterr().out)["experiments"]
    assert (experiment["model"], experiment["gpu"]) == ("qwen3-8b", "h100-80gb-sxm")
    words = f"simulate --trace {folder} --model qwen3-8b --gpu h100 --engine vllm-0.15 --json"
    assert main(words.split()) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["num_completed"] == num
    (by_records,), _, _ = served.read(folder)
    ((by_file,), _) = runs.read(file)
    assert by_file.num_requests == num and by_file.is_greedy and by_file.output_tokens == 12
    assert by_file.latencies_s["ttft_mean"] == pytest.approx(values["ttft_s"]["mean"])
    assert by_file.latencies_s["e2e_mean"] == pytest.approx(values["e2e_s"]["mean"])
    took_s = table.requests["end_s"] - table.requests["placed_s"]
    streamed = table.requests["end_s"] > table.requests["first_token_s"]
    assert by_records.num_requests == streamed.sum() and by_records.is_greedy and by_records.output_tokens == 12
    assert by_records.latencies_s["e2e_mean"] == pytest.approx(took_s[streamed].mean())


def test_an_open_loop_sends_at_its_times_and_a_time_ends_it(
    emulator: serving.Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    words = ("--rate", "60", "--num-requests", "12", "--cv", "0", *SHORT, "--endpoint", "chat", "--no-warm-up")
    found = loaded(capsys, emulator.url, *words, "--save-detailed", str(file))
    assert found["measured"]["prompt_tokens"] == 12 * 60 and not found["measured"]["num_unlike_prompts"]
    assert found["measured"]["offered_rps"] == pytest.approx(60) and found["warm_up"] is None
    written = json.loads(file.read_text())
    assert written["request_rate"] == 60 and written["burstiness"] in (None, math.inf) and "temperature" not in written
    assert all(at >= i / 60 for i, at in enumerate(written["start_times"]))
    found = loaded(capsys, emulator.url, "--duration", "0.2", "--concurrency", "2", *SHORT, "--no-warm-up")
    assert 0 < found["measured"]["num_requests"] < 100_000


def test_a_trace_and_sessions_keep_what_they_share(
    emulator: serving.Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,40,3\n0.01,50,4\n0.02,60,5\n")
    found = loaded(capsys, emulator.url, "--trace", str(trace), "--no-warm-up")
    assert (found["measured"]["prompt_tokens"], found["measured"]["output_tokens"]) == (150, 12)
    words = ("--turns", "3", "--think", "0", "--rate", "50", "--num-requests", "12", *SHORT, "--no-warm-up")
    found = loaded(capsys, emulator.url, *words)
    values = found["measured"]
    assert values["num_completed"] == 12 and not values["num_unlike_prompts"]
    assert values["prompt_tokens"] == 4 * (60 + (60 + 12 + 60) + (60 + 12 + 60 + 12 + 60))
    assert values["cached_prompt_share"] > 0.3  # of three turns' 396 tokens, 180 are new


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_files_of_a_tokenizer_count(
    emulator: serving.Process, tmp_path: Path, capsys: pytest.CaptureFixture[str], endpoint: str
) -> None:
    pytest.importorskip("tokenizers")
    import tokenizing

    known = [word.strip() for word in prompts.WORDS]
    folder = tokenizing.write_model(tmp_path, known)
    words = ("--tokenizer", str(folder), "--endpoint", endpoint, "--num-requests", "3", "--no-warm-up", *SHORT)
    found = loaded(capsys, emulator.url, *words)
    assert found["measured"]["prompt_tokens"] == 180
    assert not any("prompt" in note for note in found["notes"])  # a busy machine has notes of its own
    bare = tokenizing.write_model(tmp_path / "bare", known, template=None)
    found = loaded(capsys, emulator.url, *words, "--tokenizer", str(bare))
    assert any("a guess" in note for note in found["notes"]) == (endpoint == "chat")


@pytest.mark.skipif(engines.NO_LLAMA, reason="pip install xllamacpp gguf")
def test_a_real_llama_cpp_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving.closing(server := engines.LLAMA.start()):
        words = ("--concurrency", "2", "--num-requests", "8", *SHORT, "--temperature", "1")
        values = loaded(capsys, server.url, *words, "--save-detailed", str(tmp_path / "out.json"))["measured"]
    assert (values["num_completed"], values["num_unlike_prompts"], values["num_short"]) == (8, 0, 0)
    assert (values["prompt_tokens"], values["output_tokens"]) == (8 * 60, 8 * 12)
    ((run,), _) = runs.read(tmp_path / "out.json")
    assert run.num_requests == 8


# An engine that answers as it is told.

HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED = HEAD.replace("Connection: close", "Transfer-Encoding: chunked")
OUT_OF_MEMORY = '{"error": {"message": "out of memory", "code": 500}}'
USAGE = {"prompt_tokens": 60, "completion_tokens": 3, "total_tokens": 63}


def event(text: str, finish: str | None = None, **more: Any) -> str:
    value = {"id": "a", "choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}
    return f"data: {json.dumps(value)}\n\n"


WHOLE = (
    event(" a")
    + event(" b c", "length")
    + f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n"
    + "data: [DONE]\n\n"
)
Reply = Callable[[int], str]
"""What is written for the stream of this number, from 0."""


class Engine(ScriptedEngine):
    """Lists a model, and writes what `reply` says for each stream."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self._replies = (reply(i) for i in itertools.count())
        self.start()

    async def get(self, exchange: Exchange) -> None:
        is_list = exchange.path == "/v1/models"
        exchange.answer({"data": [{"id": "house-model"}]} if is_list else {}, 200 if is_list else 404)

    async def complete(self, exchange: Exchange) -> None:
        if exchange.json().get("stream"):
            exchange.send(next(self._replies).encode())
        else:
            exchange.send(b"HTTP/1.1 404 no\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        exchange.close()


@pytest.fixture
def engine() -> Iterator[Callable[[Reply], Engine]]:
    started: list[Engine] = []

    def start(reply: Reply) -> Engine:
        started.append(Engine(reply))
        return started[-1]

    yield start
    for each in started:
        each.close()


ODD = {
    "status 429": "HTTP/1.1 429 Many\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    "broken off": CHUNKED + f"{len(event('a')):x}\r\n{event('a')}\r\n",
    "ended early": HEAD + event(" a"),
    "reported an error in the stream": HEAD + event(" a") + f"data: {OUT_OF_MEMORY}\n\n",
    "answered without a token": HEAD + "data: [DONE]\n\n",
    "answered without a stream": "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
}


def test_errors_are_counted_by_their_kind(
    engine: Callable[[Reply], Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = [*ODD.values(), HEAD + WHOLE]
    server = engine(lambda i: replies[i % len(replies)])
    words = ("--concurrency", "1", "--num-requests", "14", "--prompt-tokens", "60", "--output-tokens", "3")
    file = tmp_path / "out.json"
    found = loaded(capsys, server.url, *words, "--no-warm-up", "--save-detailed", str(file), "--records", str(tmp_path))
    values = found["measured"]
    expected = {kind: 2 for kind in ODD if kind != "ended early"} | {"broken off": 4}
    assert {kind: each["num"] for kind, each in values["errors"].items()} == expected
    assert values["num_completed"] == 2 and values["num_merged"] == 2 and values["prompt_tokens"] == 120
    assert any("2 of 14 requests failed, status 429" in note for note in found["notes"])
    assert any("a guess, one token a word" in note for note in found["notes"])
    written = json.loads(file.read_text())
    assert (written["completed"], written["failed"]) == (2, 12) and sum(map(bool, written["errors"])) == 12
    table, _ = records.load(tmp_path)
    assert np.bincount(table.requests["outcome"]).tolist() == [2, 0, 12]
    assert loaded(capsys, server.url, "--num-requests", "1", "--no-warm-up", code=3)["measured"]["num_completed"] == 0
    assert main(["load", server.url]) == 2
    assert "/v1/completions: broken off: " in capsys.readouterr().err  # the warm-up's first


def test_ctrl_c_keeps_what_was_measured(
    engine: Callable[[Reply], Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = threading.Event()

    def reply(number: int) -> str:
        if number < 5:
            return HEAD + WHOLE
        os.kill(os.getpid(), signal.SIGINT)
        done.wait(60)
        return ""

    server = engine(reply)
    words = ("--concurrency", "1", "--prompt-tokens", "60", "--output-tokens", "3", "--no-warm-up")
    try:
        found = loaded(capsys, server.url, *words, "--records", str(tmp_path), code=130)
    finally:
        done.set()
    assert found["is_stopped"] and found["measured"]["num_completed"] == 5 and found["measured"]["num_stopped"] == 1
    assert len(records.load(tmp_path)[0].requests["request"]) == 5


def test_bad_input_is_told_before_anything_is_sent(
    emulator: serving.Process, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, why in (
        (["http://127.0.0.1:9"], "gives no answer"),
        ([emulator.url, "--model", "qwen3-9b"], "qwen3-8b"),
        ([emulator.url, "--cv", "2"], "--cv: goes with --rate"),
        ([emulator.url, "--turns", "2"], "--turns: goes with --rate"),
        ([emulator.url, "--limit", "2"], "--limit: goes with --trace"),
        ([emulator.url, "--think", "2"], "--think: goes with --turns"),
        ([emulator.url, "--prompt-tokens", "azure-comv"], "azure-conv"),
        ([emulator.url, "--gpu", "h1000"], "unknown GPU"),
    ):
        assert main(["load", *words]) == 2
        assert why in capsys.readouterr().err


# Streams.


def answer_of(*events: str) -> Answer:
    """Each event comes a second after the one before, the first at 1 s."""
    answer, clock = Answer(0.0), iter(range(1, 100))
    reader = StreamReader(answer, lambda: float(next(clock)))
    for each in events:
        reader.feed([each.encode()])
    reader.close()
    answer.end_s = 99.0
    return answer


END = event("", "length")


def usage(tokens: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 9, "completion_tokens": tokens}}


def with_ids(text: str, *ids: int) -> str:
    return event(text).replace('"index": 0', f'"index": 0, "token_ids": {list(ids)}')


STREAMS = {
    "token ids": ([with_ids(" a", 5), with_ids(" b c d", 6, 7, 8), with_ids(" e", 9), END], [1, 3, 1]),
    "usage by chunk": ([event(" a", **usage(1)), event(" b c d", **usage(4)), event(" e", **usage(5)), END], [1, 3, 1]),
    "timings": (
        [
            event(" a", timings={"predicted_n": 1}),
            event(" bcd", timings={"predicted_n": 4}),
            event(" e", timings={"predicted_n": 5}),
            END,
        ],
        [1, 3, 1],
    ),
    "unsaid": ([event(" a"), event(" b c d"), event(" e"), event("", "length", **usage(5))], [1, 1, 1]),
    "unsaid, with text at the end": ([event(" a"), event(" b c d"), event(" e", "length", **usage(5))], [1, 1, 1]),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_several_tokens_in_a_chunk_are_told_from_one(kind: str) -> None:
    events, tokens = STREAMS[kind]
    answer = answer_of(*events)
    assert answer.chunk_tokens == tokens and answer.chunk_s == [1.0, 2.0, 3.0] and answer.output_tokens == 5
    assert answer.is_merged == kind.startswith("unsaid")
    gaps = results.token_gaps_s(answer)
    assert len(gaps) == 4 and gaps.sum() == pytest.approx(2.0) == 4 * results.tpot_s(answer)
    assert np.allclose(gaps, [1 / 3, 1 / 3, 1 / 3, 1] if not answer.is_merged else 0.5)


def test_a_chat_begins_with_its_first_token_and_errors_end_it() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    word = {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}
    answer = answer_of(*(f"data: {json.dumps(each)}\n\n" for each in (role, word)), END)
    assert answer.chunk_s == [2.0] and math.isnan(results.tpot_s(answer)) and not len(results.token_gaps_s(answer))
    for bad in ("event: error\ndata: no\n\n", 'data: {"error": {"message": "no"}}\n\n', event(" a")):
        with pytest.raises(EngineError):
            answer_of(event(" a"), bad)


# Prompts.


def counting(cost: Callable[[str], int]) -> prompts.Count:
    async def count(text: str) -> int | None:
        return cost(text)

    return count


def merged(text: str) -> int:
    """Words of few letters are one token, others one for each letter."""
    return 1 + sum(1 if len(word) < 4 else len(word) for word in text.split())


TOKENIZERS: dict[str, Callable[[str], int]] = {
    "words": lambda text: len(text.split()) + 2,
    "short words": merged,
    "bytes": lambda text: len(text.encode()),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_have_exactly_their_tokens(kind: str) -> None:
    cost = TOKENIZERS[kind]
    words = asyncio.run(prompts.vocabulary(counting(cost)))
    assert words.note == "" and len(words.words) >= prompts.GROUP
    made = prompts.Prompts(words, 3, is_chat=False)
    for tokens in (10, 33, 400):
        first, second = (made.fields(Request(i, 0.0, tokens, 5))["prompt"] for i in (1, 2))
        assert cost(first) == cost(second) == tokens and first != second
        assert made.fields(Request(1, 9.0, tokens, 7))["prompt"] == first


def test_lengths_that_cannot_be_exact_are_said() -> None:
    async def unknown(text: str) -> int | None:
        return None

    for count in (None, unknown):
        assert "a guess" in asyncio.run(prompts.vocabulary(count)).note
    words = asyncio.run(prompts.vocabulary(counting(lambda text: 2 * len(text.encode()))))
    assert "approximate" in words.note and words.tokens_per_word > 2
    odd = asyncio.run(prompts.vocabulary(counting(lambda text: min(len(text.split()), 150))))
    assert "257 tokens were counted as 150" in odd.note


def test_prompts_share_their_segments_and_have_the_engines_answers() -> None:
    words = prompts.Vocabulary(prompts.WORDS)
    for is_chat in (False, True):
        made = prompts.Prompts(words, 0, is_chat)
        first = Request(0, 0.0, 8, 4, prefix=(Segment(7, 6),), output_id=9)
        other = Request(1, 0.0, 8, 4, prefix=(Segment(7, 6),))
        later = Request(2, 0.0, 20, 4, prefix=(Segment(7, 6), Segment(8, 2), Segment(9, 4)))
        made.keep(first, " said so")
        made.keep(other, " for nobody")
        if is_chat:
            roles = [each["role"] for each in made.fields(later)["messages"]]
            assert roles == ["user", "assistant", "user"]
            assert made.fields(later)["messages"][1]["content"] == " said so"
            continue
        texts = [made.fields(each)["prompt"] for each in (first, other, later)]
        begin = words.text(6, 0, "load/0/segment/7")
        assert all(text.startswith(begin) for text in texts) and texts[0] != texts[1]
        assert [len(text.split()) for text in texts] == [8, 8, 6 + 2 + 2 + 8] and " said so" in texts[2]


def test_no_load_repeats_the_prompts_of_another() -> None:
    words = prompts.Vocabulary(prompts.WORDS)
    request = Request(0, 0.0, 40, 4, prefix=(Segment(7, 20),))
    loads = [(0, 0), (0, 1), (1, 0), (1, 1)]
    texts = [prompts.Prompts(words, seed, False, num).fields(request)["prompt"].split() for seed, num in loads]
    again = prompts.Prompts(words, 0, False).fields(request)["prompt"].split()
    assert texts[0] == again
    assert len({tuple(text[:16]) for text in texts}) == len({tuple(text[20:]) for text in texts}) == len(loads)


def test_prompts_that_the_engine_knew_before_are_said(
    emulator: serving.Process, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (emulator.url, "--concurrency", "2", "--num-requests", "4", *SHORT, "--no-warm-up")
    for seed, share in (("91", 0.0), ("91", 0.8), ("92", 0.0)):
        found = loaded(capsys, *words, "--seed", seed)
        assert found["measured"]["unshared_cached_share"] == pytest.approx(share)
        assert any("the same ones before" in note for note in found["notes"]) is bool(share)
    for _ in range(2):
        assert loaded(capsys, *words)["measured"]["unshared_cached_share"] == 0


# First uses.


def test_stalls_are_waits_that_do_not_come_again() -> None:
    waits = [(1, 3.4), (4, 3.2), (1, 0.05), (4, 0.2), (1, 0.04), (4, 0.21)]
    assert warm_up.stalls_s(waits) == [3.4, 3.2]
    assert warm_up.is_steady(waits[:4]) and not warm_up.is_steady([(1, 0.05), (4, 0.2), (1, 0.04), (4, 3.0)])
    slow = [(1, 9.0), (4, 12.0), (1, 9.5), (4, 11.0)]  # a long prompt on a slow engine
    assert warm_up.stalls_s(slow) == [] and warm_up.is_steady(slow)


def stream_of(number: int, times: Sequence[float]) -> Sent:
    answer = Answer(times[0] - 0.1, list(times), [1] * len(times), end_s=times[-1] + 0.001)
    return Sent(Request(number, times[0] - 0.1, 10, len(times)), answer)


def test_a_standstill_is_a_pause_of_all_streams() -> None:
    one = np.arange(0.0, 2.0, 0.01)
    held = np.where(one < 1.0, one, one + 3.5)
    alone = stream_of(0, list(held))
    early, late = stream_of(1, [x + 0.004 for x in held]), stream_of(2, [x + 6.0 for x in one])
    (pause,) = warm_up.standstills([alone, early, late])
    assert pause[1] - pause[0] == pytest.approx(3.5, abs=0.02)
    assert warm_up.first_uses([pause]) == [pause] and warm_up.without([alone, early, late], [pause]) == [late]
    assert warm_up.first_uses([(100.0, 104.0)]) == []
    steady = stream_of(3, [x * 3 for x in one])
    assert warm_up.standstills([alone, early, steady]) == []  # another stream went on
    assert warm_up.standstills([stream_of(0, list(one)), stream_of(1, [x + 9 for x in one])]) == []  # idle between


# The driver.


def table(num: int, gap_s: float = 0.0) -> Workload:
    tokens = np.full(num, 5)
    return Workload({"arrival_s": gap_s * np.arange(num), "prompt_tokens": tokens, "output_tokens": tokens})


async def at_once(request: Request, now: Callable[[], float]) -> Answer:
    answer = Answer(now(), [now()], [5], reported_tokens=5)
    await asyncio.sleep(0)
    answer.end_s = now()
    return answer


def test_all_requests_are_sent_once_and_none_before_its_time() -> None:
    for source in (TraceSource(table(40, 0.001)), ClosedLoop(table(40), 7)):
        sent = asyncio.run(Driver(source, at_once).run())
        assert sorted(each.request.id for each in sent) == list(range(40))
        assert all(each.answer.sent_s >= each.request.arrival_s for each in sent)
        assert {each.outcome for each in sent} == {Outcome.FINISHED}


def test_a_closed_loop_has_no_more_in_flight_than_clients() -> None:
    in_flight, most = 0, 0

    async def ask(request: Request, now: Callable[[], float]) -> Answer:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        answer = await at_once(request, now)
        for _ in range(20):
            await asyncio.sleep(0)
        in_flight -= 1
        return answer

    asyncio.run(Driver(ClosedLoop(table(50), 3), ask).run())
    assert most == 3


def test_objectives_count_failures_and_not_what_was_stopped() -> None:
    good, slow = stream_of(0, [0.0, 0.1]), stream_of(1, [0.0, 0.5])
    failed, stopped = (
        Sent(Request(i, 0.0, 5, 5), Answer(0.0, end_s=1.0, kind=kind)) for i, kind in ((2, "x"), (3, "stopped"))
    )
    all_of = [good, slow, failed, stopped]
    assert results.attainment(all_of, results.Slo(tpot_s=0.2)) == pytest.approx(1 / 3)
    assert results.attainment(all_of, results.Slo(ttft_s=0.2)) == pytest.approx(2 / 3)
    values = results.measured(all_of)
    assert (values.num_completed, values.num_stopped, list(values.errors)) == (2, 1, ["x"])
    assert saved.vllm_bench(all_of, "m", saved.datetime(2026, 1, 1), rate_rps=None, burstiness=1.0, concurrency=2,
                            temperature=None, endpoint="chat")["max_concurrent_requests"] == 3  # fmt: skip
