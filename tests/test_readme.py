"""What README.md shows is what happens."""

import json
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cron_ticks.cli.main import app as command_line
from cron_ticks.settings import PREFIX, Settings
from support.processes import Processes
from support.watching import watching

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_it_opens_with_the_two_commands() -> None:
    assert blocks("sh")[0].split("\n") == ["make run", "make test", ""]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.soak(small=8, full=20)
async def test_make_run_fires_schedules(embedded_folder: Path, processes: Processes, size: int) -> None:
    make = shutil.which("make")
    assert make is not None
    [arguments] = re.findall(r'^make run ARGS="(.*)"$', README, re.MULTILINE)
    assert arguments == "--for 20 --json"
    running = await processes.start(
        make,
        "--silent",
        "run",
        f"ARGS={arguments.replace('20', str(size))}",
        environment={"CRON_TICKS_EMBEDDED_DATA_DIR": str(embedded_folder)},
        folder=ROOT,
    )
    summary = json.loads((await running.output(size + 60)).splitlines()[-1])
    assert await running.wait() == 0
    assert (summary["duplicates"], summary["missed"]) == (0, 0)
    assert summary["fired"] > 0
    assert summary["workers"] == 2
    print(f"make run ARGS='--for {size} --json': fired {summary['fired']}, duplicates 0, missed 0")  # noqa: T201


async def test_the_example_runs(tmp_path: Path, embedded_folder: Path, processes: Processes) -> None:
    [example] = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    (tmp_path / "app.py").write_text(example, encoding="utf-8")
    environment = {"CRON_TICKS_EMBEDDED_DATA_DIR": str(embedded_folder)}
    running = await processes.start(sys.executable, "app.py", environment=environment, folder=tmp_path)
    first = await running.first_output_line()
    running.send(signal.SIGTERM)
    assert await running.wait() == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z \{'scope': 'system'\}", first)


async def test_the_example_is_an_app_for_the_worker_command(
    tmp_path: Path, embedded_folder: Path, processes: Processes
) -> None:
    [arguments] = re.findall(r"`cron-ticks (worker --app \S+)`", README)
    (tmp_path / "app.py").write_text(blocks("python")[0], encoding="utf-8")
    environment = {"CRON_TICKS_EMBEDDED_DATA_DIR": str(embedded_folder)}
    worker = await processes.cron_ticks(*arguments.split(), environment=environment, folder=tmp_path)
    assert (await worker.wait_for("worker_started"))["queues"] == ["memo.batch_check"]
    worker.send(signal.SIGTERM)
    assert await worker.wait() == 0


async def test_the_example_of_messages_does_what_its_page_says(
    dsn: str, connection: Any, tmp_path: Path, processes: Processes
) -> None:
    page = (ROOT / "docs" / "how-to" / "messages.md").read_text(encoding="utf-8")
    (tmp_path / "app.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    running = await processes.start(sys.executable, "app.py", environment={"CRON_TICKS_DSN": dsn}, folder=tmp_path)
    async with watching(dsn, "queue_messages") as watch:
        await watch.until("SELECT count(completed_at) = 4 AND count(dlq_at) = 2 FROM queue_messages")
    running.send(signal.SIGTERM)
    printed = await running.output()
    for line in ("invoice 1 for ws_A", "invoice 2 for ws_B", "invoice 5 for ws_B", "thumbnail of cat.png"):
        assert line in printed
    dead = await connection.fetch("SELECT error_message FROM queue_messages WHERE dlq_at IS NOT NULL ORDER BY 1")
    assert [row["error_message"][:25] for row in dead] == ["invoice 3: nothing to pay", "the payload doesn't fit I"]


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_setting_is_documented_with_its_default() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(CRON_TICKS_[A-Z_]+)` \| ([^|]*) \|", page, re.MULTILINE))
    assert set(rows) == {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        if field.default is not None:
            shown = rows[f"{PREFIX}{name.upper()}"].strip().strip("`")
            assert shown == str(field.default).lower()


def test_every_command_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    names = {
        command.name or command.callback.__name__ for command in command_line.registered_commands if command.callback
    }
    assert names == set(re.findall(r"^## `cron-ticks ([a-z]+)`", page, re.MULTILINE))


def test_the_changelog_has_a_place_for_what_comes() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in changelog
