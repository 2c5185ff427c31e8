"""The scorecard: groups, means and the command that writes it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headway.calibration.scorecard import band, family, page
from headway.calibration.validation import ExperimentErrors, LatencyError


def errors(e2e_pct: float, **changes: object) -> ExperimentErrors:
    one = ExperimentErrors(
        "7", "chat", "llama-3.1-8b", "h100-80gb-sxm", 2, 1, True, None, 0,
        {"e2e_mean": LatencyError(100.0, 100.0 + e2e_pct, e2e_pct)}, [], engine="vllm-0.15", file="a.csv",
    )  # fmt: skip
    return replace(one, **changes)


def test_errors_are_grouped_and_averaged() -> None:
    text = page(
        [errors(4.0), errors(-2.0, load_factor=0.83, pp=2), errors(9.0, gpu="l40s", file="b.csv", model="gpt-oss-20b")],
        "headway validate a.csv b.csv --scorecard card.md",
    )
    lines = text.splitlines()
    assert "    headway validate a.csv b.csv --scorecard card.md" in lines
    assert "| a.csv | 2 | 3.0 (+1.0) | - | - | - | - | 17% |" in lines
    assert "| b.csv | 1 | 9.0 (+9.0) | - | - | - | - | - |" in lines
    assert "| **all** | 3 | 5.0 (+3.7) | - | - | - | - | 17% |" in lines
    assert "| l40s | 1 | 9.0 (+9.0) | - | - | - | - | - |" in lines
    assert any(
        line.startswith("| 7 llama-3.1-8b tp2 pp2 h100-80gb-sxm chat | -2.0 ") and "0.83" in line for line in lines
    )


@pytest.mark.parametrize(("model", "name"), [("llama-3.1-8b", "llama"), ("gpt-oss-120b", "gpt-oss"), ("yi-34b", "yi")])
def test_families_are_names_without_versions(model: str, name: str) -> None:
    assert family(errors(0.0, model=model)) == name


@pytest.mark.parametrize(("share", "name"), [(0.1, "low"), (0.5, "medium"), (1.4, "high")])
def test_bands_of_load(share: float, name: str) -> None:
    assert band(errors(0.0, concurrency=share)).startswith(name)
