"""`headway load --sweep` and `--calibrate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from headway.calibration.solve import FitResult
from headway.cli.load_twin import JUDGED, Predicted, Twin
from headway.cli.output import command_line, print_json, print_table
from headway.core.errors import HeadwayError
from headway.report.page import write_page
from headway.report.render import page as html
from headway.serving.discover import fleet_file
from headway.serving.load_generator import page
from headway.serving.load_generator.run import Load
from headway.serving.load_generator.sweep import Point, Sweep, sweep
from headway.workload.arrivals import Poisson
from headway.workload.atomic_file import write_text
from headway.workload.generate import generate
from headway.workload.random_streams import stream
from headway.workload.spec import WorkloadSpec, resolved

if TYPE_CHECKING:
    from headway.cli.load_session import Session

INTERRUPTED = 130
CONCURRENCY, NUM_REQUESTS, LOAD_S = 64, 50, 10.0
"""Clients of the closed loop; least requests of each load; and approximate seconds of its arrivals."""
ALONE = 20
"""Maximum number of requests of the closed loop with one client."""


async def run(session: Session) -> int:
    """Run a sweep, print and write the results. Returns the exit code."""
    flags = session.flags
    if flags["calibrate_to"] is not None:  # checked before minutes of load that could not be used
        _, why = _twin(session, ())
        if why:
            raise HeadwayError(f"--calibrate: {why}")
    many = flags["concurrency"] or CONCURRENCY
    full = resolved(session.spec)
    most = len(generate(full, session.seed, session.base_dir)) if full.trace is not None else None

    async def measure(rate_rps: float | None, concurrency: int | None) -> Load:
        spec = _spec(full, flags["num_requests"], most, rate_rps, concurrency, session.seed)
        load = await session.load(spec, None)
        if not flags["no_progress"] and sys.stderr.isatty():
            point = Point(rate_rps, concurrency, load)
            click.echo(
                f"{point.name}: {point.throughput_rps:.3g} requests/s in {load.measured.duration_s:.0f} s", err=True
            )
        return load

    found = await sweep(measure, many, flags["attainment"] if session.slo is not None else None)
    for point in found.points if flags["records_to"] is not None else ():
        session.save_records(point.load, flags["records_to"] / _folder(point))
    notes = [*session.notes(), *(f"{each.name}: {note}" for each in found.points for note in each.load.notes())]
    if found.open_points and not found.open_points[-1].is_growing:
        notes.append("the waits of no load grow: none was shown to be beyond saturation; send more with --num-requests")
    twin, why = _twin(session, found.points)
    notes += [f"no prediction: {why}"] if twin is None else twin.notes
    predicted = [None] * len(found.points) if twin is None else twin.predicted()
    calibration = None
    if twin is not None and flags["calibrate_to"] is not None and not found.is_stopped:
        try:
            calibration = _calibrated(session, twin, flags["calibrate_to"])
            predicted = calibration.pop("predicted")
            notes += calibration.pop("left_out")
            notes += _doubts(calibration)
            notes.append("the predictions are those after the fit to these loads")
        except HeadwayError as error:  # reported after the measurements are printed
            why = str(error)
    title = page.headline(found, flags["slo"] or "", flags["attainment"])
    if flags["page_to"] is not None:
        _write_page(session, found, predicted, title, notes)
    if flags["as_json"]:
        print_json(_document(session, found, predicted, notes, calibration))
    else:
        _print(session, found, predicted, title, notes, calibration)
    if found.is_stopped:
        return INTERRUPTED
    if flags["calibrate_to"] is not None and calibration is None:
        raise HeadwayError(f"--calibrate: {why}")
    return 0


def _spec(
    full: WorkloadSpec,
    num_requests: int | None,
    most: int | None,
    rate_rps: float | None,
    concurrency: int | None,
    seed: int,
) -> WorkloadSpec:
    """The workload's requests at a rate, or in a closed loop. `most`: the number of requests in a trace."""
    num = num_requests or max(NUM_REQUESTS, round((rate_rps or 0.0) * LOAD_S))
    if concurrency is not None:
        num = min(num, ALONE) if concurrency == 1 else max(num, 2 * concurrency)
    num = num if most is None else min(num, most)
    if rate_rps is not None and full.sessions is None and full.agents is None:
        rate_rps = _drawn_at(rate_rps, num, seed)
    shape: dict[str, Any] = {
        "arrivals": rate_rps,
        "concurrency": concurrency,
        "duration_s": None,
        "num_requests": num,
    }
    if concurrency is not None:
        shape |= {"sessions": None, "agents": None}
        if full.trace is not None:
            shape |= {"arrivals": 1.0}
    return replace(full, **shape)


def _drawn_at(rate_rps: float, num: int, seed: int) -> float:
    """The rate of the Poisson process whose `num` arrivals of this seed take `num / rate_rps` seconds, first to last.

    The rate of few arrivals differs from their process's, of 50 by 14% (standard deviation). The loads of a sweep are
    judged by their rates, so they have them exactly, and none answers more than was sent.
    """
    if num < 2:
        return rate_rps
    arrivals_s = Poisson(rate_rps).times(stream(seed, "arrivals"), num, None)
    return rate_rps * float(arrivals_s[-1] - arrivals_s[0]) * rate_rps / num


def _folder(point: Point) -> str:
    return f"clients-{point.concurrency}" if point.rate_rps is None else f"rate-{point.rate_rps:.3g}"


def _twin(session: Session, points: Sequence[Point]) -> tuple[Twin | None, str]:
    """The loads as experiments, or the reason why there is no prediction."""
    pool, file = session.pool(), session.flags["fleet"]
    if file is None and "gpu" not in pool.entry:
        if "name" not in pool.notes:
            return None, f"{session.target.model} is {pool.notes['model']}; give it with --fleet FILE"
        why = pool.notes["name"]
        return None, f"{why}; give --gpu" if session.flags["gpu"] is None else why
    try:
        model, is_greedy = pool.model, session.flags["temperature"] == 0
        text, url = session.fleet_text(pool), session.found.url
        return Twin.of(points, text, file, model, is_greedy, url, session.flags["pool"]), ""
    except HeadwayError as error:
        return None, str(error)


def _calibrated(session: Session, twin: Twin, out: Path) -> dict[str, Any]:
    """The errors before and after, the errors at loads that the fit has not seen, and the predictions after."""
    fitted = twin.without_standstills()
    before = fitted.errors()
    source = f"headway load {session.found.url}, {session.began:%Y-%m-%d}"
    coefficients, fits = fitted.calibrated(out, source, session.found.version)
    after, unseen = fitted.errors(coefficients), _held_out(fits)
    is_named = session.flags["is_written"] and _is_better(before, unseen or after)
    if is_named:
        fleet: Path = session.flags["fleet"]
        write_text(fleet, fleet_file.with_coefficients(fleet, twin.pool, out))
    return {
        "before": before,
        "after": after,
        "held_out": unseen,
        "out": str(out),
        "is_named": is_named,
        "predicted": twin.predicted(coefficients),
        "left_out": fitted.notes[len(twin.notes) :],
    }


def _is_better(before: dict[str, float], unseen: dict[str, float]) -> bool:
    """Whether loads that the fit has not seen are predicted better than before, on the mean over the latencies."""
    judged = before.keys() & unseen.keys()
    return sum(unseen[key] for key in judged) < sum(before[key] for key in judged)


def _doubts(calibration: dict[str, Any]) -> Iterator[str]:
    before, unseen = calibration["before"], calibration["held_out"]
    worse = [JUDGED[key] for key in JUDGED if unseen.get(key, 0.0) > before.get(key, unseen.get(key, 0.0))]
    if worse:
        yield (
            f"{', '.join(worse)} of loads left out of the fit: predicted worse than before. The loads differ by more "
            "than their rates, as on a busy machine: measure again, or keep the step times from before"
        )


def _held_out(fits: Sequence[FitResult]) -> dict[str, float]:
    """Errors at loads that were left out of the fit in turn."""
    return next((dict(each.held_out) for each in fits if each.held_out), {})


def _write_page(
    session: Session, found: Sweep, predicted: Sequence[Predicted | None], title: str, notes: Sequence[str]
) -> None:
    version = f" {session.found.version}" if session.found.version else ""
    about = {
        "Model": session.target.model,
        "Engine": f"{session.found.product or session.found.api}{version}",
        "GPU": str(session.pool().entry.get("gpu", "unknown")),
        "Measured": f"{session.began:%Y-%m-%d %H:%M}",
        "Requests": f"{sum(each.load.measured.num_requests for each in found.points):,}",
    }
    write_page(
        session.flags["page_to"],
        html(page.report(found, predicted, about, title, notes), command_line()),
    )
    click.echo(f"wrote {session.flags['page_to']}", err=True)


def _document(
    session: Session,
    found: Sweep,
    predicted: Sequence[Predicted | None],
    notes: Sequence[str],
    calibration: dict[str, Any] | None,
) -> dict[str, Any]:
    knee = found.knee
    points = [
        {
            "rate_rps": point.rate_rps,
            "concurrency": point.concurrency,
            "measured": point.load.measured,
            "predicted": each,
        }
        for point, each in zip(found.points, predicted, strict=True)
    ]
    return {
        "engine": session.found,
        "model": session.target.model,
        "warm_up": session.warmed,
        "points": points,
        "knee_rps": None if knee is None else knee.rate_rps,
        "most_rps": found.most_rps,
        "highest": found.highest,
        "calibration": calibration,
        "notes": notes,
        "is_stopped": found.is_stopped,
    }


def _print(
    session: Session,
    found: Sweep,
    predicted: Sequence[Predicted | None],
    title: str,
    notes: Sequence[str],
    calibration: dict[str, Any] | None,
) -> None:
    print_table(page.heads(predicted), page.rows(found, predicted))
    click.echo(f"\n{session.target.model} at {session.found.url}: {title}")
    if calibration is not None:
        click.echo()
        columns = ("before", "after", "held_out")
        print_table(
            ("mean error of the prediction, %", "before", "after", "loads left out in turn"),
            [
                (
                    name,
                    *(f"{calibration[column][key]:.1f}" if key in calibration[column] else "-" for column in columns),
                )
                for key, name in JUDGED.items()
            ],
        )
        how = "use it with --coefficients, or coefficients: in a fleet file"
        if session.flags["is_written"]:
            as_it_was = "is as it was, as loads that the fit has not seen are predicted worse than before"
            how = f"{session.flags['fleet']} {'names it' if calibration['is_named'] else as_it_was}"
        click.echo(f"wrote {calibration['out']}; {how}")
    for note in notes:
        click.echo(f"note: {note}")
