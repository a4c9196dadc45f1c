"""`cron-ticks bench`: how fast it is here, beside the same SQL without Python around it."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import typer

from cron_ticks.cli.bench import audit, bloat, calendar, fire, load_commands
from cron_ticks.cli.bench.progress import shown_steps
from cron_ticks.cli.bench.rounds import LEVEL_CONTENDERS, MEASURES, OTHER_LEVELS, OWN_CONTENDERS, Contender, run_rounds
from cron_ticks.cli.bench.showing import BenchDsn, PlotFile, Rounds, Shown, check_plot_file, on_server, show_results
from cron_ticks.cli.common import Json, load_settings, reported_errors, run
from cron_ticks.errors import InvalidInputError

bench_app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
load_commands.register(bench_app)

Messages = Annotated[int, typer.Option(help="Messages per measure; a tenth of them one by one.", min=100)]
Ticks = Annotated[int, typer.Option(help="Due ticks per drain.", min=2000, max=100_000)]
PerSecond = Annotated[int, typer.Option(help="Ticks a second of the steady load.", min=10, max=10_000)]
SteadySeconds = Annotated[float, typer.Option(help="How long the steady load is measured.", min=1, max=3600)]
Bursts = Annotated[
    list[int] | None,
    typer.Option(
        "--burst",
        help="Schedules that fall due at the same instant; may be repeated. Default: 1000, 10000 and 100000.",
        min=100,
        max=100_000,
        show_default=False,
    ),
]
Schedules = Annotated[int, typer.Option(help="Schedules of each kind.", min=300, max=1_000_000)]
Audited = Annotated[int, typer.Option("--schedules", help="Schedules.", min=300, max=1_000_000)]
Hours = Annotated[int, typer.Option(help="Hours of the ledger; one of them is audited.", min=1, max=24)]
Only = Annotated[str, typer.Option(help="Only measures whose name begins so.", show_default=False)]
Events = Annotated[bool, typer.Option("--events", help="Also with the other levels of events, to see what they cost.")]


@bench_app.callback()
def bench() -> None:
    """Measure on this machine."""


@bench_app.command("queue")
def bench_queue(  # noqa: PLR0917 - typer's way of declaring options
    messages: Messages = 20_000,
    rounds: Rounds = 5,
    only: Only = "",
    events: Events = False,
    dsn: BenchDsn = None,
    as_json: Json = False,
    plot: PlotFile = None,
) -> None:
    """Sending and consuming: the queue beside the bare SQL, in turn, on one server."""
    contenders = OWN_CONTENDERS + LEVEL_CONTENDERS if events else OWN_CONTENDERS
    show_queue_figures(contenders, messages, rounds, dsn, only=only, as_json=as_json, plot=plot)


@bench_app.command("fire")
def bench_fire(  # noqa: PLR0917 - typer's way of declaring options
    ticks: Ticks = 20_000,
    burst: Bursts = None,
    per_second: PerSecond = 1000,
    seconds: SteadySeconds = 20,
    rounds: Rounds = 5,
    only: Only = "",
    events: Events = False,
    dsn: BenchDsn = None,
    as_json: Json = False,
    plot: PlotFile = None,
) -> None:
    """Firing: due ticks into messages, beside the bare statement in turn; bursts; lateness under a steady load."""
    load = fire.Load(ticks, per_second, seconds, burst or fire.BURST_SIZES)
    levels = OTHER_LEVELS if events else {}
    measure = partial(fire.run_fire_rounds, load=load, rounds=rounds, levels=levels)
    _show_figures(measure, fire.measures_of(load), dsn, only=only, as_json=as_json, plot=plot)


@bench_app.command("calendar")
def bench_calendar(  # noqa: PLR0917 - typer's way of declaring options
    schedules: Schedules = 100_000,
    rounds: Rounds = 5,
    only: Only = "",
    dsn: BenchDsn = None,
    as_json: Json = False,
    plot: PlotFile = None,
) -> None:
    """Planning: schedules with cron expressions beside as many with intervals, in turn."""
    measure = partial(calendar.run_calendar_rounds, schedules=schedules, rounds=rounds)
    _show_figures(measure, calendar.MEASURES, dsn, only=only, as_json=as_json, plot=plot)


@bench_app.command("audit")
def bench_audit(  # noqa: PLR0917 - typer's way of declaring options
    schedules: Audited = 100_000,
    hours: Hours = 1,
    rounds: Rounds = 5,
    only: Only = "",
    dsn: BenchDsn = None,
    as_json: Json = False,
    plot: PlotFile = None,
) -> None:
    """Auditing: an hour of many schedules, what it reads, and that it names what was removed by hand."""
    load = audit.AuditLoad(schedules, hours)
    measure = partial(audit.run_audit_rounds, load=load, rounds=rounds)
    _show_figures(measure, audit.MEASURES, dsn, only=only, as_json=as_json, plot=plot)


BloatCount = Annotated[int, typer.Option("--count", help="Messages, and ticks, of a drain.", min=1000, max=10_000_000)]
Slices = Annotated[int, typer.Option(help="Slices of a drain; the last are compared with the first.", min=6, max=100)]


@bench_app.command("bloat")
def bench_bloat(  # noqa: PLR0917 - typer's way of declaring options
    count: BloatCount = 200_000,
    slices: Slices = 20,
    rounds: Rounds = 1,
    only: Only = "",
    dsn: BenchDsn = None,
    as_json: Json = False,
    plot: PlotFile = None,
) -> None:
    """Bloat: what is left of the speed when another session has held an old snapshot for long."""
    show_bloat_figures(bloat.OURS, count, slices, rounds, dsn, only=only, as_json=as_json, plot=plot)


def show_bloat_figures(
    contenders: tuple[Contender, ...],
    count: int,
    slices: int,
    rounds: int,
    dsn: str | None,
    *,
    only: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Run the rounds and print what came out."""
    load = bloat.BloatLoad(count, slices)
    measure = partial(bloat.run_bloat_rounds, contenders=contenders, load=load, rounds=rounds)
    _show_figures(measure, bloat.MEASURES, dsn, only=only, as_json=as_json, plot=plot)


def show_queue_figures(
    contenders: tuple[Contender, ...],
    messages: int,
    rounds: int,
    dsn: str | None,
    *,
    only: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Run the rounds and print what came out."""
    measure = partial(run_rounds, contenders=contenders, messages=messages, rounds=rounds)
    _show_figures(measure, MEASURES, dsn, only=only, as_json=as_json, plot=plot)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def _show_figures(
    measure: Callable[..., Awaitable[Shown]],
    known: Sequence[_Named],
    dsn: str | None,
    *,
    only: str,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Run measures, all or those chosen by `only`, and show what came out."""
    with reported_errors(), shown_steps() as steps:
        settings = load_settings(dsn)
        check_plot_file(plot)
        measures = [measure for measure in known if measure.name.startswith(only)]
        if not measures:
            names = ", ".join(measure.name for measure in known)
            raise InvalidInputError("--only", f"no measure begins with {only!r}; there are: {names}")
        figures = run(on_server, settings, dsn, partial(measure, measures=measures, progress=steps))
    show_results(figures, as_json=as_json, plot=plot)
