"""What the benchmarks printed as JSON, as tables for a page: the median of the rounds, and the range behind it."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cron_ticks.cli.bench import failover, idle, steady
from cron_ticks.cli.bench.bursts import BARE, OURS, with_processes

Json = Mapping[str, Any]


def spread(summary: Json, form: str = ",.0f", unit: str = "") -> str:
    """The median and the range, or the one value that all rounds have."""
    median, lowest, highest = (f"{summary[name]:{form}}" for name in ("median", "lowest", "highest"))
    return f"{median}{unit}" if lowest == highest else f"{median}{unit} ({lowest} to {highest})"


def of_values(values: Sequence[float]) -> Json:
    """For those that come without it."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """As Markdown; all columns but the first have numbers, unless said otherwise."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(headings) - 1)
    lines = [headings, rule, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def burst_table(found: Json) -> str:
    """Schedules that fall due at the same instant."""
    headings = ["due at once", "a second", "ours by theirs", "p50, ms", "p99, ms", "last, ms", "fired"]
    left_out = (f"{name} is left out: {why.splitlines()[0]}." for name, why in found.get("left_out", {}).items())
    return "\n\n".join([table(headings, _burst_rows(found["bursts"])), *left_out])


def _burst_rows(bursts: Json) -> Iterator[list[str]]:
    for size, burst in bursts.items():
        for name, result in burst["contenders"].items():
            fired = bool(result["per_second"]["lowest"])  # otherwise it has no lateness, and ours no ratio to it
            late = [spread(result[part]) if fired else "" for part in ("p50_ms", "p99_ms", "max_ms")]
            form = ",.2f" if name.startswith(BARE) else ",.0f"
            ratio = spread(result["ratio_of_ours"], form) if fired and not name.startswith(OURS) else ""
            yield [f"{int(size):,}: {name}", spread(result["per_second"]), ratio, *late, _fired(result)]


def _fired(result: Json) -> str:
    """All, or what is wrong in the worst round."""
    wrong = [f"{max(result[what]):,} {what}" for what in ("missing", "doubled") if max(result[what])]
    return ", ".join(wrong) or "all"


def rates_table(found: Json) -> str:
    """Contenders side by side, with our ratio to each."""
    names = list(found["versions"])
    rows = (
        [measure, *(_rate(results[name], own=name == OURS) for name in names)]
        for measure, results in found["measures"].items()
    )
    return table(["a second", *(f"{name} {version}" for name, version in found["versions"].items())], rows)


def _rate(result: Json, *, own: bool) -> str:
    ratio = "" if own else f"; ours: {spread(of_values(result['ratio_of_ours']), '.2f')} times"
    return spread(result) + ratio


def steady_table(found: Json) -> str:
    """A load that goes on for minutes."""
    loads = found["loads"]
    rows = [["held in each round", *("yes" if load["held"] else "no" for load in loads.values())]]
    rows += _shown(steady.SHOWN, list(loads.values()))
    return table(["schedules of one minute", *(f"{int(size):,}" for size in loads)], rows)


def failover_table(found: Json) -> str:
    """A worker that is killed."""
    variants = found["variants"]
    met = [[each["met"] for each in variant["rounds"]] for variant in variants.values()]
    rows = [["rounds with none later than allowed", *(f"{sum(each)} of {len(each)}" for each in met)]]
    rows += _shown(failover.SHOWN, list(variants.values()))
    return table(["sink", *variants], rows)


def idle_table(found: Json) -> str:
    """A worker with nothing to do."""
    sizes = found["sizes"]
    rows = _shown(idle.SHOWN, list(sizes.values()))
    return table(["schedules, none of them due", *(f"{int(size):,}" for size in sizes)], rows)


def _shown(shown: Iterable[tuple[str, str, str]], columns: Sequence[Json]) -> list[list[str]]:
    return [
        [label, *(spread(column[name], form) if name in column else "" for column in columns)]
        for name, label, form in shown
        if any(name in column for column in columns)
    ]


def generate_table(found: Json) -> str:
    """Making ticks."""
    rows = [[f"rate, {name}", spread(rate, unit=" ticks/s"), ""] for name, rate in found["per_second"].items()]
    rows[0][-1] = f"{spread(found['share_of_bare'], '.2f')} of the bare statements"
    for size, result in found["passes"].items():
        ratio = f"{spread(result['ratio'], '.2f')} times the first"
        rows.append(
            [f"a pass with {found['due']:,} due among {int(size):,}", spread(result["seconds"], ".2f", " s"), ratio]
        )
    return table(["making ticks", "", "ratio"], rows)


def bloat_table(found: Json) -> str:
    """What is left of the speed."""
    rows = (
        [f"{measure}: {name}", f"{result['count']:,}", spread(result["ratio"], ".2f"), f"{most_dead(result):,}"]
        for measure, results in found["measures"].items()
        for name, result in results.items()
    )
    return table(["", "count", "what was left of the speed", "dead rows in the end"], rows)


def most_dead(result: Json) -> int:
    """Rows, in the worst round."""
    return max(map(int, result["dead_rows"]))


def best_peer(burst: Json) -> tuple[str, Json]:
    """The fastest of the others, by its median."""
    peers = {name: found for name, found in burst["contenders"].items() if not name.startswith((OURS, BARE))}
    return max(peers.items(), key=lambda peer: float(peer[1]["per_second"]["median"]))


def ours(burst: Json, processes: int) -> Json:
    """Of the contenders, our own."""
    found: Json = burst["contenders"][with_processes(OURS, processes)]
    return found
