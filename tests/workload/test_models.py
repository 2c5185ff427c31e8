"""`models` of a workload: a trace keeps the requests of these models, and none is given to another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.core.errors import HeadwayError
from headway.workload.generate import generate
from headway.workload.spec import TraceSpec, WorkloadSpec
from headway.workload.table import Workload

OWN = "arrival_s,prompt_tokens,output_tokens,model\n" + "".join(
    f"{i},{100 + i % 3},10,{('chat', 'code', 'draft')[i % 3]}\n" for i in range(300)
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{i},{('ChatGPT', 'GPT-4')[i % 2]},{100 + i % 2},10,110,API log\n" for i in range(10)
)


def _made(folder: Path, text: str, wanted: str | dict[str, float] | None, **trace: object) -> Workload:
    (folder / "trace.csv").write_text(text)
    return generate(WorkloadSpec(trace=TraceSpec("trace.csv", **trace), models=wanted), 0, folder)  # type: ignore[arg-type]


def _models(made: Workload) -> list[str]:
    return [made.models[code] for code in made.columns["model"].tolist()]


def test_requests_of_other_models_are_left_out(tmp_path: Path) -> None:
    """They became requests of the wanted model, with the lengths of the others."""
    made = _made(tmp_path, OWN, "code")
    assert len(made) == 100 and set(_models(made)) == {"code"} and set(made.prompt_tokens.tolist()) == {101}
    assert made.notes[-1] == "200 requests for other models are left out"


def test_shares_thin_out_a_model(tmp_path: Path) -> None:
    made = _made(tmp_path, OWN, {"chat": 1.0, "code": 0.3})
    counts = {name: _models(made).count(name) for name in ("chat", "code", "draft")}
    assert counts["chat"] == 100 and 15 < counts["code"] < 45 and not counts["draft"]
    assert (made.arrival_s == _made(tmp_path, OWN, {"chat": 1.0, "code": 0.3}).arrival_s).all()


def test_a_public_traces_models_can_be_named(tmp_path: Path) -> None:
    made = _made(tmp_path, BURST, "GPT-4")
    assert len(made) == 5 and set(made.prompt_tokens.tolist()) == {101}
    renamed = _made(tmp_path, BURST, "small", models={"ChatGPT": "small", "GPT-4": "large"})
    assert len(renamed) == 5 and set(renamed.prompt_tokens.tolist()) == {100}


def test_a_trace_without_models_gets_them(tmp_path: Path) -> None:
    """Names that a public trace does not have are the fleet's, for all of its requests."""
    assert _models(_made(tmp_path, BURST, "llama-3.1-8b")) == ["llama-3.1-8b"] * 10
    plain = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},5,5\n" for i in range(200))
    mixed = _models(_made(tmp_path, plain, {"chat": 0.5, "code": 0.5}))
    assert 70 < mixed.count("chat") < 130


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("chta", "unknown model 'chta'; did you mean 'chat'"),
        ({"chat": 2.0}, "models: chat: 2; expected a share of the trace's requests, 0 to 1"),
        ({"chat": 0.0}, "no request of the trace is for chat"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, models: str | dict[str, float], words: str) -> None:
    with pytest.raises(HeadwayError, match=words):
        _made(tmp_path, OWN, models)
