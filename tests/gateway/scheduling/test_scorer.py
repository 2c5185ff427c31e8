"""Scores of answers: from token probabilities, or from a judging model's reply."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scorer import AnswerScorer, ConfidenceMeter, ScoringError
from headway.gateway.settings import Judge
from headway.gateway.upstream import sse
from headway.gateway.upstream.chunks import Choice
from headway.gateway.upstream.client import Client
from in_memory import InMemoryTransport
from scripted import Exchange

JUDGE = Judge(url="http://judge:1", model="judge", timeout_s=1.0)


def _chunk(**logprobs: Any) -> Choice:
    return sse.read_chunk(json.dumps({"choices": [{"index": 0, "logprobs": logprobs}]}).encode())[0].choices[0]


def test_confidence_is_the_geometric_mean_of_the_probabilities() -> None:
    meter = ConfidenceMeter()
    meter.observe(_chunk(content=[{"token": "a", "logprob": math.log(0.5)}]))
    meter.observe(_chunk(token_logprobs=[None, math.log(0.125)]))
    meter.observe(_chunk(content="in another form"))
    assert meter.score() == pytest.approx(25.0)


def test_confidence_without_probabilities_is_an_error() -> None:
    with pytest.raises(ScoringError, match="no log probabilities"):
        ConfidenceMeter().score()


async def _score(reply: str | int | None, tries: list[str] | None = None, judge: Judge = JUDGE) -> float | None:
    """The score by a judge that replies so: a text, a status, or nothing."""
    sent = [] if tries is None else tries

    async def serve(exchange: Exchange) -> None:
        sent.append(json.loads(exchange.body)["messages"][0]["content"])
        if isinstance(reply, int):
            exchange.answer(b"{}", reply)
        elif reply is not None:
            message = {"role": "assistant", "content": reply}
            exchange.answer(json.dumps({"choices": [{"index": 0, "message": message}]}).encode())

    scorer = AnswerScorer(judge)
    assert scorer._model is not None and scorer.confidence_meter() is None
    scorer._model._client = Client(judge.url, transport=InMemoryTransport(serve))
    try:
        return await scorer.score(InFlightRequest(Live(0, 0.0, 1, 1)), "why {answer}?", "because", None)
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("80", 80.0),
        (" 7.5\n", 7.5),
        ("<think>3 or 4</think> 4", 4.0),
        ("100", 100.0),
        ("101", None),
        ("80 of 100", None),
        ("", None),
        ("good", None),
        (500, None),
    ],
)
def test_the_judges_reply_is_a_number_and_nothing_else(reply: str | int, score: float | None) -> None:
    assert asyncio.run(_score(reply)) == score


def test_placeholders_in_the_question_are_not_substituted() -> None:
    prompts: list[str] = []
    asyncio.run(_score("1", prompts, Judge(url="http://judge:1", model="j", prompt="{question} / {answer}")))
    assert prompts == ["why {answer}? / because"]


def test_a_failed_request_to_the_judge_is_repeated_once() -> None:
    prompts: list[str] = []
    assert asyncio.run(_score(500, prompts)) is None and len(prompts) == 2


def test_a_judge_that_does_not_reply_in_time_gives_no_score() -> None:
    judge = Judge(url="http://judge:1", model="j", timeout_s=0.01)
    assert asyncio.run(_score(None, judge=judge)) is None


def test_scoring_ends_with_the_request() -> None:
    async def story() -> float | None:
        request, scorer = InFlightRequest(Live(0, 0.0, 1, 1)), AnswerScorer(Judge(by="confidence"))
        scorer._score = lambda *_: asyncio.sleep(60, 1.0)  # type: ignore[method-assign, assignment]
        scoring = asyncio.create_task(scorer.score(request, "", "", None))
        await asyncio.sleep(0)
        assert request.scoring is not None
        request.end(Outcome.CANCELLED)
        score = await scoring
        assert request.scoring is None
        return score

    assert asyncio.run(story()) is None
