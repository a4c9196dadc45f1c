"""The command line, in processes of its own."""

import json
from pathlib import Path

import asyncpg
import pytest

import cron_ticks
from cron_ticks.migrator import known_migrations, render_script
from support.processes import Processes

TESTS = Path(__file__).parent
LABELS = [migration.label for migration in known_migrations()]


async def test_version(processes: Processes) -> None:
    assert (await (await processes.cron_ticks("--version")).output()).strip() == cron_ticks.__version__


async def test_migrate_check_then_migrate(empty_dsn: str, processes: Processes) -> None:
    check = await processes.cron_ticks("migrate", "--check", "--json", "--dsn", empty_dsn)
    assert json.loads(await check.output()) == {"pending": LABELS, "applied": [], "known": len(LABELS)}
    assert await check.wait() == 1
    first = await processes.cron_ticks("migrate", "--dsn", empty_dsn)
    assert (await first.output()).splitlines() == [f"applied {label}" for label in LABELS]
    again = await processes.cron_ticks("migrate", "--dsn", empty_dsn)
    assert (await again.output()).strip() == f"up to date: {len(LABELS)} migration(s)"
    check = await processes.cron_ticks("migrate", "--check", environment={"CRON_TICKS_DSN": empty_dsn})
    assert await check.wait() == 0


async def test_migrate_sql_prints_and_connects_to_nothing(processes: Processes) -> None:
    environment = {"CRON_TICKS_DSN": "postgresql://127.0.0.1:1/none", "CRON_TICKS_DATABASE_SCHEMA": "tenant"}
    printed = await processes.cron_ticks("migrate", "--sql", environment=environment)
    assert await printed.output() == render_script("tenant")
    assert await printed.wait() == 0


async def test_migrate_uses_the_embedded_server_without_a_dsn(embedded_folder: Path, processes: Processes) -> None:
    environment = {"CRON_TICKS_EMBEDDED_DATA_DIR": str(embedded_folder)}
    migrated = await processes.cron_ticks("migrate", "--json", environment=environment)
    assert json.loads(await migrated.output())["applied"] == LABELS


@pytest.mark.parametrize(
    ("app", "says"),
    [
        ("nothing", "must be module:name"),
        ("no_such_module:app", "No module named 'no_such_module'"),
        ("support.apps:no_such_name", "has no 'no_such_name'"),
        ("support.apps:not_a_manager", "is a int, not a QueueManager"),
    ],
)
async def test_a_wrong_app_is_said_so(processes: Processes, app: str, says: str) -> None:
    worker = await processes.cron_ticks("worker", "--app", app, environment={"PYTHONPATH": str(TESTS)})
    assert await worker.wait() == 2
    assert says in worker.errors[-1]
    assert worker.errors[-1].startswith("error: --app: ")


async def test_wrong_settings_are_all_shown(processes: Processes) -> None:
    environment = {"CRON_TICKS_LEASE_SECONDS": "x", "CRON_TICKS_SHARD_ID": "9"}
    migrate = await processes.cron_ticks("migrate", environment=environment)
    assert await migrate.wait() == 2
    shown = "\n".join(migrate.errors)
    assert shown.startswith("error: 2 setting(s)")
    assert "CRON_TICKS_LEASE_SECONDS" in shown
    assert "CRON_TICKS_SHARD_ID" in shown
    assert "Traceback" not in shown


async def test_an_unknown_variable_is_warned_of(processes: Processes) -> None:
    printed = await processes.cron_ticks("migrate", "--sql", environment={"CRON_TICKS_LOKAHEAD_SECONDS": "5"})
    warning = await printed.wait_for("unknown_setting")
    assert warning["did_you_mean"] == "CRON_TICKS_LOOKAHEAD_SECONDS"


async def test_an_unreachable_server_is_an_error_without_traceback(processes: Processes) -> None:
    environment = {"CRON_TICKS_DSN": "postgresql://127.0.0.1:1/none", "CRON_TICKS_CONNECT_TIMEOUT_SECONDS": "0.3"}
    migrate = await processes.cron_ticks("migrate", environment=environment)
    assert await migrate.wait() == 2
    assert migrate.errors[-1].startswith("error: no answer from PostgreSQL within 0.3 s")


async def test_up_on_a_database_of_ones_own_leaves_its_schedules_alone(dsn: str, processes: Processes) -> None:
    """There is a schedule already, so no examples are declared."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        """INSERT INTO cron_schedules (id, name, queue_name, payload, interval_us, anchor_at, created_at, updated_at)
        VALUES ('cron_mine', 'mine', 'mine', '{}', 86400000000, now() + interval '1 hour', now(), now())"""
    )
    await connection.execute("INSERT INTO cron_schedule_cursors SELECT id, anchor_at FROM cron_schedules")
    running = await processes.cron_ticks("up", "--workers", "1", "--for", "1", "--json", "--dsn", dsn)
    summary = json.loads(await running.output())
    assert await running.wait() == 0
    assert [schedule["name"] for schedule in summary["schedules"]] == ["mine"]
    assert summary["fired"] == 0
    await connection.close()
