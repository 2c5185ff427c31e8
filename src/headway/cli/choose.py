"""The scenario that a command is to run: from a file, from options alone, or from both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.cli.flags import changes, flag, given, scenario_file
from headway.config import strict_yaml
from headway.config.scenario import Scenario, read
from headway.core.errors import HeadwayError
from headway.scenario.run import assemble


def choose(name: str, scenario: Path | None, preset: str | None, flags: dict[str, Any]) -> Scenario:
    """What file and options say; options go before the file. `name` is what it is called without a file."""
    file = scenario_file(scenario, preset)
    if file is not None:
        data, places = read(file)
        pools = data.get("fleet")
        num_pools = len(pools) if isinstance(pools, list) else 0
        return assemble(data, places, file.parent, changes(flags, num_pools))
    _check_complete(given(flags))
    data = {"name": name, "workload": {}, "fleet": [{}]}
    return assemble(data, strict_yaml.Places(), Path(), changes(flags))


def _check_complete(used: dict[str, Any]) -> None:
    """Without a scenario, the options must say it all."""
    for name in ("limit", "rate_scale"):
        if name in used and "trace" not in used:
            raise HeadwayError(f"{flag(name)}: goes with --trace")
    if not used.keys() & {"trace", "workload", "prompt_tokens", "output_tokens"}:
        raise HeadwayError(
            "no workload: give a SCENARIO, --trace, --workload,"
            " or --rate, --num-requests, --prompt-tokens and --output-tokens"
        )
    if not used.keys() & {"model", "model_config"}:
        raise HeadwayError("--model or --model-config is missing; headway catalog models lists names")
    if "gpu" not in used:
        raise HeadwayError("--gpu is missing; headway catalog gpus lists names")
