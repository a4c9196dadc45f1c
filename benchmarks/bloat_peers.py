"""`bench bloat` beside PgQueuer and Procrastinate: `python benchmarks/bloat_peers.py [--count 200000] [--json]`.

Messages alone. The peers are those of `queue_peers.py`. They are slower, so they get fewer messages; and because what
is left depends on how many are done with, our own runs with all messages, and with as many as each peer has.
"""

import os
from dataclasses import replace

import typer
from environments import HERE, contract_folder, install_peers
from queue_peers import ENVIRONMENT, PEERS

from cron_ticks.cli.bench import BloatCount, Only, Slices, show_bloat_figures
from cron_ticks.cli.bench.bloat import OURS
from cron_ticks.cli.bench.rounds import Contender
from cron_ticks.cli.bench.showing import BenchDsn, PlotFile, Rounds
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
    contenders = [*OURS]
    for name, share in SHARES.items():
        script = str(HERE / "peers" / PEERS[name][0])
        contenders.append(replace(OURS[0], name=f"{OURS[0].name}, as many as {name}", share=share))
        contenders.append(Contender(name, (str(python), script), share, environment))
    show_bloat_figures(tuple(contenders), count, slices, rounds, dsn, only=only, as_json=as_json, plot=plot)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    typer.run(main)
