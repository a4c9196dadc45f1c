"""A model of what schedules mean, beside the real database: whatever is done to schedules, both must agree.

The model knows nothing of the engine's code. It steps through occurrences one by one, and keeps for each schedule the
versions with the time for which each holds, and what became of each occurrence. It owns the clock.
"""

import asyncio
import hashlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import Any, Literal, TypeVar

import asyncpg
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import cron_ticks.schedule_repository
from cron_ticks.audit_repository import AuditRepository
from cron_ticks.checks import PRIORITIES, Priority
from cron_ticks.database import Connection, Database, open_database
from cron_ticks.errors import InvalidInputError
from cron_ticks.firing import CATCHING_UP, DUE_NOW, RETRY
from cron_ticks.ids import new_tick_id
from cron_ticks.occurrences import CatchUp
from cron_ticks.rows import FiredTicks, Planned
from cron_ticks.schedule_manager import ScheduleManager
from cron_ticks.schedule_repository import Saved
from cron_ticks.schedules import ScheduleDefinition, define_schedule, redefine_schedule
from cron_ticks.settings import Settings
from support.moved_clock import ClockedRepository
from token_queue.doubled import find_doubled
from token_queue.queue_repository import QUEUE_SINK

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
LOOKAHEAD = timedelta(seconds=20)
MISSED_AFTER = timedelta(seconds=15)
MOST_MADE_UP = 4
OLDEST_MADE_UP = timedelta(seconds=60)
SETTINGS = Settings.load(
    catch_up_max_count=MOST_MADE_UP,
    catch_up_max_age_seconds=OLDEST_MADE_UP.total_seconds(),
    lookahead_seconds=LOOKAHEAD.total_seconds(),
    missed_after_seconds=MISSED_AFTER.total_seconds(),
    manager_interval_seconds=5,
    manager_batch_size=3,  # small, so that a pass takes several
    jitter_cap_seconds=15,
)
TABLES = (
    "cron_schedules",
    "cron_schedule_cursors",
    "cron_schedule_versions",
    "cron_ticks",
    "cron_runs",
    "queue_messages",
)
BATCH = 3  # small, so that a pass takes several
MOST_SCHEDULES = 2
MOST_PASSES = 10
STEPS = 40

Result = TypeVar("Result")


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


# What must have happened


@dataclass(frozen=True)
class Terms:
    """What an application asks for."""

    every: timedelta | None = None
    at: datetime | None = None
    jitter: float | timedelta | None = None
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    max_runs: int | None = None
    priority: Priority = "normal"
    catch_up: CatchUp = "latest"
    payload: int = 0

    @property
    def amplitude(self) -> timedelta:
        if self.every is None or self.jitter is None:
            return timedelta(0)
        return self.jitter if isinstance(self.jitter, timedelta) else self.every * self.jitter

    def definition(self, name: str) -> ScheduleDefinition:
        options = {key: value for key, value in vars(self).items() if key != "payload"}
        return define_schedule(name, **options, payload={"n": self.payload}, jitter_cap=SETTINGS.jitter_cap)


@dataclass(frozen=True)
class Version:
    """What holds for occurrences after a time, until another version does."""

    terms: Terms
    anchor: datetime
    after: datetime
    enabled: bool
    left: int | None  # of the runs that are allowed

    def occurrences(self, until: datetime) -> list[datetime]:
        found: list[datetime] = []
        occurrence = self.anchor
        while self.enabled and occurrence <= until:
            starts_at, ends_at = self.terms.starts_at or occurrence, self.terms.ends_at or occurrence
            if self.after < occurrence and starts_at <= occurrence <= ends_at:
                found.append(occurrence)
            if self.terms.every is None:
                break
            occurrence += self.terms.every
        return found[: self.left]


@dataclass(frozen=True)
class Tick:
    """A tick as it is made, and never changed."""

    execute_at: datetime
    due_at: datetime
    payload: int
    priority: Priority
    version: int
    turn: int = 0

    def is_late(self, now: datetime) -> bool:
        """Whether somebody must decide before it is fired, or has decided that it is made up."""
        floor = now - MISSED_AFTER
        return self.execute_at < floor and (self.turn == CATCHING_UP or self.due_at < floor)


@dataclass
class Life:
    """A schedule from its creation on."""

    id: str
    name: str
    versions: list[Version]
    reached: datetime  # occurrences before it are dealt with
    pending: dict[datetime, Tick] = field(default_factory=dict)
    fired: dict[datetime, tuple[Tick, datetime]] = field(default_factory=dict)
    dropped: set[datetime] = field(default_factory=set)
    missed: set[datetime] = field(default_factory=set)
    triggers: dict[datetime, Tick] = field(default_factory=dict)
    fired_triggers: dict[datetime, tuple[Tick, datetime]] = field(default_factory=dict)
    dropped_triggers: set[datetime] = field(default_factory=set)
    strays: int = 0  # ticks put in by hand

    @property
    def current(self) -> Version:
        return self.versions[-1]

    @property
    def terms(self) -> Terms:
        return self.current.terms

    def expected(self, until: datetime) -> dict[datetime, int]:
        """Every occurrence that should be dealt with, with the number of its version."""
        found: dict[datetime, int] = {}
        for index, version in enumerate(self.versions):
            end = min([until, *(later.after for later in self.versions[index + 1 :])])
            found |= dict.fromkeys(
                (occurrence for occurrence in version.occurrences(until) if occurrence <= end), index + 1
            )
        return found

    def left(self, terms: Terms) -> int | None:
        dealt = len(self.pending) + len(self.fired) + len(self.dropped) + len(self.missed)
        return None if terms.max_runs is None else max(0, terms.max_runs - dealt)

    def tick(self, occurrence: datetime, now: datetime) -> Tick:
        version, terms = self.current, self.terms
        execute_at = occurrence
        if occurrence != version.anchor:
            moved = occurrence + offset(self.id, occurrence, terms.amplitude)
            execute_at = max(moved, terms.starts_at or moved)
        made_late = execute_at <= now
        while any(other.execute_at == execute_at for other in (*self.pending.values(), *self.triggers.values())):
            execute_at += MICROSECOND
        due_at = max(execute_at, occurrence) if made_late else execute_at
        turn = CATCHING_UP if now - occurrence > MISSED_AFTER else DUE_NOW
        return Tick(execute_at, due_at, terms.payload, terms.priority, len(self.versions), turn)

    def made_up(self, late: list[datetime], now: datetime) -> set[datetime]:
        """What the policy wants of these, the latest first."""
        room = {"skip": 0, "latest": 1}.get(self.terms.catch_up, MOST_MADE_UP)
        young = [moment for moment in sorted(late) if moment >= now - OLDEST_MADE_UP]
        return set(young[len(young) - min(room, len(young)) :])

    def make(self, now: datetime, until: datetime, late_ticks: list[datetime] | None = None) -> int:
        """Ticks for all up to then, but of those that are too late what is made up; how many of these are missed.

        Late ticks that are there are decided about together with them.
        """
        wanted = [occurrence for occurrence in self.current.occurrences(until) if occurrence >= self.reached]
        late = [occurrence for occurrence in wanted if now - occurrence > MISSED_AFTER]
        ticks = late_ticks or []
        kept = self.made_up([*ticks, *late], now)
        for moment in ticks:
            tick = self.pending.pop(moment)
            if moment in kept:
                self.pending[moment] = replace(tick, turn=CATCHING_UP)
        missed = set(late) - kept
        self.missed |= missed | (set(ticks) - kept)
        for occurrence in wanted:
            if occurrence not in missed:
                self.pending[occurrence] = self.tick(occurrence, now)
        self.reached = max(self.reached, until + MICROSECOND)
        return len(missed)

    def late_ticks(self, now: datetime) -> list[datetime]:
        return [moment for moment, tick in self.pending.items() if tick.is_late(now)]

    def make_window(self, now: datetime) -> int:
        """A manager's pass. One that is behind with making decides about late ticks too."""
        end = now + LOOKAHEAD - MICROSECOND
        unmade = [moment for moment in self.current.occurrences(now) if moment >= self.reached]
        behind = any(now - moment > MISSED_AFTER for moment in unmade)
        return self.make(now, end, self.late_ticks(now) if behind else None)

    def catch_up(self, now: datetime) -> None:
        """What a ticker does that finds late ticks, before it fires anything."""
        floor = now - MISSED_AFTER
        waiting = (*self.pending.values(), *self.triggers.values())
        if any(tick.turn == DUE_NOW and tick.due_at < floor for tick in waiting):
            self.make(now, now + LOOKAHEAD - MICROSECOND, self.late_ticks(now))
            for moment, tick in self.triggers.items():
                if tick.due_at < floor:
                    self.triggers[moment] = replace(tick, turn=CATCHING_UP)

    def fire(self, now: datetime) -> None:
        for waiting, done in ((self.pending, self.fired), (self.triggers, self.fired_triggers)):
            for moment in [moment for moment, tick in waiting.items() if tick.due_at <= now]:
                done[moment] = (waiting.pop(moment), now)
        self.strays = 0

    def boundary(self, now: datetime) -> datetime:
        """Up to here a change can't change anything: the past, what has fired early, what is due."""
        due = [occurrence for occurrence, tick in self.pending.items() if tick.due_at <= now]
        return max([now, *due, *self.fired])

    def last_tick(self, now: datetime) -> datetime:
        return max([self.boundary(now), *self.pending])

    def edit(self, terms: Terms, now: datetime) -> int:
        enabled = self.current.enabled
        boundary = self.boundary(now) if enabled else self.last_tick(now)
        missed = self.make(now, boundary)
        if enabled:
            self.pending = {occurrence: tick for occurrence, tick in self.pending.items() if occurrence <= boundary}
        has_begun = self.terms.every is not None and self.current.anchor <= boundary
        keeps_phase = has_begun and terms.every is not None
        anchor = self.current.anchor if keeps_phase else terms.at or terms.starts_at or now
        self.begin(Version(terms, anchor, boundary, enabled, self.left(terms)), now)
        return missed

    def disable(self, now: datetime, *, drop: bool) -> int:
        boundary, last_tick = self.boundary(now), self.last_tick(now)
        missed = self.make(now, boundary)
        if drop:
            self.drop()
        if self.current.enabled:
            self.begin(replace(self.current, after=boundary if drop else last_tick, enabled=False), now)
        return missed

    def enable(self, now: datetime) -> None:
        last_tick = self.last_tick(now)
        self.dropped = {occurrence for occurrence in self.dropped if occurrence <= last_tick}
        self.begin(replace(self.current, after=last_tick, enabled=True, left=self.left(self.terms)), now)

    def delete(self, now: datetime) -> None:
        self.make(now, now)
        self.drop()
        self.begin(replace(self.current, after=max([now, *self.fired]), enabled=False), now)

    def drop(self) -> None:
        self.dropped |= set(self.pending)
        self.dropped_triggers |= set(self.triggers)
        self.pending, self.triggers, self.strays = {}, {}, 0

    def begin(self, version: Version, now: datetime) -> None:
        self.versions.append(version)
        self.reached = version.after + MICROSECOND
        self.make_window(now)

    def fates(self) -> dict[str, dict[datetime, tuple[str, datetime | None]]]:
        """What the ledger should say, by origin."""
        ends = ((self.fired, self.dropped), (self.fired_triggers, self.dropped_triggers))
        found: dict[str, dict[datetime, tuple[str, datetime | None]]] = {
            origin: {moment: ("enqueued", when) for moment, (_, when) in fired.items()}
            | dict.fromkeys(dropped, ("disabled", None))
            for origin, (fired, dropped) in zip(("schedule", "trigger"), ends, strict=True)
        }
        found["schedule"] |= dict.fromkeys(self.missed, ("missed", None))
        return found


def offset(schedule_id: str, occurrence: datetime, amplitude: timedelta) -> timedelta:
    """Jitter, written down again."""
    width = amplitude // MICROSECOND
    epoch = (occurrence - datetime(1970, 1, 1, tzinfo=UTC)) // MICROSECOND
    number = int(hashlib.sha256(f"{schedule_id} {epoch}".encode()).hexdigest()[:15], 16)
    return timedelta(microseconds=number % (2 * width) - width if width else 0)


def born(schedule_id: str, name: str, terms: Terms, now: datetime) -> Life:
    """A schedule that is created: nothing before now is expected, but a one-off that has passed."""
    after = now if terms.at is None else terms.at
    anchor = terms.at or terms.starts_at or now
    life = Life(
        schedule_id, name, [Version(terms, anchor, after - MICROSECOND, enabled=True, left=terms.max_runs)], after
    )
    life.make_window(now)
    return life


def levels_rise(batches: list[list[int]]) -> bool:
    """Whether each batch took the most urgent that there was."""
    flat = [level for batch in batches for level in sorted(batch)]
    return flat == sorted(flat)


# What did happen


class CountingManager(ScheduleManager):
    """Keeps how many occurrences of each schedule it has missed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.missed: Counter[str] = Counter()

    def _note(self, plans: Sequence[Planned], ticks: int) -> None:
        super()._note(plans, ticks)
        self.missed.update({made.needing.schedule_id: made.plan.missed for made in plans})


@dataclass(frozen=True)
class World:
    """The real thing."""

    runner: asyncio.Runner
    database: Database
    repository: ClockedRepository
    connection: "asyncpg.Connection[asyncpg.Record]"
    monkeypatch: pytest.MonkeyPatch

    @property
    def audits(self) -> AuditRepository:
        return AuditRepository(self.database, SETTINGS, partial(find_doubled, self.database))

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.runner.run(work)

    def rows(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        return self.run(self.connection.fetch(statement, *arguments))

    def name_schedules(self, new_id: Callable[[], str]) -> None:
        self.monkeypatch.setattr(cron_ticks.schedule_repository, "new_schedule_id", new_id)

    def clear(self) -> None:
        for table in TABLES:
            self.run(self.connection.execute(f"DELETE FROM {table}"))

    async def make(self, now: datetime) -> Counter[str]:
        """A manager's pass at that time; how many occurrences it missed."""
        self.repository.instant = now
        manager = CountingManager(self.database, self.repository, SETTINGS)
        await asyncio.wait_for(manager.run_once(), 30)
        return manager.missed

    async def catch_up(self, now: datetime) -> None:
        """What a ticker has done before it fires, if ticks are late."""
        for _ in range(MOST_PASSES):
            ids = await self.repository.late_schedules(QUEUE_SINK.name, limit=BATCH, now=now)
            if not ids:
                return
            async with self.database.transaction() as connection:
                taken = await self.repository.find_schedules_needing_ticks(
                    limit=BATCH, connection=connection, ids=ids, now=now
                )
                plans = [Planned(needing, self.repository.plan(needing)) for needing in taken]
                await self.repository.create_ticks(plans, connection=connection)
                await self.repository.update_next_tick_needed(plans, connection=connection)
                await self.repository.set_aside(taken, connection=connection)
        raise AssertionError("a ticker comes to no end")

    async def fire(self, now: datetime, turn: int) -> list[list[FiredTicks]]:
        """A ticker's pass at that time, batch by batch."""
        batches: list[list[FiredTicks]] = []
        while not batches or len(batches[-1]) == BATCH:
            fired = await self.repository.fire_due_ticks(
                QUEUE_SINK, ticker_id="ticker_x", limit=BATCH, turn=turn, now=now
            )
            batches.append(fired)
        return batches

    async def rolled_back(self, work: Callable[[Connection], Awaitable[object]]) -> None:
        """Do something in a caller's transaction that fails afterwards."""
        transaction = self.connection.transaction()
        await transaction.start()
        try:
            await work(self.connection)
        finally:
            await transaction.rollback()


# Both


def rarely(values: st.SearchStrategy[Result]) -> st.SearchStrategy[Result | None]:
    return st.one_of(st.none(), st.none(), values)


@dataclass(frozen=True)
class Jump:
    """Where the clock goes before something is done: nowhere, or to the microsecond that decides about a tick."""

    to: Literal["nowhere", "due", "occurrence"]
    number: int  # of the schedule's ticks, the next one first
    aside: int  # microseconds
    tidy: bool  # whatever was due before has been fired
    fire: bool  # what is due has been fired too


jumps = st.builds(
    Jump,
    to=st.sampled_from(["nowhere", "due", "due", "occurrence"]),
    number=st.integers(0, 2),
    aside=st.sampled_from([0, 0, 0, 1, -1]),
    tidy=st.booleans(),
    fire=st.booleans(),
)
spans = st.integers(0, 20).map(lambda halves: seconds(halves / 2))
jitters = st.sampled_from([0.5, 0.5, 0.1, seconds(0.4), None])
priorities = st.sampled_from(PRIORITIES)
interval_changes: dict[str, st.SearchStrategy[Any]] = {
    "every": st.sampled_from([7, 5, 10, 13, 20, 3, 2, 1]).map(seconds),
    "jitter": jitters,
    "starts_at": rarely(st.integers(-60, 60).map(lambda halves: seconds(halves / 2))),
    "ends_at": rarely(st.integers(0, 120).map(lambda halves: seconds(halves / 2))),
    "max_runs": st.none() | st.integers(1, 25),
    "priority": priorities,
    "catch_up": st.sampled_from(["latest", "all", "skip"]),
    "payload": st.integers(0, 3),
}


def resolved(changes: dict[str, Any], now: datetime) -> dict[str, Any]:
    """Bounds are drawn as distances from now."""
    moments = {
        key: now + value
        for key, value in changes.items()
        if key in ("at", "starts_at", "ends_at") and value is not None
    }
    return changes | moments


def has_interval(life: Life) -> bool:
    return life.terms.every is not None


def in_order(terms: Terms) -> Terms:
    """A schedule doesn't end before it starts."""
    if terms.starts_at is not None and terms.ends_at is not None and terms.ends_at < terms.starts_at:
        return replace(terms, ends_at=terms.starts_at)
    return terms


class ScheduleMachine(RuleBasedStateMachine):
    """Does the same to the database and to the model, and compares."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.repository = world.repository
        self.now = START
        self.lives: list[Life] = []  # those that exist
        self.ended: list[Life] = []
        self.names = 0
        world.clear()

    def pick(self, number: int, jump: Jump, suits: Callable[[Life], bool] = lambda _: True) -> Life:
        """A schedule, at a time that is critical for it."""
        lives = [life for life in self.lives if suits(life)]
        life = lives[number % len(lives)]
        self.jump(life, jump)
        return life

    def jump(self, life: Life, jump: Jump) -> None:
        moments = [occurrence if jump.to == "occurrence" else tick.due_at for occurrence, tick in life.pending.items()]
        edges = sorted(moment for moment in moments if moment > self.now)
        if jump.to == "nowhere" or not edges:
            return
        edge = edges[min(jump.number, len(edges) - 1)]
        if jump.tidy:
            self.now = edge - MICROSECOND
            self.fire()
        self.now = max(self.now, edge + jump.aside * MICROSECOND)
        if jump.fire:
            self.fire()

    # Living with schedules

    @initialize(seed=st.integers(0, 999), changes=st.fixed_dictionaries(interval_changes))
    def begin(self, seed: int, changes: dict[str, Any]) -> None:
        """Ids decide about jitter, so they are chosen too: the same example does the same again."""
        numbers = count(1)
        self.world.name_schedules(lambda: f"cron_{seed}_{next(numbers)}")
        self.create(changes)

    @precondition(lambda self: len(self.lives) < MOST_SCHEDULES)
    @rule(changes=st.fixed_dictionaries(interval_changes))
    def create(self, changes: dict[str, Any]) -> None:
        self.declare_new(in_order(Terms(**resolved(changes, self.now))))

    @precondition(lambda self: len(self.lives) < MOST_SCHEDULES)
    @rule(at=st.integers(-60, 80), priority=priorities)
    def create_one_off(self, at: int, priority: Priority) -> None:
        self.declare_new(Terms(at=self.now + seconds(at / 2), priority=priority))

    def declare_new(self, terms: Terms, name: str | None = None) -> None:
        self.names += 1
        name = f"n{self.names}" if name is None else name
        saved = self.save(name, terms)
        assert saved.change == "created"
        self.lives.append(born(saved.schedule.id, name, terms, self.now))

    def save(self, name: str, terms: Terms) -> Saved:
        return self.world.run(self.repository.save_schedule(terms.definition(name), now=self.now))

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), jump=jumps)
    def declare_again(self, number: int, jump: Jump) -> None:
        """Or enable what is enabled: nothing changes."""
        life = self.pick(number, jump)
        before = [self.world.rows(f"SELECT * FROM {table}") for table in TABLES]
        assert self.save(life.name, life.terms).change == "unchanged"
        if life.current.enabled:
            saved = self.world.run(self.repository.enable_schedule(life.id, now=self.now))
            assert saved.change == "unchanged"
        assert [self.world.rows(f"SELECT * FROM {table}") for table in TABLES] == before

    @precondition(lambda self: self.lives)
    @rule(
        number=st.integers(0, 9),
        jump=jumps,
        changes=st.fixed_dictionaries({}, optional=interval_changes),
        trigger=st.booleans(),
    )
    def edit(self, *, number: int, jump: Jump, changes: dict[str, Any], trigger: bool) -> None:
        """By declaring it with another definition; and perhaps somebody tries it out at once."""
        life = self.pick(number, jump)
        terms = replace(life.terms, at=None, **resolved(changes, self.now))
        if terms.every is None:
            terms = replace(terms, every=seconds(3))
        self.redeclare(life, in_order(terms))
        if trigger:
            self.place_trigger(life)

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), jump=jumps, at=st.integers(-10, 60))
    def edit_to_one_off(self, number: int, jump: Jump, at: int) -> None:
        life = self.pick(number, jump)
        terms = Terms(at=self.now + seconds(at / 2), payload=life.terms.payload)
        edge = life.boundary(self.now) if life.current.enabled else life.last_tick(self.now)
        if terms.at is not None and terms.at <= edge and terms.at != life.terms.at:
            with pytest.raises(InvalidInputError, match=r"at: .+ has passed"):
                self.save(life.name, terms)
        else:
            self.redeclare(life, terms)

    def redeclare(self, life: Life, terms: Terms) -> None:
        self.change(life, terms, lambda: self.save(life.name, terms))

    def change(self, life: Life, terms: Terms, work: Callable[[], Saved]) -> None:
        changed = terms != life.terms
        with self.nothing_due(life):
            saved = work()
            assert saved.change == ("edited" if changed else "unchanged")
            assert saved.missed == (life.edit(terms, self.now) if changed else 0)

    @precondition(lambda self: any(map(has_interval, self.lives)))
    @rule(number=st.integers(0, 9), jump=jumps, changes=st.fixed_dictionaries({}, optional=interval_changes))
    def update(self, number: int, jump: Jump, changes: dict[str, Any]) -> None:
        """By naming what changes."""
        life = self.pick(number, jump, has_interval)
        terms = in_order(replace(life.terms, **resolved(changes, self.now)))
        named: Any = {name: getattr(terms, name) for name in (*changes, "ends_at")}
        if "payload" in named:
            named["payload"] = {"n": terms.payload}
        redefine = partial(redefine_schedule, changes=named, jitter_cap=SETTINGS.jitter_cap)
        work = partial(self.repository.update_schedule, life.id, redefine, now=self.now)
        self.change(life, terms, lambda: self.world.run(work()))

    @precondition(lambda self: any(map(has_interval, self.lives)))
    @rule(number=st.integers(0, 9), jump=jumps, halves=st.integers(1, 40) | st.just(0), trigger=st.booleans())
    def postpone(self, *, number: int, jump: Jump, halves: int, trigger: bool) -> None:
        """By a later start, which the phase doesn't follow: a tick that jitter would move to before it is cut there."""
        life = self.pick(number, jump, has_interval)
        if trigger:
            self.place_trigger(life)
        starts_at = self.now + seconds(halves / 2)
        self.redeclare(life, replace(life.terms, jitter=0.5, starts_at=starts_at, ends_at=None))

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), jump=jumps, drop=st.booleans())
    def disable(self, *, number: int, jump: Jump, drop: bool) -> None:
        self.switch_off(self.pick(number, jump), drop=drop)

    @precondition(lambda self: any(not life.current.enabled for life in self.lives))
    @rule(number=st.integers(0, 9), jump=jumps, fire_now=st.booleans())
    def enable(self, *, number: int, jump: Jump, fire_now: bool) -> None:
        life = self.pick(number, jump, lambda life: not life.current.enabled)
        self.switch_on(life, fire_now=fire_now)

    @precondition(lambda self: self.lives)
    @rule(
        number=st.integers(0, 9),
        before=jumps,
        within=jumps,
        drop=st.booleans(),
        every=st.none() | interval_changes["every"],
        fire_now=st.booleans(),
    )
    def interrupt(
        self,
        *,
        number: int,
        before: Jump,
        within: Jump,
        drop: bool,
        every: timedelta | None,
        fire_now: bool,
    ) -> None:
        """Disable and enable soon after, and perhaps change something meanwhile."""
        life = self.pick(number, before)
        self.switch_off(life, drop=drop)
        if every is not None and life.terms.every is not None:
            self.redeclare(life, replace(life.terms, every=every))
        self.jump(life, within)
        self.switch_on(life, fire_now=fire_now)

    def switch_off(self, life: Life, *, drop: bool) -> None:
        enabled = life.current.enabled
        with self.nothing_due(life):
            saved = self.world.run(self.repository.disable_schedule(life.id, drop_pending=drop, now=self.now))
            assert saved.change == ("disabled" if enabled else "unchanged")
            assert saved.missed == life.disable(self.now, drop=drop)

    def switch_on(self, life: Life, *, fire_now: bool) -> None:
        with self.nothing_due(life):
            saved = self.world.run(self.repository.enable_schedule(life.id, fire_now=fire_now, now=self.now))
            assert saved.change == "enabled"
            life.enable(self.now)
            if fire_now:
                [placed] = self.world.rows(
                    """SELECT scheduled_for FROM cron_ticks
                    WHERE schedule_id = $1 AND origin = 'trigger' AND scheduled_for <> ALL ($2::timestamptz[])""",
                    life.id,
                    list(life.triggers),
                )
                self.note_trigger(life, placed["scheduled_for"])

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), jump=jumps)
    def trigger(self, number: int, jump: Jump) -> None:
        self.place_trigger(self.pick(number, jump))

    def place_trigger(self, life: Life) -> None:
        triggered = self.world.run(self.repository.trigger(life.id, now=self.now))
        self.note_trigger(life, triggered.scheduled_for)

    def note_trigger(self, life: Life, moment: datetime) -> None:
        """At the first microsecond that is nobody's, and never one of an occurrence."""
        assert self.now <= moment < self.now + 1000 * MICROSECOND
        assert moment not in {*life.pending, *life.fired, *life.dropped, *life.missed}
        assert moment not in {*life.triggers, *life.fired_triggers, *life.dropped_triggers}
        assert moment not in life.expected(moment)
        life.triggers[moment] = Tick(moment, moment, life.terms.payload, life.terms.priority, len(life.versions))

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), jump=jumps, again=st.booleans())
    def delete(self, *, number: int, jump: Jump, again: bool) -> None:
        """And perhaps create one of that name, which has nothing to do with it."""
        life = self.pick(number, jump)
        self.world.run(self.repository.delete_schedule(life.id, now=self.now))
        life.delete(self.now)
        self.lives.remove(life)
        self.ended.append(life)
        if again and life.terms.every is not None:
            self.declare_new(life.terms, life.name)

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 9), drop=st.booleans())
    def change_and_roll_back(self, *, number: int, drop: bool) -> None:
        """What is rolled back has never been: the comparison finds nothing."""
        life = self.lives[number % len(self.lives)]
        terms = replace(life.terms, payload=life.terms.payload + 1)

        async def work(connection: Connection) -> None:
            await self.repository.trigger(life.id, connection=connection, now=self.now)
            await self.repository.save_schedule(terms.definition(life.name), connection=connection, now=self.now)
            await self.repository.disable_schedule(life.id, drop_pending=drop, connection=connection, now=self.now)

        self.world.run(self.world.rolled_back(work))

    @precondition(lambda self: any(life.fired for life in self.lives))
    @rule(number=st.integers(0, 9))
    def put_in_a_second_tick(self, number: int) -> None:
        """By hand, for an occurrence that has fired: only the gate stands between it and a second message."""
        fired = [(life, occurrence) for life in self.lives for occurrence in life.fired]
        life, occurrence = fired[number % len(fired)]
        life.strays += 1
        self.world.rows(
            """INSERT INTO cron_ticks (id, schedule_id, schedule_name, queue_name, payload, scheduled_for, execute_at,
                due_at, created_at, turn)
            VALUES ($1, $2, 'x', 'x', '{"n": 99}', $3, $4, $5, $5, 1)""",
            new_tick_id(),
            life.id,
            occurrence,
            START - timedelta(days=1) + life.strays * MICROSECOND,
            self.now,
        )

    # Time passes

    @rule(span=spans, make=st.booleans(), fire=st.booleans())
    def advance(self, *, span: timedelta, make: bool, fire: bool) -> None:
        self.pass_time(span)
        self.work(make=make, fire=fire)

    @rule(span=st.integers(30, 90).map(seconds), trigger=st.booleans(), fire=st.booleans())
    def advance_beyond_the_window(self, *, span: timedelta, trigger: bool, fire: bool) -> None:
        """While nobody made anything."""
        self.pass_time(span)
        if trigger and self.lives:
            self.place_trigger(self.lives[0])
        self.work(make=False, fire=fire)

    def pass_time(self, span: timedelta) -> None:
        """To a time that rules are likely to hit: the clock may have been at any microsecond."""
        half = seconds(0.5)
        self.now += -(self.now - START) % half + span

    @rule()
    def make_and_fire(self) -> None:
        self.work(make=True, fire=True)

    def work(self, *, make: bool, fire: bool) -> None:
        if make:
            missed = self.world.run(self.world.make(self.now))
            for life in self.lives:
                assert missed[life.id] == life.make_window(self.now)
        if fire:
            self.fire()

    def fire(self) -> None:
        self.world.run(self.world.catch_up(self.now))
        for life in self.lives:
            life.catch_up(self.now)
        due = {
            (life.id, moment): PRIORITIES.index(tick.priority)
            for life in self.lives
            for waiting in (life.pending, life.triggers)
            for moment, tick in waiting.items()
            if tick.due_at <= self.now
        }
        turns = [self.world.run(self.world.fire(self.now, turn)) for turn in (DUE_NOW, RETRY, CATCHING_UP)]
        fired = [tick for batches in turns for batch in batches for tick in batch]
        passed = [(tick.schedule_id, tick.scheduled_for) for tick in fired if tick.passed]
        assert Counter(passed) == Counter(due.keys())
        assert len(fired) - len(passed) == sum(life.strays for life in self.lives)
        for batches in turns:
            levels = [[due[tick.schedule_id, tick.scheduled_for] for tick in batch if tick.passed] for batch in batches]
            assert levels_rise(levels)
        for life in self.lives:
            life.fire(self.now)

    @property
    def all_lives(self) -> list[Life]:
        return [*self.lives, *self.ended]

    # What always holds

    @contextmanager
    def nothing_due(self, life: Life) -> Iterator[None]:
        """A change makes nothing due, but what was overdue already under the definition before it."""
        overdue = set(life.expected(self.now))
        before = self.due(life)
        yield
        assert self.due(life) - before <= overdue

    def due(self, life: Life) -> set[datetime]:
        rows = self.world.rows(
            "SELECT scheduled_for FROM cron_ticks WHERE schedule_id = $1 AND due_at <= $2 AND origin = 'schedule'",
            life.id,
            self.now,
        )
        return {row["scheduled_for"] for row in rows}

    @invariant()
    def no_occurrence_has_two_messages(self) -> None:
        assert not self.world.rows("SELECT FROM queue_messages GROUP BY schedule_id, scheduled_for HAVING count(*) > 1")

    @invariant()
    def what_fired_was_expected_and_not_early(self) -> None:
        """By the version in force. A tick made after its jittered time waits for the occurrence itself."""
        expected = {life.id: life.expected(self.now + LOOKAHEAD) for life in self.all_lives}
        lives = {life.id: life for life in self.all_lives}
        for run in self.world.rows("SELECT * FROM cron_runs WHERE origin = 'schedule' AND outcome = 'enqueued'"):
            schedule_id, occurrence = run["schedule_id"], run["scheduled_for"]
            assert run["version"] == expected[schedule_id][occurrence]
            tick, _ = lives[schedule_id].fired[occurrence]
            assert run["ended_at"] >= tick.due_at

    @invariant()
    def ticks_are_as_they_were_made(self) -> None:
        found = self.world.rows("SELECT * FROM cron_ticks WHERE payload <> $1", '{"n": 99}')
        expected = {
            (life.id, origin, moment): tick
            for life in self.lives
            for origin, waiting in (("schedule", life.pending), ("trigger", life.triggers))
            for moment, tick in waiting.items()
        }
        assert {tick_key(row): tick_of(row) for row in found} == expected
        assert len(found) == len(expected)

    @invariant()
    def the_ledger_says_what_became_of_each(self) -> None:
        found = self.world.rows("SELECT * FROM cron_runs")
        said = [
            ((*tick_key(row)[:2], moment), (row["outcome"], row["ended_at"] if row["message_id"] else None))
            for row in found
            for moment in self.told_of(row)
        ]
        assert len(dict(said)) == len(said)  # each occurrence once
        assert dict(said) == {
            (life.id, origin, moment): fate
            for life in self.all_lives
            for origin, fates in life.fates().items()
            for moment, fate in fates.items()
        }

    def told_of(self, row: asyncpg.Record) -> list[datetime]:
        """The occurrences of a run: of missed ones there may be a whole stretch."""
        last, first = row["scheduled_for"], row["missed_since"]
        if first is None:
            return [last]
        [life] = [life for life in self.all_lives if life.id == row["schedule_id"]]
        found = [moment for moment in life.versions[row["version"] - 1].occurrences(last) if moment >= first]
        assert (found[0], found[-1], len(found)) == (first, last, row["occurrences"])
        return found

    def teardown(self) -> None:
        """Whatever is under way goes on for a while and comes to its end; then everything must add up."""
        if sys.exception() is not None:  # what went wrong has been found
            return
        for _ in range(3):
            self.now += LOOKAHEAD / 2
            self.work(make=True, fire=True)
        for life in self.lives:
            self.world.run(self.repository.disable_schedule(life.id, now=self.now))
            life.disable(self.now, drop=False)
        self.now += 2 * LOOKAHEAD
        self.fire()
        self.ticks_are_as_they_were_made()
        self.the_ledger_says_what_became_of_each()
        for life in self.all_lives:
            self.everything_adds_up(life)
        self.the_audit_agrees()

    def the_audit_agrees(self) -> None:
        """It computes from the versions what should have happened, in a way of its own."""
        audit = self.world.run(self.world.audits.audit(START - timedelta(days=2), self.now, now=self.now))
        assert audit.findings == []
        expected = [life.expected(self.now - MICROSECOND) for life in self.all_lives]
        assert audit.total.expected == sum(map(len, expected))
        fired = [moment for life in self.all_lives for moment in life.fired if moment < self.now]
        assert (audit.total.enqueued, audit.total.pending) == (len(fired), 0)

    def everything_adds_up(self, life: Life) -> None:
        assert self.versions_in_the_database(life).expected(self.now) == life.expected(self.now)
        messages = self.world.rows("SELECT * FROM queue_messages WHERE schedule_id = $1", life.id)
        sent = {row["scheduled_for"]: row for row in messages if json.loads(row["headers"])["origin"] == "schedule"}
        disabled = self.world.rows(
            "SELECT scheduled_for FROM cron_runs WHERE schedule_id = $1 AND outcome = 'disabled'", life.id
        )
        assert set(sent) == set(life.expected(self.now)) - {row["scheduled_for"] for row in disabled} - life.missed
        triggered = {row["scheduled_for"]: row for row in messages if row["scheduled_for"] not in sent}
        assert set(triggered) == set(life.fired_triggers)
        for moment, (tick, when) in (life.fired | life.fired_triggers).items():
            message = (sent | triggered)[moment]
            assert (json.loads(message["payload"]), message["inserted_at"]) == ({"n": tick.payload}, when)
            assert (message["priority"], message["queue_name"]) == (PRIORITIES.index(tick.priority), life.name)

    def versions_in_the_database(self, life: Life) -> Life:
        """What should have happened can be computed from these rows alone."""
        rows = self.world.rows("SELECT * FROM cron_schedule_versions WHERE schedule_id = $1 ORDER BY version", life.id)
        assert [row["version"] for row in rows] == list(range(1, len(life.versions) + 1))
        return replace(life, versions=[version_of(row) for row in rows])


def tick_key(row: asyncpg.Record) -> tuple[str, str, datetime]:
    return row["schedule_id"], row["origin"], row["scheduled_for"]


def tick_of(row: asyncpg.Record) -> Tick:
    payload, priority = json.loads(row["payload"])["n"], PRIORITIES[row["priority"]]
    return Tick(row["execute_at"], row["due_at"], payload, priority, row["version"], row["turn"])


def version_of(row: asyncpg.Record) -> Version:
    interval = row["interval_us"]
    terms = Terms(
        every=None if interval is None else timedelta(microseconds=interval),
        starts_at=row["starts_at"],
        ends_at=row["ends_at"],
    )
    left = None if row["max_runs"] is None else max(0, row["max_runs"] - row["planned"])
    return Version(terms, row["anchor_at"], row["holds_after"], row["enabled"], left)


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[tuple[Database, "asyncpg.Connection[asyncpg.Record]"]]:
    async with open_database(SETTINGS, dsn=dsn) as database:
        connection = await asyncpg.connect(dsn)
        try:
            yield database, connection
        finally:
            await connection.close()


@pytest.fixture
def world(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """With an event loop of its own: hypothesis knows of none."""
    with asyncio.Runner() as runner:
        opening = opened(dsn)
        database, connection = runner.run(opening.__aenter__())
        try:
            yield World(runner, database, ClockedRepository(database, SETTINGS, START), connection, monkeypatch)
        finally:
            runner.run(opening.__aexit__(None, None, None))


@pytest.mark.soak(small=80, full=800)
@pytest.mark.timeout(1200)  # should it fail, it looks for a shorter way to do so
def test_whatever_is_done_to_schedules_the_database_agrees_with_the_model(world: World, size: int) -> None:
    machine: Any = partial(ScheduleMachine, world)
    examples = hypothesis_settings(
        max_examples=size,
        stateful_step_count=STEPS,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(machine, settings=examples)


# What the machine finds too seldom


def begun(world: World, suits: Callable[[timedelta], bool], **terms: Any) -> tuple[ScheduleMachine, Life]:
    """A schedule of every 10 s, whose tick of the first 10 s is moved as the case wants it."""
    moved = (offset(f"cron_{seed}_1", START + seconds(10), seconds(5)) for seed in count())
    seed = next(seed for seed, found in enumerate(moved) if suits(found))
    machine = ScheduleMachine(world)
    machine.begin(seed, {"every": seconds(10), "jitter": 0.5} | terms)
    machine.fire()
    return machine, machine.lives[0]


def test_a_trigger_leaves_the_occurrence_of_an_earlier_rule_alone(world: World) -> None:
    """At the microsecond of an occurrence whose tick is due later, after an edit to a rule that doesn't have it."""
    machine, life = begun(world, lambda moved: moved > timedelta(0))
    machine.now = START + seconds(10)
    machine.redeclare(life, replace(life.terms, every=seconds(7)))
    machine.place_trigger(life)
    machine.fire()
    machine.ticks_are_as_they_were_made()
    machine.teardown()
    assert START + seconds(10) in life.fired


def test_a_tick_is_made_though_a_trigger_has_its_microsecond(world: World) -> None:
    """A tick that is cut at the start, which is when somebody triggers; the edit doesn't make it due for all that."""
    machine, life = begun(world, lambda moved: moved < -seconds(4), jitter=None)
    machine.now = START + seconds(7)
    machine.place_trigger(life)
    machine.redeclare(life, replace(life.terms, jitter=0.5, starts_at=machine.now))
    assert life.pending[START + seconds(10)].execute_at == machine.now + MICROSECOND
    machine.ticks_are_as_they_were_made()
    machine.teardown()
    assert START + seconds(10) in life.fired


def test_a_trigger_leaves_an_occurrence_that_nobody_has_made_alone(world: World) -> None:
    machine, life = begun(world, lambda _: True)
    machine.now = START + 3 * LOOKAHEAD
    machine.place_trigger(life)
    machine.work(make=True, fire=True)
    machine.teardown()
    assert START + 3 * LOOKAHEAD in life.fired
