"""A real PgBouncer in transaction mode in front of a test server."""

import os
import pwd
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from support.servers import TestServer

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@dataclass(frozen=True)
class PgBouncer:
    """A running one, by its port on the loopback address."""

    port: int

    def dsn_of(self, dsn: str) -> str:
        """The same database, through the pooler."""
        return f"postgresql://postgres@127.0.0.1:{self.port}{urlsplit(dsn).path}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def pgbouncer(server: TestServer, folder: Path) -> Iterator[PgBouncer]:
    """Runs PgBouncer until the block ends."""
    assert PROGRAM is not None
    port = free_port()
    folder.mkdir()
    (folder / "users.txt").write_text('"postgres" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"""[databases]
* = host='{server.embedded.cluster.socket_folder}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder}/users.txt
pool_mode = transaction
default_pool_size = 3
max_client_conn = 200
"""
    )
    command = [PROGRAM, str(folder / "pgbouncer.ini")]
    if os.geteuid() == 0:
        account = pwd.getpwnam("nobody")
        os.chown(folder, account.pw_uid, account.pw_gid)
        command = [PROGRAM, "--user", "nobody", str(folder / "pgbouncer.ini")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "process up" in line:
                    break
            else:
                raise AssertionError("PgBouncer did not start")
            # Its log must be read, or it stands still when the pipe is full.
            reader = threading.Thread(target=process.stderr.read)
            reader.start()
            yield PgBouncer(port)
        finally:
            process.terminate()
            process.wait()
        reader.join()
