"""QueueManager.apply(): schedules brought in line with a file, all of them or none."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cron_ticks import repository, schedule_sql
from cron_ticks.errors import CronTicksError, DeclarationsError, InvalidInputError
from cron_ticks.schedules import Schedule
from cron_ticks.settings import Settings
from token_queue import QueueManager

pytestmark = pytest.mark.sql

TWO = """
owner = "billing"
[[schedules]]
queue_name = "weekly"
cron = "0 9 * * MON"
timezone = "Europe/Berlin"
[[schedules]]
queue_name = "sync"
workspace_id = "ws"
every = 300
payload = { n = 1 }
"""


@pytest.fixture
async def manager(settings: Settings) -> AsyncIterator[QueueManager]:
    async with QueueManager(settings=settings) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "schedules.toml"
    write(path, TWO)
    return path


def write(path: Path, text: str) -> None:
    path.write_text(text)


async def by_name(manager: QueueManager) -> dict[str, Schedule]:
    return {schedule.name: schedule for schedule in await manager.list_schedules()}


async def everything(connection: Any) -> list[Any]:
    """All that an apply could change."""
    tables = ("cron_schedules", "cron_schedule_cursors", "cron_schedule_versions", "cron_ticks", "cron_runs")
    return [await connection.fetch(f"SELECT * FROM {table} AS found ORDER BY found::text") for table in tables]


def summary(applied: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(item.change, item.name, item.fields) for item in applied.changes]


async def test_what_is_new_is_created_and_then_unchanged(manager: QueueManager, file: Path, connection: Any) -> None:
    first = await manager.apply(file)
    assert summary(first) == [("create", "weekly", ()), ("create", "sync", ())]
    assert (first.owner, first.dry_run, first.count("create"), first.count("remove")) == ("billing", False, 2, 0)
    found = await by_name(manager)
    assert [item.schedule_id for item in first.changes] == [found["weekly"].id, found["sync"].id]
    assert (found["weekly"].owner, found["sync"].workspace_id) == ("billing", "ws")
    before = await everything(connection)
    again = await manager.apply(str(file))
    assert summary(again) == [("unchanged", "weekly", ()), ("unchanged", "sync", ())]
    assert await everything(connection) == before


async def test_a_change_is_an_edit_and_names_its_fields(manager: QueueManager, file: Path) -> None:
    await manager.apply(file)
    before = await by_name(manager)
    write(file, TWO.replace("300", "600").replace("n = 1", "n = 2").replace("0 9", "0 10"))
    applied = await manager.apply(file)
    assert summary(applied) == [("change", "weekly", ("cron",)), ("change", "sync", ("every", "payload"))]
    after = await by_name(manager)
    assert {name: schedule.id for name, schedule in after.items()} == {
        name: schedule.id for name, schedule in before.items()
    }
    assert [after[name].version for name in ("weekly", "sync")] == [2, 2]
    assert after["sync"].anchor_at == before["sync"].anchor_at


async def test_fields_are_named_as_they_are_declared(manager: QueueManager, file: Path) -> None:
    write(file, '[[schedules]]\nqueue_name = "q"\nevery = 60\njitter = 0.2\n')
    await manager.apply(file)
    write(file, '[[schedules]]\nqueue_name = "q"\nevery = 70\njitter = "3s"\n')
    assert summary(await manager.apply(file)) == [("change", "q", ("every", "jitter"))]


async def test_a_schedule_that_is_disabled_stays_so(manager: QueueManager, file: Path) -> None:
    applied = await manager.apply(file)
    assert applied.changes[1].schedule_id is not None
    await manager.disable_schedule(applied.changes[1].schedule_id)
    write(file, TWO.replace("300", "600"))
    await manager.apply(file)
    assert not (await by_name(manager))["sync"].enabled


async def test_prune_removes_only_what_the_same_owner_declared(
    manager: QueueManager, file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    write(other, "owner: other\nschedules: [{queue_name: theirs, every: 60}]")
    await manager.apply(other)
    await manager.schedule("from-code", every=60)
    await manager.apply(file)
    write(file, 'owner = "billing"\n[[schedules]]\nqueue_name = "weekly"\ncron = "0 9 * * MON"\n')
    kept = await manager.apply(file)  # without prune nothing goes
    assert summary(kept) == [("change", "weekly", ("timezone",))]
    assert set(await by_name(manager)) == {"theirs", "from-code", "weekly", "sync"}
    pruned = await manager.apply(file, prune=True)
    assert summary(pruned) == [("unchanged", "weekly", ()), ("remove", "sync", ())]
    assert set(await by_name(manager)) == {"theirs", "from-code", "weekly"}
    write(file, 'owner = "billing"\n')
    await manager.apply(file, prune=True)
    assert set(await by_name(manager)) == {"theirs", "from-code"}


async def test_prune_needs_an_owner(manager: QueueManager, file: Path) -> None:
    await manager.schedule("from-code", every=60)
    write(file, TWO.replace('owner = "billing"', ""))
    with pytest.raises(InvalidInputError, match="owner: prune removes what the same owner"):
        await manager.apply(file, prune=True)
    assert set(await by_name(manager)) == {"from-code"}
    assert (await manager.apply(file, prune=True, owner="given")).owner == "given"
    assert set(await by_name(manager)) == {"from-code", "weekly", "sync"}


async def test_a_dry_run_says_what_would_be_and_changes_nothing(
    manager: QueueManager, file: Path, connection: Any
) -> None:
    await manager.apply(file)
    write(file, TWO.replace("300", "600").replace('"weekly"', '"monthly"'))
    before = await everything(connection)
    with capture_logs() as logs:
        would = await manager.apply(file, prune=True, dry_run=True)
    assert would.dry_run
    expected = [("create", "monthly", ()), ("change", "sync", ("every",)), ("remove", "weekly", ())]
    assert summary(would) == expected
    assert would.changes[0].schedule_id is None  # there is none
    assert await everything(connection) == before
    assert [entry for entry in logs if entry["event"].startswith("schedule_")] == []
    did = await manager.apply(file, prune=True)
    assert summary(did) == expected


async def test_with_one_mistake_nothing_is_written(manager: QueueManager, file: Path, connection: Any) -> None:
    before = await everything(connection)
    write(file, TWO + '[[schedules]]\nqueue_name = "wrong"\ncron = "0 9 * * MON"\ntimezone = "Mars/Olympus"\n')
    with pytest.raises(DeclarationsError, match=r"schedules\.toml:12 schedule 'wrong': timezone"):
        await manager.apply(file)
    assert await everything(connection) == before


async def test_what_only_the_database_knows_is_also_said_at_once(
    manager: QueueManager, file: Path, connection: Any
) -> None:
    """Names of others, and an edit into the past: nothing is written, though the first schedule is fine."""
    await manager.schedule("theirs", every=60, owner="other")
    await manager.schedule("once", at=(await later(connection, hours=1)))
    before = await everything(connection)
    past = (await later(connection, hours=-1)).isoformat()
    write(
        file,
        TWO
        + '[[schedules]]\nqueue_name = "theirs"\nevery = 5\n'
        + f'[[schedules]]\nqueue_name = "once"\nat = "{past}"\n',
    )
    with pytest.raises(DeclarationsError) as raised:
        await manager.apply(file)
    theirs, once = raised.value.problems
    assert theirs.startswith("schedules.toml:12 schedule 'theirs': owner: 'other' has declared")
    assert once.startswith("schedules.toml:15 schedule 'once': at: ")
    assert await everything(connection) == before


async def later(connection: Any, *, hours: int) -> Any:
    return await connection.fetchval("SELECT now() + make_interval(hours => $1)", hours)


async def test_what_nobody_owns_is_adopted(manager: QueueManager, file: Path) -> None:
    created = await manager.schedule("weekly", cron="0 9 * * MON", timezone="Europe/Berlin")
    applied = await manager.apply(file)
    assert summary(applied)[0] == ("change", "weekly", ("owner",))
    assert (await manager.get_schedule(created.id)).owner == "billing"


async def test_a_file_without_an_owner_leaves_it(manager: QueueManager, file: Path) -> None:
    await manager.apply(file)
    write(file, TWO.replace('owner = "billing"', ""))
    assert (await manager.apply(file)).count("unchanged") == 2


async def test_what_was_removed_may_be_declared_otherwise(manager: QueueManager, file: Path) -> None:
    """A process remembers what it has declared, until that is gone."""
    await manager.schedule("sync", every=60, workspace_id="ws", owner="billing")
    write(file, 'owner = "billing"\n')
    await manager.apply(file, prune=True)
    await manager.schedule("sync", every=61, workspace_id="ws")


async def test_pods_that_apply_one_file_at_once_do_it_once(file: Path, settings: Settings, connection: Any) -> None:
    managers = [QueueManager(settings=settings) for _ in range(6)]
    for opened in managers:
        await opened.__aenter__()
    try:
        results = await asyncio.gather(*(opened.apply(file, prune=True) for opened in managers))
        write(file, TWO.replace("300", "600"))
        edits = await asyncio.gather(*(opened.apply(file, prune=True) for opened in managers))
    finally:
        for opened in managers:
            await opened.__aexit__(None, None, None)
    assert sorted(result.count("create") for result in results) == [0, 0, 0, 0, 0, 2]
    assert sorted(result.count("change") for result in edits) == [0, 0, 0, 0, 0, 1]
    assert await connection.fetchval("SELECT count(*) FROM cron_schedule_versions") == 3


async def test_two_files_in_opposite_order_do_not_stop_each_other(manager: QueueManager, tmp_path: Path) -> None:
    """Each changes what the other changes, and the zone of the workspace is changed meanwhile."""
    names = [f"name-{number}" for number in range(12)]

    def write_in(path: Path, order: list[str], hour: int) -> None:
        entries = "".join(
            f'[[schedules]]\nqueue_name = "q"\nname = "{name}"\nworkspace_id = "ws"\ncron = "0 {hour} * * *"\n'
            for name in order
        )
        write(path, f'owner = "both"\n{entries}')

    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    for turn in range(6):
        write_in(one, names, turn)
        write_in(other, names[::-1], turn + 10)
        zone = ("Europe/Berlin", "Asia/Tokyo")[turn % 2]
        await asyncio.gather(manager.apply(one), manager.set_workspace_timezone("ws", zone), manager.apply(other))
        found = await manager.list_schedules(workspace_id="ws")
        assert {schedule.zone for schedule in found} == {zone}
        assert len({schedule.cron for schedule in found}) == 1


async def test_who_waits_too_long_for_another_file_is_told(
    manager: QueueManager, file: Path, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "APPLY_PATIENCE_SECONDS", 0.2)
    async with connection.transaction():
        await connection.execute(schedule_sql.LOCK_APPLY)
        with pytest.raises(CronTicksError, match="another process has been applying a file"):
            await manager.apply(file)
    assert (await manager.apply(file)).count("create") == 2


@pytest.mark.parametrize("path", [5, None, b"schedules.toml"])
async def test_what_is_no_path_is_refused(manager: QueueManager, path: Any) -> None:
    with pytest.raises(InvalidInputError, match="path: must be the path of a file"):
        await manager.apply(path)


async def test_a_file_whose_schedules_must_be_known_to_a_sink(manager: QueueManager, file: Path) -> None:
    @manager.sink("broker")
    async def publish(ticks: Any) -> None: ...

    write(file, '[[schedules]]\nqueue_name = "a"\nevery = 5\nsink = "broker"\n')
    (change,) = (await manager.apply(file)).changes
    assert change.schedule_id is not None
    assert (await manager.get_schedule(change.schedule_id)).sink == "broker"


async def test_a_long_file(manager: QueueManager, file: Path, connection: Any) -> None:
    entry = '[[schedules]]\nqueue_name = "q"\nname = "n{0}"\ncron = "{1} {2} * * *"\ntimezone = "America/New_York"\n'
    write(file, 'owner = "many"\n' + "".join(entry.format(n, n % 60, n % 24) for n in range(300)))
    assert (await manager.apply(file)).count("create") == 300
    assert (await manager.apply(file)).count("unchanged") == 300
    assert await connection.fetchval("SELECT count(*) FROM cron_schedules WHERE owner = 'many'") == 300
