"""Time zones: which names are taken, and what a span says."""

import io
import random
import struct
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest

from cron_ticks import preview, zones
from cron_ticks.cron_rules import CronRule
from cron_ticks.errors import InvalidInputError
from cron_ticks.zones import Span, check_zone, known_zones, span_at

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
NONE = timedelta(0)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# Names


def refusal(value: object) -> str:
    with pytest.raises(InvalidInputError) as caught:
        check_zone("timezone", value)
    assert caught.value.field == "timezone"
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+5", "Asia/Katmandu"]
)
def test_name_of_the_database_is_taken(name: str) -> None:
    assert check_zone("timezone", name) == name


def test_every_name_that_is_taken_can_be_followed() -> None:
    """Old names that are links too."""
    assert len(known_zones()) > 500
    for name in known_zones():
        assert check_zone("timezone", name) == name
        assert ZoneInfo(name).key == name


@pytest.mark.parametrize(
    ("value", "suggested"),
    [
        ("europe/berlin", "Europe/Berlin"),
        ("EUROPE/BERLIN", "Europe/Berlin"),
        ("Utc", "UTC"),
        ("utc", "UTC"),
        ("Europe/Berlni", "Europe/Berlin"),
        ("Europe/ Berlin", "Europe/Berlin"),
        (" Europe/Berlin", "Europe/Berlin"),
        ("Europe/Berlin\n", "Europe/Berlin"),
        ("America/NewYork", "America/New_York"),
        ("America/New York", "America/New_York"),
        ("Asia/Calcuta", "Asia/Calcutta"),
    ],
)
def test_name_that_is_almost_right_is_refused_with_the_right_one(value: str, suggested: str) -> None:
    assert f"did you mean {suggested}?" in refusal(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "localtime",  # zoneinfo would take it from the machine
        "posixrules",
        "posix/Europe/Berlin",
        "right/Europe/Berlin",  # counts leap seconds
        "leapseconds",
        "tzdata.zi",
        "zone.tab",
        "Europe",
        "Europe/",
        "CEST",
        "PDT",
        "UTC+2",
        "+02:00",
        "<+02>-2",
        "EST5EDT,M3.2.0,M11.1.0",
        "Mars/Olympus_Mons",
    ],
)
def test_what_is_no_zone_of_the_database_is_refused(value: str) -> None:
    assert repr(value) in refusal(value)


@pytest.mark.parametrize(
    "value",
    [
        "../../etc/passwd",
        "../zoneinfo/Europe/Berlin",
        "Europe/../Europe/Berlin",
        "./UTC",
        "/etc/passwd",
        "/usr/share/zoneinfo/Europe/Berlin",
        "C:\\Windows\\win.ini",
        "Europe\\Berlin",
        "Europe//Berlin",
        "Europe/Berlin/",
        "Europe/Berlin\0",
        "\0",
        "Europe/Berlin\0.txt",
        "__init__",
        "zoneinfo/UTC",
        "Еurope/Berlin",  # noqa: RUF001 - Cyrillic E, that is the point
        "\ud800",
        "\N{FULLWIDTH LATIN CAPITAL LETTER U}TC",
    ],
)
def test_paths_and_odd_letters_are_names_like_any_other(value: str) -> None:
    """Nothing is opened: the name is not in the list."""
    message = refusal(value)
    assert "there is no time zone" in message
    assert "\0" not in message


@pytest.mark.parametrize("value", ["A" * 1_000_000, "Europe/Berlin" * 100_000, "/" * 1_000_000, "é" * 1_000_000])
def test_very_long_name_is_refused_in_short(value: str) -> None:
    assert len(refusal(value)) < 200


@pytest.mark.parametrize(
    "value", [None, 0, 1.5, True, b"UTC", ["UTC"], {"UTC": 1}, ("UTC",), object(), UTC, ZoneInfo("UTC")]
)
def test_what_is_no_string_is_refused(value: object) -> None:
    assert f"not {type(value).__name__}" in refusal(value)


def test_preview_refuses_an_unknown_zone() -> None:
    with pytest.raises(InvalidInputError, match="did you mean Europe/Berlin"):
        preview(cron="0 0 * * *", timezone="europe/berlin", after=utc("2026-01-01"))
    with pytest.raises(InvalidInputError, match="localtime"):
        preview(cron="0 0 * * *", timezone="localtime", after=utc("2026-01-01"))


# Spans


@pytest.mark.parametrize(
    ("zone", "instant", "between", "hours"),
    [
        # Berlin, winter and summer; at the very instants of the changes, and a second before them.
        ("Europe/Berlin", "2026-01-01 00:00", ("2025-10-26 01:00", "2026-03-29 01:00"), (1, -1, 1)),
        ("Europe/Berlin", "2026-03-29 00:59:59", ("2025-10-26 01:00", "2026-03-29 01:00"), (1, -1, 1)),
        ("Europe/Berlin", "2026-03-29 00:59:59.999999", ("2025-10-26 01:00", "2026-03-29 01:00"), (1, -1, 1)),
        ("Europe/Berlin", "2026-03-29 01:00", ("2026-03-29 01:00", "2026-10-25 01:00"), (2, 1, -1)),
        ("Europe/Berlin", "2026-10-25 01:00", ("2026-10-25 01:00", "2027-03-28 01:00"), (1, -1, 1)),
        ("Australia/Lord_Howe", "2026-04-04 15:00", ("2026-04-04 15:00", "2026-10-03 15:30"), (10.5, -0.5, 0.5)),
        ("Pacific/Apia", "2011-12-30 10:00", ("2011-12-30 10:00", "2012-03-31 14:00"), (14, 24, -1)),
        ("Pacific/Apia", "2011-12-30 09:59:59", ("2011-09-24 14:00", "2011-12-30 10:00"), (-10, 1, 24)),
        # Changes on New Year's day and on its eve.
        ("Africa/Sao_Tome", "2018-06-01 00:00", ("2018-01-01 01:00", "2019-01-01 01:00"), (1, 1, -1)),
        ("Asia/Kathmandu", "1985-12-31 18:29:59", ("1984-01-01 00:00", "1985-12-31 18:30"), (5.5, 0, 0.25)),
        ("Asia/Kathmandu", "1986-01-01 00:00", ("1985-12-31 18:30", "1988-01-01 00:00"), (5.75, 0.25, 0)),
        # Where nothing changes for years it is cut, without a jump.
        ("UTC", "2026-06-01 00:00", ("2025-01-01 00:00", "2028-01-01 00:00"), (0, 0, 0)),
        ("Asia/Tehran", "2023-06-01 00:00", ("2022-09-21 19:30", "2025-01-01 00:00"), (3.5, -1, 0)),
        # By the rule for the years that no table lists.
        ("Europe/Berlin", "2499-07-01 00:00", ("2499-03-29 01:00", "2499-10-25 01:00"), (2, 1, -1)),
    ],
)
def test_span_is_the_time_between_two_changes(
    zone: str, instant: str, between: tuple[str, str], hours: tuple[float, float, float]
) -> None:
    """In hours: the offset, and the jumps at the start and at the end."""
    offset, shift, next_shift = (number * HOUR for number in hours)
    assert span_at(zone, utc(instant)) == Span(utc(between[0]), utc(between[1]), offset, shift, next_shift)


@pytest.mark.soak(small=100, full=3_000)
def test_spans_hold_what_they_promise(size: int) -> None:
    """In any zone, one after the other: no jump inside, the jump at the end is the next one's at its start."""
    dice = random.Random(6)  # noqa: S311 - no secret
    names = sorted(known_zones())
    for _ in range(size):
        zone = dice.choice(names)
        instant = utc("1970-01-01") + dice.randrange(16_000_000_000) * SECOND
        spans = [span_at(zone, instant)]
        assert spans[0].start <= instant < spans[0].end, (zone, instant)
        spans += [span_at(zone, spans[0].end)]
        for span in spans:
            for moment in (span.start, span.start + (span.end - span.start) * dice.random(), span.end - SECOND):
                assert moment.astimezone(ZoneInfo(zone)).utcoffset() == span.offset, (zone, instant, moment)
        assert joins(*spans), (zone, instant)


def joins(span: Span, following: Span) -> bool:
    """The next span begins where this one ends; if this one was cut there, the next began with it or before."""
    if span.next_shift == NONE:
        return following.start <= span.end < following.end and following.offset == span.offset
    return (
        following.start == span.end
        and following.shift == span.next_shift
        and following.offset == span.offset + span.next_shift
    )


def test_spans_of_a_zone_lead_through_the_years() -> None:
    """Going from end to end is how occurrences are found: it always goes on."""
    instants = [utc("1970-01-01")]
    while instants[-1] < utc("2100-01-01"):
        instants.append(span_at("Europe/Berlin", instants[-1]).end)
    assert all(earlier < later for earlier, later in pairwise(instants))
    assert len(instants) > 2 * 119  # two a year since 1980


def made_zone(at: datetime, before: timedelta, after: timedelta) -> ZoneInfo:
    """A zone with a single change."""
    kinds = b"".join(struct.pack(">lbB", offset // SECOND, 0, 0) for offset in (before, after))
    counts = struct.pack(">6l", 0, 0, 0, 1, 2, 1)  # one change, two kinds of time, a name of one (empty) letter
    data = b"TZif" + bytes(16) + counts + struct.pack(">lB", int(at.timestamp()), 1) + kinds + bytes(1)
    return ZoneInfo.from_file(io.BytesIO(data), key="Made/Zone")


@pytest.fixture
def new_year_rule(monkeypatch: pytest.MonkeyPatch) -> CronRule:
    """Half past eleven on the clocks of a zone that set them back by an hour with the first second of 2030."""
    made = made_zone(utc("2030-01-01"), NONE, -HOUR)
    monkeypatch.setattr(zones, "_info", lambda _: made)
    return CronRule("30 23 * * *", "Made/Zone", dst_fold="second")


def test_change_at_new_year_is_found(new_year_rule: CronRule) -> None:
    found = new_year_rule.occurrences(utc("2029-12-30"), utc("2030-01-01 12:00"))
    assert found == [utc("2029-12-30 23:30"), utc("2030-01-01 00:30")]


def test_change_at_new_year_is_seen_from_years_before(new_year_rule: CronRule) -> None:
    """A span may be cut there: the first pass of the repeated hour is before it."""
    start, end = utc("2028-12-01"), utc("2030-01-01 12:00")
    assert new_year_rule.occurrences(start, end)[-2:] == [utc("2029-12-30 23:30"), utc("2030-01-01 00:30")]
    assert new_year_rule.count(start, end) == 396  # one for each date


@pytest.mark.parametrize("zone", ["Europe/Atlantis", "America", "x" * 5000, "../etc/passwd", ""])
def test_zone_that_is_gone_is_a_key_error(zone: str) -> None:
    """Also what is a folder of zones, or no name of a file: no trouble of the disk's, which would stop a manager."""
    with pytest.raises(ZoneInfoNotFoundError):
        span_at(zone, utc("2026-01-01"))
    assert issubclass(ZoneInfoNotFoundError, KeyError)
