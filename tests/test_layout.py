"""The shape of the repository that other things rely on."""

import queue
import subprocess
import sysconfig
from pathlib import Path

import pytest

import cron_ticks
import token_queue
from cron_ticks.repository import CronRepository

ROOT = Path(__file__).parent.parent


def test_queue_folder_has_no_init() -> None:
    """With one it would be a package called `queue` and hide the standard library's module."""
    assert not (ROOT / "queue" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_standard_library_queue_is_not_hidden() -> None:
    assert Path(queue.__file__).parent == Path(sysconfig.get_path("stdlib"))


def test_both_packages_are_typed() -> None:
    for package in (cron_ticks, token_queue):
        assert package.__file__ is not None
        assert (Path(package.__file__).parent / "py.typed").exists()


def test_the_repository_holds_the_operations_of_the_design() -> None:
    """Under the names that a reader of the design looks for."""
    for name in (
        "create_schedule",
        "find_schedules_needing_ticks",
        "create_ticks",
        "batch_lease_ticks",
        "delete_tick",
        "delete_expired_ticks",
        "delete_orphaned_ticks",
        "update_next_tick_needed",
        "disable_schedule",
        "delete_schedule",
    ):
        assert callable(getattr(CronRepository, name))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_top_level_is_as_designed() -> None:
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    names = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    folders = {"cron_ticks", "queue", "migrations", "tests", "deploy", "docs", ".ci"}
    files = {"pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"}
    assert folders | files <= names
    assert names <= folders | files | {"benchmarks", ".gitignore", ".dockerignore"}
