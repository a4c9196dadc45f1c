"""What processes use, as the kernel counts it: processor time and memory. Linux alone; elsewhere nothing is known."""

import os
from dataclasses import dataclass
from pathlib import Path

PROCESSES = Path("/proc")
PARENT, OWN_TIME, CHILDREN_TIME = 1, slice(11, 13), slice(13, 15)  # of `stat`, counted from after the program's name

MEGABYTE = 1024 * 1024


@dataclass(frozen=True)
class Usage:
    """Seconds of the processor since the process began, and bytes of memory now."""

    cpu_seconds: float
    memory_bytes: int


def usage_of(pid: int) -> Usage | None:
    """Of one process; None where the kernel doesn't say, or it is gone."""
    fields = _stat(pid)
    if fields is None:
        return None
    try:
        pages = int((PROCESSES / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return Usage(_own_seconds(pid, fields), pages * os.sysconf("SC_PAGE_SIZE"))


def server_of(backend: int) -> int | None:
    """The main process of the server that has this backend; None unless it runs here."""
    name = _name(backend)
    fields = _stat(backend)
    return int(fields[PARENT]) if fields is not None and name is not None and name.startswith("postgres") else None


def server_cpu_seconds(server: int) -> float | None:
    """Of all processes of a server, also those that have ended: their time has gone to the one that began them."""
    main = _stat(server)
    if main is None:
        return None
    living = sum(
        _own_seconds(pid, fields)
        for pid in _pids()
        if (fields := _stat(pid)) is not None and int(fields[PARENT]) == server
    )
    return _own_seconds(server, main) + _seconds(main[CHILDREN_TIME]) + living


def memory_of_machine() -> int | None:
    """Bytes; None where nobody says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROCESSES.iterdir() if entry.name.isdecimal()]


def _stat(pid: int) -> list[str] | None:
    try:
        return (PROCESSES / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _name(pid: int) -> str | None:
    try:
        return (PROCESSES / str(pid) / "comm").read_text(errors="replace").strip()
    except OSError:
        return None


def _own_seconds(pid: int, fields: list[str]) -> float:
    """In nanoseconds by thread, where the kernel says so: `stat` has hundredths, and threads that have ended."""
    try:
        threads = [(task / "schedstat").read_text().split()[0] for task in (PROCESSES / str(pid) / "task").iterdir()]
    except OSError:
        threads = []
    return max(_seconds(fields[OWN_TIME]), sum(map(int, threads)) / 1e9)


def _seconds(ticks: list[str]) -> float:
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
