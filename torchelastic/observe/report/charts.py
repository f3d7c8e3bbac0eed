"""The smaller drawings: one bar for all time, the phases of a failure, the loss curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from torchelastic.observe.ledger.accounts import Account, Amounts
from torchelastic.observe.report.losses import LossCurve
from torchelastic.observe.report.model import PHASES, Incident
from torchelastic.observe.report.svg import Scale, node, number, value_ticks
from torchelastic.text import duration, percent

#: So many failures are numbered in a drawing; more are lines only.
MOST_FLAGS = 40
_WIDTH = 1120.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 1108.0, 26.0, 246.0
#: From so large a ratio on losses are drawn by their logarithm.
_LOG_FROM = 50.0


def account_bar(amounts: Amounts) -> Element:
    """All time in one bar."""
    total = sum(amounts) or 1
    parts, x = [], 0.0
    for account, ns in zip(Account, amounts, strict=True):
        width = _WIDTH * ns / total
        if width > 0:
            about = node("title", f"{account.label}: {percent(ns / total)}, {duration(ns)}")
            parts.append(node("rect", about, class_=account.label, x=x, y=0, width=width, height=30))
            x += width
    return node("svg", *parts, viewBox=f"0 0 {_WIDTH:.0f} 30", role="img", preserveAspectRatio="none",
                style="height: 30px; border-radius: 6px")  # fmt: skip


def share_bar(value: float, attainable: float) -> Element:
    """A share, and where its bound lies."""
    scale = Scale(0, 1, 0, 200)
    bound = scale.place(attainable)
    return node(
        "svg",
        node("rect", class_="track", x=0, y=3, width=200, height=8, rx=4),
        node("rect", class_="productive", x=0, y=3, width=scale.place(value), height=8, rx=4),
        node(
            "line", node("title", f"attainable: {percent(attainable)}"), class_="bound", x1=bound, x2=bound, y1=0, y2=14
        ),
        viewBox="-1 0 202 14",
        role="img",
    )


def phase_bar(phases_ns: Mapping[str, int], longest_ns: int) -> Element:
    """The phases of one failure, as long as they took beside the longest one of the run."""
    scale = Scale(0, max(1, longest_ns), 0, 400)
    parts, at_ns = [], 0
    for name, ns in phases_ns.items():
        left, right = scale.place(at_ns), scale.place(at_ns + ns)
        at_ns += ns
        class_ = name if name in PHASES else "other"
        width = max(0.6, right - left) if ns else 0.0
        if width:
            about = node("title", f"{name} {duration(ns)}")
            parts.append(node("rect", about, class_=class_, x=left, y=0, width=width, height=12))
    return node("svg", *parts, viewBox="0 0 401 12", role="img")


def loss_chart(curve: LossCurve, incidents: Sequence[Incident]) -> Element:
    """The loss by step, with the failures where they broke in."""
    points = curve.points
    low, high = min(point.low for point in points), max(point.high for point in points)
    is_log = low > 0 and high / low > _LOG_FROM
    if low == high:
        low, high = low - 0.5, high + 0.5
    steps = Scale(points[0].step, max(points[-1].step, points[0].step + 1), _LEFT, _RIGHT)
    values = Scale(low, high, _BOTTOM, _TOP, is_log)
    placed = [(steps.place(point.step), point) for point in points]
    line = "L".join(f"{number(x)} {number(values.place(point.mean))}" for x, point in placed)
    above = "L".join(f"{number(x)} {number(values.place(point.high))}" for x, point in placed)
    below = "L".join(f"{number(x)} {number(values.place(point.low))}" for x, point in reversed(placed))
    return node(
        "svg",
        node("title", "loss by step"),
        *_grid(steps, values),
        node("path", class_="band", d=f"M{above}L{below}Z"),
        node("path", class_="line", d=f"M{line}"),
        *_failures(incidents, steps),
        viewBox=f"0 0 {_WIDTH:.0f} {_BOTTOM + 44:.0f}",
        role="img",
    )


def _grid(steps: Scale, values: Scale) -> Iterator[Element]:
    for value in value_ticks(values):
        y = values.place(value)
        yield node("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=y, y2=y)
        yield node("text", f"{value:.4g}", class_="faint", x=_LEFT - 8, y=y + 4, text_anchor="end")
    for step in value_ticks(steps, 10):
        if step == int(step):
            x = steps.place(step)
            yield node("text", f"{int(step)}", class_="faint", x=x, y=_BOTTOM + 20, text_anchor="middle")
    yield node("text", "step", class_="faint", x=_RIGHT, y=_BOTTOM + 38, text_anchor="end")


def failure_line(one: Incident, about: str, x: float, top: float, bottom: float, *, is_numbered: bool) -> Element:
    """A failure in a drawing, with its number above it."""
    line = node("line", class_="failure" if is_numbered else "failure many", x1=x, x2=x, y1=top + 7, y2=bottom)
    flag = node("circle", class_="flag", cx=x, cy=top, r=9)
    name = node("text", str(one.number), class_="flagged", x=x, y=top + 3.6, text_anchor="middle")
    numbered = (flag, name) if is_numbered else ()
    return node("g", node("title", f"failure {one.number} {about}"), line, *numbered)


def _failures(incidents: Sequence[Incident], steps: Scale) -> Iterator[Element]:
    shown = [one for one in incidents if steps.low <= one.step <= steps.high]
    for one in shown:
        lost = f", {one.steps_back} steps lost" if one.steps_back else ""
        about = f"after step {one.step}{lost}: {one.why}"
        x, is_numbered = steps.place(one.step), len(shown) <= MOST_FLAGS
        yield failure_line(one, about, x, _TOP - 12, _BOTTOM, is_numbered=is_numbered)
