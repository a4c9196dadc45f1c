"""What a worker counts, and where it shows it."""

import asyncio
import signal
import socket
from datetime import timedelta
from typing import Any
from urllib.request import urlopen

import pytest

from cron_ticks.cleanup import CleanupWorker
from cron_ticks.database import Database
from cron_ticks.errors import CronTicksError
from cron_ticks.metrics import Metrics, served
from cron_ticks.repository import CronRepository
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedules import define_schedule
from cron_ticks.settings import Settings
from support.processes import Processes
from support.rig import handling, rig
from support.watching import watching
from token_queue import QueueManager

MINUTE = timedelta(minutes=1)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


async def handle(_message: Any) -> None: ...


async def test_what_is_made_missed_fired_refused_and_cleaned_up_is_counted(
    database: Database, settings: Settings, connection: Any
) -> None:
    metrics = Metrics()
    repository = CronRepository(database, settings)
    now = await connection.fetchval("SELECT statement_timestamp()")
    begun = now - 10 * MINUTE
    saved = await repository.save_schedule(define_schedule("queue", every=60, jitter=None), now=begun)
    await connection.execute("DELETE FROM cron_ticks")
    await connection.execute("UPDATE cron_schedule_cursors SET next_tick_needed_at = $1", begun)
    await ScheduleManager(database, repository, settings, metrics).run_once()
    made, missed = value(metrics, "cron_ticks_generated_total"), value(metrics, "cron_ticks_missed_total")
    assert made is not None
    assert missed is not None
    assert made + missed == 12
    assert missed == 9
    await repository.trigger(saved.schedule.id)
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at, turn)
        SELECT 'tick_again' || id, schedule_id, schedule_name, queue_name, payload, scheduled_for,
            execute_at + interval '1 microsecond', due_at, created_at, turn
        FROM cron_ticks WHERE due_at <= statement_timestamp() AND origin = 'schedule'"""
    )
    async with rig(database, handling(handle), metrics=metrics) as worker:
        await worker.firer.run_once()
    assert value(metrics, "cron_ticks_fired_total", origin="schedule") == 2
    assert value(metrics, "cron_ticks_fired_total", origin="trigger") == 1
    assert value(metrics, "cron_ticks_refused_total") == 2
    assert value(metrics, "cron_ticks_execution_latency_seconds_count") == 3
    assert value(metrics, "cron_ticks_execution_latency_seconds_bucket", le="60.0") == 2
    assert value(metrics, "cron_ticks_lease_duration_seconds_count") == 2  # what is due, and what is caught up with
    assert value(metrics, "cron_ticks_coverage_ratio") == pytest.approx(2 / 11)
    await connection.execute("UPDATE cron_ticks SET attempts = 3, leased_until = now() - interval '1 day'")
    await connection.execute(
        """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
            due_at, created_at)
        VALUES ('tick_orphan', 'cron_gone', 'gone', 'queue', '{}', now(), now(), now() + interval '1 hour', now())"""
    )
    await CleanupWorker(repository, settings, metrics).run_once()
    assert value(metrics, "cron_ticks_expired_total") == 1
    assert value(metrics, "cron_ticks_orphaned_total") == 1
    assert value(metrics, "cron_ticks_schedules_broken_total") == 0


def test_without_occurrences_nothing_is_uncovered() -> None:
    assert value(Metrics(), "cron_ticks_coverage_ratio") == 1


async def test_a_worker_serves_its_metrics_on_its_own_port(dsn: str, processes: Processes) -> None:
    async with QueueManager(dsn) as manager, watching(dsn, "cron_runs") as watch:
        worker = await processes.worker(dsn, metrics_port="0")
        port = (await worker.wait_for("metrics_served"))["port"]
        await manager.schedule("queue", every=3600)
        await watch.until("SELECT count(*) = 1 FROM cron_runs")
        await worker.wait_for("ticks_fired")

        def read() -> str:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                return str(answer.read().decode())

        text = await asyncio.to_thread(read)
    assert 'cron_ticks_fired_total{origin="schedule"} 1.0' in text
    assert "cron_ticks_coverage_ratio 1.0" in text
    worker.send(signal.SIGTERM)
    assert await worker.wait() == 0


async def test_a_port_in_use_is_said_at_the_start(dsn: str, processes: Processes) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CronTicksError, match=f"metrics can't be served at 127.0.0.1:{port} .*METRICS_PORT"):
            async with served(Metrics(), Settings.load(metrics_port=port)):
                raise AssertionError
        worker = await processes.cron_ticks(
            "worker",
            "--app",
            "cron_ticks.cli.example:example_app",
            environment={"CRON_TICKS_DSN": dsn, "CRON_TICKS_METRICS_PORT": str(port)},
        )
        assert await worker.wait() != 0
    assert worker.errors[-1].startswith(f"error: metrics can't be served at 127.0.0.1:{port}")


async def test_without_a_port_nothing_is_served() -> None:
    async with served(Metrics(), Settings()):
        pass
