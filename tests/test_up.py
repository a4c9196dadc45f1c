"""`cron-ticks up`: the whole product, watched, stopped and crashed."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from cron_ticks.embedded import EmbeddedServer
from support.processes import Processes, RunningProcess
from support.servers import kill_server, postmaster, program_folder


async def start_up(processes: Processes, folder: Path, *arguments: str, **settings: str) -> RunningProcess:
    chosen = {"embedded_data_dir": str(folder)} | settings
    environment = {f"CRON_TICKS_{name.upper()}": value for name, value in chosen.items()}
    return await processes.cron_ticks("up", *arguments, environment=environment)


async def workers_of(running: RunningProcess, count: int = 2) -> list[psutil.Process]:
    await running.wait_for("worker_started", times=count)
    return [child for child in psutil.Process(running.pid).children() if "worker" in child.cmdline()]


def server_in(folder: Path) -> EmbeddedServer:
    return EmbeddedServer(folder, program_folder(18))


def events(running: RunningProcess, name: str) -> int:
    return len([event for event in running.events if event["event"] == name])


async def stop(running: RunningProcess) -> dict[str, Any]:
    """Stop it; the summary, which must be clean."""
    running.send(signal.SIGTERM)
    summary: dict[str, Any] = json.loads(await running.output())
    assert await running.wait() == 0
    summary_is_clean(summary)
    return summary


def summary_is_clean(summary: dict[str, Any]) -> None:
    assert (summary["duplicates"], summary["missed"]) == (0, 0)
    assert summary["fired"] > 0


@pytest.mark.soak(small=8, full=60)
async def test_a_run_of_some_seconds(
    embedded_folder: Path, processes: Processes, size: int, request: pytest.FixtureRequest
) -> None:
    running = await start_up(processes, embedded_folder, "--for", str(size), "--json")
    summary = json.loads(await running.output(size + 60))
    assert await running.wait() == 0
    summary_is_clean(summary)
    assert len(summary["schedules"]) == 5
    assert sum(summary["fired_by"].values()) == summary["fired"]
    assert summary["completed"] > 0
    assert not server_in(embedded_folder).accepts_connections()
    if request.config.getoption("--soak"):  # in a few seconds one process may be quicker each time
        assert len(summary["fired_by"]) == 2
    shown = {key: value for key, value in summary.items() if key != "schedules"}
    print(f"up --for {size}: {json.dumps(shown)}")  # noqa: T201


async def test_two_processes_share_the_examples(embedded_folder: Path, processes: Processes) -> None:
    running = await start_up(processes, embedded_folder, "--json")
    first = await running.wait_for("ticks_fired")
    await running.wait_for("ticks_fired", where=lambda line: line["ticker_id"] != first["ticker_id"])
    assert len((await stop(running))["fired_by"]) == 2


def is_heartbeat_after(begun: datetime, line: dict[str, Any]) -> bool:
    return line["schedule"] == "example.heartbeat" and datetime.fromisoformat(line["scheduled_for"]) > begun


async def test_it_goes_on_from_where_it_was(embedded_folder: Path, processes: Processes) -> None:
    """The second run finds the schedules of the first, in the same phase."""
    phases = []
    for _ in range(2):
        running = await start_up(processes, embedded_folder, "--workers", "1", "--json", log_level="debug")
        begun = datetime.fromisoformat((await running.wait_for("worker_started"))["timestamp"])
        await running.wait_for("tick_fired", where=partial(is_heartbeat_after, begun))
        summary = await stop(running)
        assert len(summary["schedules"]) == 5
        fired = {row["name"]: row["last_at"] for row in summary["schedules"] if row["last_at"] is not None}
        phases.append({name: datetime.fromisoformat(last_at).microsecond for name, last_at in fired.items()})
    common = phases[0].keys() & phases[1].keys()
    assert "example.heartbeat" in common
    assert {name: phases[0][name] for name in common} == {name: phases[1][name] for name in common}


async def test_ctrl_c_stops_everything_and_still_prints_the_table(embedded_folder: Path, processes: Processes) -> None:
    running = await start_up(processes, embedded_folder)
    workers = await workers_of(running)
    await running.wait_for("ticks_fired")
    running.send(signal.SIGINT)
    output = await running.output()
    assert await running.wait() == 0
    assert "example.heartbeat" in output
    assert not any(worker.is_running() for worker in workers)
    assert not server_in(embedded_folder).accepts_connections()


def test_a_terminal_shows_the_table_while_it_runs(embedded_folder: Path, tmp_path: Path) -> None:
    """A real terminal of 80 columns, through a pseudo-terminal; logs go to a file."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = os.environ | {
        "CRON_TICKS_EMBEDDED_DATA_DIR": str(embedded_folder),
        "TERM": "xterm",
        "TMPDIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "cron_ticks.cli", "up"]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as running:
        os.close(terminal)
        shown = b""
        while not re.search(rb"fired [1-9]\d*, duplicates 0, missed 0", shown):
            shown += os.read(master, 65536)
        running.send_signal(signal.SIGINT)
        with suppress(OSError):  # the terminal is gone when the last process that has it is
            while more := os.read(master, 65536):
                shown += more
        assert running.wait(60) == 0
    os.close(master)
    text = shown.decode()
    for word in (
        "example.heartbeat",
        "example.calendar",
        "next in",
        "last ago",
        "lateness",
        "duplicates",
        "missed",
        "Ctrl-C stops",
    ):
        assert word in text
    [log_file] = tmp_path.glob("cron_ticks_up_*.log")
    assert "ticks_fired" in log_file.read_text()
    assert "ticks_fired" not in text


@pytest.mark.soak(small=2, full=15)
async def test_killing_the_servers_processes_loses_nothing(
    embedded_folder: Path, processes: Processes, size: int
) -> None:
    running = await start_up(processes, embedded_folder, "--json")
    await workers_of(running)
    for crash in range(1, size + 1):
        await running.wait_for("ticks_fired", times=events(running, "ticks_fired") + 2)
        kill_server(server_in(embedded_folder))
        await running.wait_for("embedded_server_revived", times=crash)
    await running.wait_for("ticks_fired", times=events(running, "ticks_fired") + 3)
    summary = await stop(running)
    print(f"{size} kills of the server: fired {summary['fired']}, duplicates 0, missed 0")  # noqa: T201


async def test_killing_only_the_postmaster_loses_nothing(embedded_folder: Path, processes: Processes) -> None:
    """Its children hold the old shared memory for a moment."""
    running = await start_up(processes, embedded_folder, "--json")
    await workers_of(running)
    await running.wait_for("ticks_fired", times=2)
    postmaster(server_in(embedded_folder)).kill()
    await running.wait_for("embedded_server_revived")
    await running.wait_for("ticks_fired", times=events(running, "ticks_fired") + 3)
    await stop(running)


async def test_a_killed_worker_is_started_again(embedded_folder: Path, processes: Processes) -> None:
    running = await start_up(processes, embedded_folder, "--json")
    workers = await workers_of(running)
    await running.wait_for("ticks_fired")
    workers[0].kill()
    exited = await running.wait_for("worker_exited")
    assert exited["exit_code"] == -signal.SIGKILL
    await running.wait_for("worker_started", times=3)
    await stop(running)


async def test_when_up_itself_is_killed_nothing_is_left_behind(embedded_folder: Path, processes: Processes) -> None:
    running = await start_up(processes, embedded_folder)
    workers = await workers_of(running)
    await running.wait_for("ticks_fired")
    running.send(signal.SIGKILL)
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert (len(gone), alive) == (2, [])
    assert not server_in(embedded_folder).accepts_connections()
