"""Logs: JSON where nobody looks, readable on a terminal."""

import io
import json
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from cron_ticks.logs import configure_logs, configure_logs_unless_done


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_json_lines_when_not_a_terminal() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    log = structlog.get_logger("test_json")
    log.info("ticks_fired", ticks=3)
    log.debug("tick_fired")
    log.warning("service_failed", exc_info=ValueError("broken"))
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["ticks"], first["level"]) == ("ticks_fired", 3, "info")
    assert first["timestamp"].endswith("Z")
    assert "ValueError: broken" in second["exception"]


def test_readable_on_a_terminal() -> None:
    stream = Terminal()
    configure_logs(stream=stream)
    structlog.get_logger("test_readable").info("ticks_fired", ticks=3)
    assert "ticks_fired" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_an_application_that_configures_structlog_keeps_its_way() -> None:
    stream = io.StringIO()
    configure_logs("warning", "json", stream)
    configure_logs_unless_done("debug", "console")
    log = structlog.get_logger("test_unless_done")
    log.info("below_the_applications_level")
    log.warning("above_it")
    assert json.loads(stream.getvalue())["event"] == "above_it"


def test_tracebacks_do_not_show_variables() -> None:
    stream = Terminal()
    configure_logs(stream=stream)

    def fail(password: str) -> None:
        raise ValueError(f"broken, {len(password)} characters")

    try:
        fail("open sesame")
    except ValueError:
        structlog.get_logger("test_traceback").warning("service_failed", exc_info=True)
    assert "broken, 11 characters" in stream.getvalue()
    assert "open sesame" not in stream.getvalue().replace('fail("open sesame")', "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_loses_lines_and_not_the_work() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        configure_logs(stream=full)
        structlog.get_logger("test_full").warning("service_failed")
        with suppress(OSError):
            full.close()


def test_format_and_level_can_be_forced() -> None:
    stream = Terminal()
    configure_logs("debug", "json", stream)
    structlog.get_logger("test_forced").debug("tick_fired")
    assert json.loads(stream.getvalue())["event"] == "tick_fired"
