"""Bursts: many schedules fall due at the same instant. What became of them, contender by contender."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg
from rich import box
from rich.table import Table

from cron_ticks.cli.bench.plot import Bar, bar_of
from cron_ticks.errors import CronTicksError

OURS, BARE = "cron_ticks", "bare SQL"

# The first firing of each schedule counts; any other is one too many.
SUMMARY = """
WITH first AS (
    SELECT schedule, count(*) AS firings, extract(epoch FROM min(fired_at) - $1::timestamptz)::float * 1000 AS late
    FROM ({firings}) AS firing
    GROUP BY schedule
)
SELECT count(*) AS fired, coalesce(sum(firings), 0)::bigint - count(*) AS doubled,
    coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY late), 0) AS p50_ms,
    coalesce(percentile_cont(0.99) WITHIN GROUP (ORDER BY late), 0) AS p99_ms, coalesce(max(late), 0) AS max_ms
FROM first
"""


class NotReadyError(CronTicksError):
    """A contender was not ready when its schedules were due, or can't have so many: a result, and no end of the run."""


@dataclass(frozen=True)
class Burst:
    """What became of one."""

    schedules: int
    fired: int  # schedules that fired at all
    doubled: int  # firings beyond the first of a schedule
    p50_ms: float
    p99_ms: float
    max_ms: float  # of the last that fired

    @property
    def missing(self) -> int:
        """Schedules that did not fire while it was watched."""
        return self.schedules - self.fired

    @property
    def per_second(self) -> float:
        """What fired, by the lateness of the last."""
        return self.fired / self.max_ms * 1000 if self.fired else 0.0


async def burst_of(
    connection: "asyncpg.Connection[asyncpg.Record]", firings: str, schedules: int, due: datetime
) -> Burst:
    """By a query of the rows that firing has made: `schedule` and `fired_at`."""
    row = await connection.fetchrow(SUMMARY.replace("{firings}", firings), due)
    return Burst(schedules, **dict(row or {}))


def with_processes(name: str, processes: int) -> str:
    """How a contender is called."""
    return f"{name}, {processes} process" + ("" if processes == 1 else "es")


@dataclass(frozen=True)
class BurstFigures:
    """Bursts by size, then by contender, one per round; fewer of one that was not ready in some round."""

    bursts: Mapping[int, Mapping[str, Sequence[Burst]]]
    processes: Mapping[str, int]  # of each contender

    def ratios(self, size: int, name: str) -> list[float]:
        """Ours by the contender's, in each round: ours with as many processes as it has."""
        ours = self._rates(size, with_processes(OURS, self.processes[name]))
        return [our / theirs if theirs else 0.0 for our, theirs in zip(ours, self._rates(size, name), strict=False)]

    def to_best_peer(self, size: int) -> list[float]:
        """Ours with two processes by the best of the others in that round, the bare statement apart."""
        peers = [name for name in self.bursts[size] if not name.startswith((OURS, BARE))]
        best = map(max, itertools.zip_longest(*(self._rates(size, name) for name in peers), fillvalue=0.0))
        ours = self._rates(size, with_processes(OURS, 2))
        return [our / theirs if theirs else 0.0 for our, theirs in zip(ours, best, strict=False)]

    def as_json(self) -> dict[str, Any]:
        """Each value, with the median and the range."""
        return {
            str(size): {
                "contenders": {name: self._contender(size, name, found) for name, found in by_contender.items()},
                "ours_to_bare_1_process": summary(self.ratios(size, with_processes(BARE, 1)), 3),
            }
            | ({"ours_to_best_peer": summary(self.to_best_peer(size), 1)} if self.to_best_peer(size) else {})
            for size, by_contender in self.bursts.items()
        }

    def table(self) -> Table:
        """For people."""
        table = Table(title="schedules that fall due at the same instant", box=box.SIMPLE_HEAD)
        for heading in ("", "a second", "ratio", "p50 ms", "p99 ms", "max ms", "fired"):
            table.add_column(heading, justify="right" if heading else "left")
        for size, by_contender in self.bursts.items():
            table.add_row(f"[bold]{size:,}")
            for name, found in by_contender.items():
                table.add_row(*self._cells(size, name, found))
        return table

    def bars(self) -> dict[str, dict[str, Bar]]:
        """Rates, a group per size."""
        return {
            f"{size:,} at once": {name: bar_of(self._rates(size, name)) for name in by_contender}
            for size, by_contender in self.bursts.items()
        }

    def _rates(self, size: int, name: str) -> list[float]:
        return [burst.per_second for burst in self.bursts[size][name]]

    def _contender(self, size: int, name: str, found: Sequence[Burst]) -> dict[str, Any]:
        def of(value: Callable[[Burst], float]) -> list[float]:
            return [value(burst) for burst in found]

        return {
            "processes": self.processes[name],
            "per_second": summary(self._rates(size, name), 1),
            "ratio_of_ours": summary(self.ratios(size, name), 3),
            "p50_ms": summary(of(lambda burst: burst.p50_ms), 2),
            "p99_ms": summary(of(lambda burst: burst.p99_ms), 2),
            "max_ms": summary(of(lambda burst: burst.max_ms), 2),
            "fired": [burst.fired for burst in found],
            "missing": [burst.missing for burst in found],
            "doubled": [burst.doubled for burst in found],
        }

    def _cells(self, size: int, name: str, found: Sequence[Burst]) -> list[str]:
        own = name == with_processes(OURS, self.processes[name])
        fired = all(burst.fired for burst in found)  # otherwise it has no lateness, and ours no ratio to it
        late = [[getattr(burst, f"{part}_ms") for burst in found] for part in ("p50", "p99", "max")]
        return [
            f"  {name}",
            _spread(self._rates(size, name), 0),
            _spread(self.ratios(size, name), 2) if fired and not own else "",
            *(_spread(values, 0) if fired else "" for values in late),
            _fired(found),
        ]


def summary(values: Sequence[float], digits: int) -> dict[str, Any]:
    """A value per round, with the median and the range."""
    return {
        "rounds": [round(value, digits) for value in values],
        "median": round(statistics.median(values), digits),
        "lowest": round(min(values), digits),
        "highest": round(max(values), digits),
    }


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f}\n{min(values):,.{digits}f} to {max(values):,.{digits}f}"


def _fired(found: Sequence[Burst]) -> str:
    """All, or what is wrong in the worst round."""
    missing, doubled = max(burst.missing for burst in found), max(burst.doubled for burst in found)
    wrong = [f"{count:,} {what}" for count, what in ((missing, "missing"), (doubled, "doubled")) if count]
    return ", ".join(wrong) or "all"
