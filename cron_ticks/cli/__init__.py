"""The command line, on top of the cron core and the queue."""
