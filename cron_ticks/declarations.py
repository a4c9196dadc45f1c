"""Schedules declared in a file: read and checked as a whole, every mistake with its place."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from cron_ticks.checks import check_name, shown
from cron_ticks.documents import read_document
from cron_ticks.errors import DeclarationsError, InvalidInputError
from cron_ticks.schedules import ScheduleDefinition, SinkKind, define_schedule

NOT_IN_FILES = {"owner", "jitter_cap", "sinks"}
OPTIONS = [name for name in signature(define_schedule).parameters if name not in NOT_IN_FILES]
RULES = ("every", "cron", "at")
CALENDAR = {"timezone", "dst_gap", "dst_fold"}
DURATIONS = ("every", "jitter", "max_age", "backoff", "misfire_grace")
TIMES = ("at", "starts_at", "ends_at")
# Put in for what is wrong, so that the rest of a schedule can be checked too.
HARMLESS = {"queue_name": "queue", "every": 3600, "cron": "0 0 * * *", "at": datetime(2400, 1, 1, tzinfo=UTC)}

DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Declared:
    """A schedule of a file, and where it stands."""

    place: str
    definition: ScheduleDefinition


@dataclass(frozen=True)
class Declarations:
    """What a file declares."""

    owner: str | None
    schedules: tuple[Declared, ...]

    @property
    def workspaces(self) -> list[str]:
        """Whose schedules there are."""
        found = {declared.definition.workspace_id for declared in self.schedules}
        return sorted(workspace_id for workspace_id in found if workspace_id is not None)


@dataclass(frozen=True)
class AppliedChange:
    """What became of a schedule when a file was applied."""

    change: Literal["create", "change", "remove", "unchanged"]
    workspace_id: str | None
    name: str
    schedule_id: str | None  # None: it would be created
    fields: tuple[str, ...] = ()  # that were changed


@dataclass(frozen=True)
class Applied:
    """What applying a file did, or with `dry_run` would do."""

    owner: str | None
    dry_run: bool
    changes: tuple[AppliedChange, ...]

    def count(self, change: str) -> int:
        """How many schedules it became so of."""
        return sum(item.change == change for item in self.changes)


def read_declarations(
    path: Path, *, owner: str | None, jitter_cap: timedelta, sinks: Mapping[str, SinkKind]
) -> Declarations:
    """Read a file, or raise one DeclarationsError with everything that is wrong in it."""
    document, lines = read_document(path)
    problems = _check_top(path, document)
    label = document.get("owner") if owner is None else owner
    problems += _problems_of_owner(path.name, label)
    entries = document.get("schedules") or []
    if not isinstance(entries, list):
        raise DeclarationsError([f"{path.name}: schedules: must be a list of tables"])
    declared: list[Declared] = []
    places: dict[str, str] = {}
    for number, entry in enumerate(entries):
        place = _place(path, lines[number] if len(lines) == len(entries) else None, number, entry)
        definition, mistakes = _define(entry, jitter_cap, sinks)
        key = _key(entry)
        if key is not None and places.setdefault(key, place) != place:
            mistakes.append(f"name: {places[key]} has the same name and workspace")
        problems += [f"{place}: {mistake}" for mistake in mistakes]
        if definition is not None:
            declared.append(Declared(place, definition))
    if problems:
        raise DeclarationsError(problems)
    return Declarations(label, tuple(declared))


def parse_duration(field: str, text: str) -> timedelta:
    """A duration such as 30s, 5m, 1h30m, 2d or 500ms."""
    if not DURATION.fullmatch(text):
        raise InvalidInputError(
            field, f"must be a number of seconds or a text such as 30s, 5m or 1h30m, not {shown(text)}"
        )
    seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    try:
        return timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidInputError(field, f"{shown(text)} is too long") from None


def parse_time(field: str, text: str) -> datetime:
    """A time as ISO 8601 writes it."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(field, f"must be a time such as 2027-01-01T09:00:00Z, not {shown(text)}") from None
    if moment.utcoffset() is None:
        raise InvalidInputError(field, f"must end in Z or in an offset such as +01:00, not {shown(text)}")
    return moment


def _check_top(path: Path, document: dict[str, Any]) -> list[str]:
    known = ("owner", "schedules")
    return [f"{path.name}: {_unknown(key, known)}" for key in document if key not in known]


def _problems_of_owner(file: str, owner: object) -> list[str]:
    try:
        if owner is not None:
            check_name("owner", owner)
    except InvalidInputError as error:
        return [f"{file}: {error}"]
    return []


def _place(path: Path, line: int | None, number: int, entry: object) -> str:
    name = (entry.get("name") or entry.get("queue_name")) if isinstance(entry, dict) else None
    where = path.name if line is None else f"{path.name}:{line}"
    return f"{where} schedule {number + 1 if name is None else shown(name)}"


def _key(entry: object) -> str | None:
    """Which schedule it is, if that can be told."""
    if not isinstance(entry, dict):
        return None
    names = (entry.get("workspace_id"), entry.get("name") or entry.get("queue_name"))
    return repr(names) if isinstance(names[1], str) and isinstance(names[0], str | None) else None


def _define(
    entry: object, jitter_cap: timedelta, sinks: Mapping[str, SinkKind]
) -> tuple[ScheduleDefinition | None, list[str]]:
    """A schedule's definition, and every mistake in it: what is wrong is put right and the rest is checked again."""
    if not isinstance(entry, dict):
        return None, ["must be a table"]
    options, problems = _complete(entry)
    while True:
        try:
            return define_schedule(**_values(options), jitter_cap=jitter_cap, sinks=sinks), problems
        except InvalidInputError as error:
            if str(error) in problems or error.field not in options:
                return None, problems if str(error) in problems else [*problems, str(error)]
            problems.append(str(error))
            del options[error.field]
            if error.field in HARMLESS:
                options[error.field] = HARMLESS[error.field]


def _complete(entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What can be checked: known keys, with a queue and one rule; and what is wrong with them so far."""
    problems = [_unknown(key, OPTIONS) for key in entry if key not in OPTIONS]
    options = {key: value for key, value in entry.items() if key in OPTIONS}
    if "queue_name" not in options:
        problems.append("queue_name: is missing")
        options["queue_name"] = HARMLESS["queue_name"]
    if sum(name in options for name in RULES) != 1:
        problems.append("every: give one of every, cron and at")
        options = {name: value for name, value in options.items() if name not in RULES}
        rule = "cron" if options.keys() & CALENDAR else "every"
        options[rule] = HARMLESS[rule]
    return options, problems


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    """As schedule() takes them: durations and times may be written as texts."""
    values = dict(options)
    for names, read in ((DURATIONS, parse_duration), (TIMES, parse_time)):
        for name in names:
            text = values.get(name)
            if isinstance(text, str) and not (name == "jitter" and text == "default"):
                values[name] = read(name, text)
    return values


def _unknown(key: object, known: Sequence[str]) -> str:
    close = get_close_matches(str(key), known, n=1)
    return f"{key}: there is no such key{f': did you mean {close[0]}?' if close else ''}"
