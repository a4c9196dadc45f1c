"""One embedded server per PostgreSQL version, one fresh database per test."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import hypothesis
import pytest
import structlog

import cron_ticks.sweeps
from cron_ticks.database import Database, open_database
from cron_ticks.embedded import EmbeddedServer
from cron_ticks.settings import Settings
from support.pgbouncer import PROGRAM, PgBouncer, pgbouncer
from support.processes import Processes
from support.servers import TestServer, program_folder

# Nothing here depends on how fast the machine is.
hypothesis.settings.register_profile("steady", deadline=None)
hypothesis.settings.load_profile("steady")

crashes: list[str] = []  # of the servers that tests share, which none of them asked for

ALL_VERSIONS = (18, 16, 15)
NEWEST, OLDEST = 18, 15


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="tests marked soak run at full size")
    parser.addoption("--all-versions", action="store_true", help="tests marked sql run on PostgreSQL 16 too")
    parser.addoption("--no-skips", action="store_true", help="a skipped test fails the run")
    parser.addoption("--update-snapshot", action="store_true", help="rewrite docs/reference/schema.sql")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        versions: tuple[int, ...] = (NEWEST,)
        if metafunc.definition.get_closest_marker("sql"):
            versions = (NEWEST, OLDEST)
        if metafunc.definition.get_closest_marker("every_version") or (
            len(versions) > 1 and metafunc.config.getoption("--all-versions")
        ):
            versions = ALL_VERSIONS
        routes = [(version, "direct") for version in versions]
        if metafunc.definition.get_closest_marker("pooled") and "route" in metafunc.fixturenames:
            routes.append((NEWEST, "pgbouncer"))
        ids = [f"pg{version}" if route == "direct" else route for version, route in routes]
        if "route" in metafunc.fixturenames:
            metafunc.parametrize(("server", "route"), routes, indirect=True, ids=ids, scope="session")
        else:
            metafunc.parametrize("server", versions, indirect=True, ids=ids, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """At full size a test may take its time."""
    if config.getoption("--soak"):
        for item in items:
            item.add_marker(pytest.mark.timeout(1200))


def pytest_testnodedown(node: Any) -> None:
    """One of several processes that share the tests has ended: what it knows of crashes is for the summary."""
    crashes.extend(getattr(node, "workeroutput", {}).get("crashes", []))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["crashes"] = crashes
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if session.config.getoption("--no-skips") and skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in crashes:
        terminalreporter.write_line(line)
    if config.getoption("--no-skips") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("FAILED: tests were skipped, and --no-skips was given", red=True)


@pytest.fixture(autouse=True)
def _every_look_is_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: tests move rows behind the engine's back. Processes do as the product does."""
    monkeypatch.setattr(cron_ticks.sweeps, "QUICK_SECONDS", math.inf)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings come from the test alone."""
    for name in os.environ:
        if name.startswith("CRON_TICKS_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    """No test hears less because another one has configured logs: a queue manager does, in a process that has not."""
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture
def size(request: pytest.FixtureRequest) -> int:
    """How large a test marked soak(small=, full=) is this time."""
    marker = request.node.get_closest_marker("soak")
    assert marker is not None
    return int(marker.kwargs["full" if request.config.getoption("--soak") else "small"])


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[TestServer]:
    """A running server with a migrated template database.

    Not in pytest's own folder: that one is closed to other users again whenever another run starts.
    """
    version: int = request.param
    programs = program_folder(version)
    if not (programs / "postgres").exists():
        pytest.skip(f"PostgreSQL {version} is not installed: apt-get install postgresql-{version}")
    with TemporaryDirectory(prefix=f"cron_ticks_pg{version}_", ignore_cleanup_errors=True) as folder:
        embedded = EmbeddedServer(Path(folder) / "data", programs, durable=False)
        embedded.acquire()
        try:
            started = TestServer(embedded, version)
            asyncio.run(started.make_template())
            yield started
        finally:
            lines = (embedded.cluster.folder / "server.log").read_text(errors="replace").splitlines()
            for number, line in enumerate(lines):
                if "terminated by signal" in line:
                    crashes.extend([f"PostgreSQL {version} crashed:", *lines[max(0, number - 5) : number + 5]])
            embedded.release()


database_numbers = count(1)


@pytest.fixture
async def dsn(server: TestServer) -> AsyncIterator[str]:
    """A fresh, migrated database."""
    async with server.fresh_database(f"test_{next(database_numbers)}") as fresh:
        yield fresh


@pytest.fixture
async def empty_dsn(server: TestServer) -> AsyncIterator[str]:
    """A fresh database without our tables."""
    async with server.fresh_database(f"test_{next(database_numbers)}", template="template0") as fresh:
        yield fresh


@pytest.fixture(scope="session")
def bouncer(server: TestServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode in front of the server."""
    if PROGRAM is None:
        pytest.skip("PgBouncer is not installed: apt-get install pgbouncer")
    with pgbouncer(server, tmp_path_factory.mktemp("bouncer") / "run") as running:
        yield running


@pytest.fixture
def route(request: pytest.FixtureRequest) -> str:
    """How the product reaches the server: directly, or through PgBouncer for tests marked pooled."""
    name: str = request.param
    return name


@pytest.fixture
def settings(request: pytest.FixtureRequest, dsn: str, route: str) -> Settings:
    if route == "direct":
        return Settings.load(dsn=dsn)
    bouncer: PgBouncer = request.getfixturevalue("bouncer")
    return Settings.load(dsn=bouncer.dsn_of(dsn), transaction_pooler=True)


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    assert settings.dsn is not None
    async with open_database(settings, dsn=settings.dsn.get_secret_value()) as opened:
        yield opened


@pytest.fixture
async def connection(dsn: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """A connection of the test's own, to look at rows and to play the application."""
    opened = await asyncpg.connect(dsn)
    yield opened
    await opened.close()


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    """Starts real processes; whatever still runs at the end is killed."""
    started = Processes()
    yield started
    await started.kill_all()


@pytest.fixture
def embedded_folder(tmp_path: Path) -> Path:
    return tmp_path / "embedded"
