"""preview(): when a schedule would occur. Pure: no clock, no database."""

from datetime import datetime, timedelta

from cron_ticks.checks import LATEST, check_count, check_instant
from cron_ticks.cron_rules import DstFold, DstGap
from cron_ticks.occurrences import MICROSECOND, Timetable
from cron_ticks.schedules import calendar_of, check_bounds, check_rule, rule_of

MOST_PREVIEWED = 10_000


def preview(
    *,
    cron: str | None = None,
    every: float | timedelta | None = None,
    at: datetime | None = None,
    timezone: str | None = None,
    after: datetime,
    count: int = 5,
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    dst_gap: DstGap | None = None,
    dst_fold: DstFold | None = None,
) -> list[datetime]:
    """The first `count` occurrences strictly after `after`, in UTC; fewer if there are no more.

    The arguments mean what they do in `schedule()`. An interval is counted from `starts_at`, else from `after`.
    """
    instant = check_instant("after", after)
    check_count("count", count, most=MOST_PREVIEWED)
    interval, moment, calendar = check_rule(
        every=every, cron=cron, at=at, timezone=timezone, dst_gap=dst_gap, dst_fold=dst_fold
    )
    bounds = check_bounds(starts_at, ends_at, max_runs=None)
    anchor = moment or bounds["starts_at"] or instant
    rule = rule_of(
        anchor,
        interval,
        calendar_of(calendar["cron"], calendar["timezone"], calendar["dst_gap"], calendar["dst_fold"]),
    )
    timetable = Timetable(rule, bounds["starts_at"], bounds["ends_at"])
    return timetable.occurrences(instant + MICROSECOND, LATEST, most=count)
