"""The commands of `cron-ticks bench` that put a load on real workers and look at what becomes of it."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cron_ticks.cli.bench import failover, generate, idle, steady
from cron_ticks.cli.bench.loads import parse_sizes
from cron_ticks.cli.bench.machine import server_settings
from cron_ticks.cli.bench.progress import shown_steps
from cron_ticks.cli.bench.showing import BenchDsn, PlotFile, Rounds, Shown, check_plot_file, on_server, show_results
from cron_ticks.cli.common import Json, load_settings, reported_errors, run
from cron_ticks.schedules import DEFAULT_JITTER_RATIO

MOST = 5_000_000

Sizes = Annotated[str, typer.Option("--schedules", help="Schedules; several numbers with commas between them.")]
Processes = Annotated[int, typer.Option(help="Worker processes.", min=1, max=64)]
Jitter = Annotated[float, typer.Option(help="Jitter, as a share of the interval.", min=0, max=0.5)]
Minutes = Annotated[float, typer.Option(help="How long it is measured.", min=0.05, max=1440)]
Consume = Annotated[bool, typer.Option("--consume", help="One more worker, which consumes the messages.")]
Horizon = Annotated[
    float | None,
    typer.Option(help="CRON_TICKS_HORIZON_SECONDS of the workers; default: the lookahead.", min=60, show_default=False),
]
Find = Annotated[bool, typer.Option("--find", help="Stop at the first load that isn't held, and look for the highest.")]

Due = Annotated[int, typer.Option(help="Schedules due at each pass.", min=1, max=1_000_000)]
Ticks = Annotated[
    int, typer.Option(help="Schedules that all need a tick, for the rate; 0: leave it out.", min=0, max=1_000_000)
]
IdleSeconds = Annotated[float, typer.Option(help="How long a worker is watched.", min=1, max=3600)]
Failing = Annotated[int, typer.Option("--schedules", help="Schedules of one to five seconds.", min=5, max=100_000)]
SeveralProcesses = Annotated[
    int, typer.Option("--processes", help="Worker processes, of which one dies.", min=2, max=64)
]
Before = Annotated[float, typer.Option(help="Seconds that are measured before the kill.", min=1, max=3600)]
Afterwards = Annotated[
    float, typer.Option("--after", help="Seconds after the kill: the shards must have moved by then.", min=1, max=3600)
]
OnlySink = Annotated[str, typer.Option("--only", help="Only sinks whose name begins so.", show_default=False)]
CronShare = Annotated[float, typer.Option(help="Share of those due that have cron expressions.", min=0, max=1)]


def register(bench_app: typer.Typer) -> None:
    """Make them commands of the application."""
    bench_app.command("steady")(bench_steady)
    bench_app.command("generate")(bench_generate)
    bench_app.command("idle")(bench_idle)
    bench_app.command("failover")(bench_failover)


def bench_steady(  # noqa: PLR0917 - typer's way of declaring options
    schedules: Sizes = "100000",
    minutes: Minutes = 3,
    processes: Processes = 2,
    consume: Consume = False,
    find: Find = False,
    jitter: Jitter = DEFAULT_JITTER_RATIO,
    horizon: Horizon = None,
    rounds: Rounds = 1,
    plot: PlotFile = None,
    dsn: BenchDsn = None,
    as_json: Json = False,
) -> None:
    """A steady load: schedules of one minute for some minutes: lateness, what was missed, and what it costs."""
    with reported_errors():
        sizes = parse_sizes("--schedules", schedules, least=60, most=MOST)
    loads = [steady.SteadyLoad(size, minutes * 60, processes, consume, jitter, horizon) for size in sizes]
    _show(partial(steady.run_steady, loads=loads, rounds=rounds, find=find), dsn, plot, as_json=as_json)


def bench_generate(  # noqa: PLR0917 - typer's way of declaring options
    schedules: Sizes = "10000,100000,1000000",
    due: Due = 5000,
    ticks: Ticks = 100_000,
    cron_share: CronShare = 0.5,
    rounds: Rounds = 5,
    plot: PlotFile = None,
    dsn: BenchDsn = None,
    as_json: Json = False,
) -> None:
    """Making ticks: how many a second, and how long a pass takes with the same number due among ever more schedules."""
    with reported_errors():
        sizes = parse_sizes("--schedules", schedules, least=due, most=MOST)
    load = generate.GenerateLoad(sizes, due, ticks, cron_share)
    _show(partial(generate.run_generate, load=load, rounds=rounds), dsn, plot, as_json=as_json)


def bench_idle(  # noqa: PLR0917 - typer's way of declaring options
    schedules: Sizes = "1000,1000000",
    seconds: IdleSeconds = 60,
    rounds: Rounds = 5,
    plot: PlotFile = None,
    dsn: BenchDsn = None,
    as_json: Json = False,
) -> None:
    """A worker with nothing to do: statements, CPU and memory among few and among very many schedules."""
    with reported_errors():
        sizes = parse_sizes("--schedules", schedules, least=1, most=MOST)
    _show(partial(idle.run_idle, sizes=sizes, seconds=seconds, rounds=rounds), dsn, plot, as_json=as_json)


def bench_failover(  # noqa: PLR0917 - typer's way of declaring options
    schedules: Failing = 2000,
    processes: SeveralProcesses = 2,
    before: Before = 10,
    afterwards: Afterwards = 20,
    jitter: Jitter = DEFAULT_JITTER_RATIO,
    rounds: Rounds = 5,
    only: OnlySink = "",
    plot: PlotFile = None,
    dsn: BenchDsn = None,
    as_json: Json = False,
) -> None:
    """One of several workers is killed under a load: how late ticks are then, and that none is lost or doubled."""
    load = failover.FailoverLoad(schedules, processes, before, afterwards, jitter)
    with reported_errors():
        load.check()
        variants = failover.variants_named(only)
    _show(partial(failover.run_failover, load=load, variants=variants, rounds=rounds), dsn, plot, as_json=as_json)


def _show(measure: Callable[..., Awaitable[Shown]], dsn: str | None, plot: Path | None, *, as_json: bool) -> None:
    with reported_errors(), shown_steps() as steps:
        settings = load_settings(dsn)
        check_plot_file(plot)
        server = server_settings() if dsn is None else {}
        figures = run(on_server, settings, dsn, partial(measure, server=server, progress=steps))
    show_results(figures, as_json=as_json, plot=plot)
