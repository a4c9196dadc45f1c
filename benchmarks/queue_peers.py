"""The queue beside PgQueuer and Procrastinate: `python benchmarks/queue_peers.py [--rounds 5] [--json]`.

Everything runs on one server, in turn, round after round: see `cron_ticks.cli.bench.rounds`. The peers are installed
from PyPI into a virtual environment of their own under `.cache/`, with the versions of `peers/requirements.txt` and the
settings that their documentation names as the best; why each was chosen stands in `peers/`.
"""

import os

import typer
from environments import HERE, contract_folder, install_peers

from cron_ticks.cli.bench import Messages, Only, show_queue_figures
from cron_ticks.cli.bench.rounds import OWN_CONTENDERS, Contender
from cron_ticks.cli.bench.showing import BenchDsn, PlotFile, Rounds
from cron_ticks.cli.common import Json

ENVIRONMENT = "queue_peers"

# Procrastinate takes a job at a time, so it gets fewer of them.
PEERS = {"PgQueuer": ("pgqueuer_contender.py", 1.0), "Procrastinate": ("procrastinate_contender.py", 0.1)}


def main(
    messages: Messages = 20_000,
    rounds: Rounds = 5,
    only: Only = "",
    dsn: BenchDsn = None,
    plot: PlotFile = None,
    *,
    as_json: Json = False,
) -> None:
    """Measure, and print a table or JSON."""
    python = install_peers(ENVIRONMENT, "requirements.txt")
    environment = {"PYTHONPATH": str(contract_folder(ENVIRONMENT))}
    peers = [
        Contender(name, (str(python), str(HERE / "peers" / script)), share, environment)
        for name, (script, share) in PEERS.items()
    ]
    show_queue_figures((*OWN_CONTENDERS, *peers), messages, rounds, dsn, only=only, as_json=as_json, plot=plot)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    typer.run(main)
