"""What a worker counts, for Prometheus, and the port at which it serves it."""

from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate

import anyio
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cron_ticks.audit_results import KeptAudit
from cron_ticks.errors import CronTicksError
from cron_ticks.settings import Settings

log = structlog.get_logger("cron_ticks.metrics")

BESIDE_THE_RULE = ("trigger", "backfill")  # origins of ticks that nobody expected at that time
AUDITED = {
    "expected": "Occurrences of the audited hour that the versions of schedules say.",
    "enqueued": "Of the expected, those that became messages.",
    "explained": "Of the expected, those that did not, with the reason in the ledger.",
    "pending": "Of the expected, those that have a tick or are left for a manager.",
    "overdue": "Of the pending, those that have been due for too long.",
    "late": "Of the enqueued, those that were too late.",
    "unexplained": "Of the expected, those that became nothing. Must be 0.",
    "duplicate": "Occurrences that were told of twice. Must be 0.",
    "seconds": "How long the last audit took.",
    "timestamp_seconds": "When the last audit began.",
}
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class BatchHistogram(Collector):
    """A histogram that takes a batch at a time: thousands of ticks a second pass through it."""

    def __init__(self, name: str, documentation: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, values: Sequence[float]) -> None:
        """Count these."""
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += sum(values)

    def collect(self) -> Iterator[Metric]:
        """What Prometheus reads."""
        names = [*(repr(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The metrics of one worker, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.generated = Counter("cron_ticks_generated", "Ticks made by this worker's manager.", registry=registry)
        self.fired = Counter("cron_ticks_fired", "Ticks that became messages.", ["origin"], registry=registry)
        self.refused = Counter("cron_ticks_refused", "Ticks of occurrences that had fired before.", registry=registry)
        self.latency = BatchHistogram(
            "cron_ticks_execution_latency_seconds",
            "From when a tick was due to its message.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.lease_duration = BatchHistogram(
            "cron_ticks_lease_duration_seconds",
            "How long taken ticks are held: for the same database, the time of the firing statement.",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.missed = Counter("cron_ticks_missed", "Occurrences found too late to be made up.", registry=registry)
        self.overlapped = Counter(
            "cron_ticks_overlapped",
            "Occurrences skipped, because the message before was unfinished.",
            registry=registry,
        )
        self.not_sent = Counter(
            "cron_ticks_not_sent", "Attempts to send a tick that failed.", ["sink"], registry=registry
        )
        self.failed = Counter("cron_ticks_failed", "Ticks given up after their attempts.", ["sink"], registry=registry)
        self.recovered = Counter(
            "cron_ticks_recovered",
            "Delivered ticks that a dead or hanging attempt had left.",
            ["sink"],
            registry=registry,
        )
        self.messages_removed = Counter(
            "cron_ticks_messages_removed",
            "Completed messages removed when their retention was over.",
            registry=registry,
        )
        self.expired = Counter("cron_ticks_expired", "Ticks whose last lease ran out.", registry=registry)
        self.orphaned = Counter(
            "cron_ticks_orphaned", "Ticks removed because their schedule is gone.", registry=registry
        )
        self.broken = Counter("cron_ticks_schedules_broken", "Schedules put in the error state.", registry=registry)
        coverage = Gauge(
            "cron_ticks_coverage_ratio",
            "Of the occurrences that this worker has dealt with, the part that became messages.",
            registry=registry,
        )
        coverage.set_function(self._coverage)
        self._audited = {
            name: Gauge(f"cron_ticks_audit_{name}", f"{text} By the last audit of any worker.", registry=registry)
            for name, text in AUDITED.items()
        }
        self._done = self._lost = 0

    def note_generated(self, ticks: int, missed: int) -> None:
        """A batch of a manager."""
        self.generated.inc(ticks)
        self.note_lost(missed, self.missed)

    def note_lost(self, occurrences: int, counter: Counter) -> None:
        """Occurrences that become no message."""
        counter.inc(occurrences)
        self._lost += occurrences

    def begin(self, sink: str) -> None:
        """There is nothing to count of a sink yet: alerts need to see that too."""
        for counter in (self.not_sent, self.failed, self.recovered):
            counter.labels(sink)

    def note_overlapped(self, origins: Sequence[str]) -> None:
        """Ticks that became no message, because the one before was unfinished."""
        self.overlapped.inc(len(origins))
        self._lost += sum(origin not in BESIDE_THE_RULE for origin in origins)

    def note_not_sent(self, sink: str, over: Mapping[str, bool]) -> None:
        """Ticks by id that could not be sent, and whether that was the last attempt."""
        self.not_sent.labels(sink).inc(len(over))
        given_up = sum(over.values())
        self.failed.labels(sink).inc(given_up)
        self._lost += given_up

    def note_fired(self, fired: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Ticks that became messages: origins, and how many seconds the ticks of each were late."""
        by_origin: dict[str, list[float]] = {}
        for origin, lateness in fired:
            by_origin.setdefault(origin, []).extend(lateness)
        for origin, lateness in by_origin.items():
            self.fired.labels(origin).inc(len(lateness))
            if origin not in BESIDE_THE_RULE:
                self._done += len(lateness)
            self.latency.observe([max(0.0, seconds) for seconds in lateness])

    def note_audit(self, audit: KeptAudit) -> None:
        """The last audit that any worker has made."""
        figures = audit._asdict() | {"seconds": audit.seconds, "timestamp_seconds": audit.started_at.timestamp()}
        for name, gauge in self._audited.items():
            gauge.set(figures[name])

    def _coverage(self) -> float:
        expected = self._done + self._lost
        return self._done / expected if expected else 1.0


@asynccontextmanager
async def served(metrics: Metrics, settings: Settings) -> AsyncIterator[None]:
    """Serve the metrics while the block runs, if a port is set."""
    if settings.metrics_port is None:
        yield
        return
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, metrics.registry)
    except OSError as error:
        raise CronTicksError(
            f"metrics can't be served at {settings.metrics_host}:{settings.metrics_port} ({error}): "
            "set CRON_TICKS_METRICS_PORT to a free port, or to 0"
        ) from error
    log.info("metrics_served", host=settings.metrics_host, port=server.server_port)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):  # it looks up twice a second, and others need not wait for that
            await anyio.to_thread.run_sync(server.shutdown)
        server.server_close()
        thread.join()
