"""A distributed cron on PostgreSQL: schedules, ticks and the services that make them."""

from cron_ticks.backfills import Backfill
from cron_ticks.descriptions import describe
from cron_ticks.errors import CronTicksError
from cron_ticks.events import Event
from cron_ticks.previews import preview
from cron_ticks.release import __version__
from cron_ticks.rows import LeasedTick
from cron_ticks.runs import MessageState, Run
from cron_ticks.schedules import Schedule, Triggered
from cron_ticks.settings import Settings
from cron_ticks.sinks import RejectTick, UnknownOutcome
from cron_ticks.user_sinks import Constant, FunctionSink, TableSink

__all__ = [
    "Backfill",
    "Constant",
    "CronTicksError",
    "Event",
    "FunctionSink",
    "LeasedTick",
    "MessageState",
    "RejectTick",
    "Run",
    "Schedule",
    "Settings",
    "TableSink",
    "Triggered",
    "UnknownOutcome",
    "__version__",
    "describe",
    "preview",
]
