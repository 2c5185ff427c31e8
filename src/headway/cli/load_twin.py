"""Predictions of the simulator for measured loads, before and after a calibration to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from msgspec import Struct

from headway.calibration import calibrate
from headway.calibration.measurements import Measurements
from headway.calibration.replay import replay
from headway.calibration.runs.run import MeasuredRun, RequestRows, run_of
from headway.calibration.solve import FitResult
from headway.calibration.validation import compare
from headway.catalog.coefficients import Coefficients
from headway.catalog.load import coefficients_in
from headway.cli.measured_fleet import FoundRun, MeasuredFleet
from headway.config import strict_yaml
from headway.core.errors import HeadwayError
from headway.serving.load_generator.sweep import Point

LEAST_REQUESTS = 5
"""Minimum number of complete answers of a load; loads with fewer are not compared."""
FAR = 20.0
"""Ratio of measured to predicted ITL, relative to the median of the loads, from which the engine stood still."""
JUDGED = {"e2e_mean": "E2E", "itl_mean": "ITL", "ttft_mean": "TTFT"}
Predicted = dict[str, float]


class Twin(Struct, frozen=True):
    """The loads as experiments on the pool in a fleet file."""

    runs: tuple[FoundRun | None, ...]
    """The simulated runs; None: not comparable."""
    notes: tuple[str, ...]
    """Why loads are not comparable."""

    @staticmethod
    def of(
        points: Sequence[Point],
        fleet_text: str,
        file: Path | None,
        model: str,
        is_greedy: bool,
        url: str = "",
        pool: str | None = None,
    ) -> Twin:
        """`fleet_text` describes the pool if there is no `file`. With a `file`, `pool` is the pool's name in the file;
        None: the pool with the engine's `url`.

        Raises HeadwayError, even without points, if the pool cannot be simulated, or if several pools might be the
        engine's.
        """
        flags = {} if file is None else {"fleet": file, "pool": pool or _pool_with(file, url) or None}
        fleet = MeasuredFleet(flags, fleet_text, Path("fleet.yaml"))
        fleet.pool(MeasuredRun(f"{file}: {url} is no endpoint in it", model, 0, 0.0, 0.0, 0.0, {}))
        runs: list[FoundRun | None] = []
        notes = []
        for point in points:
            run = _run(point, model, is_greedy)
            fault = f"fewer than {LEAST_REQUESTS} whole answers" if run is None else run.fault
            if fault:
                notes.append(f"{point.name}: no prediction: {fault}")
            runs.append(None if run is None or fault else fleet.found(Path(point.name), run))
        return Twin(tuple(runs), tuple(notes))

    @property
    def pool(self) -> str:
        """The name of the pool that was measured; empty without a comparable load."""
        return next((each.pool.name for each in self.runs if each is not None), "")

    def predicted(self, coefficients: Coefficients | None = None) -> list[Predicted | None]:
        """Mean latencies of each load in seconds, by the keys of `JUDGED`."""
        return [None if each is None else _predicted(each, coefficients) for each in self.runs]

    def without_standstills(self) -> Twin:
        """The loads without those in which a token took many times longer than in the others: the engine stood still,
        as on a busy machine, which no step time explains."""
        errors = {i: _error_pcts(each, None).get("itl_mean") for i, each in enumerate(self.runs) if each is not None}
        ratios = {i: 1 / max(1 + pct / 100, 1e-9) for i, pct in errors.items() if pct is not None}
        usual = median(ratios.values()) if ratios else 1.0
        far = [i for i, ratio in ratios.items() if ratio > FAR * usual]
        notes = [
            f"{each.run.where}: left out of the fit: {ratios[i] / usual:.0f} times as slow as the other loads"
            for i, each in enumerate(self.runs)
            if each is not None and i in far
        ]
        kept = tuple(None if i in far else each for i, each in enumerate(self.runs))
        return Twin(kept, (*self.notes, *notes))

    def errors(self, coefficients: Coefficients | None = None) -> dict[str, float]:
        """Mean absolute errors over the loads in percent, by the keys of `JUDGED`."""
        found: dict[str, list[float]] = {key: [] for key in JUDGED}
        for each in self.runs:
            for key, pct in ({} if each is None else _error_pcts(each, coefficients)).items():
                found[key].append(abs(pct))
        return {key: sum(values) / len(values) for key, values in found.items() if values}

    def calibrated(self, out: Path, source: str, version: str) -> tuple[Coefficients, list[FitResult]]:
        """Fit the step times to the loads, and write them to `out`. Raises HeadwayError if the loads determine no step
        time."""
        known = [each for each in self.runs if each is not None]
        if not known:
            raise HeadwayError("no load has enough whole answers to calibrate by")
        pool = known[0].pool
        measured = Measurements((), (), tuple(each.experiment for each in known))
        made = calibrate.calibrate(measured, pool.gpu, pool.engine, source, version, known[0].coefficients)
        calibrate.write(out, made.file)
        return coefficients_in(out, pool.gpu.name, pool.engine.name), list(made.fits)


def _pool_with(file: Path, url: str) -> str:
    """The name of the fleet file's pool with this endpoint; empty if there is none."""
    document, _ = strict_yaml.read(file)
    pools = [each for each in document.get("fleet") or () if isinstance(each, dict)]
    named = {
        str(one).rstrip("/").removesuffix("/v1"): str(each.get("name", ""))
        for each in pools
        for one in each.get("endpoints") or ()
    }
    return named.get(url, "")


def _run(point: Point, model: str, is_greedy: bool) -> MeasuredRun | None:
    rows = [
        (
            answer.sent_s,
            answer.prompt_tokens or each.request.prompt_tokens,
            answer.output_tokens,
            answer.first_s - answer.sent_s,
            answer.last_s - answer.sent_s,
            math.nan if answer.cached_tokens is None else answer.cached_tokens,
        )
        for each in point.load.sent
        if (answer := each.answer).is_whole
    ]
    if len(rows) < LEAST_REQUESTS:
        return None
    return run_of(
        RequestRows.of(rows),
        point.name,
        model,
        duration_s=point.load.measured.duration_s,
        concurrency=point.concurrency,
        is_greedy=is_greedy,
    )


def _error_pcts(found: FoundRun, coefficients: Coefficients | None) -> dict[str, float]:
    """Errors of one load in percent, by the keys of `JUDGED`."""
    used = coefficients or found.coefficients
    compared = compare(found.experiment, replay(found.experiment, (0,), coefficients=used), used.calibrated)
    return {key: compared.errors[key].error_pct for key in JUDGED if key in compared.errors}


def _predicted(found: FoundRun, coefficients: Coefficients | None) -> Predicted:
    simulated = replay(found.experiment, (0,), coefficients=coefficients or found.coefficients).overall
    means = (float(simulated.e2e_ms.mean()), simulated.itl_mean_ms, float(simulated.ttft_ms.mean()))
    return {key: mean / 1e3 for key, mean in zip(JUDGED, means, strict=True)}
