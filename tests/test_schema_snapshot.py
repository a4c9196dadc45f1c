"""The schema that the migrations make is the one that docs/reference/schema.sql shows."""

import re
import subprocess
from pathlib import Path

import pytest

from support.servers import TestServer

SNAPSHOT = Path(__file__).parent.parent / "docs" / "reference" / "schema.sql"
HEADER = "-- The schema that the migrations make. Written by `make schema-snapshot`; do not edit.\n\n"


def dump(server: TestServer, dsn: str) -> str:
    program = str(server.embedded.cluster.bin_folder / "pg_dump")
    options = ["--schema-only", "--no-owner", "--no-privileges", "--exclude-table=cron_runs_*"]  # partitions by day
    command = [program, *options, "--dbname", dsn]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kept = [line for line in text.splitlines() if not re.match(r"--|SET |SELECT pg_catalog|\\(un)?restrict|$", line)]
    return HEADER + "\n".join(kept).replace(";\n", ";\n\n") + "\n"


def test_snapshot_is_up_to_date(server: TestServer, dsn: str, request: pytest.FixtureRequest) -> None:
    made = dump(server, dsn)
    if request.config.getoption("--update-snapshot"):
        SNAPSHOT.write_text(made, encoding="utf-8")
    assert made == SNAPSHOT.read_text(encoding="utf-8"), "run 'make schema-snapshot' and look at the difference"
