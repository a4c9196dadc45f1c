"""Occurrences that nobody dealt with in time: what is made up of them, and the ledger's rows of what is not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from cron_ticks import missing_sql, tick_sql
from cron_ticks.database import Connection, Database
from cron_ticks.occurrences import CatchUp, MakingUp, Stretch, Timetable, paced
from cron_ticks.rows import LateTick, NeedingTicks, Planned

Occurrence = tuple[str, datetime]  # a schedule's id, and when
Policies = Callable[[CatchUp], MakingUp]


def kept_late(made: Planned) -> Sequence[LateTick]:
    """Late ticks that are made up, and were not so before; none as long as there are more than could be looked at."""
    if made.plan.late_undecided:
        return []
    return [tick for tick in made.needing.late[made.plan.late_missed :] if tick.turn == 0]


def paced_of(plans: Sequence[Planned], *, missed_after: timedelta, span: timedelta) -> dict[Occurrence, datetime]:
    """When occurrences are due that are made up one after the other."""
    found: dict[Occurrence, datetime] = {}
    for made in plans:
        needing = made.needing
        if needing.catch_up == "spread":
            late = [tick.scheduled_for for tick in kept_late(made)]
            late += (moment for moment in made.plan.occurrences if moment < needing.now - missed_after)
            due = paced(needing.schedule_id, late, now=needing.now, span=span)
            found |= {(needing.schedule_id, moment): when for moment, when in zip(late, due, strict=True)}
    return found


async def settle_late(
    database: Database,
    plans: Sequence[Planned],
    policies: Policies,
    paced: Mapping[Occurrence, datetime],
    connection: Connection,
) -> int:
    """End the late ticks that are missed, and let those that are made up go out behind what is due now; how many."""
    missed = [
        (tick, policies(made.needing.catch_up).reason)
        for made in plans
        for tick in made.needing.late[: made.plan.late_missed]
    ]
    if missed:
        await _make_partitions(database, [tick.scheduled_for for tick, _ in missed], connection)
        arguments = ([tick.id for tick, _ in missed], [reason for _, reason in missed], plans[0].needing.now)
        await database.fetch(missing_sql.MISS_TICKS, *arguments, connection=connection)
    kept = [
        (tick.id, paced.get((made.needing.schedule_id, tick.scheduled_for)))
        for made in plans
        for tick in kept_late(made)
    ]
    if kept:
        ids, due = zip(*kept, strict=True)
        await database.fetch(missing_sql.KEEP_TICKS, ids, due, connection=connection)
    return len(kept)


async def record_missed(
    database: Database, plans: Sequence[Planned], policies: Policies, connection: Connection
) -> None:
    """A row of the ledger for each stretch of occurrences that are not made up."""
    left = [(made.needing, made.plan.stretch) for made in plans if made.plan.stretch is not None]
    if left:
        await _make_partitions(database, [stretch.last for _, stretch in left], connection)
    while left:
        rows = await database.fetch(
            missing_sql.MISS_OCCURRENCES,
            [needing.schedule_id for needing, _ in left],
            [needing.version for needing, _ in left],
            [stretch.first for _, stretch in left],
            [stretch.last for _, stretch in left],
            [stretch.count for _, stretch in left],
            [policies(needing.catch_up).reason for needing, _ in left],
            plans[0].needing.now,
            connection=connection,
        )
        written = {row["schedule_id"] for row in rows}
        left = [
            (needing, shorter)
            for needing, stretch in left
            if needing.schedule_id not in written and (shorter := _shortened(needing, stretch)) is not None
        ]


def _shortened(needing: NeedingTicks, stretch: Stretch) -> Stretch | None:
    """Without its last occurrence, which has a row of its own: it was dropped in the middle of being sent."""
    if stretch.count == 1:
        return None
    timetable: Timetable = needing.timetable
    return replace(stretch, last=timetable.nth(stretch.first, stretch.count - 2), count=stretch.count - 1)


async def _make_partitions(database: Database, moments: Sequence[datetime], connection: Connection) -> None:
    days = sorted({moment.date() for moment in moments})
    await database.fetch(tick_sql.MAKE_PARTITIONS_OF, days, connection=connection)
