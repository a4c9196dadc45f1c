"""The loop helper: passes, errors, wake-ups and stopping."""

from collections.abc import Callable

import anyio
import pytest
from structlog.testing import capture_logs

from cron_ticks.loops import LONGEST_BACKOFF_SECONDS, Pause, ServiceGroup, ServiceHealth, backoff_seconds, run_service


class Counting:
    """A service whose passes are scripted."""

    name = "counting"

    def __init__(self, work: Callable[[int], float]) -> None:
        self.passes = 0
        self._work = work

    async def run_once(self) -> float:
        self.passes += 1
        return self._work(self.passes)


async def test_passes_follow_each_other_until_stopped() -> None:
    pause = Pause()

    def work(number: int) -> float:
        if number == 5:
            pause.stop()
        return 0

    service, health = Counting(work), ServiceHealth()
    await run_service(service, pause, health)
    assert (service.passes, health.passes, health.errors) == (5, 5, 0)


async def test_an_error_is_logged_counted_and_survived() -> None:
    pause = Pause()

    def work(number: int) -> float:
        if number <= 2:
            raise ConnectionError("server away")
        pause.stop()
        return 0

    health = ServiceHealth()
    with capture_logs() as logs:
        await run_service(Counting(work), pause, health)
    assert (health.errors, health.passes, health.consecutive_errors) == (2, 1, 0)
    assert health.last_error == "ConnectionError: server away"
    assert [entry["event"] for entry in logs] == ["service_failed", "service_failed", "service_recovered"]


async def test_a_sleeping_service_stops_at_once() -> None:
    async with anyio.create_task_group() as tasks:
        services = ServiceGroup(tasks)
        services.start(Counting(lambda _: 86_400))
        await anyio.wait_all_tasks_blocked()
        services.stop()


async def test_a_wake_up_ends_the_sleep_and_one_before_it_is_not_lost() -> None:
    pause = Pause()
    service = Counting(lambda _: 86_400)
    async with anyio.create_task_group() as tasks:
        pause.wake()
        tasks.start_soon(run_service, service, pause, ServiceHealth())
        await anyio.wait_all_tasks_blocked()
        assert service.passes == 2
        pause.wake()
        await anyio.wait_all_tasks_blocked()
        assert service.passes == 3
        pause.stop()


async def test_cancellation_is_not_swallowed() -> None:
    class Hanging:
        name = "hanging"

        async def run_once(self) -> float:
            await anyio.sleep_forever()
            return 0

    health = ServiceHealth()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_service, Hanging(), Pause(), health)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert (health.passes, health.errors) == (0, 0)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1.0])
def test_backoff_grows_to_its_cap(draw: float) -> None:
    delays = [backoff_seconds(errors, lambda: draw) for errors in range(1, 2000)]
    assert delays == sorted(delays)
    assert delays[0] <= 0.1
    assert LONGEST_BACKOFF_SECONDS / 2 <= delays[-1] <= LONGEST_BACKOFF_SECONDS
