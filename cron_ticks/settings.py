"""Settings: read once from `CRON_TICKS_` variables, validated together, frozen."""

import difflib
import getpass
import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from cron_ticks.errors import SettingsError
from cron_ticks.events import DEFAULT_LEVEL, EventLevel

PREFIX = "CRON_TICKS_"
JITTER_CAP_SECONDS = 30.0
LONGEST_IDLE_SECONDS = 20
SLOTS = 256  # of the schedules, as the database hashes them
SHARD_LEASE_SECONDS = 30.0
SHORTEST_LEASE_SECONDS = 3.0  # of shards, unless somebody wants it otherwise: a heartbeat comes three times as often

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)]
Retention = Annotated[float, Field(gt=0, le=3650 * 86_400, allow_inf_nan=False)]
RetentionDays = Annotated[int, Field(ge=2, le=36_500)]
BatchSize = Annotated[int, Field(ge=1, le=100_000)]


def _number(value: object) -> object:
    """Variables are texts, and a choice of numbers doesn't read them by itself."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


class Settings(BaseSettings):
    """Everything that can be set. `Settings.load()` reports all mistakes at once."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", validate_default=True
    )

    # Where the data is
    dsn: SecretStr | None = Field(
        default=None, description="PostgreSQL to use; without it the embedded server is started"
    )
    database_schema: str = Field(
        default="public",
        pattern=r"^[a-z_][a-z0-9_]{0,47}$",
        description="Database schema that the tables live in; installations in different schemas don't meet",
    )
    embedded_data_dir: Path | None = Field(
        default=None, description="Folder of the embedded server; default: the user's data directory"
    )
    embedded_version: Annotated[Literal[16, 18], BeforeValidator(_number)] = Field(
        default=18, description="PostgreSQL release of the embedded server"
    )
    embedded_durable: bool = Field(
        default=True, description="fsync of the embedded server; off only for data that may be lost"
    )
    migrate_on_start: bool = Field(
        default=True,
        description="Apply pending migrations when a worker starts; off: refuse to start instead",
    )

    # Connections
    pool_max_size: int = Field(default=10, ge=1, le=1000, description="Connections per process at the most")
    connect_timeout_seconds: Seconds = Field(default=30, description="How long to try to reach the server at start")
    statement_timeout_seconds: Seconds = Field(default=30, description="Deadline of each statement")
    transaction_pooler: bool = Field(
        default=False,
        description="Set when the DSN leads to a pooler in transaction mode: no cached statements",
    )

    listen_dsn: SecretStr | None = Field(
        default=None,
        description="PostgreSQL to LISTEN at, past a transaction pooler; default: the same as the DSN",
    )

    # ScheduleManager
    lookahead_seconds: Seconds = Field(default=60, description="How far ahead ticks are made")
    horizon_seconds: Seconds | None = Field(
        default=None,
        description="How far ahead up to 4 ticks are made of a schedule that needs one; default: the lookahead",
    )
    manager_interval_seconds: Seconds = Field(default=10, description="Pause between two passes of the manager")
    manager_batch_size: BatchSize = Field(default=1000, description="Schedules per transaction of the manager")
    missed_after_seconds: Seconds = Field(
        default=60, description="An occurrence later than this is for its schedule's catch-up policy to decide"
    )
    catch_up_max_count: int = Field(
        default=100, ge=1, le=1000, description="Most occurrences of a schedule that are made up at once"
    )
    catch_up_max_age_seconds: Retention = Field(
        default=86_400, description="Age beyond which an occurrence is not made up"
    )
    catch_up_spread_seconds: Seconds = Field(
        default=300, description="Time over which catch_up='spread' paces a schedule's occurrences"
    )
    jitter_cap_seconds: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Most that jitter may move a tick; default: 30, or what the lookahead leaves room for",
    )
    virtual_shards: Annotated[Literal[0, 1, 2, 4, 8, 16, 32, 64, 128, 256], BeforeValidator(_number)] = Field(
        default=64, description="Shards of the schedules that managers lease and share out; 0: every manager has all"
    )
    shard_lease_seconds: Annotated[float, Field(ge=1, le=7 * 86_400, allow_inf_nan=False)] | None = Field(
        default=None,
        description="How long a manager that ended without a word keeps its shards; "
        "default: 30, or what the lookahead leaves room for",
    )
    shard_count: int = Field(
        default=1, ge=1, le=4096, description="Static shards of the schedules, instead of leased ones; 1: none"
    )
    shard_id: int = Field(default=0, ge=0, description="The shard that this process's manager serves")

    # Message ticker
    ticker_interval_ms: int = Field(default=100, ge=1, le=60_000, description="Pause between two looks of the ticker")
    ticker_idle_seconds: float = Field(
        default=15,
        gt=0,
        le=LONGEST_IDLE_SECONDS,
        allow_inf_nan=False,
        description="Longest pause of a ticker with nothing to do, while NOTIFY reaches it",
    )
    ticker_batch_size: BatchSize = Field(default=500, description="Ticks per firing statement")
    lease_seconds: Seconds = Field(default=10, description="How long a token, or a leased tick, lasts")
    lease_renewal_seconds: Seconds = Field(default=5, description="How often tokens in use are renewed")

    # Ticks that can't be sent; a schedule may set these otherwise
    tick_max_attempts: int = Field(default=3, ge=1, le=1000, description="Tries to send a tick before it has failed")
    tick_max_age_seconds: Retention = Field(default=86_400, description="Age at which a tick is not tried again")
    tick_backoff_seconds: Seconds = Field(
        default=10, description="Pause before a tick's second try; it doubles each time, up to 5 minutes"
    )

    # Messages; a handler may set the last four otherwise for its queue
    message_concurrency: int = Field(default=10, ge=1, le=10_000, description="Handlers at once per process")
    message_batch_size: BatchSize = Field(default=2000, description="Messages in a process's hand at the most")
    message_max_attempts: int = Field(default=5, ge=1, le=1000, description="Tries per message before it is dead")
    message_timeout_seconds: Seconds | None = Field(
        default=None, description="Longest run of a handler; none: no limit"
    )
    message_tokens_per_pair: int = Field(
        default=1, ge=1, le=1000, description="Workers at once per queue and workspace; order needs 1"
    )
    message_retention_seconds: Retention = Field(default=7 * 86_400, description="How long a completed message is kept")

    # CleanupWorker
    cleanup_interval_seconds: Seconds = Field(default=300, description="Pause between two passes of the cleanup")
    cleanup_threshold_seconds: Seconds = Field(
        default=300, description="How long an expired lease is left alone before the cleanup looks at it"
    )
    cleanup_batch_size: BatchSize = Field(default=1000, description="Rows per statement of the cleanup")

    # The ledger
    events: EventLevel = Field(
        default=DEFAULT_LEVEL,
        description="State changes that are kept: all, all but the usual way of a message, or none",
    )
    actor: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Who changes schedules, for the events; default: user@host",
    )
    audit_interval_seconds: Annotated[float, Field(ge=0, le=7 * 86_400, allow_inf_nan=False)] = Field(
        default=300, description="Pause between two audits of the last hour, by all workers together; 0: none"
    )
    runs_retention_days: RetentionDays = Field(default=90, description="How long runs, versions and audits are kept")
    events_retention_days: RetentionDays = Field(default=90, description="How long events are kept")
    dead_retention_days: RetentionDays | None = Field(
        default=90, description="How long a dead letter is kept; none: until it is removed by hand"
    )

    # Metrics
    metrics_port: int | None = Field(
        default=None, ge=0, le=65_535, description="Port of a worker's metrics; 0: a free one; none: not served"
    )
    metrics_host: str = Field(default="127.0.0.1", min_length=1, description="Address to serve metrics at")

    # The process
    stop_grace_seconds: Seconds = Field(default=10, description="How long running work may go on after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged")
    log_format: Literal["auto", "console", "json"] = Field(
        default="auto", description="auto: readable on a terminal, JSON otherwise"
    )

    @field_validator("database_schema")
    @classmethod
    def _schema_must_be_ours(cls, value: str) -> str:
        if value.startswith("pg_") or value == "information_schema":
            raise ValueError("belongs to PostgreSQL itself: choose another name")
        return value

    @field_validator("actor")
    @classmethod
    def _actor_must_be_readable(cls, value: str | None) -> str | None:
        if value is not None and not value.isprintable():
            raise ValueError("must not contain control characters")
        return value

    @field_validator("horizon_seconds")
    @classmethod
    def _the_window_ends_before_the_horizon(cls, value: float | None, info: ValidationInfo) -> float | None:
        lookahead = info.data.get("lookahead_seconds")
        if value is not None and lookahead is not None and value < lookahead:
            raise ValueError(f"must be at least {PREFIX}LOOKAHEAD_SECONDS ({lookahead:g}), in which all ticks are made")
        return value

    @field_validator("manager_interval_seconds")
    @classmethod
    def _passes_must_overlap(cls, value: float, info: ValidationInfo) -> float:
        lookahead = info.data.get("lookahead_seconds")
        if lookahead is not None and value >= lookahead:
            raise ValueError(f"must be less than {PREFIX}LOOKAHEAD_SECONDS ({lookahead:g}), or ticks are made late")
        return value

    @field_validator("jitter_cap_seconds")
    @classmethod
    def _ticks_must_be_made_before_they_are_due(cls, value: float | None, info: ValidationInfo) -> float | None:
        lookahead, interval = info.data.get("lookahead_seconds"), info.data.get("manager_interval_seconds")
        if value is not None and lookahead is not None and interval is not None and value > lookahead - interval:
            raise ValueError(
                f"must be at most {lookahead - interval:g}: {PREFIX}LOOKAHEAD_SECONDS less "
                f"{PREFIX}MANAGER_INTERVAL_SECONDS, or ticks are made after they are due"
            )
        return value

    @field_validator("shard_lease_seconds")
    @classmethod
    def _shards_must_move_before_ticks_are_due(cls, value: float | None, info: ValidationInfo) -> float | None:
        lookahead, interval = info.data.get("lookahead_seconds"), info.data.get("manager_interval_seconds")
        if value is not None and lookahead is not None and interval is not None and value > lookahead - interval:
            raise ValueError(
                f"must be at most {lookahead - interval:g}: {PREFIX}LOOKAHEAD_SECONDS less "
                f"{PREFIX}MANAGER_INTERVAL_SECONDS, or ticks of a dead pod's shards are made after they are due"
            )
        return value

    @field_validator("shard_id")
    @classmethod
    def _shard_must_exist(cls, value: int, info: ValidationInfo) -> int:
        count = info.data.get("shard_count")
        if count is not None and value >= count:
            raise ValueError(f"must be less than {PREFIX}SHARD_COUNT ({count}); the first shard is 0")
        return value

    @field_validator("lease_renewal_seconds")
    @classmethod
    def _renewal_before_expiry(cls, value: float, info: ValidationInfo) -> float:
        lease = info.data.get("lease_seconds")
        if lease is not None and value > lease / 2:
            raise ValueError(f"must be at most half of {PREFIX}LEASE_SECONDS ({lease:g}), or a token runs out in use")
        return value

    @field_validator("runs_retention_days")
    @classmethod
    def _what_may_be_made_up_has_its_runs(cls, value: int, info: ValidationInfo) -> int:
        longest = info.data.get("catch_up_max_age_seconds")
        if longest is not None and value * 86_400 <= longest:
            raise ValueError(
                f"must be more days than {PREFIX}CATCH_UP_MAX_AGE_SECONDS has ({longest / 86_400:g}), "
                "or an occurrence that is made up may have fired before"
            )
        return value

    @property
    def jitter_cap(self) -> timedelta:
        """The most that jitter may move a tick."""
        if self.jitter_cap_seconds is not None:
            return timedelta(seconds=self.jitter_cap_seconds)
        return timedelta(seconds=min(JITTER_CAP_SECONDS, self.lookahead_seconds - self.manager_interval_seconds))

    @property
    def horizon(self) -> float:
        """How far ahead ticks may be made, in seconds."""
        return self.lookahead_seconds if self.horizon_seconds is None else self.horizon_seconds

    @property
    def shard_lease(self) -> float:
        """How long a manager keeps its shards without a word, in seconds."""
        if self.shard_lease_seconds is not None:
            return self.shard_lease_seconds
        room = self.lookahead_seconds - self.manager_interval_seconds
        return max(SHORTEST_LEASE_SECONDS, min(SHARD_LEASE_SECONDS, room))

    @property
    def leased_shards(self) -> int:
        """How many shards managers share out; none if their shards are fixed."""
        return self.virtual_shards if self.shard_count == 1 else 0

    @property
    def acting_as(self) -> str:
        """Whose changes this process makes: the setting, else the system's user and host."""
        if self.actor is not None:
            return self.actor
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container whose user has no name
            user = str(os.getuid())
        return f"{user}@{socket.gethostname()}"

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Settings from the environment and `overrides`, or one SettingsError that lists every mistake."""
        try:
            return cls(**overrides)
        except ValidationError as error:
            raise SettingsError(_problems(error)) from None

    @classmethod
    def unknown_variables(cls, environment: Iterable[str] | None = None) -> dict[str, str | None]:
        """Variables with our prefix that set nothing, each with the setting it may have meant."""
        known = [name.upper() for name in cls.model_fields]
        names = os.environ if environment is None else environment
        ours = {name: name.upper().removeprefix(PREFIX) for name in names if name.upper().startswith(PREFIX)}
        return {name: _nearest(short, known) for name, short in ours.items() if short not in known}


def _nearest(name: str, known: list[str]) -> str | None:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"{PREFIX}{matches[0]}" if matches else None


def _problems(error: ValidationError) -> dict[str, str]:
    problems: dict[str, str] = {}
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "settings"
        message = item["msg"].removeprefix("Value error, ")
        shown = "" if name.endswith("dsn") else f" (got {item['input']!r})"
        problems[f"{PREFIX}{name.upper()}"] = f"{message}{shown}"
    return problems
