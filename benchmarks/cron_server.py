"""A PostgreSQL 15 from Debian for one run, with pg_cron in it where that can be had."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from cron_ticks.cli.bench.machine import server_settings
from cron_ticks.embedded import EmbeddedServer, use_embedded
from cron_ticks.errors import CronTicksError

PROGRAMS = Path("/usr/lib/postgresql/15/bin")
LIBRARY = Path("/usr/lib/postgresql/15/lib/pg_cron.so")
PACKAGES = ("postgresql-15", "postgresql-15-cron")
LONGEST_SECONDS = 300

# How pg_cron runs a job: in a background worker of the server, or over a new connection through the server's socket.
# Its README has both; connections are what it does unless it is told otherwise. Both are given as many jobs at once as
# pg_cron allows by default over connections, 32; with background workers its default is 5. Workers
# were the quicker of the two here: 3000 jobs took 37 s, over connections 66 s, a run each on a machine with other work.
BACKGROUND_WORKERS = True
JOBS_AT_ONCE = 32

SETTINGS = """
shared_preload_libraries = 'pg_cron'
cron.database_name = 'postgres'
cron.use_background_workers = {background_workers}
cron.host = '{socket_folder}'
cron.max_running_jobs = {jobs_at_once}
max_worker_processes = {worker_processes}
"""


def settings_of(socket_folder: Path, *, background_workers: bool = BACKGROUND_WORKERS) -> str:
    """Lines of postgresql.conf, with workers to spare: pg_cron's own scheduler is one, and so is who else needs one."""
    return SETTINGS.format(
        background_workers="on" if background_workers else "off",
        socket_folder=socket_folder,
        jobs_at_once=JOBS_AT_ONCE,
        worker_processes=JOBS_AT_ONCE + 8,
    )


def install() -> None:
    """The packages, as root on Debian."""
    if not has_pg_cron() and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES]
        subprocess.run(command, check=False, capture_output=True, timeout=LONGEST_SECONDS)  # noqa: S603


def programs() -> Path:
    """PostgreSQL's."""
    if not PROGRAMS.exists():
        raise CronTicksError("there is no PostgreSQL 15 from Debian here: give --dsn")
    return PROGRAMS


def has_pg_cron() -> bool:
    """Whether it is installed."""
    return LIBRARY.exists()


@asynccontextmanager
async def debian_server() -> AsyncIterator[str]:
    """Its DSN; it is gone in the end."""
    with tempfile.TemporaryDirectory(prefix="cron_ticks_bench_") as folder:
        server = EmbeddedServer(Path(folder) / "server", programs(), server_settings=server_settings())
        await anyio.to_thread.run_sync(server.acquire)  # makes the data, to which settings are added
        if has_pg_cron():
            with (server.cluster.data / "postgresql.conf").open("a") as settings:
                settings.write(settings_of(server.cluster.socket_folder))
        await anyio.to_thread.run_sync(server.release)
        async with use_embedded(server):
            yield server.dsn
