"""Structured logs: readable on a terminal, JSON otherwise.

These event names are stable, so that alerts may rely on them: schedule_created, schedule_edited, schedule_disabled,
schedule_enabled, schedule_retried, schedule_triggered, schedule_deleted, schedule_flip_flop, schedule_broken,
workspace_deleted, workspace_timezone_set, backfill_started, backfill_ended, backfill_cancelled, ticks_generated,
ticks_fired (one line a batch), tick_fired (one line a tick, level debug), tick_refused, tick_overlapped, tick_missed,
tick_waiting (level debug), tick_not_sent, tick_failed, tick_lease_lost, publish_near_deadline, leases_not_renewed,
outcome_not_written, delivery_failed, waiting_not_released, sinks_unserved, occurrences_missed, run_partitions_made,
run_partitions_removed, run_partitions_in_use, ledger_trimmed, cleaned_up, audit_done, audit_found, metrics_served,
message_failed, message_dead, token_lost, tokens_expired, outcome_refused, queues_unhandled, completed_messages_removed,
dead_letters_removed, notify_heard, notify_not_heard, worker_started, worker_stopping, worker_stopped, service_failed,
service_recovered, shards_shared_out, sweep_too_slow, batch_refused, database_unreachable, migration_applied,
embedded_server_started, embedded_server_stopped, embedded_server_revived, worker_exited.
"""

import logging
import sys
from contextlib import suppress
from typing import IO, Literal

import structlog

LogFormat = Literal["auto", "console", "json"]


class LineWriter:
    """Writes each line at once, so that processes which share a pipe don't mix theirs.

    A full disk or a closed pipe loses the line, never the work.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        """Write one line."""
        with suppress(OSError, ValueError):
            self._stream.write(f"{line}\n")
            self._stream.flush()

    debug = info = warning = error = critical = exception = msg


def configure_logs(level: str = "info", log_format: LogFormat = "auto", stream: IO[str] | None = None) -> None:
    """Send every event from `level` up to `stream`, or to standard error as it is at that moment."""
    readable = log_format == "console" or (log_format == "auto" and (stream or sys.stderr).isatty())
    renderer: list[structlog.types.Processor] = (
        # Plain, because tracebacks with the values of variables show passwords.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if readable
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: LineWriter(stream or sys.stderr),
    )


def configure_logs_unless_done(level: str, log_format: LogFormat) -> None:
    """For an application that has no opinion; one that configures structlog itself keeps its own way."""
    if not structlog.is_configured():
        configure_logs(level, log_format)
