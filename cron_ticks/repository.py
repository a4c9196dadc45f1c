"""Schedules, ticks and runs in the database; here what concerns many schedules at once: pages, workspaces, files."""

from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from cron_ticks import schedule_sql
from cron_ticks.database import Connection
from cron_ticks.declarations import Declarations
from cron_ticks.errors import CronTicksError, DeclarationsError, InvalidInputError, ScheduleNotFoundError
from cron_ticks.rows import schedule_of
from cron_ticks.schedule_repository import Held, Saved, ScheduleRepository
from cron_ticks.schedules import DEFAULT_ZONE, Schedule

APPLY_PATIENCE_SECONDS = 600.0  # pods that start together wait for the one that has begun


class _DryRun(Exception):  # noqa: N818 - no error: it rolls a transaction back
    """Everything went well, and nothing is to be kept."""


class CronRepository(ScheduleRepository):
    """Schedules, ticks and runs in the database."""

    async def list_schedules(
        self,
        *,
        workspace_id: str | None = None,
        after_id: str = "",
        limit: int = 100,
        connection: Connection | None = None,
    ) -> list[Schedule]:
        """A page of schedules; pass the last one's id as `after_id` for the next."""
        arguments = (workspace_id, after_id, limit)
        rows = await self.database.fetch(schedule_sql.LIST_SCHEDULES, *arguments, connection=connection)
        return [schedule_of(row) for row in rows]

    async def delete_workspace(self, workspace_id: str, *, connection: Connection, now: datetime | None = None) -> int:
        """Remove all schedules of a workspace with their pending ticks; how many schedules there were."""
        await self.database.fetch(schedule_sql.LOCK_ZONE, workspace_id, connection=connection)
        rows = await self.database.fetch(schedule_sql.LOCK_WORKSPACE, workspace_id, connection=connection)
        schedules = [schedule_of(row) for row in rows]
        ids = [schedule.id for schedule in schedules]
        cursors = await self.database.fetch(schedule_sql.LOCK_CURSORS, ids, connection=connection)
        ticks = await self._lock_ticks(ids, connection)
        instant = await self.database.fetchval(schedule_sql.CLOCK, now, connection=connection)
        overdue = [
            self._overdue(Held(schedule, next_needed, planned, [], instant, None), instant)
            for schedule, (next_needed, planned) in zip(schedules, cursors, strict=True)
        ]
        await self.create_ticks(overdue, connection=connection)
        dropped = [tick.scheduled_for for tick in ticks]
        dropped += [occurrence for made in overdue for occurrence in made.plan.occurrences]
        await self._drop_ticks(ids, dropped, connection, reason="workspace deleted", instant=instant)
        await self.database.fetch(schedule_sql.DELETE_SCHEDULES, ids, instant, self._actor, connection=connection)
        await self.database.fetch(schedule_sql.FORGET_PAYLOADS, workspace_id, connection=connection)
        await self.database.fetch(schedule_sql.FORGET_NOTED_PAYLOADS, workspace_id, connection=connection)
        await self.database.fetch(schedule_sql.FORGET_ZONE, workspace_id, connection=connection)
        return len(ids)

    async def apply(
        self, declarations: Declarations, *, prune: bool, dry_run: bool, now: datetime | None = None
    ) -> tuple[list[Saved], list[Schedule]]:
        """Bring schedules in line with a file, in one transaction: what was saved, and what was removed.

        All that stands against it is said at once, and then nothing is changed, nor with `dry_run`.
        """
        saved: list[Saved] = []
        removed: list[Schedule] = []
        with suppress(_DryRun):
            async with self._changing(None) as connection:
                await self._lock_files(connection)
                for workspace_id in declarations.workspaces:
                    await self.database.fetch(schedule_sql.SHARE_ZONE, workspace_id, connection=connection)
                saved += await self._save_all(declarations, connection, now)
                if prune:
                    kept = {item.schedule.id for item in saved}
                    removed += await self._delete_others(declarations.owner, kept, connection, now)
                if dry_run:
                    raise _DryRun
        return saved, removed

    async def _lock_files(self, connection: Connection) -> None:
        try:
            await self.database.fetch(
                schedule_sql.LOCK_APPLY, connection=connection, deadline_seconds=APPLY_PATIENCE_SECONDS
            )
        except TimeoutError:
            raise CronTicksError(
                f"another process has been applying a file for {APPLY_PATIENCE_SECONDS:.0f} s: try again"
            ) from None

    async def _save_all(self, declarations: Declarations, connection: Connection, now: datetime | None) -> list[Saved]:
        saved: list[Saved] = []
        problems: list[str] = []
        for declared in declarations.schedules:
            definition = replace(declared.definition, owner=declarations.owner)
            try:
                saved.append(await self.save_schedule(definition, connection=connection, now=now))
            except InvalidInputError as error:
                problems.append(f"{declared.place}: {error}")
        if problems:
            raise DeclarationsError(problems)
        return saved

    async def _delete_others(
        self, owner: str | None, kept: set[str], connection: Connection, now: datetime | None
    ) -> list[Schedule]:
        rows = await self.database.fetch(schedule_sql.OWNED_BY, owner, connection=connection)
        others = [row["id"] for row in rows if row["id"] not in kept]
        return [await self.delete_schedule(schedule_id, connection=connection, now=now) for schedule_id in others]

    async def set_workspace_timezone(
        self,
        workspace_id: str,
        timezone: str | None,
        *,
        connection: Connection | None = None,
        now: datetime | None = None,
    ) -> list[Saved]:
        """Change the zone of a workspace's schedules that name none, None: UTC. It is an edit of each of them."""
        zone = timezone or DEFAULT_ZONE
        async with self._changing(connection) as chosen:
            await self.database.fetch(schedule_sql.LOCK_ZONE, workspace_id, connection=chosen)
            if timezone is None:
                await self.database.fetch(schedule_sql.FORGET_ZONE, workspace_id, connection=chosen)
            else:
                await self.database.fetch(schedule_sql.SET_ZONE, workspace_id, timezone, now, connection=chosen)
            rows = await self.database.fetch(schedule_sql.IN_OTHER_ZONE, workspace_id, zone, connection=chosen)
            moved: list[Saved] = []
            for row in rows:
                with suppress(ScheduleNotFoundError):  # somebody has deleted it meanwhile
                    moved.append(await self._move_to_zone(row["id"], zone, chosen, now))
            return moved

    async def _move_to_zone(self, schedule_id: str, zone: str, connection: Connection, now: datetime | None) -> Saved:
        held = await self._hold(schedule_id, connection, now)
        edited = await self._edit(held, replace(held.schedule.definition, zone=zone), ("zone",), connection)
        return replace(edited, back_after=None)  # a zone that is set back is no sign of two releases

    async def get_workspace_timezone(self, workspace_id: str) -> str | None:
        """The zone of a workspace's schedules that name none."""
        zone: str | None = await self.database.fetchval(schedule_sql.GET_ZONE, workspace_id)
        return zone
