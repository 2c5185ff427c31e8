"""Bands around predictions, from errors of measured runs."""

from __future__ import annotations

import random
from itertools import product
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog
from headway.catalog.errors import (
    KNOWN,
    METRICS,
    ErrorClass,
    PredictionErrors,
    RunErrors,
    coverage,
    error_file,
    known_of,
    metric_of,
    prediction_errors,
    quantile,
    weights_of,
)

CLASSES = [
    ErrorClass(*each)
    for each in product(KNOWN, (None, "16 bit", "8 bit", "4 bit", "experts"), (None, "low", "medium", "high"))
]


def run(error: float, model: str = "m", known: str = KNOWN[0], weights: str = "16 bit", full: float = 0.1) -> RunErrors:
    return RunErrors("a run", model, "vLLM", "h100", known, weights, full, 0.0, {"e2e_mean": error})


def spread(num: int, size: float, **more: object) -> list[RunErrors]:
    """Errors from -size to size, of three models."""
    return [run(size * (2 * i / (num - 1) - 1), model=f"m{i % 3}", **more) for i in range(num)]


def test_the_quantile_is_the_rank_of_split_conformal_prediction() -> None:
    scores = [float(i) for i in range(1, 20)]
    assert quantile(scores, 0.9) == 18.0  # ceil(0.9 x 20)
    assert quantile(scores[:9], 0.9) == 9.0  # the largest of the fewest that have a rank
    assert quantile(scores[:8], 0.9) is None


@given(st.integers(9, 60), st.integers(0, 10**6))
def test_in_exchangeable_scores_the_share_left_out_is_at_most_a_tenth(num: int, seed: int) -> None:
    """Each of n + 1 scores in turn is the new one: at most a tenth of them are above the quantile of the others."""
    scores = [abs(random.Random(seed + i).gauss(0, 1)) for i in range(num + 1)]
    outside = 0
    for i, new in enumerate(scores):
        bound = quantile(scores[:i] + scores[i + 1 :], 0.9)
        assert bound is not None
        outside += new > bound
    assert outside <= 0.1 * len(scores)


@pytest.mark.parametrize("metric", METRICS)
def test_a_band_contains_its_prediction_and_is_a_factor(metric: str) -> None:
    for wanted in CLASSES:
        band, twice = (prediction_errors().band(at, metric, wanted) for at in (0.2, 0.4))
        assert band is not None and twice is not None
        assert band.low < 0.2 < band.high
        assert twice.low == pytest.approx(2 * band.low) and twice.high == pytest.approx(2 * band.high)


@pytest.mark.parametrize("metric", METRICS)
def test_what_is_less_well_known_never_has_a_narrower_band_or_a_better_chance(metric: str) -> None:
    for wanted in CLASSES:
        errors = prediction_errors()
        wide = [errors.band(1.0, metric, replace(wanted, known=known)).high for known in KNOWN]
        assert wide == sorted(wide)
        for target in (0.8, 1.0, 1.2, 2.0):
            chances = [errors.chance(1.0, target, metric, replace(wanted, known=known)) for known in KNOWN]
            assert chances == sorted(chances, reverse=True)


def test_a_class_with_too_few_runs_takes_the_band_of_all_models_which_leaves_out_none_of_its_own_runs() -> None:
    few = [run(0.5, model="x", weights="experts"), run(-0.1, model="y", weights="experts")]
    errors = PredictionErrors(spread(19, 0.1) + few)
    wanted = ErrorClass(KNOWN[0], "experts", "low")
    band = errors.band(1.0, "e2e_mean", wanted)
    assert band.basis == ErrorClass(KNOWN[0])
    assert (band.num_runs, band.num_models, band.num_own_runs) == (21, 5, 2)
    assert band.high == pytest.approx(exp(0.5))
    assert errors.chance(1.0, exp(0.4), "e2e_mean", wanted) == pytest.approx(2 / 3)
    enough = errors.band(1.0, "e2e_mean", ErrorClass(KNOWN[0], "16 bit", "low"))
    assert enough.basis.weights == "16 bit" and enough.high == pytest.approx(exp(0.1))


@given(st.integers(9, 25), st.integers(1, 6), st.integers(0, 10**6))
def test_of_models_that_are_alike_nine_of_ten_have_no_run_outside_the_band_of_the_others(
    num_models: int, num_runs: int, seed: int
) -> None:
    """Runs of a model err alike, so the rank of runs would promise too much. Each model in turn is the new one, of a
    class without runs: at most a tenth of them have a run outside the band of the others."""
    drawn = random.Random(seed)
    means = [drawn.gauss(0, 0.2) for _ in range(num_models + 1)]
    runs = [run(drawn.gauss(mean, 0.01), f"m{i}") for i, mean in enumerate(means) for _ in range(num_runs)]
    outside = 0
    for i in range(num_models + 1):
        others = PredictionErrors([each for each in runs if each.model != f"m{i}"])
        band = others.band(1.0, "e2e_mean", ErrorClass(KNOWN[0], "experts", "low"))
        assert band is not None
        outside += any(
            not band.low <= exp(each.errors["e2e_mean"]) <= band.high for each in runs if each.model == f"m{i}"
        )
    assert outside <= 0.1 * (num_models + 1)


def test_runs_of_too_few_models_are_no_class_of_their_own() -> None:
    alike = [run(0.0, model="one", weights="8 bit") for _ in range(30)]
    errors = PredictionErrors(alike)
    assert errors.band(1.0, "e2e_mean", ErrorClass(KNOWN[0], "8 bit")) is None
    assert errors.chance(1.0, 2.0, "e2e_mean", ErrorClass(KNOWN[0], "8 bit")) is None
    assert errors.band(1.0, "ttft_mean", ErrorClass(KNOWN[0])) is None


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(1, 3))
def test_a_looser_target_is_never_less_likely(predicted_s: float, target_s: float, more: float) -> None:
    errors, wanted = prediction_errors(), ErrorClass("GPU", "16 bit", "low")
    chance = errors.chance(predicted_s, target_s, "tpot_mean", wanted)
    assert 0 <= chance <= errors.chance(predicted_s, target_s * more, "tpot_mean", wanted) < 1


def test_a_chance_is_the_share_of_runs_that_would_have_met_the_target() -> None:
    errors = PredictionErrors([run(log(1 + i / 100), model=f"m{i % 3}") for i in range(19)])
    assert errors.chance(1.0, 1.0951, "e2e_mean", ErrorClass(KNOWN[0])) == pytest.approx(10 / 20)
    assert errors.chance(1.0, 9.0, "e2e_mean", ErrorClass(KNOWN[0])) == pytest.approx(19 / 20)
    assert errors.chance(1.0, 0.5, "e2e_mean", ErrorClass(KNOWN[0])) == 0


def test_the_chance_of_a_class_without_runs_counts_models_and_not_runs() -> None:
    """Twenty runs of one model say no more of another model than one does."""
    of_one = [run(0.5, model="m0") for _ in range(20)]
    errors = PredictionErrors(of_one + [run(0.0, model=f"m{i}") for i in range(1, 9)])
    wanted = ErrorClass(KNOWN[0], "experts", "low")
    assert errors.chance(1.0, exp(0.4), "e2e_mean", wanted) == pytest.approx(8 / 10)
    assert errors.chance(1.0, exp(0.6), "e2e_mean", wanted) == pytest.approx(9 / 10)


def test_coverage_is_of_models_that_the_bands_have_not_seen() -> None:
    """One model that errs more than all others is never covered, although its runs are among the catalog's."""
    usual = [run(0.01 * i, model=f"m{i}") for i in range(9)]
    found = coverage([*usual, run(1.0, model="odd"), run(1.1, model="odd")])
    assert found[0].of == ErrorClass(KNOWN[0])
    assert found[0].covered == {"e2e_mean": pytest.approx(9 / 11)}
    assert found[0].width["e2e_mean"] == pytest.approx(exp(1.1) - 1)


def test_what_is_left_of_a_class_does_not_take_the_band_of_all_models() -> None:
    """Of a class with just enough runs, too few are left without one: its coverage is that of what is left of it."""
    narrow = [run(0.01 * i, model=f"m{i}") for i in range(9)]
    wide = [run(1.0, model=f"m{i}", weights="experts") for i in range(3)]
    for left_out in ("model", "run"):
        found = {each.of: each for each in coverage([*narrow, *wide], left_out)}
        own = found[ErrorClass(KNOWN[0], "16 bit")]
        assert own.covered["e2e_mean"] == pytest.approx(8 / 9)
        assert own.num_own_band == 9 and own.width["e2e_mean"] == pytest.approx(exp(0.08) - 1)
        assert found[ErrorClass(KNOWN[0], "experts")].num_own_band == 0


def test_of_all_catalogued_runs_nine_of_ten_are_within_the_bands_from_other_models() -> None:
    """As if a model had never been measured: a class that it had made large enough has no band of its own then."""
    runs = error_file().runs
    for known, metric in product(KNOWN, METRICS):
        inside = []
        for each in runs:
            if each.known == known and metric in each.errors:
                others = PredictionErrors([other for other in runs if other.model != each.model])
                band = others.band(1.0, metric, each.own_class)
                inside += [] if band is None else [band.low <= exp(each.errors[metric]) <= band.high]
        assert sum(inside) >= 0.85 * len(inside), (known, metric)


def test_coverage_of_the_catalogued_classes() -> None:
    """All classes reach 85%, without the model and without the run."""
    runs = error_file().runs
    for left_out in ("model", "run"):
        found = {each.of: each for each in coverage(runs, left_out)}
        for known in KNOWN:
            every = found[ErrorClass(known)]
            assert every.num_runs == 30 and every.num_models == 9
            assert set(every.covered) == set(METRICS)
            assert left_out == "model" or all(share >= 0.85 for share in every.covered.values()), every.covered
        low = {each.of: each.covered_all for each in found.values() if each.covered_all < 0.85}
        assert not low


def test_classes_of_predictions() -> None:
    assert known_of(catalog.coefficients("h100-80gb-sxm", "vllm-0.15")) == "GPU and version"
    assert known_of(catalog.coefficients("h100-80gb-sxm", "vllm-0.15", "0.17")) == "GPU"
    assert known_of(catalog.coefficients("l40s", "vllm-0.15")) == "GPU"
    assert known_of(catalog.coefficients("h20-96gb", "vllm-0.15")) == "neither"
    assert known_of(catalog.coefficients("b200-180gb-sxm", "sglang")) == "neither"
    model = catalog.model("llama-3.1-8b")
    kinds = [weights_of(replace(model, dtype=dtype)) for dtype in ("bf16", "fp8", "int8", "nvfp4", "w4a16")]
    assert kinds == ["16 bit", "8 bit", "8 bit", "4 bit", "4 bit"]
    assert weights_of(catalog.model("qwen3-30b-a3b-fp8")) == "experts"


def test_metrics_of_a_summary() -> None:
    assert [metric_of(key) for key in ("ttft_s.p50", "ttft_s.p95", "tpot_s.p99", "itl_s.mean", "e2e_s.mean")] == [
        "ttft_mean",
        "ttft_p99",
        "tpot_p99",
        "itl_mean",
        "e2e_mean",
    ]
    assert [metric_of(key) for key in ("itl_s.p99", "itl_s.p50", "ttft_s.max", "tier.0.ttft_s.p50", "usd")] == 5 * [
        None
    ]


def test_the_joint_factor_holds_all_metrics_of_nine_runs_of_ten() -> None:
    """Of independent errors of two metrics: each band holds 9 of 10 runs, and both bands fewer."""
    drawn, metrics = random.Random(0), ("tpot_mean", "e2e_mean")
    runs = [
        replace(run(0.0, f"m{i % 8}", "GPU"), errors={metric: drawn.gauss(0, 0.05) for metric in metrics})
        for i in range(160)
    ]
    errors = PredictionErrors(runs)
    factor = errors.joint(metrics, "GPU")
    assert factor is not None and 1.0 < factor < 1.6
    halves = {metric: log(band.high) for metric in metrics if (band := errors.band(1.0, metric, ErrorClass("GPU")))}

    def share(power: float) -> float:
        return sum(all(abs(each.errors[key]) <= power * halves[key] for key in metrics) for each in runs) / len(runs)

    assert share(1.0) < 0.87 and share(factor) >= 0.88
    assert errors.joint(metrics, "neither") is None
