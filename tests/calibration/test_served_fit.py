"""An engine's overhead and a processor's speed found again in served runs, and what the runs do not determine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from headway import catalog
from headway.calibration.replay import replay
from headway.calibration.served_fit import fit_served
from headway.calibration.serving import ServingExperiment
from headway.calibration.solve import FitResult
from headway.catalog.coefficients import Coefficients
from headway.core.errors import HeadwayError
from made_up_measurements import GPU, KNOWN, TRUE, experiments

ENGINE = catalog.engine("vllm-0.15")
Found = tuple[FitResult, Coefficients, list[str]]


def fitted(runs: Sequence[ServingExperiment]) -> Found:
    return fit_served(runs, GPU, ENGINE, KNOWN, is_measured=True)


@pytest.fixture(scope="module")
def found() -> Found:
    return fitted(experiments())


@pytest.mark.ci
def test_a_known_overhead_is_found_again(found: Found) -> None:
    fit, coefficients, _ = found
    assert fit.values["step_s"] == pytest.approx(0.002, rel=0.1)
    assert fit.values["sequence_s"] == pytest.approx(4e-5, rel=0.1)
    assert fit.values["layer_s"] == pytest.approx(2e-5, abs=2 * fit.width["layer_s"] * 15e-6)  # 28 and 32 layers only
    assert fit.residual < 0.01
    assert coefficients.overhead.step_s == fit.values["step_s"]


@pytest.mark.ci
def test_what_is_determined_is_told(found: Found) -> None:
    """Time per step is; what launching kernels one by one costs is in part, as only first tokens wait for it."""
    fit, _, notes = found
    assert fit.width["step_s"] < 0.3 and fit.width["launch_layer_s"] > 0.5
    assert fit.values["launch_layer_s"] == pytest.approx(fit.prior["launch_layer_s"], rel=0.01)
    assert "determined in part" in notes[0] and "launch_layer_s" in notes[0]


@pytest.mark.ci
def test_runs_that_were_left_out_are_predicted(found: Found) -> None:
    fit, _, _ = found
    assert {"e2e_mean", "itl_mean", "ttft_mean"} == set(fit.held_out)
    assert fit.held_out["e2e_mean"] < 2 and fit.held_out["itl_mean"] < 2


@pytest.mark.ci
def test_one_model_cannot_tell_steps_from_layers() -> None:
    """Their sum is found again; the catalog divides it, and the notes say so."""
    fit, _, notes = fitted(experiments(("llama-3.1-8b",)))
    layers = catalog.model("llama-3.1-8b").num_layers
    total = fit.values["step_s"] + layers * fit.values["layer_s"]
    assert total == pytest.approx(0.002 + layers * 2e-5, rel=0.1)
    assert any("step_s" in note and "layer_s" in note and "only together" in note for note in notes)


@pytest.mark.ci
def test_alike_runs_determine_little() -> None:
    alike = [replace(experiments(("llama-3.1-8b",), 1)[0], id=str(i)) for i in range(6)]
    fit, _, notes = fitted(alike)
    assert fit.width["sequence_s"] > 0.9
    assert fit.values["sequence_s"] == pytest.approx(KNOWN.overhead.sequence_s, abs=1e-5)
    assert "sequence_s" in notes[0]


@pytest.mark.ci
def test_a_processor_that_nobody_measured() -> None:
    """Efficiencies a quarter of those that its kin has, and no table: served runs tell how long an iteration takes, and
    that two models of one size do not tell which of its efficiencies is low."""
    kernels = KNOWN.kernels
    slow = replace(
        kernels,
        gemm={
            dtype: replace(
                one, memory_efficiency=one.memory_efficiency / 4, compute_efficiency=one.compute_efficiency / 4
            )
            for dtype, one in kernels.gemm.items()
        },
    )
    truth = replace(KNOWN, kernels=slow)
    runs = []
    for one in experiments(num=3):
        simulated = replay(one, (0,), coefficients=truth).overall
        measured = replace(
            one.measured,
            ttft_mean_ms=float(simulated.ttft_ms.mean()),
            itl_mean_ms=simulated.itl_mean_ms,
            e2e_mean_ms=float(simulated.e2e_ms.mean()),
            tpot_mean_ms=float(simulated.tpot_ms.mean()),
        )
        runs.append(replace(one, measured=measured, stages=(replace(one.stages[0], measured=measured),)))
    fit, _, notes = fit_served(runs, GPU, ENGINE, KNOWN, is_measured=False)
    assert any(("memory" in note or "compute" in note) and "only together" in note for note in notes)
    assert fit.held_out["e2e_mean"] < 5 and fit.held_out["itl_mean"] < 5


def test_too_few_loads() -> None:
    with pytest.raises(HeadwayError, match="3 served loads; expected at least 4"):
        fitted(experiments(num=3)[:3])


@pytest.mark.parametrize(
    ("factor", "message"), [(1e-3, "of what the kernels alone take"), (1e3, "times what the kern")]
)
def test_loads_in_another_unit(factor: float, message: str) -> None:
    wrong = []
    for one in experiments(num=2):
        measured = replace(one.measured, itl_mean_ms=one.measured.itl_mean_ms * factor)
        wrong.append(replace(one, stages=(replace(one.stages[0], measured=measured),)))
    with pytest.raises(HeadwayError, match=message):
        fitted(wrong)


def test_the_truth_is_not_the_prior() -> None:
    """The tests above would pass without a fit otherwise."""
    assert TRUE.overhead.step_s > 4 * KNOWN.overhead.step_s
