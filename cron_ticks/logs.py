"""Structured logs: readable on a terminal, JSON otherwise.

The event names are stable: schedule_created, schedule_edited, schedule_deleted, ticks_generated, ticks_fired
(one line a batch), tick_fired (one line a tick, level debug), occurrences_missed, cleaned_up, message_failed,
message_dead, service_failed, service_recovered.
"""

import logging
import sys
from typing import Literal, TextIO

import structlog

LogFormat = Literal["auto", "console", "json"]


def configure_logs(level: str = "info", log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send every event from `level` up to `stream`, or to standard error as it is at that moment."""
    readable = log_format == "console" or (log_format == "auto" and (stream or sys.stderr).isatty())
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
        # A line is one write, so that processes which share a pipe don't mix their lines.
        logger_factory=lambda *_: structlog.WriteLogger(stream or sys.stderr),
    )


def configure_logs_unless_done(level: str, log_format: LogFormat) -> None:
    """For an application that has no opinion; one that configures structlog itself keeps its own way."""
    if not structlog.is_configured():
        configure_logs(level, log_format)
