"""Managers share out the slots of the schedules: each has its share, and no slot is nobody's for long."""

import asyncio
import random
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks.database import Database
from cron_ticks.errors import SettingsError
from cron_ticks.repository import CronRepository
from cron_ticks.rows import Beat
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.settings import SLOTS, Settings
from support.moved_clock import ClockedRepository, Engine

NOW = datetime(2026, 6, 15, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LEASE = 30 * SECOND  # by default, and so are
BEATS = 10 * SECOND  # these
ALL_SLOTS = set(range(SLOTS))


class Managers:
    """Heartbeats of managers, when the test says."""

    def __init__(self, repository: CronRepository, shards: int = 64) -> None:
        self._repository = repository
        self._shards = shards
        self.last: dict[str, Beat] = {}

    async def beat(self, name: str, now: datetime = NOW) -> Beat:
        beat = await self._repository.beat(f"ticker_{name}", shards=self._shards, now=now)
        self.last[name] = beat
        return beat

    async def beat_all(self, *names: str, now: datetime = NOW) -> list[int]:
        """Until nothing moves any more, as heartbeats have it; how many shards each has then."""
        await asyncio.gather(*(self.beat(name, now) for name in names))
        for _ in range(10):
            beats = [await self.beat(name, now) for name in names]
            if not any(beat.taken for beat in beats):
                return [beat.shards for beat in beats]
        raise AssertionError("they come to no end")

    async def retire(self, name: str) -> None:
        del self.last[name]
        await self._repository.retire_manager(f"ticker_{name}", shards=self._shards)

    def slots(self, *names: str) -> set[int]:
        """Of these together; nobody has one that another has."""
        found = [set(self.last[name].needed) for name in names]
        assert sum(map(len, found)) == len(set().union(*found))
        return set().union(*found)


@pytest.fixture
async def repository(database: Database) -> CronRepository:
    made = CronRepository(database, Settings.load())
    await made.add_shards(64)
    return made


@pytest.fixture
def managers(repository: CronRepository) -> Managers:
    return Managers(repository)


# Shares


@pytest.mark.sql
async def test_one_manager_has_everything_and_says_so_once(managers: Managers) -> None:
    beat = await managers.beat("a")
    assert (beat.shards, beat.taken, set(beat.needed)) == (64, 64, ALL_SLOTS)
    again = await managers.beat("a", NOW + SECOND)
    assert (again.shards, again.taken) == (64, 0)


@pytest.mark.sql
@pytest.mark.parametrize(
    ("others", "shares"), [("b", {32}), ("bc", {20, 22}), ("bcd", {16}), ("bcdefg", {10, 9, 8, 7, 6, 5, 4})]
)
async def test_managers_that_come_get_their_share(managers: Managers, others: str, shares: set[int]) -> None:
    """Afterwards each slot is of one of them."""
    names = ["a", *others]
    await managers.beat("a")
    assert set(await managers.beat_all(*names)) <= shares
    assert managers.slots(*names) == ALL_SLOTS


@pytest.mark.sql
async def test_a_newcomer_takes_its_share_with_its_second_heartbeat(managers: Managers) -> None:
    """Who has too much learns of that with its own next one, and has looked after all of it until then."""
    await managers.beat("a")
    assert (await managers.beat("b", NOW + SECOND)).shards == 0
    assert (await managers.beat("a", NOW + BEATS)).shards == 64
    assert (await managers.beat("b", NOW + BEATS + SECOND)).shards == 32
    assert (await managers.beat("a", NOW + 2 * BEATS)).shards == 32
    assert managers.slots("a", "b") == ALL_SLOTS


@pytest.mark.sql
async def test_more_managers_than_shards(database: Database) -> None:
    repository = CronRepository(database, Settings.load(virtual_shards=2))
    await repository.add_shards(2)
    managers = Managers(repository, shards=2)
    assert sorted(await managers.beat_all("a", "b", "c")) == [0, 1, 1]
    assert managers.slots("a", "b", "c") == ALL_SLOTS


@pytest.mark.sql
async def test_a_dead_managers_shards_are_taken_when_its_lease_ends_and_not_before(managers: Managers) -> None:
    await managers.beat_all("a", "b")
    almost = await managers.beat("a", NOW + LEASE - timedelta(microseconds=1))
    assert (almost.shards, almost.taken) == (32, 0)
    after = await managers.beat("a", NOW + LEASE)
    assert (after.shards, after.taken, set(after.needed)) == (64, 32, ALL_SLOTS)


@pytest.mark.sql
async def test_a_manager_that_ends_gives_its_shards_back_at_once(managers: Managers, connection: Any) -> None:
    await managers.beat_all("a", "b", "c")
    await managers.retire("c")
    assert await managers.beat_all("a", "b") == [32, 32]
    assert managers.slots("a", "b") == ALL_SLOTS
    assert await connection.fetchval("SELECT count(*) FROM cron_managers") == 2


@pytest.mark.sql
async def test_a_manager_that_slept_beyond_its_lease_comes_back_as_a_new_one(managers: Managers) -> None:
    await managers.beat_all("a", "b")
    await managers.beat("a", NOW + LEASE)
    assert await managers.beat_all("a", "b", now=NOW + LEASE + SECOND) == [32, 32]
    assert managers.slots("a", "b") == ALL_SLOTS


@pytest.mark.sql
async def test_managers_that_divide_otherwise_each_have_all(repository: CronRepository) -> None:
    """As during an upgrade that changes the number: every slot is looked after in both ways."""
    await repository.add_shards(32)
    many, few = Managers(repository), Managers(repository, shards=32)
    assert await many.beat_all("a", "b") == [32, 32]
    assert await few.beat_all("c", "d") == [16, 16]
    assert await many.beat_all("a", "b") == [32, 32]
    assert many.slots("a", "b") == few.slots("c", "d") == ALL_SLOTS


@pytest.mark.sql
async def test_shards_are_made_once(repository: CronRepository, connection: Any) -> None:
    await asyncio.gather(*(repository.add_shards(64) for _ in range(10)))
    assert await connection.fetchval("SELECT count(*) FROM cron_shards") == 64


@pytest.mark.sql
async def test_managers_that_ended_without_a_word_are_forgotten(managers: Managers, connection: Any) -> None:
    await managers.beat("a")
    await managers.beat("b", NOW + LEASE + timedelta(hours=1))
    names = "SELECT id FROM cron_managers ORDER BY id"
    repository = managers._repository
    await repository.forget_managers(now=NOW + LEASE + timedelta(hours=1))
    assert [row["id"] for row in await connection.fetch(names)] == ["ticker_a", "ticker_b"]
    await repository.forget_managers(now=NOW + LEASE + timedelta(hours=1, microseconds=1))
    assert [row["id"] for row in await connection.fetch(names)] == ["ticker_b"]


# At once


@pytest.mark.sql
@pytest.mark.soak(small=15, full=400)
async def test_managers_that_beat_at_once_never_wait_for_each_other(
    managers: Managers, size: int, connection: Any
) -> None:
    """Nor for a deadlock to be found: some come, some go, some have slept."""
    chance = random.Random(8)  # noqa: S311
    names = [str(number) for number in range(9)]
    now = NOW
    async with asyncio.timeout(60 + size):
        for _ in range(size):
            now += chance.choice([SECOND, BEATS, LEASE + SECOND])
            some = chance.sample(names, chance.randint(1, 9))
            leaving = chance.sample(sorted(managers.last), min(len(managers.last), chance.randint(0, 2)))
            await asyncio.gather(
                *(managers.beat(name, now) for name in some if name not in leaving for _ in range(2)),
                *(managers.retire(name) for name in leaving),
            )
    now += LEASE + SECOND
    assert sorted(await managers.beat_all("0", "1", "2", now=now)) == [20, 22, 22]
    assert managers.slots("0", "1", "2") == ALL_SLOTS
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert await connection.fetchval(deadlocks) == 0


# Shards that are fixed, and none


@pytest.mark.sql
@pytest.mark.parametrize("shard_count", [2, 3, 64, 300])
async def test_fixed_shards_are_all_schedules_each_once(database: Database, connection: Any, shard_count: int) -> None:
    engine = Engine(database, NOW)
    ids = {(await engine.declare("queue", name=f"schedule {k}", every=60)).id for k in range(40)}
    settings = [Settings.load(shard_count=shard_count, shard_id=number) for number in range(shard_count)]
    found: list[str] = []
    for one in settings:
        repository = CronRepository(database, one)
        async with database.transaction() as held:
            floors = (await repository.beat(now=NOW)).needed
            cursors = await repository.lock_cursors(floors, NOW + timedelta(days=1), limit=1000, connection=held)
        found += [row["schedule_id"] for row in cursors]
    assert sorted(found) == sorted(ids)
    assert {one.leased_shards for one in settings} == {0}
    assert await connection.fetchval("SELECT count(*) FROM cron_managers") == 0


@pytest.mark.sql
async def test_without_shards_every_manager_has_all_slots(database: Database, connection: Any) -> None:
    settings = Settings.load(virtual_shards=0)
    repository = ClockedRepository(database, settings, NOW)
    for name in ("ticker_a", "ticker_b"):
        manager = ScheduleManager(database, repository, settings, manager_id=name)
        await manager.run_once()
        await manager.retire()
    assert set((await repository.beat("ticker_a")).needed) == ALL_SLOTS
    assert await connection.fetchval("SELECT count(*) FROM cron_managers") == 0
    assert await connection.fetchval("SELECT count(*) FROM cron_shards") == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"virtual_shards": 3}, "0, 1, 2, 4, 8, 16, 32, 64, 128 or 256"),
        ({"virtual_shards": "many"}, "0, 1, 2, 4, 8, 16, 32, 64, 128 or 256"),
        ({"shard_count": 0}, "greater than or equal to 1"),
        ({"shard_count": 4, "shard_id": 4}, "must be less than CRON_TICKS_SHARD_COUNT (4)"),
        ({"shard_lease_seconds": 0.9}, "greater than or equal to 1"),
        ({"shard_lease_seconds": 51}, "must be at most 50: CRON_TICKS_LOOKAHEAD_SECONDS less"),
        ({"lookahead_seconds": 20, "shard_lease_seconds": 15}, "must be at most 10: CRON_TICKS_LOOKAHEAD_SECONDS less"),
    ],
)
def test_a_setting_that_cant_be_says_which_and_what_to_do(given: Mapping[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load(**given)
    name = list(given)[-1].upper()
    assert f"CRON_TICKS_{name}" in str(caught.value)
    assert says in str(caught.value)


def test_the_lease_of_shards_leaves_room_for_the_lookahead() -> None:
    assert Settings.load().shard_lease == LEASE.total_seconds()
    assert Settings.load(lookahead_seconds=15).shard_lease == 5
    assert Settings.load(lookahead_seconds=15, shard_lease_seconds=2).shard_lease == 2
    assert [Settings.load(virtual_shards="8").leased_shards, Settings.load(shard_count=2).leased_shards] == [8, 0]
