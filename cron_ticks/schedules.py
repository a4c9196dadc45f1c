"""Schedules: what an application asks for, checked at the door, and what the database keeps of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

from cron_ticks.checks import (
    JSON_TEXT,
    PRIORITIES,
    Priority,
    check_choice,
    check_count,
    check_instant,
    check_interval,
    check_name,
    check_payload,
    check_priority,
    check_span,
    shown,
)
from cron_ticks.cron_expressions import check_cron, parse
from cron_ticks.cron_rules import DST_FOLDS, DST_GAPS, CronRule, DstFold, DstGap
from cron_ticks.descriptions import describe_rule
from cron_ticks.errors import InvalidInputError
from cron_ticks.occurrences import MICROSECOND, CatchUp, IntervalRule, OneOffRule, Timetable, jitter_offset
from cron_ticks.zones import check_zone

MOST_RUNS = 10**12
DEFAULT_JITTER_RATIO = 0.1
LARGEST_JITTER_RATIO = 0.5  # beyond it, occurrences would change their order
DEFAULT_JITTER_CAP = timedelta(seconds=30)

Jitter = float | timedelta | Literal["default"] | None  # a ratio of the interval, or a time either way

OWN_QUEUE = "queue"  # the sink that everybody has
SinkKind = Literal["same_database", "outside"]
Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]
DELIVERIES: dict[SinkKind, tuple[Delivery, ...]] = {  # the first is the default
    "same_database": ("exactly_once",),
    "outside": ("at_least_once", "at_most_once"),
}
Overlap = Literal["allow", "skip", "queue_one"]
OVERLAPS: tuple[Overlap, ...] = ("allow", "skip", "queue_one")
CATCH_UPS: tuple[CatchUp, ...] = ("skip", "latest", "all", "spread")
MOST_TICK_ATTEMPTS = 1000
LONGEST_AGE = timedelta(days=365)
LONGEST_BACKOFF = timedelta(days=7)
DEFAULT_ZONE = "UTC"
NO_OTHER_SINKS: Mapping[str, SinkKind] = {}


@dataclass(frozen=True)
class ScheduleDefinition:
    """What to send, where and when: the part of a schedule that an application declares."""

    queue_name: str
    name: str
    workspace_id: str | None
    payload_json: str
    interval: timedelta | None  # None: an expression, or a one-off
    at: datetime | None
    jitter: timedelta  # how far an occurrence may move either way
    jitter_ratio: float | None  # of the interval, if it was asked for in that way
    priority: Priority
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    sink: str
    delivery: Delivery
    overlap: Overlap
    max_attempts: int | None  # to send a tick; None: the setting, as for the next two
    max_age: timedelta | None  # after which a tick that could not be sent is not tried again
    backoff: timedelta | None  # before the second attempt
    catch_up: CatchUp  # what is made up of occurrences that nobody dealt with in time
    misfire_grace: timedelta | None  # a tick later than this is missed
    cron: str | None
    timezone: str | None  # None: the workspace's
    zone: str | None  # the one that holds, as soon as it is known
    dst_gap: DstGap | None
    dst_fold: DstFold | None
    owner: str | None  # the label of the deployment that declares it

    def anchor(self, instant: datetime) -> datetime:
        """Occurrence 0 of a schedule that begins at `instant`."""
        return self.at or self.starts_at or instant

    def timetable(self, anchor: datetime) -> Timetable:
        """Its nominal times."""
        calendar = calendar_of(self.cron, self.zone, self.dst_gap, self.dst_fold)
        return Timetable(rule_of(anchor, self.interval, calendar), self.starts_at, self.ends_at, self.max_runs)


@dataclass(frozen=True)
class Schedule:
    """A row of `cron_schedules`."""

    id: str
    workspace_id: str | None
    name: str
    queue_name: str
    payload: Any
    interval: timedelta | None  # None: an expression, or a one-off at `anchor_at`
    anchor_at: datetime
    jitter: timedelta
    jitter_ratio: float | None
    priority: Priority
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    sink: str
    delivery: Delivery
    overlap: Overlap
    max_attempts: int | None  # to send a tick; None: the setting, as for the next two
    max_age: timedelta | None  # after which a tick that could not be sent is not tried again
    backoff: timedelta | None  # before the second attempt
    catch_up: CatchUp  # what is made up of occurrences that nobody dealt with in time
    misfire_grace: timedelta | None  # a tick later than this is missed
    cron: str | None
    timezone: str | None  # as declared; None: the workspace's
    zone: str | None  # the one that holds
    dst_gap: DstGap | None
    dst_fold: DstFold | None
    owner: str | None  # the label of the deployment that declared it
    enabled: bool
    version: int
    error: str | None  # why no more ticks are made, if the rule can't be followed
    error_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def description(self) -> str:
        """When it occurs, in one line of English."""
        return describe_rule(self.rule)

    @property
    def definition(self) -> ScheduleDefinition:
        """What was declared."""
        fields = {name: getattr(self, name) for name in ScheduleDefinition.__dataclass_fields__ if name in vars(self)}
        return ScheduleDefinition(**fields, payload_json=JSON_TEXT.encode(self.payload), at=self.at)

    @property
    def at(self) -> datetime | None:
        """The only occurrence of a one-off."""
        return self.anchor_at if self.interval is None and self.cron is None else None

    @property
    def rule(self) -> IntervalRule | OneOffRule | CronRule:
        """Its nominal times, whatever the bounds."""
        calendar = calendar_of(self.cron, self.zone, self.dst_gap, self.dst_fold)
        return rule_of(self.anchor_at, self.interval, calendar)

    @property
    def timetable(self) -> Timetable:
        """Its nominal times."""
        return Timetable(self.rule, self.starts_at, self.ends_at, self.max_runs)

    def execute_at(self, occurrence: datetime) -> datetime:
        """When an occurrence is due: moved by its jitter, unless it is the first, and never before `starts_at`.

        A time of day moves only forward.
        """
        if occurrence == self.anchor_at:
            return occurrence
        if self.cron is not None:
            half = self.jitter // 2
            return occurrence + half + jitter_offset(self.id, occurrence, half)
        moved = occurrence + jitter_offset(self.id, occurrence, self.jitter)
        return moved if self.starts_at is None else max(moved, self.starts_at)


@dataclass(frozen=True)
class Triggered:
    """A tick beside the rule, due at once."""

    tick_id: str
    scheduled_for: datetime

    @property
    def message_id(self) -> str:
        """The id that its message will have."""
        return self.tick_id.replace("tick_", "msg_", 1)


def calendar_of(
    cron: str | None, zone: str | None, dst_gap: DstGap | None, dst_fold: DstFold | None
) -> CronRule | None:
    """An expression in its zone, if there is one."""
    if cron is None:
        return None
    return CronRule(cron, zone or DEFAULT_ZONE, dst_gap or DST_GAPS[0], dst_fold or DST_FOLDS[0])


def rule_of(
    anchor: datetime, interval: timedelta | None, calendar: CronRule | None
) -> IntervalRule | OneOffRule | CronRule:
    """Nominal times: of a calendar, or from `anchor` on; without an interval there is one."""
    if calendar is not None:
        return calendar
    return OneOffRule(anchor) if interval is None else IntervalRule(anchor, interval)


def define_schedule(
    queue_name: str,
    *,
    every: float | timedelta | None = None,
    cron: str | None = None,
    at: datetime | None = None,
    payload: Any = None,
    workspace_id: str | None = None,
    name: str | None = None,
    timezone: str | None = None,
    jitter: Jitter = "default",
    priority: Priority = "normal",
    starts_at: datetime | None = None,
    ends_at: datetime | None = None,
    max_runs: int | None = None,
    sink: str = OWN_QUEUE,
    delivery: Delivery | None = None,
    overlap: Overlap = "allow",
    max_attempts: int | None = None,
    max_age: float | timedelta | None = None,
    backoff: float | timedelta | None = None,
    catch_up: CatchUp = "latest",
    misfire_grace: float | timedelta | None = None,
    dst_gap: DstGap | None = None,
    dst_fold: DstFold | None = None,
    owner: str | None = None,
    jitter_cap: timedelta = DEFAULT_JITTER_CAP,
    sinks: Mapping[str, SinkKind] = NO_OTHER_SINKS,
) -> ScheduleDefinition:
    """Check what the application asks for; the name defaults to the queue's. `sinks` are those beside our own queue."""
    check_name("queue_name", queue_name)
    for field, value in (("name", name), ("workspace_id", workspace_id), ("owner", owner)):
        if value is not None:
            check_name(field, value)
    interval, moment, calendar = check_rule(
        every=every, cron=cron, at=at, timezone=timezone, dst_gap=dst_gap, dst_fold=dst_fold
    )
    bounds = {"starts_at": starts_at, "ends_at": ends_at, "max_runs": max_runs}
    if moment is not None:
        given = bounds | {"jitter": None if jitter == "default" else jitter}
        _refuse("a schedule with at= has one occurrence: leave it out", given)
    amplitude, ratio = _check_jitter(jitter, interval, calendar["cron"], jitter_cap)
    return ScheduleDefinition(
        queue_name=queue_name,
        name=queue_name if name is None else name,
        workspace_id=workspace_id,
        payload_json=check_payload("payload", {} if payload is None else payload),
        interval=interval,
        at=moment,
        **calendar,
        zone=calendar["timezone"],
        owner=owner,
        jitter=amplitude,
        jitter_ratio=ratio,
        priority=PRIORITIES[check_priority("priority", priority)],
        **check_bounds(**bounds),
        **_check_sending(sink, delivery, overlap, sinks),
        max_attempts=None
        if max_attempts is None
        else check_count("max_attempts", max_attempts, most=MOST_TICK_ATTEMPTS),
        max_age=None if max_age is None else check_span("max_age", max_age, longest=LONGEST_AGE),
        backoff=None if backoff is None else check_span("backoff", backoff, longest=LONGEST_BACKOFF),
        catch_up=check_choice("catch_up", catch_up, CATCH_UPS),
        misfire_grace=None
        if misfire_grace is None
        else check_span("misfire_grace", misfire_grace, longest=LONGEST_AGE),
    )


class ScheduleChanges(TypedDict, total=False):
    """What an edit may change."""

    queue_name: str
    every: float | timedelta
    cron: str
    at: datetime
    timezone: str | None
    payload: Any
    jitter: Jitter
    priority: Priority
    starts_at: datetime | None
    ends_at: datetime | None
    max_runs: int | None
    sink: str
    delivery: Delivery | None
    overlap: Overlap
    max_attempts: int | None
    max_age: float | timedelta | None
    backoff: float | timedelta | None
    catch_up: CatchUp
    misfire_grace: float | timedelta | None
    dst_gap: DstGap | None
    dst_fold: DstFold | None
    owner: str | None


def redefine_schedule(
    schedule: Schedule,
    changes: ScheduleChanges,
    jitter_cap: timedelta = DEFAULT_JITTER_CAP,
    sinks: Mapping[str, SinkKind] = NO_OTHER_SINKS,
) -> ScheduleDefinition:
    """The schedule's definition with some of it changed; `every`, `cron` and `at` replace each other."""
    for field in changes:
        if field not in ScheduleChanges.__annotations__:
            raise InvalidInputError(field, f"can't be changed; what can: {', '.join(ScheduleChanges.__annotations__)}")
    current: dict[str, Any] = {
        "queue_name": schedule.queue_name,
        "payload": schedule.payload,
        "priority": schedule.priority,
        "workspace_id": schedule.workspace_id,
        "name": schedule.name,
        "sink": schedule.sink,
        "overlap": schedule.overlap,
        "max_attempts": schedule.max_attempts,
        "max_age": schedule.max_age,
        "backoff": schedule.backoff,
        "catch_up": schedule.catch_up,
        "misfire_grace": schedule.misfire_grace,
        "owner": schedule.owner,
    }
    if "sink" not in changes:  # another sink has a guarantee of its own
        current["delivery"] = schedule.delivery
        kind: SinkKind = "same_database" if schedule.delivery == "exactly_once" else "outside"
        sinks = {schedule.sink: kind, **sinks}
    current |= _current_rule(schedule, {"every", "cron", "at"} & changes.keys())
    current.update(changes)
    return define_schedule(**current, jitter_cap=jitter_cap, sinks=sinks)


def _current_rule(schedule: Schedule, changed: set[str]) -> dict[str, Any]:
    """What stays of a schedule's rule when `every`, `cron` or `at` is changed, or none of them."""
    if schedule.at is not None:
        return {} if changed else {"at": schedule.at}
    bounds = {"starts_at": schedule.starts_at, "ends_at": schedule.ends_at, "max_runs": schedule.max_runs}
    if schedule.cron is not None and changed <= {"cron"}:
        names = ("cron", "timezone", "dst_gap", "dst_fold", "jitter")
        return bounds | {name: getattr(schedule, name) for name in names}
    if schedule.interval is not None and changed <= {"every"}:
        jitter = schedule.jitter if schedule.jitter_ratio is None else schedule.jitter_ratio
        return bounds | {"every": schedule.interval, "jitter": jitter}
    return {} if "at" in changed else bounds


class _Calendar(TypedDict):
    cron: str | None
    timezone: str | None
    dst_gap: DstGap | None
    dst_fold: DstFold | None


def check_rule(
    *, every: Any, cron: Any, at: Any, timezone: Any, dst_gap: Any, dst_fold: Any
) -> tuple[timedelta | None, datetime | None, _Calendar]:
    """An interval, an instant, or an expression with its zone: exactly one of them."""
    if [every, cron, at].count(None) != 2:  # noqa: PLR2004 - one of three is given
        raise InvalidInputError("every", "give one of every=, cron= and at=")
    if cron is None:
        _refuse(
            "holds for cron= only: every= counts real seconds, and at= has a zone of its own",
            {"timezone": timezone, "dst_gap": dst_gap, "dst_fold": dst_fold},
        )
        interval = None if every is None else check_interval("every", every)
        moment = None if at is None else check_instant("at", at)
        return interval, moment, _Calendar(cron=None, timezone=None, dst_gap=None, dst_fold=None)
    calendar = _Calendar(
        cron=check_cron(cron),
        timezone=None if timezone is None else check_zone("timezone", timezone),
        dst_gap=DST_GAPS[0] if dst_gap is None else check_choice("dst_gap", dst_gap, DST_GAPS),
        dst_fold=DST_FOLDS[0] if dst_fold is None else check_choice("dst_fold", dst_fold, DST_FOLDS),
    )
    return None, None, calendar


def _refuse(reason: str, given: Mapping[str, object]) -> None:
    for field, value in given.items():
        if value is not None:
            raise InvalidInputError(field, reason)


def check_bounds(starts_at: Any, ends_at: Any, max_runs: Any) -> dict[str, Any]:
    """The first and the last instant, in this order, and the most occurrences."""
    if starts_at is not None:
        starts_at = check_instant("starts_at", starts_at)
    if ends_at is not None:
        ends_at = check_instant("ends_at", ends_at)
        if starts_at is not None and ends_at < starts_at:
            raise InvalidInputError("ends_at", f"must not be before starts_at ({starts_at.isoformat()})")
    if max_runs is not None:
        check_count("max_runs", max_runs, most=MOST_RUNS)
    return {"starts_at": starts_at, "ends_at": ends_at, "max_runs": max_runs}


def _check_sending(sink: Any, delivery: Any, overlap: Any, sinks: Mapping[str, SinkKind]) -> dict[str, Any]:
    check_name("sink", sink)
    if sink != OWN_QUEUE and sink not in sinks:
        raise InvalidInputError(
            "sink", f"there is no sink {sink!r}: declare it with add_sink(), or start a worker that has it first"
        )
    kind: SinkKind = "same_database" if sink == OWN_QUEUE else sinks[sink]
    possible = DELIVERIES[kind]
    if delivery is not None and delivery not in possible:
        where = "in this database" if kind == "same_database" else "outside this database"
        raise InvalidInputError(
            "delivery", f"must be {' or '.join(possible)}, because the sink {sink!r} is {where}, not {delivery!r}"
        )
    check_choice("overlap", overlap, OVERLAPS)
    if overlap != "allow" and sink != OWN_QUEUE:
        raise InvalidInputError(
            "overlap", f"must be allow: the sink {sink!r} can't say when a message is finished, only our own queue can"
        )
    return {"sink": sink, "delivery": possible[0] if delivery is None else delivery, "overlap": overlap}


def _check_jitter(
    value: object, interval: timedelta | None, cron: str | None, cap: timedelta
) -> tuple[timedelta, float | None]:
    """How far an occurrence may move, and the ratio if one was given."""
    if cron is not None:
        return _check_jitter_of_cron(value, cron, cap), None
    if value is None or interval is None:
        return timedelta(0), None
    if isinstance(value, timedelta):
        most = min(cap, interval // 2)
        if not timedelta(0) <= value <= most:
            raise InvalidInputError(
                "jitter", f"must be from 0 to {most.total_seconds():g} s: half the interval, and the cap"
            )
        return value, None
    ratio = DEFAULT_JITTER_RATIO if value == "default" else value
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= LARGEST_JITTER_RATIO:
        raise InvalidInputError(
            "jitter",
            f"must be a ratio of the interval from 0 to {LARGEST_JITTER_RATIO}, a timedelta or None, "
            f"not {shown(value)}",
        )
    if ratio == 0:
        return timedelta(0), None
    return min(cap, timedelta(microseconds=int(ratio * (interval // MICROSECOND)))), float(ratio)


def _check_jitter_of_cron(value: object, cron: str, cap: timedelta) -> timedelta:
    """A time of day moves only if asked, and not past the next one."""
    if value is None or value == "default":
        return timedelta(0)
    most = min(cap, parse(cron).shortest_gap)
    if not isinstance(value, timedelta) or not timedelta(0) <= value <= most:
        raise InvalidInputError(
            "jitter",
            f"must be from 0 to {most.total_seconds():g} s for cron={cron!r}: no more than the cap and the time "
            f"between two occurrences; as a timedelta, or in a file as 5s; not {shown(value)}",
        )
    return value
