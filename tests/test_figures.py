"""The published figures: what the pages say is what the commands printed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cron_ticks.cli.bench.figures import PUBLISHED_ROUNDS

ROOT = Path(__file__).parent.parent
KEPT = sorted((ROOT / "docs" / "reference" / "figures").glob("*.json"))
PROGRAM = ROOT / "benchmarks" / "publish.py"


def rounds_in(found: Any) -> Iterator[int]:
    """How many values each figure has."""
    if isinstance(found, dict):
        for name, value in found.items():
            if name in {"rounds", "per_second"} and isinstance(value, list):
                yield len(value)
            if name == "rounds" and isinstance(value, int):
                yield value
            yield from rounds_in(value)


def test_the_pages_are_those_of_the_kept_figures() -> None:
    checked = subprocess.run([sys.executable, PROGRAM, "check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.stem)
def test_each_figure_is_of_enough_rounds(kept: Path) -> None:
    found = json.loads(kept.read_text(encoding="utf-8"))
    assert set(rounds_in(found)) == {PUBLISHED_ROUNDS}
    assert kept.with_suffix(".svg").read_text(encoding="utf-8").startswith("<svg")


def test_a_name_that_is_not_there_is_refused() -> None:
    asked = subprocess.run([sys.executable, PROGRAM, "run", "fier"], capture_output=True, text=True, check=False)
    assert asked.returncode == 2
    assert "there is no fier; there are peers, peers-100000," in " ".join(asked.stderr.replace("│", " ").split())
