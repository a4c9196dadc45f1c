"""A distributed cron on PostgreSQL: schedules, ticks and the services that make them."""

__version__ = "0.1.0"

from cron_ticks.errors import CronTicksError
from cron_ticks.schedules import Schedule, Triggered
from cron_ticks.settings import Settings

__all__ = ["CronTicksError", "Schedule", "Settings", "Triggered", "__version__"]
