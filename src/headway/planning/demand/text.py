"""A plan for forecast demand as sentences and a table."""

from __future__ import annotations

from headway.forecast.demand import WEEK_HOURS
from headway.planning.capacity.text import describe
from headway.planning.demand.problem import DemandPlan, WeekPlan
from headway.report.blocks import Table, or_dash
from headway.report.table import dollars

WEEK_HEADS = ("week from", "busiest hour", "p50 rps", "p90 rps", "planned rps", "replicas", "GPUs", "chance",
              "with one less", "$ on demand")  # fmt: skip


def headline(plan: DemandPlan) -> str:
    if plan.status == "infeasible":
        return f"No number of replicas meets {describe(plan.at_recorded.targets)} with a chance of {plan.chance:.0%}."
    if plan.status == "short":
        return "More replicas are needed than may be tried."
    first, most = plan.due[0].replicas, max(week.replicas or 0 for week in plan.weeks)
    gpus, kind = most * plan.gpus_per_replica, plan.replica.split(",")[0]
    grows = f"{first} replicas now" if first == most else f"{first} replicas now, {most} at most"
    return f"{kind}: {grows} ({gpus} GPU{'s' if gpus != 1 else ''})."


def sentences(plan: DemandPlan) -> list[str]:
    """Sentences on the probability, the next due replica, the reservation, and the monthly cost."""
    lines = []
    if plan.demand_quantile is not None:
        model = "" if plan.model_chance is None else f", times {plan.model_chance:.1%} for the step times"
        lines.append(
            f"Each week's busiest hour meets {describe(plan.at_recorded.targets)} with a chance of {plan.chance:.0%} or"
            f" more: it is planned for the {plan.demand_quantile:.1%} quantile of its demand{model}."
        )
    later = plan.due[1:]
    if later:
        days = ", ".join(f"{each.replicas} from {each.from_day}" for each in later)
        lines.append(f"The next replica is due: {days}.")
    elif plan.due:
        lines.append("No further replica is due in this time.")
    return lines + _on_reserve(plan)


def _on_reserve(plan: DemandPlan) -> list[str]:
    reserve = plan.reserve
    if reserve is None:
        return []
    base, are = f"{reserve.num_reserved_gpus} GPUs", "are"
    if reserve.num_reserved_gpus == 1:
        base, are = "1 GPU", "is"
    on_demand = f"{dollars(reserve.on_demand_usd_per_gpu_hour)} on demand"
    rented = f"{reserve.rented_gpu_hours:,.0f} GPU-hours, at most {reserve.most_rented_gpus} at a time, are rented"
    rented += f" {reserve.rented}"
    if reserve.reserved_usd_per_gpu_hour is None:
        shares = ", ".join(f"{i}: {share:.0%}" for i, share in enumerate(reserve.used_share, 1))
        first = (
            f"{base} {are} needed every hour, and should be reserved; {rented} ({on_demand}). No reserved price was"
            " given: a replica is worth reserving where its price is below this share of the rented one, by replica"
            f" {shares}."
        )
    else:
        first = (
            f"Reserve {base} at {dollars(reserve.reserved_usd_per_gpu_hour)} an hour; {rented}. A GPU that is needed in"
            f" {reserve.break_even_utilisation:.0%} of the hours or more is cheaper reserved."
        )
    lines = [
        first,
        f"A month costs {dollars(reserve.usd_per_month)}; the busiest week's replicas, always on and on demand, cost"
        f" {dollars(reserve.usd_per_month_all_on_demand)}.",
    ]
    if reserve.schedule:
        entries = "; ".join(
            f"{each.replicas} replicas, cron {each.cron!r} for {each.duration_s / 3600:.2g} h"
            for each in reserve.schedule
        )
        lines.append(f"Scheduled minimums ({reserve.schedule[0].time_zone}): {entries}.")
    return lines


def weeks_table(plan: DemandPlan) -> Table:
    return Table(WEEK_HEADS, [_row(week) for week in plan.weeks], words=WEEK_HEADS[:2])


def _row(week: WeekPlan) -> list[str]:
    return [
        week_name(week.begins, week.num_hours),
        hour_name(week.busiest_begins),
        f"{week.p50_requests_per_s:.4g}",
        f"{week.p90_requests_per_s:.4g}",
        f"{week.planned_requests_per_s:.4g}",
        "more" if week.replicas is None else str(week.replicas),
        or_dash(week.num_gpus),
        or_dash(week.chance, "{:.0%}"),
        or_dash(week.chance_with_one_less, "{:.0%}"),
        or_dash(week.usd, "{:,.0f}"),
    ]


def week_name(begins: str, num_hours: int) -> str:
    """The day on which a week begins, and its length if it is not seven days."""
    return begins[:10] if num_hours == WEEK_HOURS else f"{begins[:10]} ({num_hours} h)"


def hour_name(begins: str) -> str:
    """A time in ISO 8601, to the minute."""
    return f"{begins[:10]} {begins[11:16]}"
