"""From running llama.cpp servers, whose model no catalog has, to a calibrated fleet file, by commands alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import engines
import serving
from headway import catalog
from headway.cli import main
from headway.core.errors import HeadwayError

pytestmark = [pytest.mark.ci, pytest.mark.skipif(engines.NO_LLAMA, reason="pip install xllamacpp gguf")]
SHORT = "--prompt-tokens 60 --output-tokens 12 --num-requests 12 --concurrency 4 --no-progress --json".split()


def test_discovered_served_and_calibrated_without_a_file_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside emulated engines of another model. How small the errors are depends on the machine, and is not asked."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeadwayError):
        catalog.model("tiny-llama")
    llamas = [engines.LLAMA.start() for _ in range(2)]
    with serving.closing(*llamas, *(others := [serving.emulator() for _ in range(2)])):
        urls = [each.url for each in (*llamas, *others)]
        assert main(["discover", *urls, "--out", "fleet.yaml"]) == 0
        written = yaml.safe_load(Path("fleet.yaml").read_text())
        if "gpu" not in written["fleet"][0]:  # a machine too busy to tell a speed
            assert main(["discover", *urls, "--gpu", "cpu", "--out", "fleet.yaml"]) == 0
        capsys.readouterr()
        assert main(["load", urls[0], "--fleet", "fleet.yaml", "--calibrate", "fitted.json", "--write", *SHORT]) == 0
        found = json.loads(capsys.readouterr().out)["calibration"]
        assert {*found["before"]} == {*found["after"]} == {"e2e_mean", "itl_mean", "ttft_mean"}
        assert main(["load", urls[1], "--gpu", "cpu", "--calibrate", "alone.json", *SHORT]) == 0
    llama, emulated = yaml.safe_load(Path("fleet.yaml").read_text())["fleet"]
    assert (llama["endpoints"], emulated["endpoints"]) == (urls[:2], urls[2:])
    assert llama.get("coefficients") == (
        "fitted.json" if found["is_named"] else None
    )  # as good as the machine is quiet
    assert "coefficients" not in emulated and Path("fitted.json").exists()
    capsys.readouterr()
    assert Path("alone.json").exists()
