"""A PostgreSQL data directory and the programs that make, start and stop its server."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from cron_ticks.errors import EmbeddedServerError

log = structlog.get_logger("cron_ticks.cluster")

SOCKET_NAME = ".s.PGSQL.5432"
IMPOSSIBLE_PID = 2**31 - 1
START_ATTEMPTS_SECONDS = 60.0
STEP_SECONDS = 120.0


@dataclass(frozen=True)
class Cluster:
    """A server's data in `folder`, its socket in `socket_folder`, its programs in `bin_folder`."""

    folder: Path
    socket_folder: Path
    bin_folder: Path
    durable: bool
    server_settings: Mapping[str, str] = field(
        default_factory=dict
    )  # beside our own; plain words, for a shell reads them

    @property
    def data(self) -> Path:
        """PostgreSQL's own data directory."""
        return self.folder / "server"

    @property
    def exists(self) -> bool:
        """Whether the data has been made."""
        return (self.data / "PG_VERSION").exists()

    def accepts_connections(self) -> bool:
        """Whether a server listens on our socket; a stale socket file doesn't count."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            try:
                probe.connect(str(self.socket_folder / SOCKET_NAME))
            except OSError:
                return False
        return True

    def initialise(self) -> None:
        """Made aside and renamed, so that a process killed half-way leaves no half of a database.

        Under a name of its own each time: the killed process's initdb may still be writing.
        """
        for leftover in self.folder.glob("unfinished.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished = self.folder / f"unfinished.{secrets.token_hex(4)}"
        arguments = ["--auth=trust", "--encoding=UTF8", "--locale=C", "--username=postgres"]
        result = self._run("initdb", *arguments, *([] if self.durable else ["--no-sync"]), "-D", str(unfinished))
        if result.returncode != 0:
            raise EmbeddedServerError(f"initdb failed in {self.folder}:\n{result.stdout}")
        unfinished.rename(self.data)

    def refuse_other_version(self) -> None:
        """Raise if the data is of another release than the programs."""
        found = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        ours = self._run("postgres", "--version").stdout.split()[-1].split(".")[0]  # "postgres (PostgreSQL) 18.4"
        if found != ours:
            raise EmbeddedServerError(
                f"{self.folder} holds data of PostgreSQL {found}, but this server is {ours}: "
                f"set CRON_TICKS_EMBEDDED_VERSION={found} or another CRON_TICKS_EMBEDDED_DATA_DIR"
            )

    def start(self, given_up: Callable[[], bool]) -> None:
        """After a crash, processes of the old server may hold its memory for a moment: try again until they end."""
        switch = "on" if self.durable else "off"
        settings = dict(self.server_settings) | {
            "listen_addresses": "''",
            "unix_socket_directories": f"'{self.socket_folder}'",
            "fsync": switch,
            "synchronous_commit": switch,
            "full_page_writes": switch,
            "max_connections": "200",
        }
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        deadline = time.monotonic() + START_ATTEMPTS_SECONDS
        while not self.accepts_connections():
            self._forget_dead_postmaster()
            if self._run("pg_ctl", "start", "-w", "-t", "60", "-l", "server.log", "-o", options).returncode == 0:
                break
            if given_up() or time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the embedded PostgreSQL in {self.folder} doesn't start; its log ends:\n{self._log_tail()}"
                )
            time.sleep(0.2)
        log.info("embedded_server_started", folder=str(self.folder))

    def stop(self) -> None:
        """End the server; who is connected is cut off, and nothing committed is lost."""
        result = self._run("pg_ctl", "stop", "-m", "fast", "-w", "-t", "60")
        if result.returncode != 0 and self.accepts_connections():
            log.warning("embedded_server_not_stopped", folder=str(self.folder))
        else:
            log.info("embedded_server_stopped", folder=str(self.folder))

    def _forget_dead_postmaster(self) -> None:
        """A number in a lock file that now belongs to something else would keep a new server from starting.

        Only the number is replaced, by one that no process can have: PostgreSQL itself then looks whether any process
        of the old server still holds its memory.
        """
        for lock_file in (self.data / "postmaster.pid", self.socket_folder / f"{SOCKET_NAME}.lock"):
            with suppress(FileNotFoundError):
                pid, _, rest = lock_file.read_text(encoding="utf-8").partition("\n")
                if not self._may_be_postmaster(pid):
                    lock_file.write_text(f"{IMPOSSIBLE_PID}\n{rest}", encoding="utf-8")

    def _may_be_postmaster(self, pid: str) -> bool:
        """False if the process is dead but not reaped, or another one that got its number; Linux alone can tell."""
        process = Path(f"/proc/{pid}")
        if not process.exists():
            return True
        try:
            state = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
            command = (process / "cmdline").read_bytes()
        except OSError:
            return True
        return state != "Z" and os.fsencode(self.socket_folder) in command

    def _log_tail(self) -> str:
        log_file = self.folder / "server.log"
        if not log_file.exists():
            return "(no log)"
        return "\n".join(log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of PostgreSQL's programs. The data's place goes by PGDATA and the folder we are in: pg_ctl hands
        its arguments to a shell.
        """
        account = server_account()
        user, group = account if account is not None else (None, None)
        try:
            return subprocess.run(  # noqa: S603 - our own programs and arguments
                [str(self.bin_folder / program), *arguments],
                stdin=subprocess.DEVNULL,
                # The server inherits pg_ctl's output and would keep a pipe open.
                stdout=subprocess.DEVNULL if program == "pg_ctl" else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "PGDATA": str(self.data)},
                user=user,
                group=group,
                extra_groups=[] if account is not None else None,
                timeout=STEP_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EmbeddedServerError(
                f"{program} of the embedded PostgreSQL can't be run ({error}): set CRON_TICKS_DSN to a server of yours"
            ) from error


def server_account() -> tuple[int, int] | None:
    """Whom the server runs as, if not as ourselves: PostgreSQL refuses root, so root's server is `nobody`'s."""
    if os.geteuid() != 0:
        return None
    import pwd  # noqa: PLC0415 - absent on Windows

    entry = pwd.getpwnam("nobody")
    return entry.pw_uid, entry.pw_gid
