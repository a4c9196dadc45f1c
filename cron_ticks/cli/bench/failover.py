"""`bench failover`: one of several workers is killed under a steady load. How late are ticks then, and is one lost?

For the queue in the same database no lease is involved: whoever is left fires what is due at its next look. Of an
outside sink, what the dead worker had in hand waits for the end of its lease. The shards for which its manager made
ticks are taken over when their lease ends; by then those who are left must go on with them, before a tick is late.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from rich import box
from rich.table import Table

from cron_ticks.cli.bench.failover_tables import (
    MAKE_DELIVERIES,
    Estate,
    Takeover,
    any_left,
    around,
    continued,
    deliveries,
    taken_over,
)
from cron_ticks.cli.bench.figures import of_rounds, spread, summary
from cron_ticks.cli.bench.load_apps import FIRING, OUTSIDE, OUTSIDE_SINK
from cron_ticks.cli.bench.load_tables import LoadTables, Made
from cron_ticks.cli.bench.loads import (
    LEAST_WIDTH,
    POLL_SECONDS,
    Course,
    Progress,
    after,
    check_audit,
    check_expected,
    drained,
    in_turn,
    lead_seconds,
    open_course,
    sleep_until,
)
from cron_ticks.cli.bench.machine import describe_machine, described
from cron_ticks.cli.bench.plot import Plot, bar_of
from cron_ticks.cli.bench.pods import Pod, pods
from cron_ticks.cli.bench.progress import Steps, within
from cron_ticks.errors import CronTicksError, InvalidInputError
from cron_ticks.settings import Settings
from token_queue.queue_repository import QUEUE_SINK

EVERY = [timedelta(seconds=number) for number in range(1, 6)]
WARM_UP_SECONDS = 3.0
DRAIN_SECONDS = 60.0
LEASE_SECONDS = float(Settings.model_fields["lease_seconds"].default)
SHOWN = (
    ("worst_ms", "latest tick after the kill, ms", ",.0f"),
    ("allowed_ms", "allowed, ms", ",.0f"),
    ("p50_ms", "lateness before it, p50, ms", ",.1f"),
    ("p99_ms", "lateness before it, p99, ms", ",.1f"),
    ("max_ms", "lateness before it, max, ms", ",.1f"),
    ("p99_after_ms", "lateness after it, p99, ms", ",.1f"),
    ("ticks", "ticks", ",.0f"),
    ("lost", "lost", ",.0f"),
    ("duplicates", "doubled", ",.0f"),
    ("recovered", "ticks taken over", ",.0f"),
    ("again", "delivered again", ",.0f"),
    ("made_late", "made late", ",.0f"),
    ("shortest_lead_s", "made ahead at the least, s", ",.1f"),
    ("taken_over_s", "its shards were taken over after, s", ",.1f"),
    ("dead_schedules", "schedules in them", ",.0f"),
    ("continued_ticks", "ticks made for these afterwards", ",.0f"),
)


@dataclass(frozen=True)
class Variant:
    """Where the ticks go."""

    name: str
    app: str
    sink: str
    delivery: str
    lease_seconds: float  # that a tick may have to wait for

    @property
    def is_outside(self) -> bool:
        """Whether it is beyond the database's transactions."""
        return self.sink == OUTSIDE_SINK


VARIANTS = (
    Variant("queue", FIRING, QUEUE_SINK.name, "exactly_once", 0.0),
    Variant("outside", OUTSIDE, OUTSIDE_SINK, "at_least_once", LEASE_SECONDS),
)


def variants_named(beginning: str) -> list[Variant]:
    """Those whose names begin so; an error if there is none."""
    chosen = [variant for variant in VARIANTS if variant.name.startswith(beginning)]
    if not chosen:
        names = ", ".join(variant.name for variant in VARIANTS)
        raise InvalidInputError("--only", f"no sink begins with {beginning!r}; there are: {names}")
    return chosen


@dataclass(frozen=True)
class FailoverLoad:
    """How much, and how long before and after the kill."""

    schedules: int
    processes: int
    before: float
    afterwards: float
    jitter: float
    # Of the managers. The default ones would make all ticks of the measured time before the kill.
    lookahead: float = 10.0
    manager_interval: float = 1.0
    shard_lease: float = 5.0

    def check(self) -> None:
        """An error if it would be over before the dead worker's shards are of any importance."""
        moved = max(self.shard_lease + self.manager_interval, EVERY[-1].total_seconds())
        least = self.lookahead + moved + self.jitter_seconds
        if self.afterwards < least:
            what = "when ticks made before the kill are used up and each schedule has had another one"
            raise InvalidInputError("--after", f"must be at least {least:g}, {what}")

    @property
    def settings(self) -> dict[str, str]:
        """Of the workers, beside the defaults."""
        return {
            "lookahead_seconds": f"{self.lookahead:g}",
            "manager_interval_seconds": f"{self.manager_interval:g}",
            "shard_lease_seconds": f"{self.shard_lease:g}",
        }

    @property
    def per_second(self) -> float:
        """Ticks."""
        return self.schedules / len(EVERY) * sum(1 / length.total_seconds() for length in EVERY)

    @property
    def jitter_seconds(self) -> float:
        """By which an occurrence moves at the most."""
        return self.jitter * EVERY[-1].total_seconds()


@dataclass(frozen=True)
class Times:
    """When it was measured, when the worker died and what became of its shards."""

    since: datetime
    until: datetime
    death: datetime
    estate: Estate
    takeover: Takeover


async def measure(dsn: str, variant: Variant, load: FailoverLoad, victim: int, say: Progress) -> dict[str, Any]:
    """One kill in a fresh database: what came out."""
    async with open_course(dsn, f"failover{variant.name}") as course:
        tables = course.tables
        if variant.is_outside:
            await tables.connection.execute(MAKE_DELIVERIES)
        say("making schedules")
        lead = lead_seconds(load.schedules, load.per_second, load.lookahead)
        start = after(await tables.now(), lead + load.jitter_seconds)
        made = Made(load.schedules, EVERY, start, None, load.jitter, variant.sink, variant.delivery)
        await tables.make_schedules(made)
        async with pods([variant.app] * load.processes, course.dsn, load.settings) as running:
            times = await _kill_one(tables, running[victim], start, load, say)
            end = after(times.until, load.jitter_seconds)
            await sleep_until(tables, end, say, "the last ticks")
            await drained(partial(any_left, tables, end), DRAIN_SECONDS)
        return await _read(course, variant, times)


async def _kill_one(tables: LoadTables, victim: Pod, start: datetime, load: FailoverLoad, say: Progress) -> Times:
    since = after(start, load.jitter_seconds + WARM_UP_SECONDS)
    await sleep_until(tables, since, say, "warming up")
    await sleep_until(tables, after(since, load.before), say, "before the kill")
    estate = await Estate.of(tables, victim.ticker_id)
    death = await tables.now()
    victim.kill()
    until = after(death, load.afterwards)
    say("after the kill, until its shards are taken over")
    takeover = await taken_over(tables, victim.ticker_id, death, until)
    await sleep_until(tables, until, say, "after the kill")
    return Times(since, until, death, estate, takeover)


async def _read(course: Course, variant: Variant, times: Times) -> dict[str, Any]:
    tables = course.tables
    outcomes = await tables.outcomes(times.since, times.until)
    arrived = await deliveries(tables) if variant.is_outside else {}
    if variant.is_outside:
        outcomes["messages"] = outcomes["enqueued"] - arrived["lost"]
    check_expected(outcomes)
    if arrived.get("again_unmarked") or not outcomes["expected"] == outcomes["enqueued"] == outcomes["messages"]:
        raise CronTicksError(
            f"not each occurrence has one message, or one that is marked as sent again: {outcomes} {arrived}"
        )
    await check_audit(course, outcomes, times.since, times.until)
    before, afterwards = await around(tables, times.since, times.until, times.death)
    late = (await tables.made(times.since, times.until))["late"]
    lead = (await tables.made(times.since, times.until, times.death))["lead_s"]
    allowed = (variant.lease_seconds + POLL_SECONDS) * 1000 + before["p99_ms"]
    return outcomes | {
        **{name: before[name] for name in ("p50_ms", "p99_ms", "max_ms", "workers")},
        "ticks": before["ticks"] + afterwards["ticks"],
        "p99_after_ms": afterwards["p99_ms"],
        "worst_ms": afterwards["max_ms"],
        "allowed_ms": round(allowed, 2),
        "met": afterwards["max_ms"] <= allowed and not late,
        "lost": outcomes["expected"] - outcomes["messages"],
        "recovered": before["recovered"] + afterwards["recovered"],
        "made_late": late,
        **({} if lead is None else {"shortest_lead_s": lead}),
        **({"again": arrived["again"]} if variant.is_outside else {}),
        **await _succession(tables, times),
    }


async def _succession(tables: LoadTables, times: Times) -> dict[str, Any]:
    """How the dead worker's schedules went on; an error if one of them didn't."""
    estate, takeover = times.estate, times.takeover
    found = await continued(tables, estate, times.since, times.until, takeover.later_than)
    if found["schedules"] != estate.schedules:
        raise CronTicksError(
            f"after the takeover ticks were made for {found['schedules']} of the {estate.schedules} schedules in the "
            "dead worker's shards"
        )
    return {
        "taken_over_s": round((takeover.seen_at - times.death).total_seconds(), 2),
        "dead_shards": len(estate.own),
        "dead_schedules": estate.schedules,
        "continued_ticks": found["ticks"],
        "continued_late": found["late"],
        "continued_lead_s": found["lead_s"],
    }


@dataclass(frozen=True)
class FailoverFigures:
    """What came out, by variant, a value per round."""

    found: dict[str, list[dict[str, Any]]]
    load: FailoverLoad
    server: dict[str, str]
    machine: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Each value, with the median and the range."""
        return {
            "machine": self.machine,
            "server": self.server,
            "schedules": self.load.schedules,
            "per_second": round(self.load.per_second, 1),
            "processes": self.load.processes,
            "seconds_before": self.load.before,
            "seconds_after": self.load.afterwards,
            "poll_ms": POLL_SECONDS * 1000,
            "lease_ms": LEASE_SECONDS * 1000,
            "settings": self.load.settings,
            "variants": {
                name: {
                    "met": all(found["met"] for found in rounds),
                    "rounds": rounds,
                    **{value: summary(values) for value, values in _values(rounds).items()},
                }
                for name, rounds in self.found.items()
            },
        }

    def table(self) -> Table:
        """For people."""
        rounds = len(next(iter(self.found.values())))
        caption = (
            f"one of {self.load.processes} workers killed under {self.load.per_second:,.0f} ticks a second, watched "
            f"for {self.load.afterwards:g} s; {of_rounds(rounds)}; allowed: poll ({POLL_SECONDS * 1000:.0f} ms) and "
            f"the run's own p99 before the kill, outside also the lease ({LEASE_SECONDS:.0f} s); managers with a "
            f"lookahead of {self.load.lookahead:g} s, an interval of {self.load.manager_interval:g} s and a shard "
            f"lease of {self.load.shard_lease:g} s, else the default settings; {described(self.machine)}"
        )
        table = Table(title="cron-ticks bench failover", caption=caption, box=box.SIMPLE_HEAD, min_width=LEAST_WIDTH)
        table.add_column("sink")
        for name in self.found:
            table.add_column(name, justify="right")
        met = [[found["met"] for found in rounds] for rounds in self.found.values()]
        table.add_row("rounds: none later, none made late", *(f"{sum(each)} of {len(each)}" for each in met))
        columns = [_values(rounds) for rounds in self.found.values()]
        for name, label, form in SHOWN:
            if any(name in column for column in columns):
                table.add_row(label, *(spread(column[name], form) if name in column else "" for column in columns))
        return table

    def plot(self) -> Plot:
        """The latest tick beside what is allowed."""
        names = {"worst_ms": "latest after the kill", "allowed_ms": "allowed", "max_ms": "latest before it"}
        groups = {
            name: {label: bar_of(_values(rounds)[value]) for value, label in names.items()}
            for name, rounds in self.found.items()
        }
        title = f"One of {self.load.processes} workers is killed: how late is a tick?"
        return Plot(title, "ms", groups, logarithmic=True, caption=described(self.machine))


def _values(rounds: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    return {name: [found[name] for found in rounds] for name, *_ in SHOWN if all(name in found for found in rounds)}


async def run_failover(
    dsn: str,
    *,
    load: FailoverLoad,
    variants: Sequence[Variant],
    rounds: int,
    server: dict[str, str],
    progress: Steps,
) -> FailoverFigures:
    """Each variant once per round; another worker dies each time."""
    found: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    progress.expect(rounds * len(variants))
    for number in range(rounds):
        for variant in in_turn(variants, number):
            label = f"round {number + 1} of {rounds}: {variant.name}"
            say = within(progress, label)
            results = await measure(dsn, variant, load, number % load.processes, say)
            found[variant.name].append(results)
    return FailoverFigures(found, load, server, await describe_machine(dsn))
