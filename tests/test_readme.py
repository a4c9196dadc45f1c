"""What README.md shows is what happens."""

import ast
import inspect
import json
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any
from zoneinfo import ZoneInfo

import anyio
import asyncpg
import pytest
import yaml

from cron_ticks import LeasedTick, TableSink, preview
from cron_ticks.cli.main import app as command_line
from cron_ticks.errors import InvalidInputError
from cron_ticks.metrics import Metrics
from cron_ticks.migrator import render_script
from cron_ticks.repository import CronRepository
from cron_ticks.settings import PREFIX, Settings
from support.processes import Processes
from support.watching import watching
from token_queue import Message, QueueManager

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page_of(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)


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
    (tmp_path / "app.py").write_text(blocks("python", page_of("how-to/messages"))[0], encoding="utf-8")
    running = await processes.start(sys.executable, "app.py", environment={"CRON_TICKS_DSN": dsn}, folder=tmp_path)
    async with watching(dsn, "queue_messages") as watch:
        await watch.until("SELECT count(completed_at) = 4 AND count(dlq_at) = 2 FROM queue_messages")
    running.send(signal.SIGTERM)
    printed = await running.output()
    for line in ("invoice 1 for ws_A", "invoice 2 for ws_B", "invoice 5 for ws_B", "thumbnail of cat.png"):
        assert line in printed
    dead = await connection.fetch("SELECT error_message FROM queue_messages WHERE dlq_at IS NOT NULL ORDER BY 1")
    assert [row["error_message"][:25] for row in dead] == ["invoice 3: nothing to pay", "the payload doesn't fit I"]


async def test_the_example_of_schedules_does_what_its_page_says(dsn: str, tmp_path: Path, processes: Processes) -> None:
    (tmp_path / "app.py").write_text(blocks("python", page_of("how-to/schedules"))[0], encoding="utf-8")
    running = await processes.start(sys.executable, "app.py", environment={"CRON_TICKS_DSN": dsn}, folder=tmp_path)
    async with watching(dsn, "queue_messages") as watch:
        await watch.until("SELECT count(completed_at) = 2 FROM queue_messages")
    running.send(signal.SIGTERM)
    printed = sorted((await running.output()).splitlines())
    assert printed == [f"{origin}: hourly-sales {{'kind': 'sales'}}" for origin in ("schedule", "trigger")]


async def test_the_example_of_sinks_does_what_its_page_says(
    dsn: str, connection: Any, tmp_path: Path, processes: Processes
) -> None:
    page = page_of("how-to/sinks")
    await connection.execute(blocks("sql", page)[0])
    (tmp_path / "app.py").write_text(blocks("python", page)[0], encoding="utf-8")
    running = await processes.start(sys.executable, "app.py", environment={"CRON_TICKS_DSN": dsn}, folder=tmp_path)
    async with watching(dsn, "cron_runs") as watch:
        await watch.until("SELECT count(*) = 2 FROM cron_runs WHERE outcome = 'enqueued'")
    running.send(signal.SIGTERM)
    assert (await running.output()).splitlines() == ["pings: {'host': 'a'}"]
    assert await running.wait() == 0
    [job] = await connection.fetch("SELECT kind, options FROM jobs")
    assert tuple(job) == ("nightly", '{"depth": 2}')


class HookClient:
    """What the page's example of an outside sink posts to."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, str]] = []

    async def post(self, url: str, *, json: Any, headers: dict[str, str], **options: Any) -> "HookClient":
        assert (json["url"], options) == (url, {"timeout": 5})
        self.posted.append((url, headers["Idempotency-Key"]))
        return self

    def raise_for_status(self) -> None:
        """All is well."""


async def test_the_pieces_of_sinks_work(dsn: str, connection: Any) -> None:
    page = page_of("how-to/sinks")
    for statement in blocks("sql", page)[1:4]:
        await connection.execute(statement)
    client = HookClient()
    async with QueueManager(dsn) as queue_manager:
        names: dict[str, Any] = {"Sequence": Sequence, "LeasedTick": LeasedTick, "TableSink": TableSink}
        names |= {"queue_manager": queue_manager, "client": client}
        for piece in blocks("python", page)[1:-1]:
            await run_piece(piece, names)
        await queue_manager.schedule("mail", every=60, payload={"to": "a@b.example"}, sink="mails")
        await queue_manager.schedule("mq", every=60, payload={"number": 7}, sink="mq")
        await queue_manager.schedule("nowhere", every=60, sink="hooks")
        async with watching(dsn, "cron_runs") as watch, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(queue_manager.run, handle_signals=False))
            await watch.until("SELECT count(*) = 5 FROM cron_runs")
            queue_manager.stop()
    assert sorted(url for url, _ in client.posted) == [f"https://hooks.example/{name}" for name in ("alarm", "backup")]
    assert all(key.startswith("msg_") for _, key in client.posted)
    assert await connection.fetchval("SELECT (address, state) FROM outgoing_mails") == ("a@b.example", "new")
    assert await connection.fetchval("SELECT (queue_name, message) FROM mq_messages") == ("mq", '{"number": 7}')
    [lost] = await connection.fetch(blocks("sql", page)[4])
    assert (lost["outcome"], lost["name"], lost["reason"]) == (
        *("failed", "nowhere"),
        "RejectTick: the payload has no url",
    )


async def test_the_check_of_a_sink_runs_as_its_page_says(dsn: str, tmp_path: Path, processes: Processes) -> None:
    (tmp_path / "check.py").write_text(blocks("python", page_of("how-to/sinks"))[-1], encoding="utf-8")
    running = await processes.start(sys.executable, "check.py", environment={"CRON_TICKS_DSN": dsn}, folder=tmp_path)
    printed = (await running.output(60)).splitlines()
    assert await running.wait() == 0
    assert {line.split()[0] for line in printed} <= {"ok", "skipped"}
    assert printed


async def run_piece(piece: str, names: dict[str, Any]) -> None:
    """As if typed into a prompt that knows `await`."""
    code = compile(piece, "page.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(code, CodeType)
    if inspect.isawaitable(result := eval(code, names)):  # noqa: S307 - our own page
        await result


def promised(piece: str) -> list[str]:
    """What the comments behind print() say; in a loop, one after the other."""
    found = re.findall(r"^( *)print\(.*\)  # (.*)$", piece, re.MULTILINE)
    return [line for indent, comment in found for line in (comment.split(", ") if indent else [comment])]


async def test_the_pieces_of_schedules_print_what_their_comments_say(dsn: str, connection: Any) -> None:
    await connection.execute("CREATE TABLE customers (id int)")
    printed: list[str] = []
    names: dict[str, Any] = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    async with QueueManager(dsn) as queue_manager, asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        names |= {"queue_manager": queue_manager, "pool": pool}
        for piece in blocks("python", page_of("how-to/schedules"))[1:]:
            await run_piece(piece, names)
            assert printed == promised(piece)
            printed.clear()


async def print_as_promised(queue_manager: QueueManager, pieces: Sequence[str]) -> None:
    printed: list[str] = []
    names: dict[str, Any] = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    names["queue_manager"] = queue_manager
    for piece in pieces:
        await run_piece(piece, names)
        assert printed == promised(piece)
        printed.clear()


async def show_as_promised(transcript: str, processes: Processes, dsn: str, folder: Path) -> None:
    """A command and what it prints, blanks around lines aside."""
    [(command, shown)] = re.findall(r"\$ cron-ticks (.*?)\n(.*)", transcript, re.DOTALL)
    running = await processes.cron_ticks(*shlex.split(command), environment={"CRON_TICKS_DSN": dsn}, folder=folder)
    printed = (await running.output()).splitlines()
    await running.wait()
    printed += [line for line in running.errors if not line.startswith("{")]
    assert [line.strip() for line in printed if line.strip()] == [
        line.strip() for line in shown.splitlines() if line.strip()
    ]


async def test_the_calendar_is_as_its_page_says(dsn: str, processes: Processes, tmp_path: Path) -> None:
    page = page_of("how-to/calendar")
    async with QueueManager(dsn) as queue_manager:
        await print_as_promised(queue_manager, blocks("python", page))
    [transcript] = blocks("console", page)
    await show_as_promised(transcript, processes, dsn, tmp_path)


async def test_a_backfill_is_as_its_page_says(dsn: str) -> None:
    async with QueueManager(dsn) as queue_manager:
        await print_as_promised(queue_manager, blocks("python", page_of("how-to/backfill")))


async def test_what_answers_did_it_fire_is_as_its_page_says(dsn: str, processes: Processes, connection: Any) -> None:
    """The pieces run and say something of a schedule that has fired; so do the commands that ask nobody."""
    page = page_of("how-to/did-it-fire")
    printed: list[str] = []
    until = datetime.now(UTC) + timedelta(minutes=1)
    async with QueueManager(dsn) as queue_manager, watching(dsn, "queue_messages") as watch:
        await queue_manager.schedule("billing", every=3600, payload={})
        worker = await processes.worker(dsn, events="all")
        await watch.until("SELECT count(*) = 1 FROM queue_messages")
        worker.send(signal.SIGTERM)
        assert await worker.wait() == 0
        message_id = await connection.fetchval("SELECT id FROM queue_messages")
        names: dict[str, Any] = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
        names |= {"queue_manager": queue_manager, "until": until, "since": until - timedelta(hours=1)}
        names["yesterday"] = until - timedelta(days=1)
        for piece in blocks("python", page):
            await run_piece(re.sub("msg_[0-9A-Z]{26}", message_id, piece), names)
            assert printed
            printed.clear()
    commands = [line for block in blocks("sh", page) for line in block.splitlines()]
    for command in [line for line in commands if "cleanup" not in line or "--yes" in line]:
        running = await processes.cron_ticks(*shlex.split(command)[1:], environment={"CRON_TICKS_DSN": dsn})
        assert await running.wait() == 0, command
    assert len(commands) > 5


async def test_a_file_of_schedules_does_what_its_page_says(
    dsn: str, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = page_of("how-to/schedules-in-a-file")
    declared, mistaken = blocks("toml", page)
    (tmp_path / "schedules.toml").write_text(declared, encoding="utf-8")
    (tmp_path / "mistakes.toml").write_text(mistaken, encoding="utf-8")
    (tmp_path / "schedules.yaml").write_text(blocks("yaml", page)[0], encoding="utf-8")
    *before, pruned = blocks("console", page)
    assert before
    for transcript in before:
        await show_as_promised(transcript, processes, dsn, tmp_path)
    monkeypatch.chdir(tmp_path)
    async with QueueManager(dsn) as queue_manager:
        await print_as_promised(queue_manager, blocks("python", page))
        assert (await queue_manager.apply("schedules.yaml")).count("unchanged") == declared.count("[[schedules]]")
    without = re.sub(r'\[\[schedules\]\]\nqueue_name = "report.weekly"\n.*?\n\n', "", declared, flags=re.DOTALL)
    (tmp_path / "schedules.toml").write_text(without, encoding="utf-8")
    await show_as_promised(pruned, processes, dsn, tmp_path)


def table_of(page: str, *headings: str) -> list[list[str]]:
    """Rows of the table with these headings."""
    _, _, rest = page.partition(f"| {' | '.join(headings)} |\n")
    rows = [line.removeprefix("| ").removesuffix("|") for line in rest.partition("\n\n")[0].splitlines()[1:]]
    assert rows
    return [[cell.strip() for cell in row.split("| ")] for row in rows]


@pytest.mark.parametrize(("heading", "part"), [("expression", "cron"), ("name", "timezone")])
def test_what_is_refused_says_what_the_reference_says(heading: str, part: str) -> None:
    for text, message in table_of(page_of("reference/expressions"), heading, "message"):
        options: dict[str, Any] = {"cron": "@daily", part: text.strip("`")}
        with pytest.raises(InvalidInputError) as error:
            preview(**options, after=datetime(2026, 1, 1, tzinfo=UTC))
        assert str(error.value) == f"{part}: {message}"


def test_clocks_change_as_the_reference_says() -> None:
    headings = ("zone", "date", "clocks", "expression", "option", "fires")
    for zone, day, clocks, expression, option, fires in table_of(page_of("reference/expressions"), *headings):
        options: dict[str, Any] = dict(re.findall(r'(\w+)="(\w+)"', option))
        after = datetime.combine(date.fromisoformat(day), datetime.min.time(), ZoneInfo(zone)) - timedelta(days=2)
        found = preview(cron=expression.strip("`"), timezone=zone, after=after, count=50, **options)
        shown = [
            f"{local:%H:%M} ({moment:%H:%M}{' of the day before' if moment.date() < local.date() else ''})"
            for moment in found
            if f"{(local := moment.astimezone(ZoneInfo(zone))):%Y-%m-%d}" == day
        ]
        assert fires == (", ".join(shown) or "never"), f"{zone} {day}: {expression}"
        if found_clocks := re.fullmatch(r"(\d\d:\d\d) to (\d\d:\d\d)", clocks):
            before, since = found_clocks.groups()
            assert is_jump(zone, f"{day} {before}", f"{day} {since}"), f"{zone} {day}: {clocks}"


def is_jump(zone: str, before: str, since: str) -> bool:
    """Whether clocks that would have shown `before` showed `since`."""
    start = datetime.fromisoformat(since).replace(tzinfo=ZoneInfo(zone), fold=1).astimezone(UTC)
    earlier, later = ((start - ago).astimezone(ZoneInfo(zone)) for ago in (timedelta(minutes=1), timedelta(0)))
    shown = (f"{earlier.replace(tzinfo=None) + timedelta(minutes=1):%Y-%m-%d %H:%M}", f"{later:%Y-%m-%d %H:%M}")
    return before != since and shown == (before, since)


@pytest.mark.parametrize("name", ["how-to/schedules", "how-to/sinks", "reference/metrics"])
async def test_the_questions_of_a_page_are_sql(connection: Any, name: str) -> None:
    statements = blocks("sql", page_of(name))
    assert statements
    for statement in statements:
        await connection.fetch(statement)


async def test_a_silent_schedule_is_found_by_the_question_for_it(dsn: str, connection: Any) -> None:
    question = blocks("sql", page_of("reference/metrics"))[0]
    async with QueueManager(dsn) as queue_manager:
        silent = await queue_manager.schedule("silent", every=60)
        await queue_manager.schedule("new", every=60)
    assert await connection.fetch(question) == []
    await connection.execute(
        "UPDATE cron_schedules SET anchor_at = anchor_at - interval '1 hour',"
        " updated_at = updated_at - interval '1 hour' WHERE id = $1",
        silent.id,
    )
    assert [row["id"] for row in await connection.fetch(question)] == [silent.id]


def test_every_metric_is_documented_with_its_type() -> None:
    rows = re.findall(r"^\| `(cron_ticks_\w+)` \| (\w+) \|", page_of("reference/metrics"), re.MULTILINE)
    kinds = {metric.name + ("_total" if metric.type == "counter" else ""): metric.type for metric in collected()}
    assert dict(rows) == kinds


def test_alerts_and_questions_name_metrics_that_exist() -> None:
    page = page_of("reference/metrics")
    [rules] = [yaml.safe_load(text) for text in blocks("yaml", page)]
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    known = {metric.name for metric in collected()}
    for expression in [*alerts, *blocks("promql", page)]:
        named = re.findall(r"cron_ticks_\w+", expression)
        assert named
        assert {re.sub("_(total|bucket)$", "", name) for name in named} <= known


def collected() -> list[Any]:
    return list(Metrics().registry.collect())


async def test_the_rights_that_a_dba_grants_are_enough_for_a_worker(empty_dsn: str) -> None:
    """Those of the page and no others, where functions are not for everybody either."""
    connection = await asyncpg.connect(empty_dsn)
    await connection.execute("CREATE ROLE cron_ticks_worker LOGIN")
    try:
        await connection.execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
        await connection.execute(render_script("cron"))
        for grant in blocks("sql", page_of("how-to/dba-applies-migrations")):
            await connection.execute(grant)
        await work_with_few_rights(empty_dsn.replace("postgres@", "cron_ticks_worker@"))
        assert await connection.fetchval("SELECT to_regclass('cron.cron_runs_20200101') IS NOT NULL")
        assert await connection.fetchval("SELECT count(*) FROM cron.cron_runs WHERE outcome = 'disabled'") > 0
        assert await clean_up_with_few_rights(empty_dsn.replace("postgres@", "cron_ticks_worker@")) > 0
    finally:
        await connection.execute("DROP OWNED BY cron_ticks_worker")
        await connection.execute("DROP ROLE cron_ticks_worker")
        await connection.close()


async def clean_up_with_few_rights(dsn: str) -> int:
    """How many days were dropped."""
    settings = Settings.load(dsn=dsn, database_schema="cron", migrate_on_start=False)
    async with QueueManager(settings=settings) as manager:
        return len((await manager.cleanup(timedelta(days=90))).runs)


async def work_with_few_rights(dsn: str) -> None:
    """A bit of everything, until a message of 2020 was handled: its run needs a partition of its own."""
    settings = Settings.load(dsn=dsn, database_schema="cron", migrate_on_start=False, runs_retention_days=36_500)
    manager = QueueManager(settings=settings)
    errors: list[str | None] = []
    published = anyio.Event()

    @manager.sink("outside")
    async def publish(_ticks: Sequence[LeasedTick]) -> None:
        published.set()

    @manager.handler("late")
    async def handle(_message: Message) -> None:
        await published.wait()
        errors.extend(health.last_error for health in manager.health.values() if health.errors)
        manager.stop()

    async with manager:
        every = await manager.schedule("other", every=1, workspace_id="ws_A")
        await manager.update_schedule_interval(every.id, 2)
        await manager.disable_schedule(every.id, drop_pending=True)
        await manager.enable_schedule(every.id, fire_now=True)
        await manager.delete_schedule((await manager.schedule("other", every=5)).id)
        await manager.delete_workspace("ws_A")
        for now in (None, datetime(2030, 1, 1, tzinfo=UTC)):
            await CronRepository(manager.database, settings).note_sinks({"outside": "outside"}, now=now)
        await manager.schedule("other", every=60, sink="outside")
        await manager.schedule("other", every=60, name="one at a time", overlap="queue_one")
        late, then = await manager.schedule("late", cron="0 0 * * *"), datetime(2020, 1, 1, tzinfo=UTC)
        begun = await manager.backfill(late.id, then, then + timedelta(days=1))
        await manager.cancel_backfill(begun.id)
        await manager.backfill(late.id, then, then + timedelta(days=1))
        await manager.run(handle_signals=False)
    assert errors == []


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
