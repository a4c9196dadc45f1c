"""The errors that cron_ticks raises on purpose.

CronTicksError
├── InvalidInputError        an argument is wrong; nothing was changed
├── DeclarationsError        a file of schedules has mistakes; nothing was changed
├── SettingsError            one or more CRON_TICKS_ variables are wrong
├── DatabaseUnavailableError the server can't be reached
├── EmbeddedServerError      the embedded PostgreSQL can't be started here
├── MigrationError           the schema and this release don't fit
├── ScheduleNotFoundError    there is no such schedule
├── BackfillNotFoundError    there is no such backfill
└── MessageNotFoundError     there is no such message
"""


class CronTicksError(Exception):
    """Base of all errors raised on purpose; the message says what to do."""


class InvalidInputError(CronTicksError, ValueError):
    """An argument is wrong: `field` names it, and nothing was changed."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class DeclarationsError(CronTicksError, ValueError):
    """Every mistake of a file at once, each with its place."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(
            "\n".join([f"{len(problems)} mistake(s), nothing was changed:", *(f"  {it}" for it in problems)])
        )
        self.problems = problems


class SettingsError(CronTicksError, ValueError):
    """Every wrong setting at once, each with the name of its variable."""

    def __init__(self, problems: dict[str, str]) -> None:
        lines = [f"  {variable}: {problem}" for variable, problem in problems.items()]
        super().__init__("\n".join([f"{len(problems)} setting(s) can't be used:", *lines]))
        self.problems = problems


class DatabaseUnavailableError(CronTicksError):
    """PostgreSQL can't be reached."""


class EmbeddedServerError(CronTicksError):
    """The embedded PostgreSQL can't be started on this machine."""


class MigrationError(CronTicksError):
    """The database's schema doesn't fit this release."""


class ScheduleNotFoundError(CronTicksError, LookupError):
    """There is no schedule under this id."""


class BackfillNotFoundError(CronTicksError, LookupError):
    """There is no backfill under this id."""


class MessageNotFoundError(CronTicksError, LookupError):
    """There is no message under this id in the state asked for."""
