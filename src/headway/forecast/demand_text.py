"""A demand forecast as sentences, and as table rows."""

from __future__ import annotations

from headway.forecast.demand import DemandForecast

WEEK_HEADS = ("week from", "requests", "mean rps", "peak hour", "p10 rps", "p50 rps", "p90 rps", "p99 rps")
SHOWN = (0.1, 0.5, 0.9, 0.99)


def headlines(found: DemandForecast) -> list[str]:
    """Sentences about the forecast, its data, and the errors of such forecasts."""
    history, last = found.history, found.hour(found.num_steps - 1)
    days = f"{history.num_days} day{'s' if history.num_days > 1 else ''}"
    hours = "1 hour" if history.num_hours == 1 else f"{history.num_hours} hours"
    hours += " of it" if history.num_days == 1 else " of them"
    lines = [
        f"{found.begins[:16]} to {last.isoformat()[:16]} ({found.time_zone}), growing by {found.growth_per_month:g} a"
        f" month; from {history.num_requests:,} requests of {days}, {hours} recorded",
        f"lengths: {found.total.prompt_tokens_mean:,.0f} prompt and {found.total.output_tokens_mean:,.0f} output tokens"
        " on average",
    ]
    backtest = found.backtest
    if backtest is None:
        return [*lines, f"profile: {found.method}; its error is unknown from one day"]
    inside = ", ".join(
        f"{share:.0%} below p{100 * float(q):g}"
        for q, share in backtest.coverage.items()
        if float(q) in (0.1, 0.5, 0.9)
    )
    num = backtest.num_held_out_days
    return [
        *lines,
        f"profile: {found.method} over {found.season_hours} h; on {num} held-out day{'s' if num > 1 else ''} it was"
        f" {backtest.wape:.0%} off" + (f", {inside}" if inside else ""),
    ]


def week_rows(found: DemandForecast) -> list[list[object]]:
    """Returns, for each week, requests and mean rate in the median, and the busiest hour at several quantiles."""
    rates = {q: found.rates(q) for q in SHOWN}
    made: list[list[object]] = []
    for steps in found.weeks:
        at = slice(steps.start, steps.stop)
        median = rates[0.5][at]
        busiest = steps.start + int(median.argmax())
        made.append(
            [
                found.hour(steps.start).strftime("%Y-%m-%d"),
                round(float(median.sum()) * found.step_s),
                float(median.mean()),
                found.hour(busiest).strftime("%a %H:00"),
                *(float(rates[q][at].max()) for q in SHOWN),
            ]
        )
    return made
