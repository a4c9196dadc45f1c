"""Settings: defaults of the design, one report of all mistakes."""

import os
import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from cron_ticks.errors import SettingsError
from cron_ticks.settings import Settings


def test_defaults_are_those_of_the_design() -> None:
    settings = Settings.load()
    assert settings.lookahead_seconds == 60
    assert settings.manager_interval_seconds == 10
    assert settings.manager_batch_size == 1000
    assert settings.ticker_interval_ms == 100
    assert settings.lease_seconds == 10
    assert settings.lease_renewal_seconds == 5
    assert settings.cleanup_interval_seconds == 300
    assert settings.cleanup_threshold_seconds == 300
    assert (settings.shard_count, settings.shard_id) == (1, 0)
    assert settings.database_schema == "public"
    assert settings.embedded_durable


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRON_TICKS_LOOKAHEAD_SECONDS", "120")
    monkeypatch.setenv("CRON_TICKS_EMBEDDED_DATA_DIR", "some/where")
    settings = Settings.load()
    assert settings.lookahead_seconds == 120
    assert settings.embedded_data_dir == Path("some/where")


def test_every_setting_can_be_set_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the text of its default; version 16 and the like are read as the numbers that they are."""
    defaults = Settings.load()
    values = {name: value for name, value in defaults.model_dump().items() if value is not None}
    for name, value in values.items():
        monkeypatch.setenv(f"CRON_TICKS_{name.upper()}", str(value))
    monkeypatch.setenv("CRON_TICKS_EMBEDDED_VERSION", "16")
    assert Settings.load().model_dump() == defaults.model_dump() | {"embedded_version": 16}


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.setenv(f"CRON_TICKS_{name.upper()}", "")
    settings = Settings.load()
    assert (settings.dsn, settings.embedded_data_dir, settings.lookahead_seconds) == (None, None, 60)


def test_every_mistake_is_reported_at_once_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRON_TICKS_LOOKAHEAD_SECONDS", "soon")
    monkeypatch.setenv("CRON_TICKS_LEASE_SECONDS", "-1")
    monkeypatch.setenv("CRON_TICKS_SHARD_COUNT", "4")
    monkeypatch.setenv("CRON_TICKS_SHARD_ID", "4")
    monkeypatch.setenv("CRON_TICKS_DATABASE_SCHEMA", "no spaces; please")
    monkeypatch.setenv("CRON_TICKS_POOL_MAX_SIZE", "0")
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert set(caught.value.problems) == {
        "CRON_TICKS_LOOKAHEAD_SECONDS",
        "CRON_TICKS_LEASE_SECONDS",
        "CRON_TICKS_SHARD_ID",
        "CRON_TICKS_DATABASE_SCHEMA",
        "CRON_TICKS_POOL_MAX_SIZE",
    }
    for variable in caught.value.problems:
        assert variable in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("MANAGER_INTERVAL_SECONDS", "60", "CRON_TICKS_LOOKAHEAD_SECONDS"),
        ("SHARD_ID", "1", "CRON_TICKS_SHARD_COUNT"),
        ("LEASE_RENEWAL_SECONDS", "6", "CRON_TICKS_LEASE_SECONDS"),
        ("RUNS_RETENTION_DAYS", "1", "greater than or equal to 2"),
        ("DEAD_RETENTION_DAYS", "0", "greater than or equal to 2"),
        ("LOOKAHEAD_SECONDS", "nan", "finite"),
        ("EMBEDDED_VERSION", "9", "16 or 18"),
        ("LOG_LEVEL", "loud", "debug"),
        ("DATABASE_SCHEMA", "pg_mine", "belongs to PostgreSQL"),
        ("DATABASE_SCHEMA", "information_schema", "belongs to PostgreSQL"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(f"CRON_TICKS_{variable}", value)
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert list(caught.value.problems) == [f"CRON_TICKS_{variable}"]
    assert says in caught.value.problems[f"CRON_TICKS_{variable}"]


def test_runs_are_kept_for_longer_than_occurrences_may_be_made_up() -> None:
    with pytest.raises(SettingsError, match="must be more days than CRON_TICKS_CATCH_UP_MAX_AGE_SECONDS has") as caught:
        Settings.load(catch_up_max_age_seconds=7 * 86_400, runs_retention_days=7)
    assert list(caught.value.problems) == ["CRON_TICKS_RUNS_RETENTION_DAYS"]
    assert Settings.load(catch_up_max_age_seconds=7 * 86_400, runs_retention_days=8).runs_retention_days == 8


def test_settings_are_frozen() -> None:
    settings = Settings.load()
    with pytest.raises(ValidationError):
        settings.shard_count = 2


def test_password_is_never_shown() -> None:
    settings = Settings.load(dsn="postgresql://me:secret@db/app")
    assert "secret" not in repr(settings)
    with pytest.raises(SettingsError) as caught:
        Settings.load(dsn=["postgresql://me:secret@db/app"])
    assert "secret" not in str(caught.value)


def test_unknown_variables_are_found_with_a_suggestion() -> None:
    unknown = Settings.unknown_variables(["CRON_TICKS_LOKAHEAD_SECONDS", "CRON_TICKS_DSN", "PATH", "CRON_TICKS_XYZZY"])
    assert unknown == {"CRON_TICKS_LOKAHEAD_SECONDS": "CRON_TICKS_LOOKAHEAD_SECONDS", "CRON_TICKS_XYZZY": None}


def test_changes_are_made_by_the_setting_or_the_systems_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load(actor="deploy").acting_as == "deploy"
    monkeypatch.setenv("LOGNAME", "alice")
    assert Settings.load().acting_as == f"alice@{socket.gethostname()}"


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def no_such_user(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", no_such_user)
    assert Settings.load().acting_as == f"{os.getuid()}@{socket.gethostname()}"
