"""Hostile cron expressions for a minute: `python benchmarks/fuzz_calendar.py [--seconds 60] [--seed N] [--json]`.

Feeds texts of all kinds to whatever reads an expression, and looks for another exception than InvalidInputError, for a
call that takes too much of the processor, and for occurrences that contradict each other. Exits with 1 if it finds one.
"""

import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

import cron_ticks
from cron_ticks import cron_expressions, cron_rules, descriptions, zones
from cron_ticks.cli.common import Json
from cron_ticks.cron_rules import DST_FOLDS, DST_GAPS, CronRule
from cron_ticks.errors import InvalidInputError

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.expressions import aimed, broken_expression, random_expression, random_instant, random_text, random_zone

# Milliseconds of the processor that a call may take on the first time, when nothing is cached yet.
LIMITS = {"parse": 5.0, "describe": 5.0, "preview": 50.0, "count": 50.0, "nth": 50.0}
REPEATS = 3  # of a slow call: the least counts, because another program may have slowed the machine down
SUSPECT = 0.5  # of the limit, or slower than all before: worth repeating
HOSTILE_PER_RIGHT = 50  # texts that are mostly refused, which takes no time, to one that is right
WARM_UP = 3  # rounds that aren't measured
USED = 0.3  # of the hostile ones that are accepted
RANDOM_TEXTS = 0.2  # of the hostile ones
AIMED = 0.2  # at a change of clocks
MOST_PREVIEWED = 5
LONGEST_OUTAGE = timedelta(days=800)  # over which occurrences are counted, as a manager does that comes back
MOST_COMPARED = 300
LAST = datetime(2500, 1, 1, tzinfo=UTC)
SHOWN = 5  # failures

ResultT = TypeVar("ResultT")
Seconds = Annotated[float, typer.Option(help="How long.", min=0.1)]
Seed = Annotated[int | None, typer.Option(help="Of the dice: the same inputs as another run's.", show_default="random")]


class Failure(Exception):  # noqa: N818 - what the search is for
    """Something that must not be."""


@dataclass
class Slowest:
    """The call that took longest of its kind."""

    milliseconds: float = 0.0
    input: str = ""


@dataclass
class Report:
    """What was tried, and what came of it."""

    seed: int
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, Slowest] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "seed": self.seed,
            "inputs": self.inputs,
            "accepted": self.accepted,
            "refused": self.refused,
            "calls": dict(self.calls),
            "limits_milliseconds": LIMITS,
            "slowest": {
                name: {"milliseconds": round(call.milliseconds, 3), "input": call.input}
                for name, call in self.slowest.items()
            },
            "failures": self.failures,
        }

    def text(self) -> str:
        """For people."""
        lines = [f"seed {self.seed}: {self.inputs} inputs, {self.accepted} accepted, {self.refused} refused", ""]
        lines += [f"{'call':<10}{'calls':>9}{'slowest':>12}{'limit':>9}  input of the slowest"]
        for name, limit in LIMITS.items():
            call = self.slowest.get(name, Slowest())
            lines.append(f"{name:<10}{self.calls[name]:>9}{call.milliseconds:>9.2f} ms{limit:>6.0f} ms  {call.input}")
        lines += ["", f"{len(self.failures)} failures", *self.failures[:SHOWN]]
        return "\n".join(lines)


class Meter:
    """Calls functions with empty caches, and keeps what the slowest took."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.measuring = False

    def call(self, name: str, described: str, function: Callable[[], ResultT]) -> ResultT:
        """What the function returns, or its InvalidInputError; any other error is a failure."""
        try:
            result, milliseconds = _measured(function)
        except Exception as error:
            raise Failure(f"{name} of {described}: {error!r}") from error
        if self.measuring:
            self._report.calls[name] += 1
            self._judge(name, described, function, milliseconds)
        if isinstance(result, InvalidInputError):
            raise result
        return result

    def _judge(self, name: str, described: str, function: Callable[[], object], milliseconds: float) -> None:
        slowest = self._report.slowest.setdefault(name, Slowest())
        if milliseconds > slowest.milliseconds or milliseconds > SUSPECT * LIMITS[name]:
            least = min(milliseconds, *(_measured(function)[1] for _ in range(REPEATS)))
            if least > slowest.milliseconds:
                self._report.slowest[name] = Slowest(least, described)
            if least > LIMITS[name]:
                raise Failure(f"{name} of {described} took {least:.1f} ms, more than {LIMITS[name]:g}")


def _measured(function: Callable[[], ResultT]) -> tuple[ResultT | InvalidInputError, float]:
    """What it returns or refuses with, and milliseconds of the processor, with empty caches."""
    for cached in CACHED:
        cached.cache_clear()
    result: ResultT | InvalidInputError
    started = time.thread_time()
    try:
        result = function()
    except InvalidInputError as error:
        result = error
    return result, (time.thread_time() - started) * 1000


def _cached_functions() -> list[Any]:
    """All that remember what they were asked, but for the list of zones, which is read once from a file."""
    found = [
        function
        for module in (cron_expressions, cron_rules, descriptions, zones)
        for function in vars(module).values()
        if hasattr(function, "cache_clear") and function is not zones.known_zones
    ]
    return list(dict.fromkeys(found))


CACHED = _cached_functions()


def fuzz(*, seconds: float, seed: int) -> Report:
    """Throw all kinds of input at the calendar for some time."""
    report, dice = Report(seed), random.Random(seed)  # noqa: S311 - no secret
    meter, rounds, end = Meter(report), 0, time.monotonic() + seconds
    while time.monotonic() < end or rounds <= WARM_UP:
        meter.measuring = rounds >= WARM_UP
        for _ in range(HOSTILE_PER_RIGHT):
            _try(report, lambda: _hostile(meter, dice, report))
        _try(report, lambda: _right(meter, dice, report))
        rounds += 1
    return report


def _try(report: Report, attempt: Callable[[], None]) -> None:
    report.inputs += 1
    try:
        attempt()
    except Failure as failure:
        report.failures.append(str(failure))


def _hostile(meter: Meter, dice: random.Random, report: Report) -> None:
    """A text that is probably refused; if it is not, it is used."""
    text = random_text(dice) if dice.random() < RANDOM_TEXTS else broken_expression(dice)
    described = ascii(text)
    try:
        meter.call("parse", described, lambda: cron_expressions.parse(text))
    except InvalidInputError:
        report.refused += 1
        _must_refuse(text)
        return
    report.accepted += 1
    if dice.random() < USED:
        _use(meter, dice, text)


def _must_refuse(text: str) -> None:
    """What parse refuses, preview refuses with the same words."""
    try:
        cron_ticks.preview(cron=text, after=datetime(2026, 1, 1, tzinfo=UTC))
    except InvalidInputError:
        return
    except Exception as error:
        raise Failure(f"preview of {text!a}: {error!r}") from error
    raise Failure(f"preview takes {text!a}, which parse refuses")


def _right(meter: Meter, dice: random.Random, report: Report) -> None:
    """An expression that must be accepted."""
    text = random_expression(dice)
    try:
        meter.call("parse", ascii(text), lambda: cron_expressions.parse(text))
    except InvalidInputError as error:
        raise Failure(f"{text!a} is refused: {error}") from error
    report.accepted += 1
    _use(meter, dice, text)


def _use(meter: Meter, dice: random.Random, text: str) -> None:
    """All that can be done with an expression that was accepted."""
    zone = random_zone(dice)
    start = random_instant(dice, zone)
    if dice.random() < AIMED:
        text, start = aimed(dice, zone)
    rule = CronRule(text, zone, dice.choice(DST_GAPS), dice.choice(DST_FOLDS))
    described = f"{text!a} {zone} {start:%Y-%m-%dT%H:%M:%S} {rule.dst_gap}/{rule.dst_fold}"
    try:
        _describe(meter, text, zone)
        _preview(meter, dice, rule, start, described)
        _count(meter, dice, rule, start, described)
    except InvalidInputError as error:
        raise Failure(f"{described} is refused: {error}") from error


def _describe(meter: Meter, text: str, zone: str) -> None:
    described = f"{text!a} {zone}"
    line = meter.call("describe", described, lambda: cron_ticks.describe(text, zone))
    if not line or not line.isprintable():
        raise Failure(f"describe of {described} is {line!r}")


def _preview(meter: Meter, dice: random.Random, rule: CronRule, after: datetime, described: str) -> None:
    count = dice.randint(1, MOST_PREVIEWED)
    found = meter.call(
        "preview",
        described,
        lambda: cron_ticks.preview(
            cron=rule.expression,
            timezone=rule.zone,
            after=after,
            count=count,
            dst_gap=rule.dst_gap,
            dst_fold=rule.dst_fold,
        ),
    )
    if len(found) > count or any(late <= early for early, late in zip([after, *found], found, strict=False)):
        raise Failure(f"preview of {described} is not increasing: {found}")


def _count(meter: Meter, dice: random.Random, rule: CronRule, start: datetime, described: str) -> None:
    """Counting, and finding one by its number, must say what listing says."""
    end = min(start + dice.random() * LONGEST_OUTAGE, LAST)
    count = meter.call("count", f"{described} to {end:%Y-%m-%d}", lambda: rule.count(start, end))
    if not count:
        return
    number = dice.randrange(count)
    found = meter.call("nth", f"{described} number {number}", lambda: rule.nth(start, number))
    if not start <= found < end or rule.count(start, found) != number:
        raise Failure(f"occurrence {number} of {described} is not {found}")
    listed = rule.occurrences(start, end, most=MOST_COMPARED + 1)
    if len(listed) != min(count, MOST_COMPARED + 1):
        raise Failure(f"{described} has {len(listed)} occurrences, not {count}")


def main(seconds: Seconds = 60.0, seed: Seed = None, json_output: Json = False) -> None:  # noqa: FBT002
    """Hostile cron expressions: no other exception, no slow case."""
    report = fuzz(seconds=seconds, seed=secrets.randbelow(10**9) if seed is None else seed)
    typer.echo(json.dumps(report.as_json(), indent=2) if json_output else report.text())
    raise typer.Exit(1 if report.failures else 0)


if __name__ == "__main__":
    typer.run(main)
