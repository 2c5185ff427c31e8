"""A request of vLLM as an ordering sees it."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.request import Phase
from headway.vllm.request import EngineRequest
from vllm_stand_in import Request

START, END = (3,), (4, 5)


def made(prompt: list[int] | None = None, priority: int = 0, **hints: Any) -> tuple[Request, EngineRequest, list[str]]:
    request, complaints = Request("a", prompt or [1, 2], 50, 7.5, priority, hints), list[str]()
    return request, EngineRequest(request, START, END, complaints.append), complaints  # type: ignore[arg-type]


def test_what_vllm_knows() -> None:
    request, view, _ = made(priority=2)
    assert (view.arrival_s, view.prompt_tokens, view.tier, view.lora, view.deadline_s) == (7.5, 2, 2, "", None)
    assert (view.output_tokens, view.generated_tokens) == (50, 0)
    request._output_token_ids.append(8)
    assert view.generated_tokens == 1


def test_what_the_client_says() -> None:
    _, view, complaints = made(
        priority=2,
        headway_tier=1,
        headway_deadline_s=2,
        headway_slo_ttft_s=0.5,
        headway_tenant="acme",
        headway_output_tokens=9,
        headway_reasoning_tokens=4.0,
        other="x",
    )
    assert (view.tier, view.deadline_s, view.slo_ttft_s, view.tenant) == (1, 9.5, 0.5, "acme")
    assert (view.output_tokens, view.reasoning_tokens) == (9, 4) and not complaints


def test_times_count_from_the_arrival_at_the_gateway() -> None:
    _, promoted, _ = made(headway_waited_s=1.5, headway_promoted_s=1.25)
    assert promoted.tier_since_s == promoted.arrival_s + 1.25
    _, view, complaints = made(headway_waited_s=1.5, headway_deadline_s=2, headway_slo_ttft_s=0.5)
    assert (view.arrival_s, view.deadline_s, view.slo_ttft_s) == (6.0, 8.0, 0.5) and not complaints


def test_priorities_below_0_are_the_most_urgent_tier() -> None:
    assert made(priority=-3)[1].tier == 0


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("headway_tier", 1.5, "headway_tier: expected a whole number of at least 0, got 1.5"),
        ("headway_tier", True, "headway_tier: expected a whole number of at least 0, got True"),
        ("headway_deadline_s", float("nan"), "headway_deadline_s: expected a number of at least 0, got nan"),
        ("headway_slo_e2e_s", "1", "headway_slo_e2e_s: expected a number of at least 0, got '1'"),
        ("headway_tenant", 3, "headway_tenant: expected a text, got 3"),
    ],
)
def test_bad_hints_are_told_and_ignored(key: str, value: Any, expected: str) -> None:
    _, view, complaints = made(**{key: value})
    assert complaints == [f"request a: {expected}"]
    assert (view.tier, view.deadline_s, view.slo_e2e_s, view.tenant) == (0, None, None, "")


def test_unknown_hint_is_told() -> None:
    (warning,) = made(headway_deadline=3)[2]
    assert warning.startswith("request a: unknown 'headway_deadline'; expected one of: headway_tier, ")


def test_phase_ends_with_the_whole_sequence_of_tokens() -> None:
    request, view, _ = made()
    assert (view.phase, view.answer_tokens) == (Phase.REASONING, 0)
    for token, phase in ((5, 0), (4, 0), (8, 0), (4, 0), (5, 1), (8, 1)):
        request._output_token_ids.append(token)
        assert view.phase == phase
    assert view.answer_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "phase"),
    [([1, 2], 0), ([3, 8, 4, 5, 2], 1), ([4, 5, 2, 3], 0), ([3, 4], 0), ([5], 0), ([4, 5], 1)],
)
def test_prompt_may_have_ended_the_reasoning(prompt: list[int], phase: int) -> None:
    request, view, _ = made(prompt)
    request._output_token_ids.append(8)
    assert (view.phase, view.answer_tokens) == (phase, phase)


def test_without_an_end_of_reasoning_all_tokens_are_answers() -> None:
    view = EngineRequest(Request("a", [1], 5, 0.0, 0, None))  # type: ignore[arg-type]
    assert view.phase is Phase.ANSWERING
