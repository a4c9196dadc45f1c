"""Managers that come, go and die, under a clock of the test's own: every slot has one, and no tick is made late."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks.database import Database
from cron_ticks.rows import Beat
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import SLOTS, Settings
from support.moved_clock import ClockedRepository, Engine

NOW = datetime(2026, 6, 15, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LEASE = 30 * SECOND  # by default, and so are
BEATS = 10 * SECOND  # these
NO_TIME = timedelta(0)
ALL_SLOTS = set(range(SLOTS))


class Notes(ClockedRepository):
    """Keeps what the last heartbeat of its manager found."""

    beats: Beat | None = None

    async def beat(self, *arguments: Any, **options: Any) -> Beat:
        self.beats = await super().beat(*arguments, **options)
        return self.beats


class Pod:
    """A manager that comes to its passes when the fleet says."""

    def __init__(self, database: Database, name: str, now: datetime) -> None:
        settings = Settings.load(manager_batch_size=20)
        self.repository = Notes(database, settings, now)
        self.manager = ScheduleManager(database, self.repository, settings, manager_id=f"ticker_{name}")
        self.next_at = now

    @property
    def beat(self) -> Beat:
        assert self.repository.beats is not None
        return self.repository.beats

    def slots(self, now: datetime) -> set[int]:
        """What it looks after."""
        return set(self.beat.needed) if self.beat.instant > now - LEASE else set()


class Fleet:
    """Pods that come, go and die, under one clock."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers = iter(range(10**6))
        self.now = NOW
        self.pods: list[Pod] = []
        self.settled_at = NOW  # when every slot must have its manager, if nothing else happens

    async def hire(self) -> Pod:
        pod = Pod(self._database, str(next(self._numbers)), self.now)
        await self._work(pod)
        self.pods.append(pod)
        return pod

    def kill(self, pod: Pod) -> None:
        """Without a word: its lease lasts, and somebody notices at the next heartbeat."""
        self.pods.remove(pod)
        self._expect(pod.beat.instant + LEASE + BEATS)

    async def retire(self, pod: Pod) -> None:
        self.pods.remove(pod)
        await pod.manager.retire()
        self._wake()
        self._expect(self.now + SECOND)

    async def crash(self, beats: int = 1) -> None:
        """A pod that dies in one of its first passes, before it has made anything."""
        name = f"ticker_{next(self._numbers)}"
        for _ in range(beats):
            await Notes(self._database, Settings.load(), self.now).beat(name, shards=64)
        self._expect(self.now + LEASE + BEATS)

    async def advance(self, until: datetime) -> None:
        """Everybody works until then."""
        while (pod := min(self.pods, key=lambda pod: pod.next_at)).next_at <= until:
            self.now = max(self.now, pod.next_at)
            await self._work(pod)
            self._check()
        self.now = until

    async def _work(self, pod: Pod) -> None:
        pod.repository.instant = self.now
        pod.next_at = self.now + timedelta(seconds=await pod.manager.run_once())

    def _wake(self) -> None:
        """A notice reaches the others a moment later."""
        for pod in self.pods:
            pod.next_at = min(pod.next_at, self.now + SECOND / 100)

    def _expect(self, moment: datetime) -> None:
        self.settled_at = max(self.settled_at, moment)

    def _check(self) -> None:
        if self.now > self.settled_at:
            assert set[int]().union(*(pod.slots(self.now) for pod in self.pods)) == ALL_SLOTS


async def most_late(connection: Any, schedules: Sequence[Any], until: datetime) -> timedelta:
    """By how much the latest tick was made after its occurrence, or not: each up to then has one."""
    rows = await connection.fetch("SELECT schedule_id, scheduled_for FROM cron_ticks WHERE scheduled_for < $1", until)
    wanted = {(one.id, moment) for one in schedules for moment in one.timetable.occurrences(NOW, until)}
    assert {tuple(row) for row in rows} == wanted
    late = "SELECT max(created_at - scheduled_for) FROM cron_ticks WHERE scheduled_for > $1"
    found: timedelta = await connection.fetchval(late, NOW)
    return found


async def declare(database: Database, number: int) -> list[Any]:
    engine = Engine(database, NOW)
    return [await engine.declare("queue", name=f"schedule {k}", every=4 + k % 9) for k in range(number)]


@pytest.mark.soak(small=4, full=60)
async def test_whoever_comes_goes_or_dies_every_slot_has_its_manager_and_no_tick_is_late(
    database: Database, connection: Any, size: int
) -> None:
    """A second lease may have ended before what died first is taken: there is room for that in the window."""
    for seed in range(size):
        chance = random.Random(seed)  # noqa: S311
        await connection.execute(
            "TRUNCATE cron_managers, cron_shards, cron_ticks, cron_schedules, cron_schedule_cursors"
        )
        schedules = await declare(database, 40)
        fleet = Fleet(database)
        await fleet.hire()
        for _ in range(30):
            await fleet.advance(fleet.now + SECOND * chance.choice([0.5, 5, 20, 45]))
            choice = chance.choice(["hire", "hire", "kill", "retire"])
            if choice == "hire" and len(fleet.pods) < 6:
                await fleet.hire()
            elif choice == "kill" and len(fleet.pods) > 1:
                fleet.kill(chance.choice(fleet.pods))
            elif choice == "retire" and len(fleet.pods) > 1:
                await fleet.retire(chance.choice(fleet.pods))
        await fleet.advance(fleet.now + 2 * LEASE)
        assert await most_late(connection, schedules, fleet.now) < NO_TIME, seed


@pytest.mark.parametrize("seconds", [2, 5, 12, 25])
async def test_a_pod_that_dies_again_and_again_when_it_starts_makes_no_tick_late(
    database: Database, connection: Any, seconds: int
) -> None:
    """Each time it is another manager, and counts as one until its lease ends."""
    assert await lateness_while_crashing(database, connection, 1, seconds) < NO_TIME


@pytest.mark.parametrize("seconds", [12, 20, 25, 35])
async def test_a_pod_that_dies_again_and_again_with_its_share_keeps_nothing_for_long(
    database: Database, connection: Any, seconds: int
) -> None:
    """The next may take from the one before, which is dead, once: all is made nevertheless."""
    assert await lateness_while_crashing(database, connection, 2, seconds) <= BEATS


async def lateness_while_crashing(database: Database, connection: Any, beats: int, seconds: int) -> timedelta:
    schedules = await declare(database, 40)
    fleet = Fleet(database)
    await fleet.hire()
    while fleet.now < NOW + timedelta(minutes=5):
        await fleet.advance(fleet.now + seconds * SECOND)
        await fleet.crash(beats)
    return await most_late(connection, schedules, fleet.now)
