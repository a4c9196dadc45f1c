"""The published figures: `python benchmarks/publish.py run [NAME ...]` measures, `write` makes the pages of it.

`run` takes one measurement after the other, some hours in all, on a machine that does nothing else. What each command
printed is kept as it is, as JSON and as a picture, in `docs/reference/figures/`. `write` makes of these files, and of
nothing else, `docs/reference/figures.md` and the tables between two marks in `README.md` and
`docs/explanation/scale.md`; a test compares them.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from capacity import capacity
from figure_tables import (
    Json,
    bloat_table,
    burst_table,
    failover_table,
    generate_table,
    idle_table,
    rates_table,
    steady_table,
)
from headlines import headlines

from cron_ticks.cli.bench.machine import described

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "figures.md"
KEPT = PAGE.with_suffix("")
README = ROOT / "README.md"
SCALE = ROOT / "docs" / "explanation" / "scale.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

OPENING = """# Figures

Made by `benchmarks/publish.py` of what the commands printed; the JSON of each, with every round, is in
[figures/](figures/). [Benchmarks](../../benchmarks/README.md) says how each one measures. A cell has the median of the
rounds, and the lowest and the highest. Figures of one table were taken in turn in one run, so compare these; another
machine, or another hour, has others. To take all of them on yours, which is some hours of a machine that does nothing
else:

```sh
make figures
```
"""


@dataclass(frozen=True)
class Measured:
    """A command whose result is published."""

    name: str
    title: str
    said: str
    command: str
    tables: tuple[Callable[[Json], str], ...]

    @property
    def results(self) -> Path:
        """What it printed."""
        return KEPT / f"{self.name}.json"

    @property
    def picture(self) -> Path:
        """What it drew."""
        return KEPT / f"{self.name}.svg"

    def load(self) -> dict[str, Any]:
        """What it found."""
        found: dict[str, Any] = json.loads(self.results.read_text(encoding="utf-8"))
        return found

    def run(self) -> None:
        """Take it again; what was kept stays until it is done."""
        program, *arguments = shlex.split(self.command)
        start = ["-m", "cron_ticks.cli"] if program == "cron-ticks" else [str(ROOT / arguments.pop(0))]
        drawn = self.picture.with_suffix(".new.svg")
        command = [sys.executable, *start, *arguments, "--json", "--plot", str(drawn)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own
        self.results.write_text(json.dumps(json.loads(printed), indent=1) + "\n", encoding="utf-8")
        drawn.replace(self.picture)

    def section(self, found: Json) -> str:
        """Of the page."""
        tables = "\n\n".join(made(found) for made in self.tables)
        parts = (
            f"## {self.title}",
            self.said,
            f"```sh\n{self.command}\n```",
            tables,
            f"![{self.title}](figures/{self.name}.svg)",
            f"{described(found['machine'])}.\n",
        )
        return "\n\n".join(parts)


MEASURED = (
    Measured(
        "peers",
        "Many schedules fall due at once, beside other schedulers",
        "The rate is the number of schedules by the lateness of the last.",
        "python benchmarks/fire_peers.py --rounds 5",
        (burst_table,),
    ),
    Measured(
        "peers-100000",
        "100,000 schedules fall due at once, beside other schedulers",
        "Each is watched for a minute. Who has not fired all by then is shown with what it had fired: its rate, and "
        "the lateness of these alone.",
        "python benchmarks/fire_peers.py --burst 100000 --rounds 5",
        (burst_table,),
    ),
    Measured(
        "fire",
        "Firing, beside the bare statement",
        "A drain: ticks that are due already. A burst: ticks that fall due at the same instant.",
        "cron-ticks bench fire --rounds 5",
        (rates_table, burst_table),
    ),
    Measured(
        "queue",
        "The queue, beside other queues",
        "Messages a second, sent and consumed; a handler that does nothing.",
        "python benchmarks/queue_peers.py --rounds 5",
        (rates_table,),
    ),
    Measured(
        "steady",
        "100,000 schedules of one minute",
        "Two workers with the default settings; messages are made and not consumed.",
        "cron-ticks bench steady --schedules 100000 --minutes 2 --rounds 5",
        (steady_table,),
    ),
    Measured(
        "consumed",
        "100,000 schedules of one minute, and a consumer",
        "The same, and a third worker that consumes what is made.",
        "cron-ticks bench steady --schedules 100000 --minutes 2 --consume --rounds 5",
        (steady_table,),
    ),
    Measured(
        "million",
        "1,000,000 schedules of one minute",
        "Two workers with `CRON_TICKS_HORIZON_SECONDS=240`; [Scale](../explanation/scale.md) says what that does.",
        "cron-ticks bench steady --schedules 1000000 --minutes 2 --horizon 240 --rounds 5",
        (steady_table,),
    ),
    Measured(
        "generate",
        "Making ticks",
        "A pass should cost what is due, however many schedules there are.",
        "cron-ticks bench generate --rounds 5",
        (generate_table,),
    ),
    Measured(
        "idle",
        "A worker with nothing to do",
        "It should cost the same among few schedules and among very many.",
        "cron-ticks bench idle --rounds 5",
        (idle_table,),
    ),
    Measured(
        "failover",
        "One of two workers is killed",
        "By `kill -9`, under a load. Allowed: the poll of 100 ms and the run's p99; outside also the lease of 10 s.",
        "cron-ticks bench failover --rounds 5",
        (failover_table,),
    ),
    Measured(
        "bloat-ticks",
        "A long transaction elsewhere: ticks",
        "Nothing that is done with can be removed while it lasts. What was left is the speed in the end by that at the "
        "beginning, before which as many ticks have been fired and vacuumed. `none held` is the control: what is lost "
        "there too is not the snapshot's doing.",
        "cron-ticks bench bloat --count 1000000 --only ticks --rounds 5",
        (bloat_table,),
    ),
    Measured(
        "bloat-messages",
        "A long transaction elsewhere: messages",
        "The same for messages that are consumed, beside other queues. They are slower and have fewer; because what is "
        "left depends on how many are done with, our own runs with as many too.",
        'python benchmarks/bloat_peers.py --only "messages, 1" --rounds 5',
        (bloat_table,),
    ),
)


app = typer.Typer(add_completion=False, help=__doc__)
Names = Annotated[list[str] | None, typer.Argument(help="Which; default: all.", show_default=False)]


@app.command("run")
def run_those(names: Names = None) -> None:
    """Measure, one after the other, and keep what was printed."""
    known = {measured.name: measured for measured in MEASURED}
    if unknown := set(names or ()) - set(known):
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    KEPT.mkdir(exist_ok=True)
    for name in names or known:
        typer.echo(f"{name}: {known[name].command}", err=True)
        known[name].run()


@app.command("write")
def write_pages() -> None:
    """Make the pages of what is kept."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


@app.command("check")
def check_pages() -> None:
    """Whether the pages are those of what is kept."""
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            typer.echo(f"{path.name} is not what the kept figures say: python benchmarks/publish.py write", err=True)
            raise typer.Exit(1)


def pages() -> dict[Path, str]:
    """All that show figures, of what has been taken."""
    taken = [measured for measured in MEASURED if measured.results.exists()]
    found = {measured.name: measured.load() for measured in taken}
    return {
        PAGE: "\n".join([OPENING, *(measured.section(found[measured.name]) for measured in taken)]),
        README: _between_marks(README, headlines(found)),
        SCALE: _between_marks(SCALE, capacity(found["million"]) if "million" in found else ""),
    }


def _between_marks(path: Path, tables: str) -> str:
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    shown = f"\n{tables}\n\n" if tables else ""
    return f"{before}{BEGIN}\n{shown}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    app()
