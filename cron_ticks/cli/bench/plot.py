"""Figures as a picture: groups of bars on one axis, as SVG text that needs nothing else.

Bars lie on their side, so that each has its contender's name and its value beside it, however many there are.
"""

import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 960
MARGIN = 24
NAMES_WIDTH = 190  # left of the bars
VALUES_WIDTH = 110  # right of the longest whisker
TITLE_HEIGHT = 52
GROUP_HEIGHT = 34
ROW_HEIGHT = 24
BAR_HEIGHT = 15
LINE_HEIGHT = 16
AXIS_HEIGHT = 44
CAPTION_LETTERS = 140  # of a line
MOST_STEPS = 6

BACKGROUND, INK, FAINT_INK, GRID = "#ffffff", "#1f2933", "#52606d", "#d9e2ec"
COLOURS = ("#2a6fb5", "#d98324", "#3f9b6b", "#8e5ea8", "#c24d52", "#6b7f94", "#a68a2d", "#4aa3a8")
STYLE = f"text{{font:13px system-ui,sans-serif;fill:{INK}}}.faint{{font-size:12px;fill:{FAINT_INK}}}"


@dataclass(frozen=True)
class Bar:
    """One figure: the median of the rounds, and the range."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Plot:
    """Groups of bars on one axis."""

    title: str
    unit: str
    groups: dict[str, dict[str, Bar]]  # group (size, measure) -> contender -> bar
    logarithmic: bool = False
    caption: str = ""


def bar_of(values: Sequence[float]) -> Bar:
    """A value per round."""
    return Bar(statistics.median(values), min(values), max(values))


def shown(value: float) -> str:
    """With as many digits as mean something."""
    size = abs(value)
    digits = 0 if size >= 100 or value == 0 else 1 if size >= 10 else 2 if size >= 0.1 else 4  # noqa: PLR2004
    return f"{value:,.{digits}f}"


def svg(plot: Plot) -> str:
    """The picture, on a background of its own."""
    axis = _axis(plot)
    bottom = TITLE_HEIGHT + sum(GROUP_HEIGHT + ROW_HEIGHT * len(bars) for bars in plot.groups.values()) + 8
    caption = textwrap.wrap(plot.caption, CAPTION_LETTERS)
    height = bottom + AXIS_HEIGHT + LINE_HEIGHT * len(caption) + MARGIN
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(plot.title)}</title>',
        f'<desc id="description">{escape(_in_words(plot))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="{BACKGROUND}"/>',
        f'<text x="{MARGIN}" y="34" style="font-size:17px;font-weight:600">{escape(plot.title)}</text>',
        *axis.drawn(bottom, plot.unit),
        *_groups(plot, axis),
        *(
            f'<text class="faint" x="{MARGIN}" y="{bottom + AXIS_HEIGHT + LINE_HEIGHT * (number + 1)}">'
            f"{escape(line)}</text>"
            for number, line in enumerate(caption)
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Axis:
    """From values to places."""

    start: float
    step: float  # between two lines; on a logarithmic axis, decades
    steps: int
    logarithmic: bool

    def place(self, value: float) -> float:
        """How far to the right."""
        if self.logarithmic:
            value = math.log10(value) if value > 0 else self.start
        share = (value - self.start) / (self.step * self.steps)
        return MARGIN + NAMES_WIDTH + min(max(share, 0.0), 1.0) * (WIDTH - 2 * MARGIN - NAMES_WIDTH - VALUES_WIDTH)

    def drawn(self, bottom: int, unit: str) -> Iterator[str]:
        """Its lines, their values and the unit."""
        for number in range(self.steps + 1):
            exponent = self.start + number * self.step
            value = 10**exponent if self.logarithmic else exponent
            place = f"{self.place(value):.1f}"
            yield f'<path d="M{place} {TITLE_HEIGHT}V{bottom}" stroke="{GRID}"/>'
            yield f'<text class="faint" x="{place}" y="{bottom + 17}" text-anchor="middle">{_round(value)}</text>'
        scale = ", logarithmic axis" if self.logarithmic else ""
        place = f"{self.place(10**self.start if self.logarithmic else self.start):.1f}"
        yield f'<text class="faint" x="{place}" y="{bottom + 36}">{escape(unit)}{scale}</text>'


def _axis(plot: Plot) -> _Axis:
    bars = [bar for group in plot.groups.values() for bar in group.values()]
    highest = max((bar.highest for bar in bars), default=0.0)
    if plot.logarithmic:
        positive = [value for bar in bars for value in (bar.lowest, bar.median, bar.highest) if value > 0] or [1.0]
        first = math.floor(math.log10(min(positive)))
        first -= math.log10(min(positive)) - first < 0.1  # noqa: PLR2004 - the shortest bar must be seen
        last = max(math.ceil(math.log10(max(positive))), first + 1)
        return _Axis(first, 1, last - first, logarithmic=True)
    step = _round_step(highest if highest > 0 else 1.0)
    return _Axis(0, step, math.ceil((highest if highest > 0 else 1.0) / step - 1e-9), logarithmic=False)


def _round_step(highest: float) -> float:
    """1, 2 or 5 of something, so that there are few lines."""
    size: float = 10 ** math.floor(math.log10(highest / MOST_STEPS))
    return next(factor * size for factor in (1, 2, 5, 10) if factor * size * MOST_STEPS >= highest * (1 - 1e-9))


def _round(value: float) -> str:
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def _groups(plot: Plot, axis: _Axis) -> Iterator[str]:
    contenders = list(dict.fromkeys(name for bars in plot.groups.values() for name in bars))
    top = TITLE_HEIGHT
    for group, bars in plot.groups.items():
        yield f'<text x="{MARGIN}" y="{top + 24}" style="font-weight:600">{escape(group)}</text>'
        top += GROUP_HEIGHT
        for name, bar in bars.items():
            colour = COLOURS[contenders.index(name) % len(COLOURS)]
            yield from _row(name, bar, axis, top, colour, f"{group}, {name}: {_with_range(bar)} {plot.unit}")
            top += ROW_HEIGHT


def _row(name: str, bar: Bar, axis: _Axis, top: int, colour: str, said: str) -> Iterator[str]:  # noqa: PLR0917
    """A bar with its contender's name, a whisker for the range, and the median in figures."""
    left, middle = float(MARGIN + NAMES_WIDTH), top + ROW_HEIGHT / 2
    median, lowest, highest = (axis.place(value) for value in (bar.median, bar.lowest, bar.highest))
    yield f"<g><title>{escape(said)}</title>"
    yield f'<text x="{left - 8}" y="{middle + 4.5}" text-anchor="end">{escape(name)}</text>'
    yield (
        f'<rect x="{left:.1f}" y="{middle - BAR_HEIGHT / 2:.1f}" width="{median - left:.1f}" height="{BAR_HEIGHT}" '
        f'fill="{colour}"/>'
    )
    if bar.highest > bar.lowest:
        whisker = f"M{lowest:.1f} {middle - 4}v8M{lowest:.1f} {middle}H{highest:.1f}M{highest:.1f} {middle - 4}v8"
        yield f'<path d="{whisker}" stroke="{INK}" stroke-width="1.5" fill="none"/>'
    yield f'<text x="{max(median, highest) + 8:.1f}" y="{middle + 4.5}">{shown(bar.median)}</text></g>'


def _with_range(bar: Bar) -> str:
    return f"{shown(bar.median)} ({shown(bar.lowest)} to {shown(bar.highest)})"


def _in_words(plot: Plot) -> str:
    """All figures, for those who can't see the picture."""
    groups = (
        f"{group}: " + "; ".join(f"{name} {_with_range(bar)}" for name, bar in bars.items())
        for group, bars in plot.groups.items()
    )
    return f"Median and range, in {plot.unit}. " + ". ".join(groups) + "."
