"""The ledger, as people read it. The statements are in `run_sql`."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cron_ticks import run_sql
from cron_ticks.database import Database
from cron_ticks.runs import Outcome, Run, RunPlace

DEFAULT_SPAN = timedelta(days=1)  # back in time, where no schedule is asked for
FIRST_SPAN, GROWTH = timedelta(minutes=1), 8  # of the parts in which a time is read, the newest first
THE_BEGINNING = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class RunChoice:
    """Which runs are asked for: what is None doesn't matter."""

    schedule_id: str | None = None
    name: str | None = None
    workspace_id: str | None = None
    queue_name: str | None = None
    outcome: Outcome | None = None
    since: datetime | None = None
    until: datetime | None = None  # before it
    after: RunPlace | None = None  # the last one of the page before


class RunRepository:
    """Runs, page by page, the newest first."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def runs(self, choice: RunChoice, *, limit: int, now: datetime | None = None) -> list[Run]:
        """A page; without a schedule those of the day before `until`, unless it is said otherwise."""
        schedules = await self._schedules(choice)
        if choice.schedule_id is not None or choice.name is not None:
            return await self._page(choice, limit, choice.since or THE_BEGINNING, choice.until, schedules)
        end = choice.until or now or await self._database.fetchval("SELECT statement_timestamp()")
        since = choice.since or end - DEFAULT_SPAN
        if schedules is not None:
            return await self._page(choice, limit, since, choice.until, schedules)
        return await self._in_parts(choice, limit, since, end)

    async def _schedules(self, choice: RunChoice) -> list[str] | None:
        """The ids to look for, None: whatever they are. A name may have been given to several, one after the other."""
        if choice.schedule_id is not None:
            return [choice.schedule_id]
        if choice.name is not None:
            rows = await self._database.fetch(run_sql.SCHEDULES_NAMED, choice.name, choice.workspace_id)
        elif choice.workspace_id is not None:
            rows = await self._database.fetch(run_sql.SCHEDULES_OF_WORKSPACE, choice.workspace_id)
        else:
            return None
        return [row["schedule_id"] for row in rows]

    async def _in_parts(self, choice: RunChoice, limit: int, since: datetime, end: datetime) -> list[Run]:
        """Longer and longer parts of the time, until there is a page: a busy minute is enough for one."""
        newest = end if choice.after is None else min(end, choice.after.scheduled_for)
        until, span = choice.until, FIRST_SPAN
        begin = max(since, newest - span)
        found = await self._page(choice, limit, begin, until, None)
        while len(found) < limit and begin > since:
            until, span = begin, span * GROWTH
            begin = max(since, newest - span)
            found += await self._page(choice, limit - len(found), begin, until, None, first=False)
        return found

    async def _page(
        self,
        choice: RunChoice,
        limit: int,
        since: datetime,
        until: datetime | None,
        schedules: list[str] | None,
        *,
        first: bool = True,
    ) -> list[Run]:
        """`first`: with stretches of missed occurrences that went on beyond the end."""
        place = (None, None) if choice.after is None else choice.after
        beyond = choice.until if first else None
        arguments = (*place, choice.outcome, choice.workspace_id, choice.queue_name, since, until, beyond)
        if schedules is not None:
            rows = await self._database.fetch(run_sql.OF_SCHEDULES, limit, *arguments, schedules)
        elif choice.outcome in (None, "enqueued"):
            rows = await self._database.fetch(run_sql.OF_TIME, limit, *arguments)
        else:
            rows = await self._database.fetch(run_sql.NOT_ENQUEUED, limit, *arguments)
        return [Run(**row) for row in rows]
