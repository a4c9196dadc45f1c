"""The queue beside PgQueuer and Procrastinate: `python benchmarks/queue_peers.py [--rounds 5] [--json]`.

Everything runs on one server, in turn, round after round: see `cron_ticks.cli.bench.rounds`. The peers are installed
from PyPI into a virtual environment of their own under `.cache/`, with the versions of `peers/requirements.txt` and the
settings that their documentation names as the best; why each was chosen stands in `peers/`.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import typer

from cron_ticks.cli.bench import BenchDsn, Messages, Only, PlotFile, Rounds, contract, show_queue_figures
from cron_ticks.cli.bench.rounds import OWN_CONTENDERS, Contender
from cron_ticks.cli.common import Json

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent / ".cache" / "queue_peers"

# Procrastinate takes a job at a time, so it gets fewer of them.
PEERS = {"PgQueuer": ("pgqueuer_contender.py", 1.0), "Procrastinate": ("procrastinate_contender.py", 0.1)}


def install_peers() -> Path:
    """A virtual environment with the peers; its Python."""
    python = ENVIRONMENT / "bin" / "python"
    wanted = (HERE / "peers" / "requirements.txt").read_text()
    done = ENVIRONMENT / "installed.txt"
    if not done.exists() or done.read_text() != wanted:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "-r", HERE / "peers" / "requirements.txt"], check=True)  # noqa: S603
        done.write_text(wanted)
    return python


def main(
    messages: Messages = 20_000,
    rounds: Rounds = 5,
    only: Only = "",
    dsn: BenchDsn = None,
    *,
    as_json: Json = False,
    plot: PlotFile = None,
) -> None:
    """Measure, and print a table or JSON."""
    python = install_peers()
    environment = {"PYTHONPATH": str(Path(contract.__file__).parent)}
    peers = [
        Contender(name, (str(python), str(HERE / "peers" / script)), share, environment)
        for name, (script, share) in PEERS.items()
    ]
    show_queue_figures((*OWN_CONTENDERS, *peers), messages, rounds, dsn, only=only, as_json=as_json, plot=plot)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.path.insert(0, str(HERE.parent))
    typer.run(main)
