"""How far a bench command is: a bar on standard error, where that is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Steps(Protocol):
    """Is called with what runs now, at the beginning of each step."""

    def expect(self, steps: int) -> None:
        """So many calls will come."""

    def __call__(self, text: str) -> None:
        """The step before has ended, and this begins."""

    def say(self, text: str) -> None:
        """What is happening in the step."""


def within(steps: Steps, label: str) -> Callable[[str], None]:
    """Begin a step; what is said is said of it."""
    steps(label)
    return lambda text: steps.say(f"{label}: {text}")


@dataclass
class ShownSteps:
    """A bar: steps done of all, what runs now, and for how long it has been going on."""

    bar: Progress
    task: TaskID
    begun: bool = False

    def expect(self, steps: int) -> None:
        """Until this is known, the bar moves and shows no share."""
        self.bar.update(self.task, total=steps)

    def __call__(self, text: str) -> None:
        """The bar goes on by one, but for the first."""
        self.bar.update(self.task, description=text, advance=1 if self.begun else 0)
        self.begun = True

    def say(self, text: str) -> None:
        """The bar stays where it is."""
        self.bar.update(self.task, description=text)


@contextmanager
def shown_steps(console: Console | None = None) -> Iterator[ShownSteps]:
    """A bar while something runs, gone in the end; nothing where there is no terminal."""
    console = Console(stderr=True) if console is None else console
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield ShownSteps(bar, bar.add_task("starting", total=None))
