"""Structured logs: readable on a terminal, JSON otherwise.

The event names are stable: schedule_created, schedule_edited, schedule_deleted, ticks_generated, ticks_fired
(one line a batch), tick_fired (one line a tick, level debug), occurrences_missed, cleaned_up, message_failed,
message_dead, service_failed, service_recovered.
"""

import logging
import sys
from typing import Literal, TextIO

import structlog


def configure_logs(
    level: str = "info", log_format: Literal["auto", "console", "json"] = "auto", stream: TextIO | None = None
) -> None:
    """Send every event from `level` up to `stream`, or to standard error. Called by the command line alone."""
    target = sys.stderr if stream is None else stream
    readable = log_format == "console" or (log_format == "auto" and target.isatty())
    renderer: list[structlog.types.Processor] = (
        [structlog.dev.ConsoleRenderer()]
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
        logger_factory=structlog.PrintLoggerFactory(file=target),
        cache_logger_on_first_use=True,
    )
