"""What `bench bloat` found: how much of its speed a contender keeps while nothing can be removed."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.table import Table

from cron_ticks.cli.bench.machine import described
from cron_ticks.cli.bench.plot import Plot, bar_of
from cron_ticks.errors import CronTicksError

EDGE = 3  # slices at the beginning, and at the end, that are compared
ENOUGH_ROUNDS = 5  # for figures that others will read


@dataclass(frozen=True)
class Drain:
    """One drain: the rate of each slice, and the dead rows that were there in the end."""

    count: int
    rates: list[float]
    dead_rows: int

    @property
    def first(self) -> float:
        """At the beginning."""
        return statistics.median(self.rates[:EDGE])

    @property
    def last(self) -> float:
        """In the end."""
        return statistics.median(self.rates[-EDGE:])

    @property
    def ratio(self) -> float:
        """What was left of the speed."""
        return self.last / self.first


@dataclass(frozen=True)
class BloatFigures:
    """Drains by measure, then by contender, one per round."""

    drains: Mapping[str, Mapping[str, list[Drain]]]
    versions: Mapping[str, str]
    machine: dict[str, Any]
    count: int
    slices: int
    rounds: int

    def as_json(self) -> dict[str, Any]:
        """Each value."""
        return {
            "machine": self.machine,
            "count": self.count,
            "slices": self.slices,
            "rounds": self.rounds,
            "versions": dict(self.versions),
            "measures": {
                measure: {name: _shown(drains) for name, drains in by_contender.items()}
                for measure, by_contender in self.drains.items()
            },
        }

    def table(self) -> Table:
        """For people: the speed at the beginning and in the end, and the ratio."""
        caption = (
            f"a second, median of the first and of the last {EDGE} of {self.slices} slices; what was left: last by "
            f"first. {_said(self.rounds)}. {described(self.machine)}"
        )
        table = Table(title="cron-ticks bench bloat", caption=caption, box=box.SIMPLE_HEAD)
        table.add_column("")
        for heading in ("count", "first", "last", "what was left", "dead rows"):
            table.add_column(heading, justify="right")
        for measure, by_contender in self.drains.items():
            for name, drains in by_contender.items():
                table.add_row(f"{measure}: {name}", *_cells(drains))
        return table

    def plot(self) -> Plot | None:
        """What was left of the speed."""
        groups = {
            measure: {name: bar_of([drain.ratio for drain in drains]) for name, drains in by_contender.items()}
            for measure, by_contender in self.drains.items()
        }
        caption = f"{_said(self.rounds)}; {self.count:,} at the most. {described(self.machine)}."
        return Plot("cron-ticks bench bloat", "last slices by first slices", groups, caption=caption)


def _said(rounds: int) -> str:
    """What the figures are, and whether they are enough."""
    median = f"Median of {rounds} rounds (lowest to highest)" if rounds > 1 else "1 round"
    return median if rounds >= ENOUGH_ROUNDS else f"{median}: not for publication"


def _shown(drains: Sequence[Drain]) -> dict[str, Any]:
    ratios = [drain.ratio for drain in drains]
    return {
        "count": drains[0].count,
        "per_second": [[round(rate, 1) for rate in drain.rates] for drain in drains],
        "dead_rows": [drain.dead_rows for drain in drains],
        "ratio": {
            "rounds": [round(ratio, 3) for ratio in ratios],
            "median": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
        },
    }


def _cells(drains: Sequence[Drain]) -> Iterable[str]:
    ratios = [drain.ratio for drain in drains]
    yield f"{drains[0].count:,}"
    yield f"{statistics.median(drain.first for drain in drains):,.0f}"
    yield f"{statistics.median(drain.last for drain in drains):,.0f}"
    yield f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    yield f"{statistics.median(drain.dead_rows for drain in drains):,.0f}"


def slice_rates(
    reports: Mapping[int, Sequence[tuple[float, int]]], start: float, total: int, slices: int
) -> list[float]:
    """The rate of each slice, from what each process said: a time, and how many it had handled by then.

    Between two reports it is taken to have gone on evenly.
    """
    said = sorted((at, number, handled) for number, given in reports.items() for at, handled in given)
    by_process = dict.fromkeys(reports, 0)
    edges, wanted = [start], [total * (number + 1) / slices for number in range(slices)]
    before, done = start, 0
    for at, number, handled in said:
        by_process[number] = handled
        now_done = sum(by_process.values())
        while len(edges) <= slices and now_done >= wanted[len(edges) - 1]:
            share = (wanted[len(edges) - 1] - done) / (now_done - done)
            edges.append(before + share * (max(at, before) - before))
        before, done = max(at, before), now_done
    if len(edges) <= slices:
        raise CronTicksError(f"only {done} of {total} were handled")
    return [total / slices / max(end - begin, 1e-6) for begin, end in pairwise(edges)]
