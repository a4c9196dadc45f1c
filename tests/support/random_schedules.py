"""Schedules of every kind, drawn by hypothesis, and put into the database as they are: cursors at any position."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from cron_ticks.cron_rules import DST_FOLDS, DST_GAPS, CronRule
from cron_ticks.occurrences import EPOCH, MICROSECOND, IntervalRule, OneOffRule, Timetable

ZERO, SECOND, DAY = timedelta(0), timedelta(seconds=1), timedelta(days=1)
# Near transitions of zones below, on days without one, and far ahead.
NOWS = [
    datetime(2026, 3, 29, 0, 59, 30, tzinfo=UTC),  # Berlin forward
    datetime(2026, 10, 25, 0, 30, tzinfo=UTC),  # Berlin back
    datetime(2026, 11, 1, 5, 45, tzinfo=UTC),  # New York back
    datetime(2026, 4, 4, 14, 50, tzinfo=UTC),  # Lord Howe back, by half an hour
    datetime(2028, 2, 28, 23, 59, 30, tzinfo=UTC),
    datetime(2199, 12, 31, 23, 50, tzinfo=UTC),
]
ZONES = ["UTC", "America/New_York", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu"]
CRONS = ["* * * * *", "*/7 * * * * *", "30 2 * * *", "15,45 * * * *", "0 0 29 2 *", "*/20 1-3 * * *", "0 1 * * 7"]


def microseconds(least: timedelta, most: timedelta) -> st.SearchStrategy[timedelta]:
    return st.integers(least // MICROSECOND, most // MICROSECOND).map(lambda number: number * MICROSECOND)


@dataclass(frozen=True)
class Drawn:
    """A schedule with its cursor; its times are relative to the pass, so that much of it happens in the window."""

    interval: timedelta | None
    calendar: tuple[str, str, str, str] | None  # the expression, the zone, dst_gap, dst_fold
    anchor: timedelta | datetime  # before the pass, or a time long ago
    jitter: timedelta
    starts_at: timedelta | None
    ends_at: timedelta | None
    max_runs: int | None
    cursor: timedelta
    aligned: bool  # the cursor is at an occurrence, as it always is in the product
    planned: int
    catch_up: str
    copied: tuple[str, int, str, str, str, int | None]  # workspace, priority, sink, delivery, overlap, misfire_grace
    keeps: int  # every so many ticks of it are there already; 0: none

    def schedule(self, number: int, now: datetime) -> dict[str, Any]:
        workspace, priority, sink, delivery, overlap, grace = self.copied
        cron, zone, dst_gap, dst_fold = self.calendar or (None,) * 4
        one_off = self.interval is None and cron is None
        bound = {name: getattr(self, name) for name in ("starts_at", "ends_at")}
        moments = {name: None if at is None or one_off else now + at for name, at in bound.items()}
        return {
            "id": f"cron_{number}",
            "workspace_id": workspace,
            "name": f"schedule {number}",
            "queue_name": f"queue {number % 3}",
            "payload": json.dumps({"number": number}),
            "interval_us": None if self.interval is None else self.interval // MICROSECOND,
            "anchor_at": self.anchor if isinstance(self.anchor, datetime) else now - self.anchor,
            "jitter_us": 0 if one_off else self._amplitude // MICROSECOND,
            "priority": priority,
            **moments,
            "max_runs": None if one_off else self.max_runs,
            "version": 1 + number % 4,
            "sink": sink,
            "delivery": delivery,
            "overlap": overlap,
            "cron": cron,
            "zone": zone,
            "dst_gap": dst_gap,
            "dst_fold": dst_fold,
            "catch_up": self.catch_up,
            "misfire_grace_us": grace,
            "created_at": now,
            "updated_at": now,
        }

    @property
    def _amplitude(self) -> timedelta:
        return self.jitter if self.interval is None else min(self.jitter, self.interval / 2)

    def cursor_at(self, schedule: dict[str, Any], now: datetime) -> datetime | None:
        """From where on ticks are needed; None if there is nothing."""
        needed_from = now + self.cursor
        return _timetable(schedule).occurrence_at_or_after(needed_from) if self.aligned else needed_from


def _timetable(schedule: dict[str, Any]) -> Timetable:
    rule: Any
    if schedule["cron"] is not None:
        rule = CronRule(schedule["cron"], schedule["zone"], schedule["dst_gap"], schedule["dst_fold"])
    elif schedule["interval_us"] is not None:
        rule = IntervalRule(schedule["anchor_at"], schedule["interval_us"] * MICROSECOND)
    else:
        rule = OneOffRule(schedule["anchor_at"])
    return Timetable(rule, schedule["starts_at"], schedule["ends_at"], schedule["max_runs"])


intervals = st.one_of(
    st.sampled_from([SECOND, 5 * SECOND, 60 * SECOND, DAY, 400 * DAY]),
    microseconds(SECOND, 90 * SECOND),
    microseconds(SECOND, 400 * DAY),
)
calendars = st.tuples(
    st.sampled_from(CRONS), st.sampled_from(ZONES), st.sampled_from(DST_GAPS), st.sampled_from(DST_FOLDS)
)
# An interval, a time of day, or neither: a one-off.
rules: st.SearchStrategy[tuple[timedelta | None, tuple[str, str, str, str] | None]] = st.one_of(
    st.tuples(intervals, st.none()), st.tuples(st.none(), calendars), st.just((None, None))
)
anchors = st.one_of(
    microseconds(-90 * SECOND, 90 * SECOND),
    microseconds(-400 * DAY, 400 * DAY),
    st.just(EPOCH),
    st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001 - hypothesis wants naive bounds
)
bounds = st.one_of(st.none(), st.none(), microseconds(-90 * SECOND, 90 * SECOND))
copied = st.tuples(
    st.sampled_from([None, "a workspace"]),
    st.integers(0, 3),
    st.sampled_from(["queue", "another"]),
    st.sampled_from(["exactly_once", "at_least_once", "at_most_once"]),
    st.sampled_from(["allow", "skip", "queue_one"]),
    st.sampled_from([None, 1, 60_000_000]),
)


def drawn(missed_after: timedelta) -> st.SearchStrategy[Drawn]:
    """Most are not behind; some are, by a microsecond or by hours."""
    edge = st.sampled_from([-missed_after, -missed_after - MICROSECOND, ZERO, -missed_after + MICROSECOND])
    cursors = st.one_of(microseconds(-missed_after, 60 * SECOND), edge, microseconds(-3600 * SECOND, 7200 * SECOND))
    return st.builds(
        lambda rule, *others: Drawn(*rule, *others),
        rules,
        anchors,
        st.sampled_from([ZERO, MICROSECOND, 300_001 * MICROSECOND, 30 * SECOND]),
        bounds,
        bounds,
        st.one_of(st.none(), st.none(), st.integers(1, 70)),
        cursors,
        st.booleans(),
        st.integers(0, 40),
        st.sampled_from(["latest", "skip", "all", "spread"]),
        copied,
        st.sampled_from([0, 0, 1, 3]),
    )


async def put(connection: Any, schedules: Sequence[dict[str, Any]]) -> None:
    """Into the database, instead of what was there."""
    await connection.execute("DELETE FROM cron_schedule_cursors; DELETE FROM cron_schedules")
    if schedules:
        rows = [tuple(schedule.values()) for schedule in schedules]
        await connection.copy_records_to_table("cron_schedules", records=rows, columns=list(schedules[0]))


async def put_cursors(connection: Any, cursors: dict[str, tuple[datetime | None, int]]) -> None:
    """Where each begins, and how many occurrences it has had."""
    await connection.execute("DELETE FROM cron_schedule_cursors")
    rows = [(schedule_id, needed, planned) for schedule_id, (needed, planned) in cursors.items()]
    names = ["schedule_id", "next_tick_needed_at", "planned"]
    await connection.copy_records_to_table("cron_schedule_cursors", records=rows, columns=names)
