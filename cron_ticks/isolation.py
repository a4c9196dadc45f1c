"""Finds the one that spoils a batch: parts of it are tried until it stands alone."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MORE_PATIENCE = 16  # with several bad ones side by side


@dataclass
class Isolated(Generic[T, R]):
    """What became of a batch's items."""

    done: list[R] = field(default_factory=list)
    failed: list[tuple[T, Exception]] = field(default_factory=list)  # each alone
    left: list[T] = field(default_factory=list)  # not tried alone, because nothing goes
    error: Exception | None = None  # the last of theirs
    trouble: Exception | None = None  # none of theirs, which ended it
    any_went: bool = False


async def isolate(
    items: Sequence[T],
    attempt: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
    *,
    is_theirs: Callable[[Exception], bool],
    took_too_long: bool = False,
) -> Isolated[T, R]:
    """Try a batch, and what fails again in parts, down to single items; each alone, if the batch took too long before.

    An error that is none of the items' ends it, as `trouble`. So do too many failures in a row: of one bad item among n
    there are about log2(n) before something goes through. Then it is not a matter of the items.
    """
    found: Isolated[T, R] = Isolated()
    patience = len(items).bit_length() + MORE_PATIENCE
    parts: list[Sequence[T]] = [[item] for item in items] if took_too_long else [items]
    fruitless = 0
    while parts:
        part = parts.pop(0)
        try:
            found.done += await attempt(part)
            found.any_went, fruitless = True, 0
        except Exception as error:  # noqa: BLE001 - the caller says whose it is
            if not is_theirs(error):
                found.trouble = error
                break
            found.error = error
            fruitless += patience // 2 if isinstance(error, TimeoutError) else 1
            if len(part) == 1:
                found.failed.append((part[0], error))
            else:
                parts[:0] = _split(part, error)
            if fruitless > patience:
                found.left = [item for rest in parts for item in rest]
                break
    return found


def _split(items: Sequence[T], error: Exception) -> list[Sequence[T]]:
    """Halves; but what takes too long would do so in each half again, so there each stands alone at once."""
    if isinstance(error, TimeoutError):
        return [[item] for item in items]
    middle = len(items) // 2
    return [items[:middle], items[middle:]]
