"""`cron-ticks up`: the whole product, watched, stopped and crashed."""

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from cron_ticks.embedded import EmbeddedServer
from support.processes import Processes, RunningProcess
from support.servers import program_folder


async def start_up(processes: Processes, folder: Path, *arguments: str) -> RunningProcess:
    return await processes.cron_ticks("up", *arguments, environment={"CRON_TICKS_EMBEDDED_DATA_DIR": str(folder)})


async def workers_of(running: RunningProcess, count: int = 2) -> list[psutil.Process]:
    await running.wait_for("worker_started", times=count)
    return [child for child in psutil.Process(running.pid).children() if "worker" in child.cmdline()]


def postgres_family(folder: Path) -> list[psutil.Process]:
    server = psutil.Process(int((folder / "server" / "postmaster.pid").read_text().split()[0]))
    return [server, *server.children(recursive=True)]


def summary_is_clean(summary: dict[str, Any]) -> None:
    assert (summary["duplicates"], summary["missed"]) == (0, 0)
    assert summary["fired"] > 0


@pytest.mark.soak(small=6, full=60)
async def test_a_run_of_some_seconds(embedded_folder: Path, processes: Processes, size: int) -> None:
    running = await start_up(processes, embedded_folder, "--for", str(size), "--json")
    summary = json.loads(await running.output(size + 60))
    assert await running.wait() == 0
    summary_is_clean(summary)
    assert 1 <= len(summary["fired_by"]) <= 2
    assert len(summary["schedules"]) == 4
    assert sum(summary["fired_by"].values()) == summary["fired"]
    assert summary["completed"] > 0
    assert not EmbeddedServer(embedded_folder, program_folder(18)).accepts_connections()
    shown = {key: value for key, value in summary.items() if key != "schedules"}
    print(f"up --for {size}: {json.dumps(shown)}")  # noqa: T201


async def test_two_processes_share_the_examples(embedded_folder: Path, processes: Processes) -> None:
    running = await start_up(processes, embedded_folder, "--json")
    first = await running.wait_for("ticks_fired")
    await running.wait_for("ticks_fired", where=lambda line: line["ticker_id"] != first["ticker_id"])
    running.send(signal.SIGTERM)
    summary = json.loads(await running.output())
    assert await running.wait() == 0
    summary_is_clean(summary)
    assert len(summary["fired_by"]) == 2


async def test_it_goes_on_from_where_it_was(embedded_folder: Path, processes: Processes) -> None:
    for _ in range(2):
        running = await start_up(processes, embedded_folder, "--workers", "1", "--for", "3", "--json")
        summary = json.loads(await running.output())
        assert await running.wait() == 0
        summary_is_clean(summary)
        assert len(summary["schedules"]) == 4


async def test_ctrl_c_stops_everything_and_still_prints_the_table(embedded_folder: Path, processes: Processes) -> None:
    running = await start_up(processes, embedded_folder)
    workers = await workers_of(running)
    await running.wait_for("ticks_fired")
    running.send(signal.SIGINT)
    output = await running.output()
    assert await running.wait() == 0
    assert "example.heartbeat" in output
    assert not any(worker.is_running() for worker in workers)
    assert not EmbeddedServer(embedded_folder, program_folder(18)).accepts_connections()


@pytest.mark.soak(small=2, full=15)
async def test_killing_the_servers_processes_loses_nothing(
    embedded_folder: Path, processes: Processes, size: int
) -> None:
    running = await start_up(processes, embedded_folder, "--json")
    await workers_of(running)
    for crash in range(1, size + 1):
        fired = len([event for event in running.events if event["event"] == "ticks_fired"])
        await running.wait_for("ticks_fired", times=fired + 2)
        for process in postgres_family(embedded_folder):
            process.kill()
        await running.wait_for("embedded_server_revived", times=crash)
    fired = len([event for event in running.events if event["event"] == "ticks_fired"])
    await running.wait_for("ticks_fired", times=fired + 3)
    running.send(signal.SIGTERM)
    summary = json.loads(await running.output())
    assert await running.wait() == 0
    summary_is_clean(summary)
    print(f"{size} kills of the server: fired {summary['fired']}, duplicates 0, missed 0")  # noqa: T201


async def test_killing_only_the_postmaster_loses_nothing(embedded_folder: Path, processes: Processes) -> None:
    """Its children hold the old shared memory for a moment."""
    running = await start_up(processes, embedded_folder, "--json")
    await workers_of(running)
    await running.wait_for("ticks_fired", times=2)
    postgres_family(embedded_folder)[0].kill()
    await running.wait_for("embedded_server_revived")
    fired = len([event for event in running.events if event["event"] == "ticks_fired"])
    await running.wait_for("ticks_fired", times=fired + 3)
    running.send(signal.SIGTERM)
    summary_is_clean(json.loads(await running.output()))


async def test_a_killed_worker_is_started_again(embedded_folder: Path, processes: Processes) -> None:
    running = await start_up(processes, embedded_folder, "--json")
    workers = await workers_of(running)
    await running.wait_for("ticks_fired")
    workers[0].kill()
    exited = await running.wait_for("worker_exited")
    assert exited["exit_code"] == -signal.SIGKILL
    await running.wait_for("worker_started", times=3)
    running.send(signal.SIGTERM)
    summary = json.loads(await running.output())
    assert await running.wait() == 0
    summary_is_clean(summary)


async def test_when_up_itself_is_killed_nothing_is_left_behind(embedded_folder: Path, processes: Processes) -> None:
    running = await start_up(processes, embedded_folder)
    workers = await workers_of(running)
    await running.wait_for("ticks_fired")
    running.send(signal.SIGKILL)
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert (len(gone), alive) == (2, [])
    assert not EmbeddedServer(embedded_folder, program_folder(18)).accepts_connections()
