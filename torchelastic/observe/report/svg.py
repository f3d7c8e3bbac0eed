"""What drawings are made of: elements that escape their texts, scales, and the values beside a scale. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

from torchelastic.text import duration, escaped

#: What may be inside of an element.
Child = Element | str

_S = 1_000_000_000
_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)


def node(tag: str, *children: Child, **attributes: str | float | int) -> Element:
    """An element.

    Args:
        tag: its name.
        children: texts and elements in order.
        attributes: by name; a trailing underscore is dropped (`class_`), others become dashes.

    >>> write(node("g", node("path", d="M0 0"), "<b>", class_="a"))
    '<g class="a"><path d="M0 0"></path>&lt;b&gt;</g>'
    """
    named = {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()}
    made = Element(tag, named)
    for child in children:
        if not isinstance(child, str):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + escaped(child)
        else:
            made.text = (made.text or "") + escaped(child)
    return made


def write(root: Element) -> str:
    """As HTML."""
    return tostring(root, encoding="unicode", method="html")


def number(value: float) -> str:
    """A coordinate, as short as it is useful."""
    return f"{value:.1f}".removesuffix(".0")


def _text(value: str | float) -> str:
    return escaped(value) if isinstance(value, str) else number(value)


@dataclass(frozen=True)
class Scale:
    """From values to places.

    Attributes:
        low, high: the values at both ends.
        begin, end: their places.
        is_log: whether equal ratios are equal distances.
    """

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies; outside of the scale: at its end."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = (math.log10(max(one, 1e-300)) for one in (low, high, value))
        part = (value - low) / (high - low) if high > low else 0.0
        return self.begin + (self.end - self.begin) * min(1.0, max(0.0, part))


def time_ticks(until_ns: int, most: int = 9) -> list[tuple[int, str]]:
    """Round times from 0 on, with their names.

    >>> time_ticks(52_000_000_000, 6)[:3]
    [(0, '0'), (10000000000, '10 s'), (20000000000, '20 s')]
    """
    if until_ns < _S:
        step_ns = max(1, 10 ** (len(str(max(1, until_ns))) - 1))
    else:
        days_s = 86400 * math.ceil(until_ns / _S / 86400 / most)
        step_ns = next((step for step in _STEPS_S if until_ns <= step * _S * most), days_s) * _S
    later = [(at_ns, re.sub(r"\.0+ ", " ", duration(at_ns))) for at_ns in range(step_ns, until_ns + 1, step_ns)]
    return [(0, "0"), *later]


def value_ticks(scale: Scale, most: int = 5) -> list[float]:
    """Round values of a scale."""
    if scale.is_log:
        first, last = math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high))
        decades = [10.0**power for power in range(first, last + 1)]
        return decades if len(decades) >= 2 else [scale.low, scale.high]
    width = (scale.high - scale.low) or 1.0
    step = 10 ** math.floor(math.log10(width / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if width / (step * factor) <= most)
    first = math.ceil(scale.low / step - 1e-9)
    return [number * step for number in range(first, math.floor(scale.high / step + 1e-9) + 1)]


def rounded(shares: Sequence[float], height: float) -> list[float]:
    """Heights of parts that are `height` together, to a tenth, so that neighbours look alike where they are."""
    ends, total = [], 0.0
    for share in shares:
        total += share
        ends.append(round(10 * total * height) / 10)
    return [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
