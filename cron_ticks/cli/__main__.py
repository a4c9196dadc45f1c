"""`python -m cron_ticks.cli`: the same as `cron-ticks`."""

from cron_ticks.cli.main import app

app()
