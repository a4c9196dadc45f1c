"""Uses an embedded server in a process of its own: `python -m support.embedded_user FOLDER`, until stdin closes."""

import sys
from pathlib import Path

from cron_ticks.embedded import EmbeddedServer
from cron_ticks.logs import configure_logs
from support.servers import program_folder

configure_logs()
server = EmbeddedServer(Path(sys.argv[1]), program_folder(18))
server.acquire()
print('{"event": "acquired"}', file=sys.stderr, flush=True)  # noqa: T201
sys.stdin.read()
server.release()
