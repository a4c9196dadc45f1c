"""The table of README: what the published figures say in a line each."""

from collections.abc import Callable, Mapping
from functools import partial

from figure_tables import Json, best_peer, of_values, ours, spread, table

from cron_ticks.cli.bench.bloat import FREE, HELD
from cron_ticks.cli.bench.bursts import BARE, OURS

Row = tuple[str, str]
CONSUME = "consume"  # of the queue's measures


def headlines(found: Mapping[str, Json]) -> str:
    """Of the published figures that are there, by their names."""
    rows = [row for name, made in ROWS.items() if name in found for row in made(found[name])]
    return table(["what", "median of five rounds (range)"], rows, numbers=False)


def _bursts(found: Json) -> list[Row]:
    return [_burst(int(size), burst) for size, burst in found["bursts"].items()]


def _burst(size: int, burst: Json) -> Row:
    name, peer = best_peer(burst)
    ratio = spread(burst["ours_to_best_peer"])
    if any(peer["missing"]):
        theirs = f"had fired {spread(of_values(peer['fired']))} when it was given up: a rate {ratio} times lower"
    else:
        theirs = f"needs {spread(peer['max_ms'], unit=' ms')}: {ratio} times as long"
    after = spread(ours(burst, 2)["max_ms"], unit=" ms")
    said = f"all are messages after {after}; {name}, the fastest peer here, {theirs}"
    return f"{size:,} schedules fall due at the same instant, two processes", said


def _drains(found: Json) -> list[Row]:
    return [_drain(measure, results) for measure, results in found["measures"].items()]


def _drain(measure: str, results: Json) -> Row:
    share = spread(of_values(results[BARE]["ratio_of_ours"]), ".2f")
    return f"due ticks into messages ({measure})", f"{spread(results[OURS])} a second: {share} of the bare statement"


def _queue(found: Json) -> list[Row]:
    return [
        _consumed(measure, results) for measure, results in found["measures"].items() if measure.startswith(CONSUME)
    ]


def _consumed(measure: str, results: Json) -> Row:
    others = (
        f"{spread(of_values(result['ratio_of_ours']), '.2f')} times {name}"
        for name, result in results.items()
        if name not in {OURS, BARE}
    )
    return f"messages handled ({measure})", f"{spread(results[OURS])} a second: {', '.join(others)}"


def _load(found: Json) -> list[Row]:
    [(size, load)] = found["loads"].items()
    said = (
        f"{'held' if load['held'] else '**not held**'}: {spread(load['per_second'])} ticks a second, "
        f"{_most(load, 'missed')} missed, {_most(load, 'duplicates')} doubled; lateness p50 "
        f"{spread(load['p50_ms'], unit=' ms')}, p99 {spread(load['p99_ms'], unit=' ms')}"
    )
    horizon = f", `CRON_TICKS_HORIZON_SECONDS={found['horizon']:g}`" if found["horizon"] else ""
    return [(f"{int(size):,} schedules of one minute{horizon}", said)]


def _pass(found: Json) -> list[Row]:
    fewest, *_, most = found["passes"]
    said = f"{spread(found['passes'][most]['ratio'], '.2f')} times as long as among {int(fewest):,}"
    return [(f"making {found['due']:,} ticks among {int(most):,} schedules", said)]


def _idle(found: Json) -> list[Row]:
    *_, (size, result) = found["sizes"].items()
    said = f"{spread(result['statements_per_second'], '.2f')} statements a second"
    return [(f"a worker with nothing to do, among {int(size):,} schedules", said)]


def _kill(found: Json) -> list[Row]:
    queue = found["variants"]["queue"]
    said = (
        f"{_most(queue, 'lost')} ticks lost, {_most(queue, 'duplicates')} doubled; the latest is "
        f"{spread(queue['worst_ms'], unit=' ms')} late"
    )
    return [("`kill -9` of one of two workers", said)]


def _bloat(found: Json, kind: str) -> list[Row]:
    """With its control: what is lost there too is not the snapshot's doing."""
    left = (
        f"{spread(results[f'{OURS}, {HELD}']['ratio'], '.2f')} with {measure.removeprefix(f'{kind}, ')}, "
        f"{spread(results[f'{OURS}, {FREE}']['ratio'], '.2f')} if none is held"
        for measure, results in found["measures"].items()
    )
    return [
        (
            f"{found['count']:,} {kind} while a session elsewhere holds an old snapshot",
            f"what is left of the first speed: {'; '.join(left)}",
        )
    ]


def _most(result: Json, name: str) -> str:
    """In the worst round."""
    return f"{result[name]['highest']:,.0f}"


ROWS: Mapping[str, Callable[[Json], list[Row]]] = {
    "peers": _bursts,
    "peers-100000": _bursts,
    "fire": _drains,
    "queue": _queue,
    "steady": _load,
    "million": _load,
    "generate": _pass,
    "idle": _idle,
    "failover": _kill,
    "bloat-ticks": partial(_bloat, kind="ticks"),
    "bloat-messages": partial(_bloat, kind="messages"),
}
