"""Cascades in front of emulated engines: scoring, escalation, records and failures."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from headway import records, scenario
from headway import serving as composition
from headway.core.errors import HeadwayError
from headway.metrics.summary import summarize
from scripted import Exchange, ScriptedEngine, opened, running
from serving import answer_text, chat, metric, send, until

pytest.importorskip("httptools")
ORACLE = "only a simulation knows"
SMALL, LARGE = "qwen3-8b", "llama-3.1-8b"


class Judge(ScriptedEngine):
    """A model that answers with `score`."""

    def __init__(self) -> None:
        super().__init__()
        self.score: Any = "50"
        """A text, or a status."""
        self.may_answer = threading.Event()
        self.may_answer.set()

    async def complete(self, exchange: Exchange) -> None:
        await opened(self.may_answer)
        message = {"role": "assistant", "content": self.score}
        status = self.score if isinstance(self.score, int) else 200
        exchange.answer({"choices": [{"index": 0, "message": message}]}, status)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with running(Judge()) as made:
        yield made


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[serving.Process, serving.Process]]:
    options = ("--speed", "4", "--confidence", "0.7", "--reasoning-tokens", "5")
    small = serving.Process("-m", "headway", "emulate", "--model", SMALL, "--gpu", "h100", "--port", "0", *options)
    large = serving.Process("-m", "headway", "emulate", "--model", LARGE, "--gpu", "h100", "--port", "0", *options)
    with serving.closing(small, large):
        yield small, large


def fleet(folder: Path, engines: tuple[serving.Process, ...], judge: dict[str, Any], threshold: float = 60.0) -> Path:
    pools = [
        {"name": name, "model": model, "gpu": "h100", "engine": "vllm-0.15", "endpoints": [engine.url]}
        for name, model, engine in zip(("small", "large"), (SMALL, LARGE), engines, strict=True)
    ]
    policy = {"name": "thresholds", "thresholds": threshold}
    cascade = {"models": [SMALL, LARGE], "name": "best", "judge_usd": 0.5, "policy": policy, "judge": judge}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": pools, "cascade": cascade, "gateway": {"scrape_period_s": 0.1}}))
    return path


def by_model(judge: Judge, **options: Any) -> dict[str, Any]:
    return {"url": judge.url, "model": "judge", "timeout_s": 2.0, **options}


@pytest.fixture(scope="module")
def front(
    engines: tuple[serving.Process, ...], judge: Judge, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[serving.Process]:
    with serving.up(serving.gateway(fleet(tmp_path_factory.mktemp("fleet"), engines, by_model(judge))), 2) as made:
        yield made


def _model(reply: serving.Reply) -> str:
    return str(reply.json()["model"])


@pytest.mark.parametrize(
    ("score", "model"),
    [
        ("90", SMALL), (" 60.0\n", SMALL), ("<think>hm, 20?</think>\n75", SMALL), ("59.9", LARGE), ("0", LARGE),
        ("about 90", LARGE), ("90/100", LARGE), ("101", LARGE), ("-1", LARGE), ("", LARGE), (500, LARGE), (None, LARGE),
    ],
)  # fmt: skip
def test_an_answer_is_scored_and_a_rejected_one_escalates(
    front: serving.Process, judge: Judge, score: Any, model: str
) -> None:
    """What is no number from 0 to 100 is no score: then the larger model answers."""
    judge.score = score
    reply = chat(front, model="best", max_tokens=9)
    assert reply.headers["x-headway-replica"].startswith("small" if model == SMALL else "large")
    assert _model(reply) == model


@pytest.mark.parametrize(("score", "which"), [("80", 0), ("10", 1)])
def test_a_stream_is_the_accepted_answer_alone(
    front: serving.Process, engines: tuple[serving.Process, ...], judge: Judge, score: str, which: int
) -> None:
    judge.score = score
    events = list(chat(front, model="best", max_tokens=30, stream=True).events())
    straight = chat(engines[which], model="any", max_tokens=30).json()["choices"][0]["message"]
    assert events[-1] == "[DONE]" and answer_text(events) == straight["content"]
    assert answer_text(events, "reasoning").split() == straight["reasoning"].split()
    assert len({(event["id"], event["model"]) for event in events[:-1]}) == 1
    assert events[0]["model"] == (SMALL, LARGE)[which]


def test_the_judge_gets_question_and_answer_each_substituted_once(
    front: serving.Process, engines: tuple[serving.Process, ...], judge: Judge
) -> None:
    judge.score, judge.bodies[:] = "70", []
    question = "what does {answer} mean, and {question}?"
    chat(front, question, model="best", max_tokens=9).json()
    answer = chat(engines[0], question, model="any", max_tokens=9).json()["choices"][0]["message"]["content"]
    (request,) = judge.bodies
    prompt = request["messages"][0]["content"]
    assert question in prompt and prompt.count(answer.strip()) == 1
    assert request["temperature"] == 0 and request["model"] == "judge"


def test_a_request_that_names_a_model_is_not_scored(front: serving.Process, judge: Judge) -> None:
    judge.bodies[:] = []
    assert _model(chat(front, model=SMALL, max_tokens=3)) == SMALL
    assert _model(chat(front, model=LARGE, max_tokens=3)) == LARGE
    assert not judge.bodies
    assert [model["id"] for model in send(front, "/v1/models").json()["data"]] == [SMALL, LARGE, "best"]


def test_a_client_may_leave_while_its_answer_is_scored(front: serving.Process, judge: Judge) -> None:
    before = metric(front, "headway_requests_total")
    judge.may_answer.clear()
    judge.bodies[:] = []
    connection = serving.http.client.HTTPConnection("127.0.0.1", front.port)
    body = {"model": "best", "messages": [{"role": "user", "content": "go"}], "max_tokens": 3}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    until(lambda: bool(judge.bodies))
    connection.close()
    until(lambda: metric(front, "headway_requests_total") == before + 1)
    judge.may_answer.set()
    judge.score = "99"
    assert _model(chat(front, model="best", max_tokens=3)) == SMALL
    until(lambda: metric(front, "headway_requests_in_flight") == 0)


@pytest.mark.parametrize(("on_failure", "model"), [("escalate", LARGE), ("accept", SMALL)])
def test_an_answer_without_a_score_is_escalated_or_accepted_by_the_setting(
    engines: tuple[serving.Process, ...], judge: Judge, tmp_path: Path, on_failure: str, model: str
) -> None:
    """Whether nobody is there, or somebody who does not answer in time."""
    for url in ("http://127.0.0.1:9", judge.url):
        judge.may_answer.clear()
        configured = by_model(judge, url=url, on_failure=on_failure, timeout_s=0.3)
        with serving.up(serving.gateway(fleet(tmp_path, engines, configured)), 2) as made:
            assert _model(chat(made, model="best", max_tokens=3)) == model
            assert answer_text(list(chat(made, model="best", max_tokens=9, stream=True).events()))
            assert metric(made, "headway_judgements_total") == 2
            assert 'outcome="unscored"} 2' in send(made, "/metrics").text()
        judge.may_answer.set()


def test_answers_are_scored_by_confidence(engines: tuple[serving.Process, ...], tmp_path: Path) -> None:
    """The emulated models give each token a probability of 0.7."""
    for threshold, model in ((69.9, SMALL), (70.1, LARGE)):
        with serving.up(serving.gateway(fleet(tmp_path, engines, {"by": "confidence"}, threshold)), 2) as made:
            answer = chat(made, model="best", max_tokens=12).json()
            assert answer["model"] == model and not answer["choices"][0].get("logprobs")
            events = list(chat(made, model="best", max_tokens=12, stream=True).events())
            assert events[0]["model"] == model
            assert not any(choice.get("logprobs") for event in events[:-1] for choice in event["choices"])
            wanted = chat(made, model="best", max_tokens=12, logprobs=True).json()["choices"][0]["logprobs"]
            assert wanted["content"][0]["logprob"] == pytest.approx(math.log(0.7))
            whole = send(made, "/v1/completions", {"model": "best", "prompt": "a b", "max_tokens": 5}).json()
            assert whole["model"] == model and not whole["choices"][0].get("logprobs")


def test_a_held_back_answer_survives_its_engine(
    engines: tuple[serving.Process, ...], judge: Judge, tmp_path: Path
) -> None:
    doomed = serving.emulator("--reasoning-tokens", "5", "--output-tokens", "200")
    path = fleet(tmp_path, engines, by_model(judge))
    data = yaml.safe_load(path.read_text())
    data["fleet"][0]["endpoints"] = [doomed.url, engines[0].url]
    path.write_text(yaml.safe_dump(data))
    judge.score = "80"
    made = serving.gateway(path)
    with serving.closing(doomed, made):
        serving.all_up(made, 3)
        replies: list[list[Any]] = []
        reader = threading.Thread(
            target=lambda: replies.append(list(chat(made, model="best", max_tokens=200, stream=True).events()))
        )
        reader.start()
        until(lambda: metric(doomed, "vllm:num_requests_running") == 1)
        doomed.kill()
        reader.join(serving.PATIENCE_S)
        straight = chat(engines[0], model="any", max_tokens=200).json()["choices"][0]["message"]["content"]
        assert answer_text(replies[0]).split() == straight.split()


def test_each_stage_is_recorded_and_the_records_can_be_simulated(
    engines: tuple[serving.Process, ...], judge: Judge, tmp_path: Path
) -> None:
    path = fleet(tmp_path, engines, by_model(judge))
    with serving.up(serving.gateway(path, "--records", str(tmp_path / "records")), 2) as made:
        for score in ("90", "20", "nonsense"):
            judge.score = score
            chat(made, model="best", max_tokens=10).json()
        chat(made, model=SMALL, max_tokens=10).json()
        assert metric(made, "headway_judgements_total") == 3
        made.stop()
    ran, _ = records.load(tmp_path / "records")
    assert [ran.models[code] for code in ran.workload["model"]] == ["best", "best", "best", SMALL]
    by_request = sorted(range(4), key=lambda row: ran.requests["request"][row])
    assert [ran.requests["stage"][row] for row in by_request] == [0, 1, 1, -1]
    stages = sorted(zip(*(ran.segments[name].tolist() for name in ("request", "stage", "replica")), strict=True))
    assert stages == [(0, 0, 0), (1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 1)]
    summary = summarize(ran)
    assert (summary.judged, summary.judge_usd) == (3, 1.5), "also the one without a score was asked for"
    scores = ran.workload[f"quality:{SMALL}"].tolist()
    assert scores[:2] == [90.0, 20.0] and all(math.isnan(score) for score in scores[2:])
    assert ran.workload[f"output_tokens:{SMALL}"].tolist() == [10, 10, 10, -1]
    data = yaml.safe_load(path.read_text())
    del data["cascade"]["judge"]
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump({**data, "workload": {"trace": str(tmp_path / "records/requests.parquet")}}))
    replayed = scenario.run(scenario.load(again)).records
    assert sorted(replayed.requests["stage"].tolist()) == [-1, 0, 1, 1]


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (None, "needs a `judge`"),
        ({}, "expected the judge's address"),
        ({"url": "http://a:1"}, "judge.model: missing"),
        ({"url": "http://a:1", "model": "m", "prompt": "score {answer}"}, "has no {question}"),
        ({"url": "http://a:1", "modle": "m"}, "did you mean 'model'?"),
        ({"by": "confidence"}, ORACLE),
    ],
)
def test_a_cascade_without_a_judge_is_refused(tmp_path: Path, judge: dict[str, Any] | None, words: str) -> None:
    class Nowhere:
        url = "http://127.0.0.1:1"

    path = fleet(tmp_path, (Nowhere(), Nowhere()), judge or {})  # type: ignore[arg-type]
    if words == ORACLE:
        path.write_text(
            path.read_text().replace("name: thresholds\n", "name: pre-routed\n").replace("thresholds:", "threshold:")
        )
    if judge is None:
        data = yaml.safe_load(path.read_text())
        del data["cascade"]["judge"]
        path.write_text(yaml.safe_dump(data))
    with pytest.raises(HeadwayError) as error:
        composition.load(path)
    assert words in str(error.value)


def test_one_models_replicas_on_two_types_of_gpu_answer_together(
    engines: tuple[serving.Process, ...], judge: Judge, tmp_path: Path
) -> None:
    """As plans of cascades write them: a pool for each type."""
    path = fleet(tmp_path, engines, by_model(judge))
    document = yaml.safe_load(path.read_text())
    other = serving.Process("-m", "headway", "emulate", "--model", SMALL, "--gpu", "a100-80gb", "--port", "0",
                            "--speed", "4", "--confidence", "0.7")  # fmt: skip
    more = {**document["fleet"][0], "name": "other", "gpu": "a100-80gb", "endpoints": [other.url]}
    document |= {"fleet": [*document["fleet"], more], "policies": {"routing": "round-robin"}}
    path.write_text(yaml.safe_dump(document))
    judge.score = "90"
    with serving.up(serving.gateway(path), 3, other) as made:
        answered = [chat(made, model="best", max_tokens=3) for _ in range(6)]
        assert {_model(reply) for reply in answered} == {SMALL}
        assert {reply.headers["x-headway-replica"].partition("/")[0] for reply in answered} == {"small", "other"}
        judge.score = "10"
        assert _model(chat(made, model="best", max_tokens=3)) == LARGE


# Stages that are combos.


def test_stages_may_be_combos(judge: Judge, tmp_path: Path) -> None:
    """Both models' prompts are handed over; what is answered, and judged, is what an engine alone says."""
    engines = [
        serving.Process("-m", "headway", "emulate", "--model", model, "--gpu", "h100", "--port", "0", "--speed", "4")
        for model in (SMALL, SMALL, LARGE, LARGE)
    ]
    combos = []
    for name, model, first, second in (("small", SMALL, *engines[:2]), ("large", LARGE, *engines[2:])):
        side = {"model": model, "gpu": "h100", "engine": "vllm-0.15"}
        parts = {"prefill": {**side, "endpoints": [first.url]}, "decode": {**side, "endpoints": [second.url]}}
        combos.append({"name": name, **parts})
    policy = {"name": "thresholds", "thresholds": 60.0}
    cascade = {"models": [SMALL, LARGE], "name": "best", "policy": policy, "judge": by_model(judge)}
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"combos": combos, "cascade": cascade, "gateway": {"scrape_period_s": 0.1}}))
    front = serving.gateway(path)
    question = "a prompt of some length " * 40
    with serving.closing(*engines, front):
        serving.all_up(front, 4)
        for score, num, engine in (("90", 1, engines[0]), ("10", 3, engines[2])):
            judge.score = score
            reply = chat(front, question, model="best", max_tokens=30)
            straight = chat(engine, question, model="any", max_tokens=30).json()
            assert reply.headers["x-headway-replica"].split("/")[0] == ("small-decode" if num == 1 else "large-decode")
            assert reply.json()["choices"][0]["message"] == straight["choices"][0]["message"]
            lines = send(front, "/metrics").text().splitlines()
            handed = [line for line in lines if line.startswith("headway_prefills_total") and "handed over" in line]
            assert sum(int(line.rsplit(" ", 1)[1]) for line in handed) == num
        events = list(chat(front, question, model="best", max_tokens=30, stream=True).events())
        assert answer_text(events) == straight["choices"][0]["message"]["content"]
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
