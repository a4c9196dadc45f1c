"""How the values of some rounds are shown: each of them, the median and the range."""

import statistics
from collections.abc import Sequence
from typing import Any

PUBLISHED_ROUNDS = 5  # fewer say little about a range


def summary(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Each value, with the median and the range."""
    return {
        "rounds": [round(value, digits) for value in values],
        "median": round(statistics.median(values), digits),
        "lowest": round(min(values), digits),
        "highest": round(max(values), digits),
    }


def spread(values: Sequence[float], form: str = ",.2f", unit: str = "") -> str:
    """For people: the median, and the range if there is one."""
    median = f"{statistics.median(values):{form}}{unit}"
    return median if len(values) == 1 else f"{median} ({min(values):{form}} to {max(values):{form}})"


def of_rounds(rounds: int) -> str:
    """For a caption: how many there were, and whether that is enough."""
    if rounds >= PUBLISHED_ROUNDS:
        return f"median of {rounds} rounds (lowest to highest)"
    shown = "" if rounds == 1 else ", median (lowest to highest)"
    return f"{rounds} round{'s' if rounds > 1 else ''}: not for publication{shown}"
