"""The tables of docs/explanation/scale.md: what a tick takes of a server, by the published load, and what follows."""

import statistics
from collections.abc import Callable, Sequence

from figure_tables import Json, spread, table

from cron_ticks.settings import Settings

SCHEDULE_TABLES = ("cron_schedules", "cron_schedule_cursors", "cron_schedule_versions")
EXAMPLES = {
    "1,000,000 of an hour": 1_000_000 / 3600,
    "100,000 of a minute": 100_000 / 60,
    "1,000,000 of a minute": 1_000_000 / 60,
}
DAY_SECONDS = 86_400
RUNS_DAYS = int(Settings.model_fields["runs_retention_days"].default)
MESSAGE_DAYS = float(Settings.model_fields["message_retention_seconds"].default) / DAY_SECONDS

OPENING = """What a tick and a row take was measured with a load whose messages are made and not consumed
([Figures](../reference/figures.md)); what some loads need follows from it."""
CLOSING = """The CPU is that of the benchmark's machine, and linear only roughly: a larger batch costs less per tick.
Handling a message comes on top: `cron-ticks bench steady --consume` says how much."""


def capacity(found: Json) -> str:
    """What one tick, row and schedule takes; then some loads."""
    [(size, load)] = found["loads"].items()
    measured = table([f"measured with {int(size):,} schedules of one minute", ""], _measured(load))
    return f"{OPENING}\n\n{measured}\n\n{table(['schedules', *EXAMPLES], _examples(load))}\n\n{CLOSING}"


def _measured(load: Json) -> list[Sequence[str]]:
    return [
        ("WAL per tick, bytes", spread(load["wal_bytes_per_tick"])),
        ("a row of `cron_runs` with its indexes, bytes", f"{_row_bytes(load, 'cron_runs'):,.0f}"),
        ("a row of `queue_messages` with its indexes, bytes", f"{_row_bytes(load, 'queue_messages'):,.0f}"),
        ("a pending tick with its indexes, bytes", f"{_row_bytes(load, 'cron_ticks'):,.0f}"),
        ("a schedule in all its tables, bytes", f"{_schedule_bytes(load):,.0f}"),
        ("CPU of the server per 1,000 ticks a second, cores", f"{_per_tick(load, 'server_cpu') * 1000:.2f}"),
        ("CPU of the workers per 1,000 ticks a second, cores", f"{_per_tick(load, 'pods_cpu') * 1000:.3f}"),
    ]


def _examples(load: Json) -> list[list[str]]:
    wal, runs, messages = (
        _median(load, "wal_bytes_per_tick"),
        _row_bytes(load, "cron_runs"),
        _row_bytes(load, "queue_messages"),
    )
    rows: dict[str, Callable[[float], str]] = {
        "ticks a second": lambda rate: f"{rate:,.0f}",
        "WAL": lambda rate: f"{rate * wal / 1e6:,.1f} MB/s",
        f"ledger, {RUNS_DAYS} days": lambda rate: f"{rate * DAY_SECONDS * RUNS_DAYS * runs / 1e9:,.0f} GB",
        f"messages, {MESSAGE_DAYS:g} days": lambda rate: (
            f"{rate * DAY_SECONDS * MESSAGE_DAYS * messages / 1e9:,.0f} GB"
        ),
        "CPU of the server": lambda rate: f"{rate * _per_tick(load, 'server_cpu'):,.2f} cores",
    }
    return [[label, *(made(rate) for rate in EXAMPLES.values())] for label, made in rows.items()]


def _median(load: Json, name: str) -> float:
    return float(load[name]["median"])


def _per_tick(load: Json, name: str) -> float:
    return _median(load, name) / _median(load, "per_second")


def _row_bytes(load: Json, name: str) -> float:
    """Of a row and what is dead beside it, which takes as much."""
    sizes = [each["sizes"][name] for each in load["rounds"]]
    rows: list[float] = [
        (size["table_bytes"] + size["index_bytes"]) / max(1, size["rows"] + size["dead_rows"]) for size in sizes
    ]
    return statistics.median(rows)


def _schedule_bytes(load: Json) -> float:
    return sum(_row_bytes(load, name) for name in SCHEDULE_TABLES)
