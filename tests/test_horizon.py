"""The horizon: schedules that need a tick get a few more, and nothing else changes."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cron_ticks.database import Database
from cron_ticks.errors import SettingsError
from cron_ticks.settings import Settings
from support.moved_clock import Engine

pytestmark = pytest.mark.sql

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
STEP = timedelta(seconds=10)
END = START + 21 * MINUTE
HORIZON = 240
RULES: dict[str, dict[str, Any]] = {
    "minutely": {"every": 60},
    "often": {"every": 7.000001},
    "hourly": {"every": 3600, "starts_at": START + 10 * MINUTE},
    "until": {"every": 50, "ends_at": START + 9 * MINUTE},
    "a few": {"every": 45, "max_runs": 7},
    "every minute": {"cron": "* * * * *"},
    "every two": {"cron": "*/2 * * * *", "timezone": "Asia/Kathmandu"},
    "some": {"cron": "1,5,6 * * * *", "max_runs": 2},
    "once": {"at": START + 3 * MINUTE},
}
EXPECTED = {
    "minutely": [START + number * MINUTE for number in range(22)],
    "often": [START + number * timedelta(seconds=7, microseconds=1) for number in range(180)],
    "hourly": [START + 10 * MINUTE],
    "until": [START + number * timedelta(seconds=50) for number in range(11)],
    "a few": [START + number * timedelta(seconds=45) for number in range(7)],
    "every minute": [START + number * MINUTE for number in range(22)],
    "every two": [START + number * MINUTE for number in range(1, 22, 2)],  # Kathmandu is 5:45 ahead
    "some": [START + number * MINUTE for number in (1, 5)],
    "once": [START + 3 * MINUTE],
}


async def fired(database: Database, horizon: float | None, connection: Any) -> tuple[dict[str, list[datetime]], int]:
    """What is fired in 21 minutes, and how often a schedule was taken in hand."""
    await connection.execute("TRUNCATE cron_schedules, cron_ticks, cron_runs, queue_messages CASCADE")
    engine = Engine(database, START, horizon_seconds=horizon)
    for name, rule in RULES.items():
        await engine.declare(name=name, jitter=None, **rule)
    await connection.execute("CREATE TABLE IF NOT EXISTS moved (schedule_id text)")
    await connection.execute(
        """CREATE OR REPLACE FUNCTION note_move() RETURNS trigger LANGUAGE plpgsql AS
        'BEGIN INSERT INTO moved VALUES (NEW.schedule_id); RETURN NULL; END'"""
    )
    await connection.execute(
        """CREATE OR REPLACE TRIGGER noted AFTER UPDATE ON cron_schedule_cursors
        FOR EACH ROW EXECUTE FUNCTION note_move()"""
    )
    await connection.execute("TRUNCATE moved")
    found: dict[str, list[datetime]] = {}
    for tick in await engine.run_until(END, step=STEP):
        found.setdefault(tick.schedule_name, []).append(tick.scheduled_for)
    in_hand = await connection.fetchval(
        "SELECT count(*) FROM moved JOIN cron_schedules ON id = schedule_id WHERE name = 'minutely'"
    )
    return {name: sorted(moments) for name, moments in found.items()}, in_hand


async def test_all_occurrences_fire_once_whatever_the_horizon(database: Database, connection: Any) -> None:
    usual, often_in_hand = await fired(database, None, connection)
    assert usual == EXPECTED
    far, rarely_in_hand = await fired(database, HORIZON, connection)
    assert far == EXPECTED
    assert often_in_hand >= 20
    assert rarely_in_hand <= 7


async def test_schedules_made_together_are_not_in_hand_together(database: Database, connection: Any) -> None:
    """Each pass has its share of them, from the second occurrence on."""
    engine = Engine(database, START, horizon_seconds=HORIZON)
    for number in range(80):
        await engine.declare(name=f"schedule {number}", every=60, jitter=None)
    made: Counter[int] = Counter()
    for minute in range(1, 13):
        engine.now = START + minute * MINUTE
        await engine.manager.run_once()
        made[minute % 4] += await connection.fetchval(
            "SELECT count(DISTINCT schedule_id) FROM cron_ticks WHERE created_at = $1", engine.now
        )
        await engine.fire()
    assert min(made.values()) > 0.3 * max(made.values())


def test_the_horizon_is_not_nearer_than_the_window() -> None:
    with pytest.raises(SettingsError, match="HORIZON_SECONDS: must be at least CRON_TICKS_LOOKAHEAD_SECONDS"):
        Settings.load(lookahead_seconds=60, horizon_seconds=59)
    assert Settings().horizon == Settings().lookahead_seconds
