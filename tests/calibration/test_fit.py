"""Fits: known coefficients are found again; what is beyond physics is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.calibration import solve as solving
from headway.calibration.fit import COPY, fit_all, roofline, tiled_rows
from headway.calibration.operators import OperatorSamples, read
from headway.calibration.solve import Coefficient, FitResult, held_out, solve
from headway.catalog.coefficients import Roofline
from headway.core.errors import HeadwayError
from headway.perf.operators import CAST_BYTES
from headway.perf.operators import tiled_rows as perf_tiled_rows
from headway.perf.roofline import roofline_s
from made_up_measurements import GPU, KERNELS, all_reduce, attention, gemm, write


def fitted(path: Path) -> dict[str, FitResult]:
    fits, notes = fit_all(read(path, GPU).samples, GPU)
    assert not notes
    return {fit.key: fit for fit in fits}


shares, times = st.floats(0.1, 1), st.floats(1e-7, 1)


@given(st.tuples(st.floats(0, 1e-4), shares, shares, st.floats(1, 12)), times, times)
def test_the_roofline_is_that_of_perf(p: tuple[float, ...], memory_s: float, compute_s: float) -> None:
    known = roofline_s(Roofline(*p), memory_s, compute_s)
    assert roofline(np.array(p), np.array([memory_s]), np.array([compute_s])) == pytest.approx([known])


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 70_000)), min_size=1), st.floats(0, 1))
def test_tiles_are_those_of_perf(shapes: list[tuple[int, int]], share: float) -> None:
    rows, out = np.array(shapes, dtype=float).T
    known = [perf_tiled_rows(m, n, 132, share) for m, n in shapes]
    assert tiled_rows(rows, out, 132, share) == pytest.approx(known)


def fp8_products(wave_share: float, noise: float) -> OperatorSamples:
    """Of a GPU with 70% of its peaks, 5 microseconds, casts at half the bandwidth, and tiles or none."""
    m, n, k = np.meshgrid(
        [1, 8, 17, 64, 65, 128, 129, 256, 300, 600, 1025, 2048, 4096],
        [1024, 2560, 4096, 7168, 14336, 28672],
        [4096, 8192],
        indexing="ij",
    )
    m, n, k = (axis.ravel().astype(float) for axis in (m, n, k))
    rows = tiled_rows(m, n, 132, wave_share) if wave_share else m
    memory_s = (n * k + m * k + 2 * m * n) / GPU.bandwidth_bytes_per_s
    compute_s = 2 * rows * n * k / GPU.peak_flops["fp8"]
    cast_s = CAST_BYTES * m * k / GPU.bandwidth_bytes_per_s / 0.5
    seconds = roofline(np.array([5e-6, 0.7, 0.7, 4.0]), memory_s, compute_s) + cast_s
    seconds *= np.exp(np.random.default_rng(3).normal(0.0, noise, len(m)))
    return OperatorSamples("gemm", "fp8", {"m": m, "n": n, "k": k}, seconds)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("wave_share", [0.0, 0.6])
def test_fit_finds_tiles(wave_share: float, noise: float) -> None:
    (fit,), notes = fit_all([fp8_products(wave_share, noise)], GPU)
    assert not notes
    assert fit.values.get("wave_share", 0.0) == pytest.approx(wave_share, abs=0.1)
    assert fit.values["compute_efficiency"] == pytest.approx(0.7, rel=0.06)
    assert fit.residual < 0.03 + noise


def test_without_a_count_of_multiprocessors_the_fit_is_smooth() -> None:
    samples = fp8_products(0.6, 0.01)
    (smooth,), _ = fit_all([samples], replace(GPU, num_sms=None))
    (tiled,), _ = fit_all([samples], GPU)
    assert "wave_share" not in smooth.values and smooth.residual > 2 * tiled.residual


def test_matrices_that_the_cache_holds_between_runs_do_not_count() -> None:
    samples = fp8_products(0.0, 0.0)
    num_bytes = samples.shape["n"] * samples.shape["k"]
    cached = 6 * num_bytes < 120e6
    spoilt = replace(samples, seconds=np.where(cached, samples.seconds / 2, samples.seconds))
    large, none = replace(GPU, l2_bytes=120e6), replace(GPU, l2_bytes=None)
    assert fit_all([spoilt], large)[0] == fit_all([samples.only(~cached)], none)[0]
    assert fit_all([spoilt], none)[0][0].residual > 0.02


def test_known_coefficients_are_found_again(tmp_path: Path) -> None:
    products = fitted(write(tmp_path / "a.csv", gemm()))["gemm.bf16"]
    known = KERNELS.gemm["bf16"]
    assert products.values["memory_efficiency"] == pytest.approx(known.memory_efficiency, rel=0.03)
    assert products.values["compute_efficiency"] == pytest.approx(known.compute_efficiency, rel=0.03)
    found = fitted(write(tmp_path / "b.csv", attention()))
    assert found["decode_attention"].values["memory_efficiency"] == pytest.approx(
        KERNELS.decode_attention.memory_efficiency, rel=0.03
    )
    assert found["decode_attention"].values["latency_s"] == pytest.approx(KERNELS.decode_attention.latency_s, rel=0.03)
    assert found["prefill_attention"].values["compute_efficiency"] == pytest.approx(
        KERNELS.prefill_attention.compute_efficiency, rel=0.05
    )
    reduced = fitted(write(tmp_path / "c.csv", all_reduce(4)))["all_reduce.4"]
    assert reduced.values["link_efficiency"] == pytest.approx(KERNELS.all_reduce["4"].link_efficiency, rel=0.05)
    for fit in (products, *found.values(), reduced):
        assert fit.residual < 0.03
    assert (products.num_fitted, products.num_held_out) == (34, 8)
    assert (reduced.num_fitted, reduced.num_held_out) == (23, 23)


def test_every_fifth_shape_is_held_out() -> None:
    assert held_out(11).nonzero()[0].tolist() == [4, 9]


def test_held_out_shapes_do_not_touch_the_fit() -> None:
    size = np.geomspace(1e3, 1e9, 40)
    seconds = 5e-6 + size / 1e11

    def found(seconds: Any) -> FitResult:
        return solve("copy", COPY, lambda p: p[0] + size / 2e11 / p[1], seconds)

    spoilt = np.where(held_out(40), seconds * 1.4, seconds)
    assert found(spoilt).values == found(seconds).values
    assert found(seconds).residual < 1e-3
    assert found(spoilt).residual == pytest.approx(1 - 1 / 1.4, rel=0.01)


def test_of_few_shapes_each_is_held_out_once() -> None:
    size = np.geomspace(1e3, 1e9, 20)
    odd = np.where(np.arange(20) == 0, 3.0, 1.0)
    fit = solve("copy", COPY, lambda p: p[0] + size / 2e11 / p[1], (5e-6 + size / 1e11) * odd)
    assert (fit.num_fitted, fit.num_held_out) == (20, 20)
    assert fit.values["efficiency"] == pytest.approx(0.5, rel=0.01)
    assert fit.residual < 0.1


def test_too_few_shapes_are_not_fitted(tmp_path: Path) -> None:
    samples = read(write(tmp_path / "a.csv", gemm()[-5:]), GPU).samples
    assert fit_all(samples, GPU) == ([], ["gemm.bf16: 5 usable shapes, 13 are needed; not fitted"])


@pytest.mark.parametrize(("speed", "word"), [(3.0, "faster"), (1e-3, "slower")])
def test_beyond_physical_bounds(speed: float, word: str) -> None:
    size = np.geomspace(1e6, 1e9, 40)
    samples = OperatorSamples("device_copy", "", {"num_bytes": size}, 2 * size / (GPU.bandwidth_bytes_per_s * speed))
    with pytest.raises(HeadwayError, match=f"device_copy: efficiency leaves its physical bounds.*{word} than any"):
        fit_all([samples], GPU)


def test_nothing_fits() -> None:
    rng = np.random.default_rng(1)
    size, seconds = np.geomspace(1e3, 1e9, 60), np.exp(rng.uniform(-12, 0, 60))
    with pytest.raises(HeadwayError, match=r"copy: .*(nothing fits|physical bounds)"):
        solve("copy", COPY, lambda p: p[0] + size / 1e12 / p[1], seconds)


def test_fit_that_does_not_converge_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(status=0, x=np.array([1.0]), message="too many steps")

    monkeypatch.setattr(solving, "least_squares", lambda: stuck)
    with pytest.raises(HeadwayError, match="copy: the fit did not converge: too many steps"):
        solve("copy", (Coefficient("a", 1, 0, 2),), lambda p: p[0] * np.ones(9), np.ones(9))


def test_without_scipy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(HeadwayError, match=r"pip install 'headway\[calibrate\]'"):
        fitted(write(tmp_path / "a.csv", gemm()))
