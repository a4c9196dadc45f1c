"""Calls of a QueueManager: what became of occurrences and of their messages, and how long that is kept."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from cron_ticks.checks import LONGEST_INTERVAL, check_choice, check_count, check_instant, check_name, check_span
from cron_ticks.errors import InvalidInputError
from cron_ticks.retention_repository import DroppedPartitions, RetentionRepository
from cron_ticks.run_repository import RunChoice, RunRepository
from cron_ticks.runs import OUTCOMES, MessageState, Outcome, Run, check_place
from cron_ticks.schedules import OWN_QUEUE
from cron_ticks.settings import PREFIX
from token_queue.opened import OpenedManager

LARGEST_PAGE = 10_000
SHORTEST_RETENTION = timedelta(days=2)  # of runs: today's partition and yesterday's are in use
CleanupKind = Literal["runs", "events", "dead", "messages"]
CLEANUP_KINDS: tuple[CleanupKind, ...] = ("runs", "events", "dead", "messages")
NOTHING = DroppedPartitions(())


@dataclass(frozen=True)
class CleanedUp:
    """What `cleanup()` removed."""

    runs: tuple[str, ...] = ()  # partitions of the ledger, a day each
    events: tuple[str, ...] = ()  # partitions of events, a week each
    versions: int = 0  # what schedules were before the first kept run
    audits: int = 0
    backfills: int = 0
    dead: int = 0  # dead letters
    messages: int = 0  # completed ones
    busy: tuple[CleanupKind, ...] = ()  # in use for long, so some is left: try again


class RunCalls(OpenedManager):
    """What became of occurrences and of their messages, and how long that is kept."""

    async def runs(
        self,
        *,
        schedule_id: str | None = None,
        name: str | None = None,
        workspace_id: str | None = None,
        queue_name: str | None = None,
        outcome: Outcome | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        after: Run | str | None = None,
        limit: int = 100,
    ) -> list[Run]:
        """What became of occurrences, the newest first, each with how far its message has come.

        Of one schedule, of all that have had a `name`, or of all; from `since` on and before `until`. With neither a
        schedule nor a name, without `since`, of the last 24 hours. `after` is the last run of the page before, or its
        `cursor`.
        """
        check_count("limit", limit, most=LARGEST_PAGE)
        names = {"schedule_id": schedule_id, "name": name, "workspace_id": workspace_id, "queue_name": queue_name}
        for field, value in names.items():
            if value is not None:
                check_name(field, value)
        choice = RunChoice(
            **names,
            outcome=None if outcome is None else check_choice("outcome", outcome, OUTCOMES),
            since=None if since is None else check_instant("since", since),
            until=None if until is None else check_instant("until", until),
            after=None if after is None else check_place("after", after),
        )
        if choice.since is not None and choice.until is not None and choice.since >= choice.until:
            raise InvalidInputError("since", "must be before until")
        found = await RunRepository(self._open.database).runs(choice, limit=limit)
        return await self._with_messages(found)

    async def _with_messages(self, runs: Sequence[Run]) -> list[Run]:
        ids = [run.message_id for run in runs if run.message_id is not None]
        states = await self._open.queue.message_states(ids) if ids else {}
        return [
            run if run.message_id is None else replace(run, message=states.get(run.message_id, _gone(run)))
            for run in runs
        ]

    async def cleanup(
        self, older_than: timedelta | float, *, kinds: Collection[CleanupKind] | None = None
    ) -> CleanedUp:
        """Remove now what is older, of all kinds or of some: runs, events, dead letters, completed messages.

        Runs go by the day and events by the week, if all of it is older. Runs of an unfinished backfill stay.
        """
        chosen = [check_choice("kinds", kind, CLEANUP_KINDS) for kind in (CLEANUP_KINDS if kinds is None else kinds)]
        age = check_span("older_than", older_than, longest=LONGEST_INTERVAL)
        if "runs" in chosen:
            self._check_age_of_runs(age)
        opened = self._open
        retention = RetentionRepository(opened.database)
        runs = await retention.drop_partitions("runs", age) if "runs" in chosen else NOTHING
        events = await retention.drop_partitions("events", age) if "events" in chosen else NOTHING
        delete_dead, delete_messages = opened.queue.delete_dead_before, opened.queue.delete_completed_before
        return CleanedUp(
            runs=runs.names,
            events=events.names,
            versions=await retention.forget_versions() if "runs" in chosen else 0,
            audits=await retention.delete_audits(age) if "runs" in chosen else 0,
            backfills=await retention.delete_backfills(age) if "runs" in chosen else 0,
            dead=await self._drain(partial(delete_dead, age)) if "dead" in chosen else 0,
            messages=await self._drain(partial(delete_messages, age)) if "messages" in chosen else 0,
            busy=(*(("runs",) if runs.busy else ()), *(("events",) if events.busy else ())),
        )

    def _check_age_of_runs(self, age: timedelta) -> None:
        """An occurrence that may still be made up must find its run: otherwise it fires twice."""
        catch_up = timedelta(seconds=self.settings.catch_up_max_age_seconds)
        if age < SHORTEST_RETENTION:
            raise InvalidInputError(
                "older_than", f"must be at least {SHORTEST_RETENTION.days} days for runs, not {age}"
            )
        if age <= catch_up:
            raise InvalidInputError(
                "older_than", f"must be more than {PREFIX}CATCH_UP_MAX_AGE_SECONDS ({catch_up}) for runs, not {age}"
            )

    async def _drain(self, delete: Callable[..., Awaitable[int]]) -> int:
        limit, total = self.settings.cleanup_batch_size, 0
        while True:
            deleted = await delete(limit=limit)
            total += deleted
            if deleted < limit:
                return total


def _gone(run: Run) -> MessageState:
    """Of a message that our queue doesn't have, or doesn't have any more."""
    handed_over = run.sink is not None and run.sink != OWN_QUEUE
    return MessageState(run.message_id or "", None if handed_over else "removed")
