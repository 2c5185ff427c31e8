"""Durations with units: one parser, in files, options and arguments of Python."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headway as hw
from headway.cli import main
from headway.cli.output import SECONDS, SECONDS_ABOVE_0
from headway.config import strict_yaml
from headway.config.spec import Spec
from headway.core.duration import in_seconds, is_seconds, seconds, seconds_of
from headway.core.errors import HeadwayError, SloWarning

FLEET = [{"model": "llama-3.1-8b", "gpu": "h100"}]
WORKLOAD = {"prompt_tokens": 50, "output_tokens": 5, "arrivals": 5, "num_requests": 20}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("450ms", 0.45), ("2s", 2.0), ("1m", 60.0), ("1h", 3600.0), ("1h30m", 5400.0), ("1.5 h", 5400.0), ("2", 2.0),
     ("1e-3", 0.001), (".5s", 0.5), ("250us", 0.00025), ("5min", 300.0), ("1d", 86400.0), (3, 3.0)],
)  # fmt: skip
def test_durations_in_seconds(text: str | float, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "soon", "2 sec", "-1s", "-1", "nan", "inf", "1 2s", "s", "2S", True, None])
def test_what_is_no_duration_says_what_is(text: Any) -> None:
    with pytest.raises(HeadwayError, match="expected seconds, or a duration such as 450ms"):
        seconds(text)


@given(st.floats(0, 1e6), st.sampled_from(["ms", "s", "m", "h"]))
def test_a_unit_scales(number: float, unit: str) -> None:
    factor = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}[unit]
    assert seconds(f"{number:.6f}{unit}") == pytest.approx(seconds(f"{number:.6f}") * factor)


def test_only_keys_of_seconds_are_durations() -> None:
    data = {"ttft_s": "450ms", "bytes_per_s": "2s", "per_s": "1m", "name": "2s", "x": [{"at_s": ["1s", 2]}], "b_s": "x"}
    assert in_seconds("", data) == {**data, "ttft_s": 0.45, "per_s": 60.0, "x": [{"at_s": [1.0, 2]}]}
    assert not is_seconds("tokens_per_s")


def _fields(kind: Any, seen: set[Any]) -> set[str]:
    """The keys of numbers in a Struct, and in all Structs below it."""
    import msgspec

    found: set[str] = set()
    todo = [msgspec.inspect.type_info(kind)]
    while todo:
        each = todo.pop()
        if isinstance(each, msgspec.inspect.StructType) and each.cls not in seen:
            seen.add(each.cls)
            found |= {
                f.encode_name for f in each.fields if "FloatType" in repr(f.type) and "Struct" not in repr(f.type)
            }
            todo += [f.type for f in each.fields]
        todo += [getattr(each, name) for name in ("item_type", "value_type") if hasattr(each, name)]
        todo += [*getattr(each, "types", ())]
    return found


def test_every_key_of_seconds_takes_a_duration(tmp_path: Path) -> None:
    """No key of a scenario is left out, and none whose unit is another is changed."""
    keys = {name for name in _fields(Spec, set()) if name.endswith("_s")}
    assert len(keys) > 50 and {"ttft_s", "tpot_s", "e2e_s", "start_s", "timeout_s", "warmup_s"} <= keys
    for key in keys:
        file = tmp_path / "a.yaml"
        file.write_text(f"{key}: 90s\n")
        read, _ = strict_yaml.read(file)
        assert read[key] == ("90s" if key.endswith("_per_s") and key != "per_s" else 90.0)


def test_a_file_with_units_is_the_one_in_seconds(tmp_path: Path) -> None:
    text = """
workload: {prompt_tokens: 50, output_tokens: 5, arrivals: 5, num_requests: 20, timeout_s: %s}
fleet: [{model: llama-3.1-8b, gpu: h100, start_s: %s}]
slo: {ttft_s: %s}
policies: {ordering: {name: edf, default_deadline_s: %s}, max_hold_s: %s}
"""
    (tmp_path / "units.yaml").write_text(text % ("1m", "2m", "450ms", "30s", "1h"))
    (tmp_path / "seconds.yaml").write_text(text % (60.0, 120.0, 0.45, 30.0, 3600.0))
    with_units, plain = hw.load(tmp_path / "units.yaml"), hw.load(tmp_path / "seconds.yaml")
    assert hw.load(plain, {"name": "x"}).spec == hw.load(with_units, {"name": "x"}).spec
    assert hw.load(with_units, {"slo.e2e_s": "2s"}).spec.slo.e2e_s == 2.0
    assert hw.load({"workload": WORKLOAD, "fleet": FLEET, "slo": {"ttft_s": "1m"}}).spec.slo.ttft_s == 60.0
    (tmp_path / "bad.yaml").write_text(text % ("1m", "2m", "2 sec", "30s", "1h"))
    with pytest.raises(
        HeadwayError, match=r"bad.yaml:4: slo.ttft_s: expected .*number.*'2 sec'; expected seconds, or a"
    ):
        hw.load(tmp_path / "bad.yaml")


def test_options_take_durations(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate --model llama-3.1-8b --gpu h100 --rate 5 --num-requests 20 --prompt-tokens 9 --output-tokens 3"
    outputs = []
    for warmup in ("1500ms", "1.5"):
        assert main([*command.split(), "--warmup-s", warmup, "--until-s", "1h", "--json"]) == 0
        outputs.append(capsys.readouterr().out.partition('"simulate_s"')[0])
    assert outputs[0] == outputs[1]
    assert main([*command.split(), "--until-s", "soon"]) == 2
    assert "'--until-s': 'soon'; expected seconds, or a duration such as 450ms" in capsys.readouterr().err


def test_options_whose_names_are_times_are_durations() -> None:
    from headway.cli import commands

    def options(command: click.Command) -> list[tuple[str, click.Parameter]]:
        own = [(f"{command.name} {each.name}", each) for each in command.params]
        return own + [found for sub in getattr(command, "commands", {}).values() for found in options(sub)]

    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        for option, parameter in options(command):
            if option.endswith(("_s", "_p99", " latency")):
                is_list = option.endswith("startup_s")
                assert is_list or parameter.type in (SECONDS, SECONDS_ABOVE_0), option


def test_slos_in_milliseconds_are_warned_of() -> None:
    document = {"workload": WORKLOAD, "fleet": FLEET}
    with pytest.warns(SloWarning, match=r"slo.ttft_s: 2,000 s is long for a TTFT; .* 2000ms is 2 s"):
        hw.load({**document, "slo": {"ttft_s": 2000}})
    with pytest.warns(SloWarning, match=r"workload.tiers\[0\].tpot_s: 50 s is long for a TPOT"):
        hw.load({**document, "workload": {**WORKLOAD, "tiers": [{"tier": 0, "tpot_s": 50}]}})
    with pytest.warns(SloWarning, match="ttft_p99_s: 450 s is long"):
        assert seconds_of("ttft_p99_s", 450) == 450
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hw.load({**document, "slo": {"ttft_s": 120, "tpot_s": 1, "e2e_s": 5000}})


def test_the_command_line_warns_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text(strict_yaml.dump({"workload": WORKLOAD, "fleet": FLEET, "slo": {"ttft_s": 2000}}))
    assert main(["compare", str(tmp_path / "s.yaml"), "--routing", "random,round-robin", "--seeds", "1"]) == 0
    assert capsys.readouterr().err.count("warning: ") == 1
    few = {"workload": {**WORKLOAD, "num_requests": 20}, "fleet": FLEET}
    (tmp_path / "few.yaml").write_text(strict_yaml.dump(few))
    plan = ["plan", "capacity", str(tmp_path / "few.yaml"), "--gpus", "h100", "--tp", "1", "--max-replicas", "1"]
    assert main([*plan, "--num-requests", "20", "--routing", "random", "--ttft-p99", "2000", "--no-cache"]) == 0
    err = capsys.readouterr().err
    assert err.count("warning: ") == 1 and "warning: --ttft-p99: 2,000 s is long for a TTFT" in err
    scaling = ["plan", "scaling", str(tmp_path / "s.yaml"), "--startup-s", "30", "--scalers", "headway", "--seeds", "1"]
    assert main([*scaling, "--slo", "ttft=3000", "--no-cache", "--no-clairvoyant"]) in (0, 3)
    err = capsys.readouterr().err
    assert err.count("warning: ") == 1 and "warning: --slo: 3,000 s is long for a TTFT" in err
