"""A model that only `--assume` takes: refused by every command that takes a model, and taken with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from msgspec.structs import replace

import headway as hw
from headway.cli import commands, main
from headway.config import strict_yaml
from headway.config.scenario import with_absolute_paths, written
from headway.core.model import Model

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "kv_compression": 3,
}
REQUESTS = "--rate 5 --num-requests 6 --prompt-tokens 20 --output-tokens 3"
TAKING = {
    "simulate": f"--gpu h100 {REQUESTS}",
    "compare": f"--gpu h100 {REQUESTS} --routing random,least-loaded",
    "plan capacity": f"--gpus h100 --tp 1 {REQUESTS} --ttft-p99 1 --what-if load=1 --jobs 1",
    "plan fleet": "t.csv --have h100:2:2 --slo ttft=2s --tp 1 --seeds 1 --jobs 1 --routing random",
    "measure": "--gpu h100 --dry-run",
    "catalog memory": "--gpu h100",
    "emulate": "--gpu h100 --kv-events-config x",  # an error after the model is read, as a server would not end
}
SCENARIO = """
workload: {prompt_tokens: 20, output_tokens: 3, arrivals: 5.0, num_requests: 6}
fleet: [{name: a, model: MODEL, gpu: h100, endpoints: [http://127.0.0.1:1]}]
slo: {ttft_s: 1, tpot_s: 1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `own` with a config, and a repository `some/own` in the hub's cache with the same."""
    snapshot = tmp_path / "hub" / "models--some--own" / "snapshots" / "1"
    for folder in (tmp_path / "own", snapshot):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (tmp_path / "t.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,model\n0,50,5,chat\n1,50,5,chat\n2,50,5,chat\n"
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def taking(group: click.Group, before: str = "") -> Iterator[tuple[str, set[str]]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from taking(command, f"{before}{name} ")
        elif command is not None:
            yield f"{before}{name}", {option for each in command.params for option in each.opts}


def test_every_command_that_takes_a_model_takes_assume() -> None:
    found = {name for name, options in taking(commands) if {"--model", "--model-config"} & options}
    found.remove("load")  # whose model is a name that the engine knows
    assert found == {*TAKING, "validate", "calibrate"}
    assert not [name for name, options in taking(commands) if name in found and "--assume" not in options]


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (command, given)
        for command in TAKING
        for given in ("--model own", "--model some/own", "--model-config own", "--model-config own/config.json")
        if command != "plan fleet" or "config" not in given
    ],
)
def test_it_is_refused_by_its_key_and_taken_with_assume(
    command: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "plan fleet":
        given = given.replace("--model ", "--model chat=")
    arguments = [*command.split(), *TAKING[command].split(), *given.split()]
    assert main(arguments) == 2
    refused = capsys.readouterr().err
    assert "not understood: kv_compression (3)" in refused and "--assume" in refused and refused.count("\n") == 1
    code, told = main([*arguments, "--assume"]), capsys.readouterr()
    if command == "emulate":
        assert "--kv-events-config" in told.err
    else:
        assert code == 0, told.err


@pytest.mark.parametrize("config", ["own", "own/config.json", "some/own"])
def test_scenarios_say_it_beside_the_config(config: str, tmp_path: Path) -> None:
    """In whatever command reads them, after they are written again, and where they are exported to."""
    for assume in (False, True):
        model = f"{{config: {config}, assume: {str(assume).lower()}}}"
        (tmp_path / "s.yaml").write_text(SCENARIO.replace("MODEL", model))
        if not assume:
            with pytest.raises(hw.HeadwayError, match="not understood: kv_compression"):
                hw.load("s.yaml")
            continue
        loaded = hw.load("s.yaml")
        (tmp_path / "elsewhere").mkdir()
        again = tmp_path / "elsewhere" / "again.yaml"
        again.write_text(strict_yaml.dump(with_absolute_paths(written(loaded), loaded.base_dir)))
        assert pool_model(hw.load(again)) == pool_model(loaded)


def pool_model(made: hw.Scenario) -> Model:
    (pool,) = made.fleet.pools
    return replace(pool.model, source="")
