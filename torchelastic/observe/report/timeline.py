"""The time line as SVG: a row per place, its accounts as coloured bars, and what happened marked on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from torchelastic.observe.ledger.accounts import Account
from torchelastic.observe.report.charts import MOST_FLAGS, failure_line
from torchelastic.observe.report.model import AttemptRow, Mark, Report, SaveRow
from torchelastic.observe.report.segments import Segment
from torchelastic.observe.report.svg import Scale, node, number, rounded, time_ticks
from torchelastic.text import counted, duration

_WIDTH, _LEFT, _RIGHT = 1120.0, 128.0, 1108.0
_IN_GROUP_TOP, _IN_GROUP_HEIGHT = 30.0, 34.0
_ROWS_TOP = _IN_GROUP_TOP + _IN_GROUP_HEIGHT + 16.0
#: So many marks of one kind are drawn on a row; they would cover each other.
_MOST_MARKS = 60
#: What is less high cannot be seen; it is in the numbers all the same.
_LEAST_HEIGHT = 0.2
_IN_NO_GROUP = (Account.START_UP, Account.IDLE)


def timeline(report: Report) -> Element:
    """The drawing of a run."""
    places: dict[str, list[AttemptRow]] = defaultdict(list)
    for life in report.lives:
        places[life.place].append(life)
    pitch = 26.0 if len(places) <= 12 else 17.0 if len(places) <= 32 else 12.0
    scale = Scale(0, max(1, report.until_ns), _LEFT, _RIGHT)
    bottom = _ROWS_TOP + pitch * len(places)
    tops = {place: _ROWS_TOP + pitch * number for number, place in enumerate(places)}
    return node(
        "svg",
        node("title", f"What every worker of {report.run_id} did when"),
        *_grid(report, scale, bottom),
        *_outages(report.marks, scale, bottom),
        *_in_group(report, scale),
        *(row for place, lives in places.items() for row in _row(place, lives, tops[place], pitch, scale)),
        *_saves(report.saves, scale, bottom + 6),
        *_failures(report, scale, bottom),
        *_marks(report.marks, tops, pitch, scale),
        viewBox=f"0 0 {_WIDTH:.0f} {bottom + 46:.0f}",
        role="img",
    )


def _grid(report: Report, scale: Scale, bottom: float) -> Iterator[Element]:
    for at_ns, name in time_ticks(report.until_ns):
        x = scale.place(at_ns)
        yield node("line", class_="grid", x1=x, x2=x, y1=_IN_GROUP_TOP, y2=bottom + 22)
        anchor = "middle" if x < _RIGHT - 20 else "end"
        yield node("text", name, class_="faint", x=x, y=bottom + 38, text_anchor=anchor)


# --- rows -------------------------------------------------------------------------------------------------------------


def _row(place: str, lives: Sequence[AttemptRow], top: float, pitch: float, scale: Scale) -> Iterator[Element]:
    height = pitch - (5.0 if pitch > 20 else 3.0)
    size = 12 if pitch > 16 else 9.5
    label = place if len(place) <= 18 else f"…{place[-17:]}"
    yield node("text", node("title", place), label, x=_LEFT - 8, y=top + height / 2 + size * 0.36, text_anchor="end",
               font_size=size)  # fmt: skip
    yield node("rect", class_="track", x=_LEFT, y=top, width=_RIGHT - _LEFT, height=height, rx=2)
    for life in lives:
        paths = _paths(life.cells, top, height, scale)
        yield node("g", node("title", _about(life)), *(
            node("path", class_=account.label, d="".join(parts)) for account, parts in paths.items()
        ))  # fmt: skip


def _paths(cells: Sequence[Segment], top: float, height: float, scale: Scale) -> dict[Account, list[str]]:
    """One path per account: in each cell its part of the height, as great as its part of the time."""
    drawn: dict[Account, list[str]] = defaultdict(list)
    for from_ns, to_ns, heights in _alike(cells, height):
        left, right = scale.place(from_ns), scale.place(to_ns)
        y = top + height
        for account, part in zip(Account, heights, strict=True):
            y -= part
            if part >= _LEAST_HEIGHT:
                width = number(right - left)
                drawn[account].append(f"M{number(left)} {number(y)}h{width}v{number(part)}h-{width}z")
    return drawn


def _alike(cells: Sequence[Segment], height: float) -> Iterator[tuple[int, int, list[float]]]:
    """Neighbours that would look the same are drawn as one."""
    known: tuple[int, int, list[float]] | None = None
    for cell in cells:
        length_ns = cell.to_ns - cell.from_ns
        heights = [round(part, 1) for part in rounded([ns / length_ns for ns in cell.amounts], height)]
        if known is not None and known[2] == heights and known[1] == cell.from_ns:
            known = (known[0], cell.to_ns, heights)
            continue
        if known is not None:
            yield known
        known = (cell.from_ns, cell.to_ns, heights)
    if known is not None:
        yield known


def _about(life: AttemptRow) -> str:
    """What is shown where one points at a life."""
    parts = sorted(((ns, account) for account, ns in zip(Account, life.amounts, strict=True) if ns), reverse=True)
    spent = ", ".join(f"{account.label} {duration(ns)}" for ns, account in parts)
    end = f", {life.end}" if life.end else "" if life.is_ended else ", no end known"
    return f"{life.name}: {duration(life.wall_ns)}{end}. {spent}"


# --- above and below the rows -----------------------------------------------------------------------------------------


def _in_group(report: Report, scale: Scale, most: int = 240) -> Iterator[Element]:
    """How many workers were in a group, over time."""
    counts = workers_in_group(report, most)
    wanted = max(1.0, float(report.seen.configured_workers), float(round(max(counts))))
    heights = Scale(0, wanted, _IN_GROUP_TOP + _IN_GROUP_HEIGHT, _IN_GROUP_TOP)
    points = [
        (scale.place(report.until_ns * (column + 0.5) / most), heights.place(count))
        for column, count in enumerate(counts)
    ]
    bottom = _IN_GROUP_TOP + _IN_GROUP_HEIGHT
    line = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    yield node("text", "in a group", class_="faint", x=_LEFT - 8, y=_IN_GROUP_TOP + 14, text_anchor="end")
    yield node(
        "text", f"of {wanted:g}", class_="faint", x=_LEFT - 8, y=_IN_GROUP_TOP + 29, text_anchor="end", font_size=10.5
    )
    yield node("path", class_="band", d=f"M{number(points[0][0])} {bottom}L{line}L{number(points[-1][0])} {bottom}Z")
    yield node("path", class_="line", d=f"M{line}")
    yield node("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=bottom, y2=bottom)


def workers_in_group(report: Report, columns: int) -> list[float]:
    """How many workers were in a group, or forming one anew, on average in each of so many equal parts of the run."""
    total_ns = max(1, report.until_ns)
    sums = [0.0] * columns
    for life in report.lives:
        for cell in life.cells:
            length_ns = cell.to_ns - cell.from_ns
            part = 1 - sum(cell.amounts[account] for account in _IN_NO_GROUP) / length_ns
            if part <= 0:
                continue
            first = cell.from_ns * columns // total_ns
            for column in range(first, min(columns, cell.to_ns * columns // total_ns + 1)):
                begin_ns, end_ns = total_ns * column / columns, total_ns * (column + 1) / columns
                sums[column] += max(0.0, min(end_ns, cell.to_ns) - max(begin_ns, cell.from_ns)) * part
    return [one * columns / total_ns for one in sums]


def _saves(saves: Sequence[SaveRow], scale: Scale, top: float) -> Iterator[Element]:
    if not saves:
        return
    yield node("text", "saves", class_="faint", x=_LEFT - 8, y=top + 10, text_anchor="end")
    columns: dict[int, list[SaveRow]] = defaultdict(list)
    for save in saves:
        columns[int(scale.place(save.at_ns) / 2)].append(save)
    for column, here in columns.items():
        ends = dict.fromkeys(str(save.step) for save in (here[0], here[-1]) if save.step >= 0)
        after = f" after step {'-'.join(ends)}" if ends else ""
        longest_ns = max(save.longest_ns for save in here)
        about = f"{counted(len(here), 'save')}{after}, training stopped for {duration(longest_ns)} at most"
        x = column * 2 + 1
        yield node("line", node("title", about), class_="save", x1=x, x2=x, y1=top, y2=top + 11)


def _failures(report: Report, scale: Scale, bottom: float) -> Iterator[Element]:
    is_numbered = len(report.incidents) <= MOST_FLAGS
    for one in report.incidents:
        step = f", step {one.step}" if one.step >= 0 else ""
        about = f"after {duration(one.at_ns)}{step}: {one.why}"
        x = scale.place(one.at_ns)
        yield failure_line(one, about, x, _IN_GROUP_TOP - 15, bottom, is_numbered=is_numbered)


def _outages(marks: Sequence[Mark], scale: Scale, bottom: float) -> Iterator[Element]:
    for mark in [one for one in marks if one.kind == "outage"]:
        left, right = scale.place(mark.at_ns), scale.place(mark.at_ns + mark.took_ns)
        about = node("title", f"{mark.text} ({duration(mark.took_ns)})")
        yield node("rect", about, class_="outage", x=left, width=max(2.0, right - left), y=_IN_GROUP_TOP,
                   height=bottom - _IN_GROUP_TOP)  # fmt: skip


def _marks(marks: Sequence[Mark], tops: dict[str, float], pitch: float, scale: Scale) -> Iterator[Element]:
    """Joins, losses, drains, stragglers; of many close to each other the first."""
    drawn: dict[tuple[str, str], set[int]] = defaultdict(set)
    middle, size = (pitch - (5.0 if pitch > 20 else 3.0)) / 2, min(5.5, pitch / 3.4)
    for mark in marks:
        if mark.kind not in _SHAPES or mark.place not in tops:
            continue
        x, y = scale.place(mark.at_ns), tops[mark.place] + middle
        slots = drawn[mark.place, mark.kind]
        slot = int(x / (_RIGHT - _LEFT) * _MOST_MARKS) if mark.kind != "loss" else int(x)
        if slot not in slots:
            slots.add(slot)
            yield _sign(mark.kind, x, y, size, node("title", mark.text))


#: Lines from the middle of a mark.
_SHAPES: dict[str, tuple[tuple[str, float, float], ...]] = {
    "join": (("M", -0.6, -1), ("L", 1, 0), ("L", -0.6, 1), ("L", -0.6, -1)),
    "loss": (("M", -1, -1), ("L", 1, 1), ("M", -1, 1), ("L", 1, -1)),
    "drain": (("M", 0.6, -1), ("L", -1, 0), ("L", 0.6, 1), ("L", 0.6, -1)),
    "skip": (("M", -0.8, 0.6), ("L", 0, -0.8), ("L", 0.8, 0.6)),
    "straggler": (("M", -1, -0.9), ("L", 1, -0.9), ("L", 0, 0.9), ("L", -1, -0.9)),
    "back": (("M", 0, -1), ("L", 1, 0), ("L", 0, 1), ("L", -1, 0), ("L", 0, -1)),
}
#: What is marked on a row, and what it means.
MARKS = {
    "join": "joins a group",
    "loss": "is lost",
    "drain": "leaves in order",
    "skip": "skips a step",
    "straggler": "is found to be slow",
    "back": "comes back from a checkpoint",
}


def mark_sign(kind: str) -> Element:
    """A mark of one of `MARKS`, for a legend."""
    style = "display: inline-block; width: 14px; margin-right: 5px; vertical-align: -2px"
    return node("svg", _sign(kind, 7, 7, 5), viewBox="0 0 14 14", style=style)


def _sign(kind: str, x: float, y: float, size: float, *about: Element) -> Element:
    path = " ".join(f"{op}{number(x + dx * size)} {number(y + dy * size)}" for op, dx, dy in _SHAPES[kind])
    return node("path", *about, class_="lost" if kind == "loss" else "mark", d=path)
