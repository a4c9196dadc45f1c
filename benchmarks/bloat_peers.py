"""`bench bloat` beside PgQueuer and Procrastinate: `python benchmarks/bloat_peers.py [--count 200000] [--json]`.

Messages alone. Each contender has its own number of them, because they are not equally fast; compare what is left of
the speed of each, not the speed. The peers are those of `queue_peers.py`.
"""

import os

import typer
from environments import HERE, contract_folder, install_peers
from queue_peers import ENVIRONMENT, PEERS

from cron_ticks.cli.bench import BenchDsn, BloatCount, Only, PlotFile, Rounds, Slices, show_bloat_figures
from cron_ticks.cli.bench.bloat import OURS
from cron_ticks.cli.bench.rounds import Contender
from cron_ticks.cli.common import Json

SHARES = {"PgQueuer": 0.1, "Procrastinate": 0.02}  # of the messages


def main(  # noqa: PLR0917 - typer's way of declaring options
    count: BloatCount = 1_000_000,
    slices: Slices = 20,
    rounds: Rounds = 1,
    only: Only = "messages",
    dsn: BenchDsn = None,
    plot: PlotFile = None,
    *,
    as_json: Json = False,
) -> None:
    """Measure, and print a table or JSON."""
    python = install_peers(ENVIRONMENT, "requirements.txt")
    environment = {"PYTHONPATH": str(contract_folder(ENVIRONMENT))}
    peers = [
        Contender(name, (str(python), str(HERE / "peers" / PEERS[name][0])), share, environment)
        for name, share in SHARES.items()
    ]
    show_bloat_figures((*OURS, *peers), count, slices, rounds, dsn, only=only, as_json=as_json, plot=plot)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    typer.run(main)
