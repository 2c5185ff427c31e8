"""The log of an engine's iterations, with a scheduler that behaves as vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.calibration.steps.read import Iteration, read
from headway.vllm import steps


class Scheduler:
    """Two requests, of which one decodes and one computes its prompt in two chunks."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="org/model", dtype="bfloat16"),
            parallel_config=SimpleNamespace(tensor_parallel_size=2, data_parallel_rank=1),
        )
        self.requests = {
            "a": SimpleNamespace(num_computed_tokens=100, num_prompt_tokens=100),
            "b": SimpleNamespace(num_computed_tokens=0, num_prompt_tokens=50),
        }
        self.running, self.waiting = [1, 2], [3]
        self.plan = [{"a": 1, "b": 30}, {"a": 1, "b": 20}, {"a": 1, "b": 1}, {}]

    def schedule(self) -> Any:
        tokens = self.plan.pop(0)
        for name, num in tokens.items():
            self.requests[name].num_computed_tokens += num
        return SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()))

    def update_from_output(self, output: Any, tokens: list[int]) -> str:
        return f"{len(tokens)} tokens"


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(steps, "_about", lambda config: {"model": config.model_config.model, "rank": 1})
    one = type(
        "Own", (Scheduler,), {"schedule": Scheduler.schedule, "update_from_output": Scheduler.update_from_output}
    )
    steps.wrap(one, tmp_path)
    return one()


def test_what_an_iteration_held(logged: Any, tmp_path: Path) -> None:
    """Two iterations are under way at once, as with asynchronous scheduling."""
    first, second = logged.schedule(), logged.schedule()
    assert logged.update_from_output(first, [1, 2]) == "2 tokens"
    third = logged.schedule()
    logged.update_from_output(second, [1])
    logged.update_from_output(third, [1, 1])
    logged.update_from_output(logged.schedule(), [])  # nothing was scheduled: no iteration
    logged.headway_step_log.flush()
    log = read(tmp_path)
    assert log.about == {"model": "org/model", "rank": 1} and log.num_rows == 3
    assert [one for span in log.spans for one in span.iterations] == [
        Iteration(1, 101, ((30, 0),)),
        Iteration(1, 102, ((20, 30),)),
        Iteration(2, 103 + 51, ()),
    ]


def test_files_are_closed_at_their_size_and_the_oldest_goes(logged: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(steps, "FILE_BYTES", 1)
    monkeypatch.setattr(steps, "FILES", 2)
    for _ in range(3):
        logged.update_from_output(logged.schedule(), [1])
        logged.headway_step_log.flush()
    assert [path.name[-8:] for path in sorted(tmp_path.iterdir())] == ["0002.csv", "0003.csv"]
    assert all(json.loads(path.read_text().split("\n")[0][2:])["model"] == "org/model" for path in tmp_path.iterdir())


def test_a_full_disk_ends_the_log_and_not_the_engine(logged: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    logged.headway_step_log = steps.StepLog(tmp_path / "file" / "folder", {})
    for _ in range(3):
        assert logged.update_from_output(logged.schedule(), [1]) == "1 tokens"
        logged.headway_step_log.flush()
    assert capsys.readouterr().out.count("no further steps are logged") == 1


def test_nothing_is_wrapped_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(steps.VARIABLE, raising=False)
    steps.install()  # imports no vLLM, which is not installed here
