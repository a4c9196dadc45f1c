"""Sinks and overlap in real processes: killed and stopped inside a publish, beside a sink that hangs, many at once."""

import asyncio
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from cron_ticks import LeasedTick, TableSink
from cron_ticks.schedules import Schedule
from cron_ticks.settings import Settings
from support import recorder
from support.crowd import Occurrence, after, count, expected_of, stop, until_end
from support.processes import TESTS, Processes, RunningProcess
from support.recorder import Delivery
from support.watching import watching
from token_queue import QueueManager

LEASE_SECONDS = 3.0
LONGER_THAN_A_LEASE = 4.0
LEASE = {"lease_seconds": str(LEASE_SECONDS), "lease_renewal_seconds": "1"}
# All schedules live longer than this window, so most of their ticks are made by managers, and not by schedule() itself.
WINDOW = {"lookahead_seconds": "3", "manager_interval_seconds": "0.5"}
RETRIES = {"tick_max_attempts": "20", "tick_backoff_seconds": "0.2"}
CLEANUP = {"cleanup_interval_seconds": "1", "cleanup_threshold_seconds": "1"}
SETTINGS = {**LEASE, **WINDOW, **RETRIES, **CLEANUP}
DECLARED_AT_ONCE = 20


@dataclass(frozen=True)
class Scale:
    """How much there is to do."""

    processes: int
    schedules: int
    seconds: int  # from the first declaration to the end of all schedules

    @property
    def is_full(self) -> bool:
        return self.seconds == 60


async def elsewhere(_ticks: Sequence[LeasedTick]) -> None:
    """What a process that only declares schedules knows of a sink."""
    raise NotImplementedError


def declaring(dsn: str) -> QueueManager:
    manager = QueueManager(settings=Settings.load(dsn=dsn, log_level="warning", **WINDOW))
    manager.add_sink("outside", elsewhere)
    manager.add_sink("hangs", elsewhere)
    manager.add_sink("table", TableSink("jobs", {"id": "message_id"}))
    return manager


async def declare(dsn: str, definitions: Sequence[Mapping[str, Any]]) -> list[Schedule]:
    """These schedules, some at once."""
    schedules: list[Schedule] = []
    async with declaring(dsn) as manager:
        for first in range(0, len(definitions), DECLARED_AT_ONCE):
            some = definitions[first : first + DECLARED_AT_ONCE]
            schedules += await asyncio.gather(*(manager.schedule("queue", **definition) for definition in some))
    return schedules


async def drain(dsn: str, ends_at: datetime, connection: Any) -> None:
    """Wait until nothing is left to make, to send or to handle. Watched from the end on: watching costs time."""
    await anyio.sleep(await until_end(ends_at, connection))
    async with watching(dsn, "cron_ticks", "cron_schedule_cursors", "queue_messages") as watch:
        await watch.until(
            """SELECT NOT EXISTS (SELECT FROM cron_ticks)
            AND NOT EXISTS (SELECT FROM cron_schedule_cursors WHERE next_tick_needed_at IS NOT NULL)
            AND NOT EXISTS (SELECT FROM queue_messages WHERE completed_at IS NULL)"""
        )


async def runs_of(schedules: Sequence[Schedule], connection: Any) -> dict[Occurrence, Any]:
    """What the ledger says of each occurrence: one row, as its key has it."""
    rows = await connection.fetch(
        "SELECT * FROM cron_runs WHERE schedule_id = ANY ($1::text[])", [schedule.id for schedule in schedules]
    )
    runs = {(row["schedule_id"], row["scheduled_for"]): row for row in rows}
    assert len(runs) == len(rows)
    return runs


def outcomes(runs: Mapping[Occurrence, Any]) -> Counter[str]:
    return Counter(run["outcome"] for run in runs.values())


@dataclass
class Outside:
    """A recorder in a process of its own, and workers that know where it is."""

    processes: Processes
    dsn: str
    file: Path
    server: RunningProcess
    port: str

    async def worker(self, app: str, **settings: str) -> RunningProcess:
        """`cron-ticks worker` with an application of `support.sink_apps`, once it has started."""
        variables = {f"CRON_TICKS_{name.upper()}": value for name, value in settings.items()}
        environment = {"CRON_TICKS_DSN": self.dsn, "PYTHONPATH": str(TESTS), "RECORDER_PORT": self.port, **variables}
        worker = await self.processes.cron_ticks("worker", "--app", f"support.sink_apps:{app}", environment=environment)
        await worker.wait_for("worker_started")
        return worker

    async def recorded(self) -> list[Delivery]:
        """All deliveries, when nobody is left who sends."""
        self.server.close_input()
        assert await self.server.wait() == 0
        return recorder.read(self.file)


@pytest.fixture
async def outside(dsn: str, processes: Processes, tmp_path: Path) -> Outside:
    file = tmp_path / "deliveries"
    command = (sys.executable, "-m", "support.recorder", str(file))
    server = await processes.start(*command, environment={"PYTHONPATH": str(TESTS)})
    return Outside(processes, dsn, file, server, await server.first_output_line())


@dataclass(frozen=True)
class Disturbance:
    """What happened to a process, by the machine's monotonic clock."""

    pid: int
    begin: float
    end: float

    def explains(self, delivery: Delivery) -> bool:
        """Whether it can have kept the sender from saying that it had delivered."""
        return self.pid == delivery.sender and self.begin - LEASE_SECONDS < delivery.at < self.end + LEASE_SECONDS


@dataclass
class Crew:
    """Workers to whom things happen."""

    outside: Outside
    everybody: list[RunningProcess] = field(default_factory=list)
    at_work: list[RunningProcess] = field(default_factory=list)
    killed: list[Disturbance] = field(default_factory=list)
    stopped: list[Disturbance] = field(default_factory=list)

    async def hire(self) -> None:
        worker = await self.outside.worker("recording", **SETTINGS)
        self.everybody.append(worker)
        self.at_work.append(worker)

    async def kill(self, victim: RunningProcess) -> None:
        """And replace it."""
        self.at_work.remove(victim)
        begin = time.monotonic()
        await victim.kill()
        self.killed.append(Disturbance(victim.pid, begin, time.monotonic()))
        await self.hire()

    async def hold_up(self, victim: RunningProcess) -> None:
        """For longer than a lease."""
        self.at_work.remove(victim)
        begin = time.monotonic()
        victim.send(signal.SIGSTOP)
        await anyio.sleep(LONGER_THAN_A_LEASE)
        victim.send(signal.SIGCONT)
        self.stopped.append(Disturbance(victim.pid, begin, time.monotonic()))
        self.at_work.append(victim)

    async def disturb(self, chance: random.Random, ends_at: datetime, connection: Any) -> None:
        """Each second one of the two to somebody, both equally often, until the schedules end."""
        turns = [self.kill, self.hold_up]
        async with anyio.create_task_group() as tasks:
            while await until_end(ends_at, connection) > 0:
                chance.shuffle(turns)
                for happen in turns:
                    if self.at_work:
                        tasks.start_soon(happen, chance.choice(self.at_work))
                    await anyio.sleep(1)

    @property
    def disturbances(self) -> list[Disturbance]:
        return self.killed + self.stopped


@dataclass(frozen=True)
class Findings:
    """What came of the schedules with one guarantee."""

    expected: set[Occurrence]
    runs: dict[Occurrence, Any]
    deliveries: dict[Occurrence, list[Delivery]]  # each in the order of its attempts

    @property
    def repeated(self) -> list[list[Delivery]]:
        return [deliveries for deliveries in self.deliveries.values() if len(deliveries) > 1]

    @property
    def recovered(self) -> int:
        return sum(run["recovered"] for run in self.runs.values())

    @property
    def late(self) -> list[list[Delivery]]:
        """Those that a process which had been stopped delivered after its successor."""
        return [deliveries for deliveries in self.repeated if deliveries != sorted(deliveries, key=lambda it: it.at)]

    @property
    def unknown(self) -> set[Occurrence]:
        """Those of which the ledger can't say that they have arrived."""
        return {occurrence for occurrence, run in self.runs.items() if run["outcome"] != "enqueued"}

    def summary(self) -> str:
        found = ", ".join(f"{times} {outcome}" for outcome, times in sorted(outcomes(self.runs).items()))
        arrived = len(self.unknown & self.deliveries.keys())
        return (
            f"{len(self.expected)} occurrences, {found} ({arrived} of {len(self.unknown)} not enqueued have arrived); "
            f"{self.recovered} recovered, {len(self.repeated)} delivered more than once, {len(self.late)} of them late"
        )


async def findings(schedules: Sequence[Schedule], delivered: Sequence[Delivery], connection: Any) -> Findings:
    """Of some schedules; a message id belongs to one occurrence."""
    ids = {schedule.id for schedule in schedules}
    deliveries: dict[Occurrence, list[Delivery]] = defaultdict(list)
    for delivery in delivered:
        if delivery.schedule_id in ids:
            deliveries[delivery.schedule_id, delivery.scheduled_for].append(delivery)
    for found in deliveries.values():
        assert len({delivery.message_id for delivery in found}) == 1
        found.sort(key=lambda delivery: delivery.attempt)
    found_runs = await runs_of(schedules, connection)
    result = Findings(expected_of(schedules), found_runs, dict(deliveries))
    assert result.runs.keys() == result.expected  # each has its row, and nothing else has
    assert result.deliveries.keys() <= result.expected
    for occurrence, run in result.runs.items():
        if run["outcome"] == "enqueued":
            assert run["message_id"] == result.deliveries[occurrence][-1].message_id
            assert run["attempts"] == result.deliveries[occurrence][-1].attempt
        else:
            assert run["reason"]
    return result


def assert_at_least_once(found: Findings, disturbances: Sequence[Disturbance]) -> None:
    """None is missing; repeats only where a process died or stalled, and marked."""
    assert outcomes(found.runs).keys() == {"enqueued"}
    assert found.deliveries.keys() == found.expected
    for deliveries in found.repeated:
        assert found.runs[deliveries[0].schedule_id, deliveries[0].scheduled_for]["recovered"]
        attempts = [delivery.attempt for delivery in deliveries]
        assert len(set(attempts)) == len(attempts)
        assert all(delivery.recovery for delivery in deliveries[1:])
        for delivery in deliveries[:-1]:
            assert any(disturbance.explains(delivery) for disturbance in disturbances), delivery


def assert_at_most_once(found: Findings) -> None:
    """Never a repeat, and every loss recorded: what is enqueued has arrived, of the others that is unknown."""
    assert found.repeated == []
    assert outcomes(found.runs).keys() <= {"enqueued", "expired", "failed"}
    missing = found.expected - found.deliveries.keys()
    assert all(found.runs[occurrence]["outcome"] in {"expired", "failed"} for occurrence in missing)
    assert all(not delivery.recovery for [delivery] in found.deliveries.values())


async def declare_outside(dsn: str, scale: Scale, ends_at: datetime) -> tuple[list[Schedule], list[Schedule]]:
    """Schedules of 1 to 3 s that end together, every other one at least once and at most once."""
    schedules = await declare(
        dsn,
        [
            {
                "name": f"schedule {number}",
                "every": 1 + 2 * number / scale.schedules,
                "ends_at": ends_at,
                "sink": "outside",
                "delivery": ("at_least_once", "at_most_once")[number % 2],
            }
            for number in range(scale.schedules)
        ],
    )
    assert all(schedule.anchor_at == schedule.created_at < ends_at for schedule in schedules)
    return schedules[::2], schedules[1::2]


@pytest.fixture
def scale(size: int) -> Scale:
    return Scale(10, size, 60) if size == 300 else Scale(4, size, 6)


@pytest.mark.soak(small=40, full=300)
async def test_while_nothing_happens_an_outside_sink_gets_each_occurrence_once(
    dsn: str, outside: Outside, connection: Any, scale: Scale
) -> None:
    """By both guarantees: without this the next proof would not know what a disturbance does."""
    workers = await asyncio.gather(*(outside.worker("recording", **SETTINGS) for _ in range(scale.processes)))
    ends_at = await after(scale.seconds, connection)
    groups = await declare_outside(dsn, scale, ends_at)
    await drain(dsn, ends_at, connection)
    await stop(workers)
    delivered = await outside.recorded()
    for schedules in groups:
        found = await findings(schedules, delivered, connection)
        assert outcomes(found.runs).keys() == {"enqueued"}
        assert found.deliveries.keys() == found.expected
        assert found.repeated == []
        assert found.recovered == 0
        print(f"\n{len(workers)} processes, {schedules[0].delivery}: {found.summary()}", end="")  # noqa: T201
    senders = {delivery.sender for delivery in delivered}
    print(f"; {len(senders)} processes sent")  # noqa: T201
    assert len(senders) > 1
    assert count(workers, "tick_lease_lost") == count(workers, "tick_not_sent") == 0


@pytest.mark.soak(small=40, full=300)
async def test_killed_and_stopped_processes_lose_nothing_silently_and_repeat_nothing_unmarked(
    dsn: str, outside: Outside, connection: Any, scale: Scale
) -> None:
    seed = random.randrange(2**32)  # noqa: S311
    print(f"\nseed {seed}")  # noqa: T201
    crew = Crew(outside)
    await asyncio.gather(*(crew.hire() for _ in range(scale.processes)))
    ends_at = await after(scale.seconds, connection)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(crew.disturb, random.Random(seed), ends_at, connection)  # noqa: S311
        groups = await declare_outside(dsn, scale, ends_at)
    await drain(dsn, ends_at, connection)
    await stop(crew.at_work)
    delivered = await outside.recorded()
    at_least_once, at_most_once = [await findings(schedules, delivered, connection) for schedules in groups]
    print(  # noqa: T201
        f"{len(crew.everybody)} processes, {len(crew.killed)} killed, {len(crew.stopped)} stopped for longer than a "
        f"lease\nat_least_once: {at_least_once.summary()}\nat_most_once: {at_most_once.summary()}\n"
        f"leases found lost: {count(crew.everybody, 'tick_lease_lost')}, "
        f"failed passes: {count(crew.everybody, 'service_failed')}"
    )
    assert_at_least_once(at_least_once, crew.disturbances)
    assert_at_most_once(at_most_once)
    assert crew.killed
    assert crew.stopped
    if scale.is_full:  # else nothing was hit, and nothing is proven
        assert at_least_once.repeated
        assert at_least_once.recovered > len(at_least_once.repeated)
        assert outcomes(at_most_once.runs)["expired"] > 0


# Sinks that should not notice that another one hangs, and the seconds that their ticks may be late at the most. An
# outside one takes turns with itself, and a machine that is busy makes its calls longer.
ON_TIME = {"queue": 1, "table": 1, "outside": 3}
GRACE_SECONDS = 2
HANGS = {
    **WINDOW,
    "stop_grace_seconds": str(GRACE_SECONDS),
    "tick_max_attempts": "4",
    "tick_backoff_seconds": "0.5",
}
LATENESS = """
SELECT sink, percentile_disc(array[0.99, 1]) WITHIN GROUP (ORDER BY extract(epoch FROM lateness)::float) AS late
FROM cron_runs JOIN cron_schedules ON cron_schedules.id = schedule_id
WHERE sink <> 'hangs' AND outcome = 'enqueued' AND scheduled_for BETWEEN $1 AND $2
GROUP BY sink
ORDER BY sink
"""


@dataclass(frozen=True)
class Late:
    """How late ticks of a sink were, in seconds."""

    p99: float
    most: float

    def __str__(self) -> str:
        return f"{self.p99 * 1000:.0f}/{self.most * 1000:.0f} ms"


async def lateness(since: datetime, until: datetime, connection: Any) -> dict[str, Late]:
    """By sink, of the occurrences between two instants."""
    rows = await connection.fetch(LATENESS, since, until)
    assert {row["sink"] for row in rows} == set(ON_TIME)
    return {row["sink"]: Late(*row["late"]) for row in rows}


def every_second(sink: str, number: int, ends_at: datetime) -> list[dict[str, Any]]:
    return [{"name": f"{sink} {n}", "every": 1, "ends_at": ends_at, "sink": sink} for n in range(number)]


async def assert_kept(hung: Sequence[Schedule], workers: Sequence[RunningProcess], connection: Any) -> tuple[int, int]:
    """Occurrences of the sink that hung are pending, or recorded as failed; how many. What it may have is marked."""
    called = {
        message_id
        for worker in workers
        for line in worker.events
        if line["event"] == "hanging"
        for message_id in line["message_ids"]
    }
    ticks = {
        (row["schedule_id"], row["scheduled_for"]): row
        for row in await connection.fetch(
            "SELECT *, 'msg_' || substr(id, 6) AS message_id FROM cron_ticks WHERE sink = 'hangs'"
        )
    }
    runs = await runs_of(hung, connection)
    assert ticks.keys() | runs.keys() == expected_of(hung)
    assert not ticks.keys() & runs.keys()
    assert outcomes(runs).keys() <= {"failed"}
    assert all(run["reason"] and run["attempts"] == 1 for run in runs.values())
    only_once = {schedule.id for schedule in hung if schedule.max_attempts == 1}
    assert {schedule_id for schedule_id, _ in runs} <= only_once
    assert all(tick["leased_until"] is None for tick in ticks.values())  # given back, and not left to run out
    assert all(tick["recovery"] == (tick["message_id"] in called) for tick in ticks.values())
    return len(ticks), len(runs)


@pytest.mark.soak(small=10, full=50)
async def test_a_sink_that_hangs_delays_nobody_else_and_no_shutdown_and_loses_nothing(
    dsn: str, outside: Outside, connection: Any, size: int
) -> None:
    """Half of its schedules may try a tick once only. At the full size calls reach their deadlines too."""
    await connection.execute("CREATE TABLE jobs (id text PRIMARY KEY)")
    processes, before, during = (8, 20, 40) if size == 50 else (2, 3, 4)
    workers = await asyncio.gather(*(outside.worker("hanging", **HANGS) for _ in range(processes)))
    ends_at = await after(before + during, connection)
    on_time = await declare(dsn, [each for sink in ON_TIME for each in every_second(sink, size, ends_at)])
    settled_at = await after(1, connection)
    await anyio.sleep(await until_end(ends_at - timedelta(seconds=during), connection))
    declared_at = await after(0, connection)
    hanging = every_second("hangs", 10 * processes, ends_at)
    hung = await declare(dsn, [{**each, "max_attempts": (None, 1)[n % 2]} for n, each in enumerate(hanging)])
    await asyncio.gather(*(worker.wait_for("hanging") for worker in workers))
    hung_at = await after(0, connection)
    await anyio.sleep(await until_end(ends_at, connection))
    async with watching(dsn, "cron_ticks", "cron_schedule_cursors") as watch:
        await watch.until(
            """SELECT NOT EXISTS (SELECT FROM cron_ticks WHERE sink <> 'hangs')
            AND NOT EXISTS (SELECT FROM cron_schedule_cursors WHERE next_tick_needed_at IS NOT NULL)"""
        )
        begin = time.monotonic()
        await stop(workers)
        stopped_in = time.monotonic() - begin
        pending, failed = await assert_kept(hung, workers, connection)
        healed = await outside.worker("healed", **HANGS)
        await watch.until("SELECT NOT EXISTS (SELECT FROM cron_ticks)")
    await stop([healed])
    without = await lateness(settled_at, declared_at, connection)
    beside = await lateness(hung_at, ends_at, connection)
    for sink in ON_TIME:
        print(f"\n{sink}: p99/most {without[sink]} late, beside the sink that hangs {beside[sink]}", end="")  # noqa: T201
    print(  # noqa: T201
        f"\n{processes} processes stopped in {stopped_in:.1f} s; of the sink that hung {pending} ticks were kept and "
        f"delivered later, {failed} had failed"
    )
    for sink, most in ON_TIME.items():
        assert beside[sink].most < most
        assert beside[sink].p99 < without[sink].p99 + most / 2
    assert GRACE_SECONDS <= stopped_in < GRACE_SECONDS + 6
    assert (await runs_of(on_time, connection)).keys() == expected_of(on_time)
    delivered = [delivery for delivery in await outside.recorded() if delivery.sender == healed.pid]
    assert len({delivery.message_id for delivery in delivered}) == len(delivered) == pending > 0
    assert outcomes(await runs_of(hung, connection)) == Counter(enqueued=pending, failed=failed)
    assert failed > 0


# What each change of a message or a waiting tick finds before and after itself. It locks nothing, so it hides no race:
# two that began at the same time unseen are seen by the first of them that ends.
LOOKS = """
CREATE TABLE test_looks (relation text, schedule_id text, found bigint);

CREATE FUNCTION test_look() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO test_looks
    SELECT TG_TABLE_NAME, changed.schedule_id, CASE TG_TABLE_NAME
        WHEN 'queue_messages' THEN (
            SELECT count(*) FROM queue_messages AS message
            WHERE message.schedule_id = changed.schedule_id AND completed_at IS NULL AND dlq_at IS NULL)
        ELSE (SELECT count(*) FROM cron_ticks AS tick WHERE tick.schedule_id = changed.schedule_id AND waiting) END
    FROM (SELECT coalesce(NEW.schedule_id, OLD.schedule_id) AS schedule_id) AS changed;
    RETURN coalesce(NEW, OLD);
END $$;

CREATE TRIGGER test_before BEFORE UPDATE OR DELETE ON queue_messages FOR EACH ROW EXECUTE FUNCTION test_look();
CREATE TRIGGER test_after AFTER INSERT OR UPDATE ON queue_messages FOR EACH ROW EXECUTE FUNCTION test_look();
CREATE TRIGGER test_before BEFORE UPDATE OR DELETE ON cron_ticks FOR EACH ROW EXECUTE FUNCTION test_look();
CREATE TRIGGER test_after AFTER INSERT OR UPDATE ON cron_ticks FOR EACH ROW EXECUTE FUNCTION test_look();
"""
MOST_FOUND = """
SELECT count(*), max(found) FILTER (WHERE relation = 'queue_messages'),
    max(found) FILTER (WHERE relation = 'cron_ticks')
FROM test_looks
WHERE schedule_id = ANY ($1::text[])
"""


@dataclass(frozen=True)
class Handled:
    """A run of a handler, by the machine's monotonic clock."""

    begin: float
    end: float


def handled_by(workers: Sequence[RunningProcess]) -> dict[str, list[Handled]]:
    """By schedule, in the order of their beginnings."""
    handled: dict[str, list[Handled]] = defaultdict(list)
    for worker in workers:
        for line in worker.events:
            if line["event"] == "handled":
                handled[line["schedule_id"]].append(Handled(line["begin"], line["end"]))
    return {schedule_id: sorted(found, key=lambda run: run.begin) for schedule_id, found in handled.items()}


def most_at_once(handled: Sequence[Handled]) -> int:
    """How many ran at the same time."""
    changes = sorted([(run.begin, 1) for run in handled] + [(run.end, -1) for run in handled])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


@dataclass(frozen=True)
class Overlap:
    """What came of the schedules with one policy."""

    runs: dict[Occurrence, Any]
    handled: list[list[Handled]]  # by schedule
    looks: int
    unfinished: int  # messages of one schedule at once at the most
    waiting: int  # ticks of one

    @property
    def at_once(self) -> int:
        """Handlers of one schedule, at the most."""
        return max(most_at_once(handled) for handled in self.handled)

    @property
    def pause(self) -> float:
        """Seconds from the end of a handler to the beginning of its schedule's next, in the median."""
        return statistics.median(
            later.begin - earlier.end for handled in self.handled for earlier, later in pairwise(handled)
        )

    def summary(self) -> str:
        found = outcomes(self.runs)
        return (
            f"{len(self.runs)} occurrences, {found['enqueued']} enqueued, {found['overlapped']} overlapped; at once "
            f"at most {self.unfinished} unfinished, {self.waiting} waiting, {self.at_once} handled; {self.looks} looks"
        )


async def overlap_of(schedules: Sequence[Schedule], handled: Mapping[str, list[Handled]], connection: Any) -> Overlap:
    """Each occurrence has its row, and those that are enqueued, and no others, have a message that was handled once."""
    ids = [schedule.id for schedule in schedules]
    runs = await runs_of(schedules, connection)
    assert runs.keys() == expected_of(schedules)
    messages = await connection.fetch(
        "SELECT schedule_id, scheduled_for, id FROM queue_messages WHERE schedule_id = ANY ($1::text[])", ids
    )
    enqueued = [(*occurrence, run["message_id"]) for occurrence, run in runs.items() if run["outcome"] == "enqueued"]
    assert sorted(map(tuple, messages)) == sorted(enqueued)
    assert sum(len(handled[schedule_id]) for schedule_id in ids) == len(enqueued)
    [looks, unfinished, waiting] = await connection.fetchrow(MOST_FOUND, ids)
    return Overlap(runs, [handled[schedule_id] for schedule_id in ids], looks, unfinished, waiting)


@pytest.mark.soak(small=4, full=10)
async def test_handlers_that_take_three_intervals_overlap_only_where_they_may(
    dsn: str, outside: Outside, connection: Any, size: int
) -> None:
    """So many schedules of each policy, all of one queue, which has a token for each worker.

    Nothing but the policy keeps two messages of a schedule apart, as those that may overlap show.
    """
    await connection.execute(LOOKS)
    tickers, seconds = (20, 60) if size == 10 else (6, 5)
    workers = await asyncio.gather(
        *(outside.worker("overlapping", **WINDOW, message_concurrency="50") for _ in range(tickers))
    )
    ends_at = await after(seconds, connection)
    definitions = [
        {"name": f"{overlap} {n}", "every": 1, "ends_at": ends_at, "overlap": overlap, "jitter": None}
        for overlap in ("skip", "queue_one", "allow")
        for n in range(size)
    ]
    schedules = await declare(dsn, definitions)
    await drain(dsn, ends_at, connection)
    await stop(workers)
    handled = handled_by(workers)
    skip, queue_one, allow = [
        await overlap_of(schedules[first : first + size], handled, connection) for first in range(0, 3 * size, size)
    ]
    firing = await connection.fetchval("SELECT count(DISTINCT ticker_id) FROM cron_runs")
    print(f"\n{firing} of {tickers} tickers fired")  # noqa: T201
    print(f"skip: {skip.summary()}\nqueue_one: {queue_one.summary()}, after {queue_one.pause * 1000:.0f} ms")  # noqa: T201
    print(f"allow: {allow.summary()}")  # noqa: T201
    assert firing > 1
    assert (skip.unfinished, skip.waiting, skip.at_once) == (1, 0, 1)
    assert (queue_one.unfinished, queue_one.waiting, queue_one.at_once) == (1, 1, 1)
    assert (allow.unfinished >= 3, allow.waiting, allow.at_once >= 3) == (True, 0, True)  # the others could have
    for limited in (skip, queue_one):
        assert outcomes(limited.runs).keys() == {"enqueued", "overlapped"}
    assert outcomes(allow.runs).keys() == {"enqueued"}
    assert queue_one.pause < 1  # what waits is told, and need not look
