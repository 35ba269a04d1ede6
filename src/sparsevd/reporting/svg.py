"""Drawings as SVG text: shapes, scales and axes, and nothing that a page without a network would miss.

Colours are classes that the page's style sheet knows (`ink`, `quiet`, `grid`, `series-0` …), so that a drawing follows
the page into the dark and onto paper.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """From values to places on the page, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + (self.end - self.start) * share

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the range."""
        return _powers(self.low, self.high, most) if self.log else _round_steps(self.low, self.high, most)


def _round_steps(low: float, high: float, most: int) -> list[float]:
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * 0.999)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float, most: int) -> list[float]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:  # not even two powers of ten: round numbers between them
        for digits in ((1, 2, 5), range(1, 10)):
            inner = [digit * 10.0**e for e in range(first - 1, last + 2) for digit in digits]
            inside = [value for value in inner if low <= value <= high]
            if len(inside) > 1:
                break
        return inside
    every = max(1, math.ceil((last - first + 1) / most))
    return [10.0**e for e in range(first, last + 1, every)]


class Drawing:
    """Shapes on a canvas of this size; `text()` is the finished element, with a title and a description for those who
    do not see it."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self._parts: list[str] = []

    def line(self, start: Point, end: Point, style: str) -> None:
        (x1, y1), (x2, y2) = start, end
        self._add(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{style}"/>')

    def path(self, points: Iterable[Point], style: str) -> None:
        """Straight lines through the points."""
        drawn = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        if drawn:
            self._add(f'<path d="M{drawn}" class="line {style}"/>')

    def bar(self, corner: Point, width: float, height: float, style: str, hint: str = "") -> None:
        x, y = corner
        shape = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(max(height, 0))}" class="{style}"'
        self._add(_hinted("rect", shape, hint))

    def dot(self, centre: Point, radius: float, style: str, hint: str = "") -> None:
        self._add(
            _hinted("circle", f'cx="{_n(centre[0])}" cy="{_n(centre[1])}" r="{_n(radius)}" class="{style}"', hint)
        )

    def label(self, place: Point, text: str, style: str = "", anchor: str = "start", turned: bool = False) -> None:
        x, y = map(_n, place)
        turn = f' transform="rotate(-90 {x} {y})"' if turned else ""
        self._add(f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{style}"{turn}>{escape(text)}</text>')

    def image(self, corner: Point, width: float, height: float, address: str) -> None:
        x, y = map(_n, corner)
        self._add(
            f'<image x="{x}" y="{y}" width="{_n(width)}" height="{_n(height)}" href="{escape(address)}" '
            'preserveAspectRatio="none" class="pixels"/>'
        )

    def bottom_axis(self, scale: Scale, y: float, title: str, texts: dict[float, str] | None = None) -> None:
        """The values below the line at this height, and what they are."""
        self.line((scale.start, y), (scale.end, y), "axis")
        for value, text in (texts or {tick: short(tick) for tick in scale.ticks()}).items():
            self.line((scale(value), y), (scale(value), y + 4), "axis")
            self.label((scale(value), y + 16), text, "quiet", "middle")
        self.label(((scale.start + scale.end) / 2, y + 33), title, "quiet", "middle")

    def left_axis(self, scale: Scale, left: float, right: float, most: int = 5) -> None:
        """The values beside lines across the canvas."""
        for tick in scale.ticks(most):
            self.line((left, scale(tick)), (right, scale(tick)), "grid")
            self.label((left - 6, scale(tick) + 4), short(tick), "quiet", "end")

    def text(self, title: str, description: str) -> str:
        """The finished element."""
        box = f"0 0 {_n(self.width)} {_n(self.height)}"
        named = escape(f"{title}. {description}")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{_n(self.width)}" '
            f'height="{_n(self.height)}" role="img" aria-label="{named}"><title>{escape(title)}</title>'
            f"<desc>{escape(description)}</desc>{''.join(self._parts)}</svg>"
        )

    def _add(self, part: str) -> None:
        self._parts.append(part)


def short(value: float) -> str:
    """A value beside an axis: 20000 is 20k."""
    if value == 0:
        return "0"
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def padded(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """A range with some air around the values."""
    low, high = min(values), max(values)
    air = share * (high - low) or abs(high) * share or 1.0
    return low - air, high + air


def _hinted(shape: str, attributes: str, hint: str) -> str:
    if not hint:
        return f"<{shape} {attributes}/>"
    return f"<{shape} {attributes}><title>{escape(hint)}</title></{shape}>"


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
