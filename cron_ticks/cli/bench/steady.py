"""`bench steady`: very many schedules of one minute for some minutes, and what they need of the machine.

Real workers with the default settings make and fire the ticks. All that is said about ticks is from the rows of the
database: what should have happened is computed from the schedules and compared with the ledger and the messages.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from rich import box
from rich.table import Table

from cron_ticks.cli.bench.figures import of_rounds, spread, summary
from cron_ticks.cli.bench.load_apps import CONSUMING, FIRING, HANDLED
from cron_ticks.cli.bench.load_tables import LoadTables, Made
from cron_ticks.cli.bench.loads import (
    LEAST_WIDTH,
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
from cron_ticks.cli.bench.usage import MEGABYTE
from cron_ticks.errors import CronTicksError

MINUTE = timedelta(minutes=1)
WARM_UP_SECONDS = 2.0
DRAIN_SECONDS = 30.0  # that ticks of the measured time may need after its end
AUDITED_MOST = 200_000  # schedules that the product's own audit looks at beside ours: more would take many minutes
BISECTIONS = 2
STEP = 10_000  # schedules, between two loads that are tried

# A load is held if nothing was missed or left over, no less is fired than falls due, and ticks don't become later and
# later. Of messages, as many are consumed as are made, and each once.
TOLERATED_MS = 2000.0
TOLERATED_GROWTH_MS = 1000.0
LEAST_FIRED = 0.99  # of what falls due
LEAST_CONSUMED = 0.98  # of what was fired
CRITERION = (
    f"held: nothing missed or left over, at least {LEAST_FIRED:.0%} of the ticks a second that fall due, and p99 in "
    f"the last third at most {TOLERATED_MS / 1000:.0f} s, or {TOLERATED_GROWTH_MS / 1000:.0f} s more than in the first"
)
CONSUMED_CRITERION = (
    f"; at least {LEAST_CONSUMED:.0%} of what was fired consumed in that time, all in the end, and each message once"
)
CONSUMER = " and one more that also consumes, beside making and firing ticks as they do"
SHOWN = (
    ("per_second", "ticks a second", ",.0f"),
    ("due_per_second", "that fall due", ",.0f"),
    ("p50_ms", "lateness p50, ms", ",.1f"),
    ("p99_ms", "lateness p99, ms", ",.1f"),
    ("max_ms", "lateness max, ms", ",.1f"),
    ("missed", "missed", ",.0f"),
    ("left_over", "left over", ",.0f"),
    ("duplicates", "duplicates", ",.0f"),
    ("made_late", "made late", ",.0f"),
    ("consumed_per_second", "consumed a second", ",.0f"),
    ("backlog_start", "messages that waited at first", ",.0f"),
    ("backlog_end", "messages that waited at the end", ",.0f"),
    ("unconsumed", "not consumed after all", ",.0f"),
    ("handled_again", "handled more than once", ",.0f"),
    ("pods_cpu", "CPU of the pods, cores", ".2f"),
    ("server_cpu", "CPU of the server, cores", ".2f"),
    ("pod_mb_start", "memory of a pod at first, MB", ",.0f"),
    ("pod_mb_end", "memory of a pod in the end, MB", ",.0f"),
    ("wal_bytes_per_tick", "WAL per tick, bytes", ",.0f"),
    ("tables_mb", "tables and indexes, MB", ",.0f"),
    ("dead_rows", "dead rows", ",.0f"),
)


@dataclass(frozen=True)
class SteadyLoad:
    """How much, and for how long."""

    schedules: int
    seconds: float
    processes: int
    consume: bool
    jitter: float
    horizon: float | None = None  # of the managers; None: the default

    @property
    def apps(self) -> list[str]:
        """Workers without a handler, and one more with a handler if messages are to be consumed."""
        return [FIRING] * self.processes + [CONSUMING] * self.consume

    @property
    def settings(self) -> dict[str, str]:
        """Of the workers, beside the defaults."""
        return {} if self.horizon is None else {"horizon_seconds": str(self.horizon)}

    @property
    def per_second(self) -> float:
        """Ticks that fall due."""
        return self.schedules / MINUTE.total_seconds()

    @property
    def jitter_seconds(self) -> float:
        """By which an occurrence moves at the most."""
        return self.jitter * MINUTE.total_seconds()


@dataclass(frozen=True)
class Reading:
    """The gauges at one moment."""

    instant: datetime
    written_bytes: int
    server_cpu: float | None
    pods_cpu: float | None
    pods_mb: list[float]

    @classmethod
    async def take(cls, tables: LoadTables, running: Sequence[Pod]) -> "Reading":
        """Look at all of them."""
        used = [usage for pod in running if (usage := pod.usage()) is not None]
        cpu = sum(usage.cpu_seconds for usage in used) if len(used) == len(running) else None
        memory = [round(usage.memory_bytes / MEGABYTE, 1) for usage in used]
        server = await tables.server_cpu_seconds()
        return cls(await tables.now(), await tables.written_bytes(), server, cpu, memory)


async def measure(dsn: str, load: SteadyLoad, say: Progress) -> dict[str, Any]:
    """One load in a fresh database: what came out."""
    async with open_course(dsn, f"steady{load.schedules}") as course:
        tables = course.tables
        say("making schedules")
        start = after(await tables.now(), lead_seconds(load.schedules, load.per_second) + load.jitter_seconds)
        await tables.make_schedules(Made(load.schedules, [MINUTE], start, jitter=load.jitter))
        async with pods(load.apps, course.dsn, load.settings) as running:
            if await tables.now() > after(start, -load.jitter_seconds):
                raise CronTicksError("the schedules took too long to write: this machine is too busy, or too small")
            since = after(start, load.jitter_seconds + WARM_UP_SECONDS + (load.horizon or 0))
            until = after(since, load.seconds)
            await sleep_until(tables, since, say, "warming up")
            first = await Reading.take(tables, running)
            await sleep_until(tables, until, say, "measuring")
            last = await Reading.take(tables, running)
            end = after(until, load.jitter_seconds)
            await sleep_until(tables, end, say, "the last ticks")
            await drained(partial(tables.any_due, end), DRAIN_SECONDS)
            if load.consume:
                await drained(partial(tables.any_unconsumed, last.instant), DRAIN_SECONDS)
        say("reading the ledger")
        found = await _read(course, load, first, last)
        if load.consume:
            found |= await _consumption(tables, running[-1], first, last)
        return found | {"held": holds(found)}


async def _read(course: Course, load: SteadyLoad, first: Reading, last: Reading) -> dict[str, Any]:
    tables = course.tables
    since, until = first.instant, last.instant
    sizes = await tables.sizes()  # before anything is analysed
    outcomes = await tables.outcomes(since, until)
    await _check(course, load, outcomes, since, until)
    total, *thirds = await tables.lateness(since, until) or [{"ticks": 0}]
    seconds = (until - since).total_seconds()
    enqueued = await tables.enqueued(since, until)
    made = await tables.made(since, until)
    found = (
        outcomes
        | total
        | {
            "per_second": enqueued / seconds,
            "due_per_second": load.per_second,
            "seconds": round(seconds, 3),
            "thirds": thirds,
            "made_late": made["late"],
            "shortest_lead_s": made["lead_s"],
            "wal_bytes_per_tick": (last.written_bytes - first.written_bytes) / max(1, enqueued),
            "tables_mb": sum(size["table_bytes"] + size["index_bytes"] for size in sizes.values()) / MEGABYTE,
            "dead_rows": sum(size["dead_rows"] for size in sizes.values()),
            "sizes": sizes,
            "pods_mb": {"start": first.pods_mb, "end": last.pods_mb},
        }
    )
    return found | _used(first, last, seconds)


async def _consumption(tables: LoadTables, consumer: Pod, first: Reading, last: Reading) -> dict[str, Any]:
    """Of messages: how many a second, how many waited, and whether each was handled once.

    What the rows say is compared with what the handler has counted.
    """
    since, until = first.instant, last.instant
    rows = await tables.handled(until)
    counted = int(consumer.last_said[HANDLED]["count"])
    if counted < rows["completed"]:
        raise CronTicksError(f"{rows['completed']} messages are completed, but only {counted} were handled")
    return await tables.backlog(since, until) | {
        "consumed_per_second": await tables.consumed(since, until) / (until - since).total_seconds(),
        "unconsumed": rows["unconsumed"],
        "handled_again": max(rows["tried_again"], counted - rows["completed"]),
    }


async def _check(course: Course, load: SteadyLoad, outcomes: dict[str, int], since: datetime, until: datetime) -> None:
    """What the product promises holds under any load; an error if it doesn't."""
    check_expected(outcomes)
    if outcomes["unexplained"] or outcomes["messages"] != outcomes["enqueued"]:
        raise CronTicksError(f"not each occurrence has one message or a reason: {outcomes}")
    if load.schedules <= AUDITED_MOST:
        await check_audit(course, outcomes, since, until)


def _used(first: Reading, last: Reading, seconds: float) -> dict[str, float]:
    """Cores in use and memory, as far as they are known."""
    found: dict[str, float] = {}
    if first.pods_cpu is not None and last.pods_cpu is not None:
        found["pods_cpu"] = (last.pods_cpu - first.pods_cpu) / seconds
        found["pod_mb_start"], found["pod_mb_end"] = max(first.pods_mb), max(last.pods_mb)
    if first.server_cpu is not None and last.server_cpu is not None:
        found["server_cpu"] = (last.server_cpu - first.server_cpu) / seconds
    return found


def holds(found: dict[str, Any]) -> bool:
    """Whether the load was held: see CRITERION."""
    thirds = found["thirds"]
    if len(thirds) < 3 or found["missed"] or found["left_over"]:  # noqa: PLR2004
        return False
    if found["per_second"] < LEAST_FIRED * found["due_per_second"]:
        return False
    if "consumed_per_second" in found and not _is_consumed(found):
        return False
    return bool(thirds[-1]["p99_ms"] <= max(TOLERATED_MS, thirds[0]["p99_ms"] + TOLERATED_GROWTH_MS))


def _is_consumed(found: dict[str, Any]) -> bool:
    in_time = found["consumed_per_second"] >= LEAST_CONSUMED * found["per_second"]
    return in_time and not found["unconsumed"] and not found["handled_again"]


@dataclass(frozen=True)
class SteadyFigures:
    """What came out: by the number of schedules, a value per round."""

    found: dict[int, list[dict[str, Any]]]
    load: SteadyLoad
    server: dict[str, str]
    machine: dict[str, Any]

    @property
    def highest_held(self) -> int | None:
        """The largest number of schedules that was held in each round."""
        return max((count for count, rounds in self.found.items() if _held(rounds)), default=None)

    @property
    def criterion(self) -> str:
        """When a load is held."""
        return CRITERION + CONSUMED_CRITERION * self.load.consume

    def as_json(self) -> dict[str, Any]:
        """Each value of each round, with the median and the range."""
        return {
            "machine": self.machine,
            "server": self.server,
            "seconds": self.load.seconds,
            "processes": self.load.processes,
            "consume": self.load.consume,
            "workers": f"{self.load.processes} that make and fire ticks{CONSUMER if self.load.consume else ''}",
            "jitter": self.load.jitter,
            "horizon": self.load.horizon,
            "criterion": self.criterion,
            "highest_held": self.highest_held,
            "loads": {
                str(count): {
                    "held": _held(rounds),
                    "rounds": rounds,
                    **{name: summary(values) for name, values in _values(rounds).items()},
                }
                for count, rounds in self.found.items()
            },
        }

    def table(self) -> Table:
        """For people."""
        rounds = len(next(iter(self.found.values())))
        set_up = ", ".join(f"{name} {value}" for name, value in self.server.items()) or "as it was found"
        caption = (
            f"schedules of one minute for {self.load.seconds:.0f} s, {self.load.processes} worker processes"
            f"{CONSUMER if self.load.consume else ''}; {of_rounds(rounds)}; {self.criterion}; "
            f"{described(self.machine)}; server: {set_up}"
        )
        table = Table(title="cron-ticks bench steady", caption=caption, box=box.SIMPLE_HEAD, min_width=LEAST_WIDTH)
        table.add_column("schedules")
        for count in self.found:
            table.add_column(f"{count:,}", justify="right")
        columns = [_values(rounds) for rounds in self.found.values()]
        table.add_row("held", *("yes" if _held(rounds) else "no" for rounds in self.found.values()))
        for name, label, form in SHOWN:
            if any(name in column for column in columns):
                table.add_row(label, *(spread(column[name], form) if name in column else "" for column in columns))
        return table

    def plot(self) -> Plot:
        """Lateness by the number of schedules."""
        groups = {
            f"{count:,}": {name.removesuffix("_ms"): bar_of(values[name]) for name in ("p50_ms", "p99_ms", "max_ms")}
            for count, rounds in self.found.items()
            if "p50_ms" in (values := _values(rounds))
        }
        title = "Lateness with so many schedules of one minute"
        return Plot(title, "ms", groups, logarithmic=True, caption=described(self.machine))


def _held(rounds: Sequence[dict[str, Any]]) -> bool:
    return all(found["held"] for found in rounds)


def _values(rounds: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    return {name: [found[name] for found in rounds] for name, *_ in SHOWN if all(name in found for found in rounds)}


async def run_steady(
    dsn: str,
    *,
    loads: Sequence[SteadyLoad],
    rounds: int,
    find: bool,
    server: dict[str, str],
    progress: Steps,
) -> SteadyFigures:
    """Each load once per round, in another order each time.

    With `find` all rounds of a load after another: up to the first that isn't held, then between it and the one before.
    """
    found: dict[int, list[dict[str, Any]]] = {}

    async def run(load: SteadyLoad, number: int) -> None:
        say = within(progress, f"round {number + 1} of {rounds}: {load.schedules:,} schedules")
        found.setdefault(load.schedules, []).append(await measure(dsn, load, say))

    async def held(load: SteadyLoad) -> bool:
        for number in range(rounds):
            await run(load, number)
        return _held(found[load.schedules])

    if find:
        await _search(loads, held)
    else:
        progress.expect(rounds * len(loads))
        for number in range(rounds):
            for load in in_turn(loads, number):
                await run(load, number)
    machine = await describe_machine(dsn)
    return SteadyFigures(dict(sorted(found.items())), loads[0], server, machine)


async def _search(loads: Sequence[SteadyLoad], held: Callable[[SteadyLoad], Awaitable[bool]]) -> None:
    below = 0
    for load in loads:
        if not await held(load):
            await _bisect(load, below, held)
            return
        below = load.schedules


async def _bisect(load: SteadyLoad, below: int, held: Callable[[SteadyLoad], Awaitable[bool]]) -> None:
    """Try some loads between one that is held and one that isn't."""
    above = load.schedules
    for _ in range(BISECTIONS):
        between = (below + above) // 2 // STEP * STEP
        if not below < between < above:
            return
        if await held(replace(load, schedules=between)):
            below = between
        else:
            above = between
