"""The embedded server: shared, stopped by the last user, back after any crash."""

import asyncio
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import asyncpg
import psutil
import pytest

import cron_ticks.embedded
from cron_ticks.cluster import SOCKET_NAME, Cluster, server_account
from cron_ticks.embedded import EmbeddedKeeper, EmbeddedServer, embedded_server
from cron_ticks.errors import EmbeddedServerError
from cron_ticks.settings import Settings
from support.processes import Processes, RunningProcess
from support.servers import kill_server, postmaster, program_folder

TESTS = Path(__file__).parent
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def own(embedded_folder: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(embedded_folder, program_folder(18), durable=False)
    yield server
    server.release()


async def select_one(server: EmbeddedServer) -> None:
    connection = await asyncpg.connect(server.dsn)
    assert await connection.fetchval("SELECT 1") == 1
    await connection.close()


async def start_user(processes: Processes, server: EmbeddedServer) -> RunningProcess:
    user = await processes.start(
        sys.executable, "-m", "support.embedded_user", str(server.folder), environment={"PYTHONPATH": str(TESTS)}
    )
    await user.wait_for("acquired")
    return user


async def test_it_keeps_its_data_from_one_use_to_the_next(own: EmbeddedServer) -> None:
    own.acquire()
    connection = await asyncpg.connect(own.dsn)
    await connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    await connection.close()
    own.release()
    assert not own.accepts_connections()
    own.acquire()
    connection = await asyncpg.connect(own.dsn)
    assert await connection.fetchval("SELECT number FROM kept") == 7
    await connection.close()


async def test_full_durability_is_the_default(embedded_folder: Path) -> None:
    server = embedded_server(Settings.load(embedded_data_dir=embedded_folder))
    server.acquire()
    try:
        connection = await asyncpg.connect(server.dsn)
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            assert await connection.fetchval(f"SHOW {name}") == "on"
        assert await connection.fetchval("SHOW listen_addresses") == ""
        await connection.close()
    finally:
        server.release()


async def test_processes_share_it_and_the_last_one_stops_it(own: EmbeddedServer, processes: Processes) -> None:
    first = await start_user(processes, own)
    server = postmaster(own)
    second = await start_user(processes, own)
    assert postmaster(own).pid == server.pid
    first.close_input()
    assert await first.wait() == 0
    await select_one(own)
    second.close_input()
    assert await second.wait() == 0
    assert not own.accepts_connections()
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


async def test_processes_that_start_at_once_start_one_server(own: EmbeddedServer, processes: Processes) -> None:
    users = await asyncio.gather(*(start_user(processes, own) for _ in range(4)))
    started = [event for user in users for event in user.events if event["event"] == "embedded_server_started"]
    assert len(started) == 1
    for user in users:
        user.close_input()
    assert await asyncio.gather(*(user.wait() for user in users)) == [0] * 4
    assert not own.accepts_connections()


async def test_a_killed_user_does_not_count(own: EmbeddedServer, processes: Processes) -> None:
    victim = await start_user(processes, own)
    own.acquire()
    await victim.kill()
    await select_one(own)
    own.release()
    assert not own.accepts_connections()


async def test_it_recovers_after_everything_was_killed(own: EmbeddedServer, processes: Processes) -> None:
    own.cluster = replace(own.cluster, durable=True)
    user = await start_user(processes, own)
    connection = await asyncpg.connect(own.dsn)
    await connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    await connection.close()
    kill_server(own)
    await user.kill()
    own.acquire()
    connection = await asyncpg.connect(own.dsn)
    assert await connection.fetchval("SELECT number FROM kept") == 7
    await connection.close()


@pytest.mark.skipif(sys.platform != "linux", reason="zombies are told apart on Linux alone")
async def test_it_starts_again_where_nobody_reaps_the_dead(own: EmbeddedServer) -> None:
    """As in a container whose process 1 is no init: here the orphans become ours, and we don't look after them."""
    library = ctypes.CDLL(None)
    assert library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        own.acquire()
        dead = postmaster(own)
        dead.kill()
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - dead, and left as it is
        assert own.revive()
        assert dead.status() == psutil.STATUS_ZOMBIE
        await select_one(own)
        own.release()
    finally:
        library.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # noqa: ASYNC222 - it does not block
                pass


async def test_the_keeper_revives_it(own: EmbeddedServer) -> None:
    own.acquire()
    keeper = EmbeddedKeeper(own)
    await keeper.run_once()
    before = postmaster(own)
    before.kill()
    before.wait(timeout=30)
    await keeper.run_once()
    assert postmaster(own).pid != before.pid
    await select_one(own)


async def test_a_half_made_data_folder_is_made_again(own: EmbeddedServer) -> None:
    unfinished = own.folder / "unfinished.1234"
    unfinished.mkdir(parents=True)
    (own.folder / "start.lock").touch()
    (unfinished / "PG_VERSION").write_text("18\n")
    own.acquire()
    await select_one(own)
    assert not unfinished.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="who has the number is told on Linux alone")
async def test_it_starts_again_when_its_number_went_to_another_process(own: EmbeddedServer) -> None:
    """As after a restart of a container that keeps its data."""
    own.acquire()
    dead = postmaster(own)
    dead.kill()
    dead.wait(timeout=30)
    user, group = server_account() or (None, None)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=user, group=group) as other:  # noqa: ASYNC220 - it starts at once
        for lock_file in (own.cluster.data / "postmaster.pid", own.cluster.socket_folder / f"{SOCKET_NAME}.lock"):
            rest = lock_file.read_text().partition("\n")[2]
            lock_file.write_text(f"{other.pid}\n{rest}")
        assert own.revive()
        other.communicate()
    await select_one(own)


def test_a_server_whose_data_is_gone_is_not_made_again_behind_its_users_back(own: EmbeddedServer) -> None:
    own.acquire()
    dead = postmaster(own)
    dead.kill()
    dead.wait(timeout=30)
    shutil.rmtree(own.cluster.data)
    with pytest.raises(EmbeddedServerError, match="is gone"):
        own.revive()


def test_who_leaves_while_it_starts_leaves_no_server_behind(
    own: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first Ctrl-C comes while a thread is still in acquire()."""
    starting, go_on = threading.Event(), threading.Event()
    start = Cluster.start

    def slow_start(cluster: Cluster, given_up: Callable[[], bool]) -> None:
        starting.set()
        go_on.wait(30)
        start(cluster, given_up)

    monkeypatch.setattr(Cluster, "start", slow_start)
    acquiring = threading.Thread(target=own.acquire)
    acquiring.start()
    assert starting.wait(30)
    releasing = threading.Thread(target=own.release)
    releasing.start()
    go_on.set()
    acquiring.join()
    releasing.join()
    assert not own.accepts_connections()


def test_a_folder_with_other_files_is_refused(own: EmbeddedServer) -> None:
    own.folder.mkdir(mode=0o755)
    (own.folder / "thesis.txt").touch()
    with pytest.raises(EmbeddedServerError, match="holds other files"):
        own.acquire()
    assert [path.name for path in own.folder.iterdir()] == ["thesis.txt"]
    assert own.folder.stat().st_uid == os.geteuid()


def test_a_link_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    server = EmbeddedServer(tmp_path / "link", program_folder(18))
    with pytest.raises(EmbeddedServerError, match="is a link"):
        server.acquire()


def test_the_version_is_compared_even_with_a_running_server(own: EmbeddedServer) -> None:
    own.acquire()
    other = EmbeddedServer(own.folder, program_folder(16))
    with pytest.raises(EmbeddedServerError, match="CRON_TICKS_EMBEDDED_VERSION=18"):
        other.acquire()


@pytest.mark.parametrize("name", ["a folder with 'quotes', \"more\", $HOME and `blanks`", "x" * 120, "日" * 28])
async def test_any_folder_will_do(tmp_path: Path, name: str) -> None:
    server = EmbeddedServer(tmp_path / name, program_folder(18), durable=False)
    server.acquire()
    try:
        await select_one(server)
    finally:
        server.release()


def test_data_of_another_version_is_refused_with_what_to_do(own: EmbeddedServer) -> None:
    own.cluster.data.mkdir(parents=True)
    (own.folder / "start.lock").touch()
    (own.cluster.data / "PG_VERSION").write_text("16\n")
    with pytest.raises(EmbeddedServerError, match="CRON_TICKS_EMBEDDED_VERSION=16"):
        own.acquire()


def test_without_the_wheel_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EmbeddedServerError, match=r"CRON_TICKS_DSN.*cron-ticks\[embedded\]"):
        embedded_server(Settings.load())


def test_a_wheel_without_this_platform_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cron_ticks.embedded, "wheel_folder", lambda: tmp_path)
    with pytest.raises(EmbeddedServerError, match="for this platform: set CRON_TICKS_DSN"):
        embedded_server(Settings.load())


def test_the_default_folder_is_the_users_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    folder = embedded_server(Settings.load()).folder
    assert folder.is_relative_to(tmp_path)
    assert folder.name == "postgres-18"


def test_only_its_owner_can_reach_it(own: EmbeddedServer) -> None:
    own.acquire()
    for folder in (own.cluster.socket_folder, own.cluster.data):
        assert folder.stat().st_mode & 0o077 == 0
    if os.geteuid() == 0:
        assert postmaster(own).username() == "nobody"
