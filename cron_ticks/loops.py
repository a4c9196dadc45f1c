"""The one loop that runs every background service, and the way to stop it."""

import math
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

log = structlog.get_logger("cron_ticks.loops")

FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 5.0


class Service(Protocol):
    """A background service: `run_once` does one pass and says how many seconds to sleep until the next."""

    name: str

    async def run_once(self) -> float:
        """Do one pass."""
        ...


class Pause:
    """A sleep that a wake-up or a request to stop ends early."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self.stopping = False

    def wake(self) -> None:
        """End the sleep under way, or make the next one return at once."""
        self._event.set()

    def stop(self) -> None:
        """Ask the loop to end after its current pass."""
        self.stopping = True
        self._event.set()

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until woken or stopped."""
        with anyio.move_on_after(seconds):
            await self._event.wait()
        if not self.stopping:
            self._event = anyio.Event()


@dataclass
class ServiceHealth:
    """What a loop has seen of its service."""

    passes: int = 0
    errors: int = 0
    consecutive_errors: int = 0
    last_error: str | None = None

    def note_success(self) -> None:
        """Count a pass that ended well."""
        self.passes += 1
        self.consecutive_errors = 0

    def note_error(self, error: Exception) -> None:
        """Count a pass that failed."""
        self.errors += 1
        self.consecutive_errors += 1
        self.last_error = f"{type(error).__name__}: {error}"


def backoff_seconds(consecutive_errors: int, draw: Callable[[], float] = random.random) -> float:
    """Exponential, capped, and spread so that pods don't come back in step."""
    longest = min(math.ldexp(FIRST_BACKOFF_SECONDS, min(consecutive_errors - 1, 20)), LONGEST_BACKOFF_SECONDS)
    return longest * (0.5 + draw() / 2)


async def run_service(service: Service, pause: Pause, health: ServiceHealth) -> None:
    """Run passes until asked to stop. An error is logged, counted and survived; cancellation is not an error."""
    while not pause.stopping:
        try:
            delay = await service.run_once()
        except Exception as error:
            health.note_error(error)
            delay = backoff_seconds(health.consecutive_errors)
            log.warning(
                "service_failed",
                service=service.name,
                error=health.last_error,
                consecutive_errors=health.consecutive_errors,
                retry_in_seconds=round(delay, 3),
                exc_info=health.consecutive_errors == 1,
            )
        else:
            if health.consecutive_errors:
                log.info("service_recovered", service=service.name, after_errors=health.consecutive_errors)
            health.note_success()
        await pause.sleep(delay)


class ServiceGroup:
    """Services that run in one task group and stop together."""

    def __init__(self, tasks: TaskGroup, health: dict[str, ServiceHealth] | None = None) -> None:
        self._tasks = tasks
        self._health = {} if health is None else health
        self._pauses: list[Pause] = []

    def start(self, service: Service, pause: Pause | None = None) -> None:
        """Run the service's loop; whoever has its `pause` can wake it."""
        chosen = Pause() if pause is None else pause
        self._pauses.append(chosen)
        health = self._health.setdefault(service.name, ServiceHealth())
        self._tasks.start_soon(run_service, service, chosen, health, name=service.name)

    def stop(self) -> None:
        """Ask every loop to end after its current pass."""
        for pause in self._pauses:
            pause.stop()


async def watch_stop_signals(
    *reactions: Callable[[], None], task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Call one reaction after the other as SIGINT or SIGTERM come; signals beyond the last are ignored.

    Started once the handlers stand; when cancelled, those that stood there before are put back. Only the main thread
    gets signals: elsewhere there is nothing to watch.
    """
    if threading.current_thread() is not threading.main_thread():
        task_status.started()
        return
    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in watched}
    pending = iter(reactions)
    try:
        with anyio.open_signal_receiver(*watched) as signals:
            task_status.started()
            async for received in signals:
                log.info("signal_received", signal=received.name)
                react = next(pending, None)
                if react is not None:
                    react()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
