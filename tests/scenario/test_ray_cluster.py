"""Runs over a Ray cluster: the same results as one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

from headway import catalog
from headway.cli import main
from headway.config.strict_yaml import parse
from headway.core.errors import HeadwayError
from headway.metrics.summary import flatten
from headway.scenario.ray_cluster import cluster
from headway.scenario.run import assemble, compare, run
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'headway[ray]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

SCENARIO = """
workload: {num_requests: 60, arrivals: 5, prompt_tokens: 500, output_tokens: 50}
fleet: [{model: llama-3.1-8b, gpu: a100-80gb, replicas: 2}]
policies: {routing: [round-robin, least-kv]}
"""
TWO_MODELS = """
workload:
  {num_requests: 60, arrivals: 5, prompt_tokens: 500, output_tokens: 50,
   models: {llama-3.1-8b: 0.6, mistral-7b: 0.4}}
fleet:
  - {model: llama-3.1-8b, gpu: a100-80gb, replicas: 2}
  - {model: mistral-7b, gpu: a100-80gb}
policies: {routing: round-robin}
"""
FLEET = """
fleet:
  - {name: fast, model: llama-3.1-8b, gpu: h100}
  - {name: slow, model: llama-3.1-8b, gpu: l40s}
slo: {ttft_s: 1, tpot_s: 0.04}
policies: {routing: round-robin}
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        with cluster() as made:
            yield made
        ray.shutdown()


def test_variants_are_those_of_one_process(pool: Executor) -> None:
    chosen = assemble(*parse(SCENARIO, "two.yaml"), Path())
    alone, spread = compare(chosen), compare(chosen, pool=pool)
    assert [run.policies for run in spread] == [run.policies for run in alone]
    for one, other in zip(alone, spread, strict=True):
        assert flatten(one.summary) == flatten(other.summary)
        assert all(
            (one.records.requests[n] == other.records.requests[n]).all() for n in ("request", "end_s", "replica")
        )


def test_parts_of_a_run_are_those_of_one_process(pool: Executor) -> None:
    chosen = assemble(*parse(TWO_MODELS, "models.yaml"), Path())
    alone, spread = run(chosen), run(chosen, jobs=None, pool=pool)
    assert spread.notes == alone.notes
    for name in ("requests", "segments", "stretches"):
        found, expected = getattr(spread.records, name), getattr(alone.records, name)
        assert {key: column.tobytes() for key, column in found.items()} == {
            key: column.tobytes() for key, column in expected.items()
        }


def test_advice_is_that_of_one_process(
    pool: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    requests = "--rate 22 --num-requests 120 --prompt-tokens 900 --output-tokens 60".split()
    assert main(["simulate", "fleet.yaml", *requests, "--out", "monday"]) == 0
    advise = ["advise", "fleet.yaml", "--records", "monday", "--kinds", "routing", "--no-cache", "--json"]
    answers = []
    for options in (["--jobs", "1"], ["--ray"]):
        capsys.readouterr()
        code = main([*advise, *options, "--no-progress"])
        answers.append((code, capsys.readouterr().out))
    assert answers[0] == answers[1]


def test_tasks_are_measured_alike(pool: Executor) -> None:
    tasks = {exponent: Call(pow, {"base": 3, "exp": exponent}) for exponent in range(6)}
    assert Runner((0,), pool=pool).run(tasks) == Runner((0,)).run(tasks)


def test_errors_say_what_they_say(pool: Executor) -> None:
    with pytest.raises(HeadwayError) as here:
        catalog.model("llama-3.1-8c")
    with pytest.raises(HeadwayError) as there:
        pool.submit(catalog.model, "llama-3.1-8c").result()
    assert str(here.value) == str(there.value)
    with pytest.raises(HeadwayError, match="ZeroDivisionError"):
        pool.submit(divmod, 1, 0).result()
