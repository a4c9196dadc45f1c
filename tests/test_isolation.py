"""Finding the one that spoils a batch: every item ends in one place, and little is tried for it."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cron_ticks.isolation import MORE_PATIENCE, Isolated, isolate


class SpoiledError(Exception):
    """An item is bad."""


class TroubleError(Exception):
    """None of the items' fault."""


class Attempts:
    """Takes batches without a bad item; remembers each part that was tried."""

    def __init__(self, bad: set[int], error: type[Exception] = SpoiledError) -> None:
        self.bad = bad
        self.error = error
        self.tried: list[list[int]] = []

    async def __call__(self, part: Sequence[int]) -> list[str]:
        self.tried.append(list(part))
        if self.bad & set(part):
            raise self.error(f"of {min(self.bad & set(part))}")
        return [f"done {item}" for item in part]


async def isolated(items: Sequence[int], attempts: Attempts) -> Isolated[int, str]:
    return await isolate(items, attempts, is_theirs=lambda error: isinstance(error, SpoiledError | TimeoutError))


async def test_a_good_batch_is_tried_once() -> None:
    attempts = Attempts(set())
    found = await isolated(range(1000), attempts)
    assert found.done == [f"done {item}" for item in range(1000)]
    assert (found.failed, found.left, found.error, found.any_went) == ([], [], None, True)
    assert len(attempts.tried) == 1


@pytest.mark.parametrize("bad", [0, 1, 499, 500, 998, 999])
async def test_one_bad_item_among_a_thousand_stands_alone_after_few_tries(bad: int) -> None:
    attempts = Attempts({bad})
    found = await isolated(range(1000), attempts)
    assert found.done == [f"done {item}" for item in range(1000) if item != bad]
    [(item, error)] = found.failed
    assert (item, str(error), found.left) == (bad, f"of {bad}", [])
    assert len(attempts.tried) <= 2 * 10 + 1  # two halves for each of log2(1000) levels


async def test_what_takes_too_long_is_not_waited_for_in_each_half_again() -> None:
    """Twice: once in the batch, once alone."""
    attempts = Attempts({37}, TimeoutError)
    found = await isolated(range(100), attempts)
    assert [item for item, _ in found.failed] == [37]
    assert len(found.done) == 99
    assert [len(part) for part in attempts.tried if 37 in part] == [100, 1]


@pytest.mark.parametrize("items", [1, 2, 3, 10, 100, 1000])
async def test_what_takes_too_long_each_time_is_given_up_soon(items: int) -> None:
    """The sink hangs: nobody waits for a thousand deadlines."""
    attempts = Attempts(set(range(items)), TimeoutError)
    found = await isolated(range(items), attempts)
    assert len(attempts.tried) == min(items + (items > 1), 3)
    assert [item for item, _ in found.failed] + found.left == list(range(items))
    assert not found.any_went


@pytest.mark.parametrize("items", [50, 1000, 10_000])
async def test_a_batch_of_which_nothing_goes_is_given_up(items: int) -> None:
    attempts = Attempts(set(range(items)))
    found = await isolated(range(items), attempts)
    assert len(attempts.tried) == items.bit_length() + MORE_PATIENCE + 1
    assert [item for item, _ in found.failed] + found.left == list(range(items))
    assert found.left
    assert found.error is not None
    assert not found.any_went


async def test_an_error_of_nobody_ends_it() -> None:
    attempts = Attempts({3}, TroubleError)
    found = await isolated(range(8), attempts)
    assert isinstance(found.trouble, TroubleError)
    assert (found.done, found.failed, found.error) == ([], [], None)
    assert len(attempts.tried) == 1


async def test_what_went_before_an_error_of_nobody_is_known() -> None:
    class Later(Attempts):
        async def __call__(self, part: Sequence[int]) -> list[str]:
            if 6 in part and len(part) < 4:
                raise TroubleError
            return await super().__call__(part)

    found = await isolated(range(8), Later({2, 5}))
    assert found.done == ["done 0", "done 1", "done 3", "done 4"]
    assert [item for item, _ in found.failed] == [2, 5]
    assert isinstance(found.trouble, TroubleError)


async def test_a_cancelled_attempt_is_no_failure() -> None:
    async def attempt(_: Sequence[int]) -> list[str]:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await isolate(range(8), attempt, is_theirs=lambda _: True)


@given(st.integers(0, 300), st.sets(st.integers(0, 299)))
@example(0, set())
@example(1, {0})
@example(64, set(range(64)))
@example(300, set(range(100, 200)))
def test_each_item_ends_in_one_place_and_in_its_order(items: int, chosen: set[int]) -> None:
    bad = {item for item in chosen if item < items}
    attempts = Attempts(bad)
    found = asyncio.run(isolated(range(items), attempts))
    done = [int(text.removeprefix("done ")) for text in found.done]
    failed = [item for item, _ in found.failed]
    assert sorted(done + failed + found.left) == list(range(items))
    assert (done, failed, found.left) == (sorted(done), sorted(failed), sorted(found.left))
    assert set(failed) <= bad
    assert not set(done) & bad
    assert all(max(done + failed, default=-1) < item for item in found.left)
    assert all(str(error) == f"of {item}" for item, error in found.failed)
    assert (found.error is None) == (not bad)


@given(st.integers(1, 300), st.sets(st.integers(0, 299), max_size=MORE_PATIENCE // 2))
def test_a_few_bad_items_never_hold_up_the_others(items: int, chosen: set[int]) -> None:
    bad = {item for item in chosen if item < items}
    found = asyncio.run(isolated(range(items), Attempts(bad)))
    assert [item for item, _ in found.failed] == sorted(bad)
    assert len(found.done) == items - len(bad)
    assert found.left == []
    assert found.any_went == (len(bad) < items)


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_items_that_hang_are_met_alone_or_left(hangs: list[bool]) -> None:
    bad = {item for item, is_bad in enumerate(hangs) if is_bad}
    attempts = Attempts(bad, TimeoutError)
    found = asyncio.run(isolated(range(len(hangs)), attempts))
    assert {item for item, _ in found.failed} <= bad
    for item in bad:
        assert len([part for part in attempts.tried if item in part]) <= 2
