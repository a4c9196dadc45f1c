"""Making ticks by one statement: it must make exactly what planning schedule by schedule makes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cron_ticks.database import Database, open_database
from cron_ticks.occurrences import MICROSECOND
from cron_ticks.rows import Planned
from cron_ticks.settings import Settings
from support.moved_clock import Engine
from support.random_schedules import NOWS, Drawn, drawn, put, put_cursors

MISSED_AFTER = timedelta(seconds=60)
MOST_SCHEDULES = 40
LONG = 1100  # seconds of a window in which a schedule may have more occurrences than are made at once

TICKS = """SELECT schedule_id, scheduled_for, execute_at, due_at, fire_before, schedule_name, workspace_id, queue_name,
    payload, created_at, version, origin, priority, sink, delivery, overlap, turn, attempts, waiting, recovery
FROM cron_ticks ORDER BY 1, 2"""
CURSORS = "SELECT schedule_id, next_tick_needed_at, planned, broken FROM cron_schedule_cursors ORDER BY 1"
RUNS = """SELECT schedule_id, scheduled_for, outcome, reason, missed_since, occurrences, version
FROM cron_runs ORDER BY 1, 2"""


async def plan_one_by_one(engine: Engine, database: Database, ids: list[str]) -> None:
    """What a manager does with schedules that are behind, for all of these."""
    repository = engine.repository
    while ids:
        async with database.transaction() as connection:
            taken = await repository.find_schedules_needing_ticks(limit=len(ids), connection=connection, ids=ids)
            plans = [Planned(needing, repository.plan(needing)) for needing in taken]
            await repository.create_ticks(plans, connection=connection)
            await repository.update_next_tick_needed(plans, connection=connection)
        ids = [made.needing.schedule_id for made in plans if not made.plan.complete]


@dataclass(frozen=True)
class Bench:
    """A database with an event loop of its own: hypothesis knows of none."""

    runner: asyncio.Runner
    database: Database
    connection: "asyncpg.Connection[asyncpg.Record]"
    monkeypatch: pytest.MonkeyPatch

    async def state(self) -> dict[str, dict[str, list[tuple[object, ...]]]]:
        """All that matters, schedule by schedule."""
        found: dict[str, dict[str, list[tuple[object, ...]]]] = {}
        for name, statement in (("ticks", TICKS), ("cursors", CURSORS), ("runs", RUNS)):
            for row in await self.connection.fetch(statement):
                found.setdefault(row["schedule_id"], {}).setdefault(name, []).append(tuple(row))
        return found

    async def both(
        self, cases: list[Drawn], now: datetime, options: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], int]:
        """What the planner and the manager make of the same state, and for how many the one statement did it all."""
        engine = Engine(self.database, now, missed_after_seconds=MISSED_AFTER.total_seconds(), **options)
        schedules = [case.schedule(number, now) for number, case in enumerate(cases)]
        needed = [case.cursor_at(schedule, now) for case, schedule in zip(cases, schedules, strict=True)]
        cursors = {
            schedule["id"]: (first, case.planned)
            for case, schedule, first in zip(cases, schedules, needed, strict=True)
        }
        await self.connection.execute("DELETE FROM cron_ticks; DELETE FROM cron_runs")
        await put(self.connection, schedules)
        window = now + timedelta(seconds=engine.settings.lookahead_seconds)
        ids = [schedule_id for schedule_id, (first, _) in cursors.items() if first is not None and first < window]
        await self._begin(cursors)
        await plan_one_by_one(engine, self.database, ids)
        keeps = {schedule["id"]: case.keeps for case, schedule in zip(cases, schedules, strict=True)}
        kept = await self._keep(keeps)
        await self._begin(cursors, kept)
        await plan_one_by_one(engine, self.database, ids)
        planned = await self.state()
        await self._begin(cursors, kept)
        with planned_by(engine, self.monkeypatch) as left:
            await engine.manager.run_once()
        return planned, await self.state(), len(ids) - len(left)

    async def _keep(self, keeps: dict[str, int]) -> list[asyncpg.Record]:
        """Every so many ticks that are not late, to be there beforehand."""
        rows = await self.connection.fetch("SELECT * FROM cron_ticks WHERE turn = 0 ORDER BY schedule_id, execute_at")
        numbers: dict[str, Iterator[int]] = {schedule_id: count() for schedule_id in keeps}
        return [
            row
            for row in rows
            if keeps[row["schedule_id"]] and next(numbers[row["schedule_id"]]) % keeps[row["schedule_id"]] == 0
        ]

    async def _begin(
        self, cursors: dict[str, tuple[datetime | None, int]], ticks: list[asyncpg.Record] | None = None
    ) -> None:
        await self.connection.execute("DELETE FROM cron_ticks; DELETE FROM cron_runs")
        await put_cursors(self.connection, cursors)
        if ticks:
            await self.connection.copy_records_to_table("cron_ticks", records=[tuple(row) for row in ticks])


@contextmanager
def planned_by(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Schedules that a manager plans in Python."""
    found: set[str] = set()
    plan = engine.repository.plan

    def noted(needing: Any, **options: Any) -> Any:
        found.add(needing.schedule_id)
        return plan(needing, **options)

    with monkeypatch.context() as patched:
        patched.setattr(engine.repository, "plan", noted)
        yield found


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[tuple[Database, "asyncpg.Connection[asyncpg.Record]"]]:
    async with open_database(Settings.load(), dsn=dsn) as database:
        connection = await asyncpg.connect(dsn)
        try:
            yield database, connection
        finally:
            await connection.close()


@pytest.fixture
def bench(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        opening = opened(dsn)
        database, connection = runner.run(opening.__aenter__())
        try:
            yield Bench(runner, database, connection, monkeypatch)
        finally:
            runner.run(opening.__aexit__(None, None, None))


@pytest.mark.sql
@pytest.mark.soak(small=60, full=1500)
@pytest.mark.timeout(1200)  # should it fail, it looks for a smaller case
def test_the_one_statement_makes_what_the_planner_makes(bench: Bench, size: int) -> None:
    """Each tick with all that it has, each cursor, each row of the ledger: whatever the schedules are."""
    total: Counter[str] = Counter()

    @hypothesis_settings(max_examples=size, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
    @given(
        cases=st.lists(drawn(MISSED_AFTER), min_size=MOST_SCHEDULES // 2, max_size=MOST_SCHEDULES),
        base=st.sampled_from(NOWS),
        later=st.integers(0, 600_000_000),
        lookahead=st.sampled_from([60, 60, 60, LONG]),
        batch=st.sampled_from([7, 1000]),
    )
    def check(cases: list[Drawn], base: datetime, later: int, lookahead: int, batch: int) -> None:
        options = {"lookahead_seconds": lookahead, "manager_batch_size": batch}
        planned, made, at_once = bench.runner.run(bench.both(cases, base + later * MICROSECOND, options))
        assert made.keys() == planned.keys()
        different = {name: (made[name], planned[name]) for name in made if made[name] != planned[name]}
        assert different == {}
        total.update(schedules=len(cases), at_once=at_once, ticks=sum(len(of.get("ticks", ())) for of in made.values()))

    check()
    print(f"\n{dict(total)}")  # noqa: T201
    assert total["at_once"] > size  # or nothing was compared
