"""`bench bloat`: how much of its speed the queue, and the firing, keep while another session holds an old snapshot.

As long as it does, nothing that is done with can be removed. The same is measured without it, as a control.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import cron_ticks
from cron_ticks.cli.bench.bloat_figures import BloatFigures, Drain
from cron_ticks.cli.bench.bloat_messages import consume_in_slices
from cron_ticks.cli.bench.bloat_ticks import fire_in_slices
from cron_ticks.cli.bench.machine import describe_machine, fresh_database
from cron_ticks.cli.bench.progress import Steps
from cron_ticks.cli.bench.rounds import OWN_CONTENDERS, Contender, Course

HELD, FREE = "old snapshot held", "none held"
OURS = OWN_CONTENDERS[:1]


@dataclass(frozen=True)
class BloatLoad:
    """How much to measure."""

    count: int
    slices: int


@dataclass(frozen=True)
class BloatMeasure:
    """What is measured once per round, with the snapshot and without it."""

    name: str
    processes: int
    of_ticks: bool = False


MEASURES = (
    BloatMeasure("messages, 1 process", 1),
    BloatMeasure("messages, 2 processes", 2),
    BloatMeasure("ticks, 1 process", 1, of_ticks=True),
    BloatMeasure("ticks, 2 processes", 2, of_ticks=True),
)


@dataclass(frozen=True)
class Trial:
    """A contender with or without the snapshot."""

    name: str
    run: Callable[[], Awaitable[Drain]]


async def run_bloat_rounds(
    dsn: str,
    *,
    measures: Sequence[BloatMeasure],
    load: BloatLoad,
    rounds: int,
    progress: Steps,
    contenders: Sequence[Contender] = OURS,
) -> BloatFigures:
    """Every measure once per round, each contender with the snapshot and without it, in another order each time."""
    versions = {contender.name: cron_ticks.__version__ for contender in contenders}
    drains: dict[str, dict[str, list[Drain]]] = {measure.name: {} for measure in measures}
    async with AsyncExitStack() as stack:
        courses = [await stack.enter_async_context(_course(dsn, contender)) for contender in contenders]
        for course in courses:
            versions[course.contender.name] = (await course.ask("setup"))["version"]
        trials = {measure.name: _trials(measure, courses, load) for measure in measures}
        progress.expect(rounds * sum(map(len, trials.values())))
        for number in range(rounds):
            for measure in measures:
                chosen = trials[measure.name]
                for trial in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:
                    progress(f"round {number + 1} of {rounds}: {measure.name}: {trial.name}")
                    drains[measure.name].setdefault(trial.name, []).append(await trial.run())
        machine = await describe_machine(dsn)
    return BloatFigures(drains, versions, machine, load.count, load.slices, rounds)


def _trials(measure: BloatMeasure, courses: Sequence[Course], load: BloatLoad) -> list[Trial]:
    """Of ticks there is our own alone."""
    chosen = courses[:1] if measure.of_ticks else courses
    return [
        Trial(f"{course.contender.name}, {name}", partial(_run, measure, course, load, held=held))
        for course in chosen
        for name, held in ((HELD, True), (FREE, False))
    ]


async def _run(measure: BloatMeasure, course: Course, load: BloatLoad, *, held: bool) -> Drain:
    count = max(load.slices, round(load.count * course.contender.share))
    if measure.of_ticks:
        return await fire_in_slices(course.dsn, count, measure.processes, load.slices, held=held)
    return await consume_in_slices(course, count, measure.processes, load.slices, held=held)


@asynccontextmanager
async def _course(dsn: str, contender: Contender) -> AsyncIterator[Course]:
    async with fresh_database(dsn, f"bloat {contender.name}") as own:
        yield Course(contender, own)
