"""One real failure as a picture: a row for each worker, time from left to right; SVG, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from benchmarks.recovery.ours import PHASES, Recovery

#: From milliseconds to a place in the picture.
Scale = Callable[[float], float]
WIDTH, LEFT, RIGHT = 860, 92, 24
TOP, ROW, BAR = 74, 46, 24
WHAT = {
    "detect": "hears of it",
    "agree": "undo, next roster",
    "re_form": "new group",
    "sync": "all level?",
    "step": "until it has committed",
}
STYLE = """
    svg { font: 12px system-ui, sans-serif; }
    .page { fill: #ffffff; } text { fill: #1f2328; } .faint { fill: #59636e; }
    .grid { stroke: #d1d9e0; } .mark { stroke: #1f2328; stroke-dasharray: 4 3; }
    .detect { fill: #f2c6c3; } .agree { fill: #f6dfa9; } .re_form { fill: #cfe3b5; }
    .sync { fill: #b9dbe8; } .step { fill: #cdc5ec; } .alive { fill: #d8dee4; } .dying { fill: #a9b1ba; }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117; } text { fill: #f0f6fc; } .faint { fill: #9198a1; }
      .grid { stroke: #3d444d; } .mark { stroke: #f0f6fc; }
      .detect { fill: #8a3b36; } .agree { fill: #7a5c12; } .re_form { fill: #41682a; }
      .sync { fill: #1f5f78; } .step { fill: #54479a; } .alive { fill: #3d444d; } .dying { fill: #656c76; }
    }
"""


def draw(recovery: Recovery) -> str:
    """The whole picture. Pure."""
    kill = recovery.kill
    survivors = sorted(recovery.survivors, key=lambda event: kill.ranks[event["pid"]])
    end_ms: float = max(1000 * (event["t"] - kill.killed_s) for event in survivors)
    start_ms, end_ms = -0.08 * end_ms, 1.02 * end_ms
    scale = (WIDTH - LEFT - RIGHT) / (end_ms - start_ms)

    def x(ms: float) -> float:
        return LEFT + (ms - start_ms) * scale

    bottom = TOP + ROW * (len(survivors) + 1)
    parts = _grid(x, end_ms, bottom)
    parts += _mark(x(0), bottom, "kill -9", 0)
    parts += _mark(x(recovery.kernel_ms), bottom, f"its end (pidfd): {recovery.kernel_ms:.0f} ms", 1)
    parts += _mark(x(recovery.total_ms), bottom, f"all have committed: {recovery.total_ms:.0f} ms", 0, anchor="end")
    parts += _victim(x, start_ms, kill.rank, recovery.kernel_ms)
    for row, event in enumerate(survivors, start=1):
        parts += _survivor(x, start_ms, row, event, 1000 * (event["noticed"] - kill.killed_s))
        parts.append(_name(row, f"rank {kill.ranks[event['pid']]}"))
    parts += _legend(bottom + 44)
    height = bottom + 66
    title = "One of four workers is killed: what the others do until their next committed step"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"  <title>{escape(title)}</title>",
            f"  <style>{STYLE}  </style>",
            f'  <rect class="page" width="{WIDTH}" height="{height}"/>',
            f'  <text x="{LEFT}" y="20" font-weight="600">{escape(title)}</text>',
            *(f"  {part}" for part in parts),
            "</svg>",
            "",
        ]
    )


def _grid(x: Scale, end_ms: float, bottom: float) -> list[str]:
    each = 10 ** math.floor(math.log10(end_ms / 3))
    each *= next(factor for factor in (1, 2, 5, 10) if end_ms / (each * factor) <= 10)
    parts = []
    for number in range(int(end_ms / each) + 1):
        at = x(number * each)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text class="faint" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{number * each:g} ms</text>'
        )
    return parts


def _victim(x: Scale, start_ms: float, rank: int, kernel_ms: float) -> list[str]:
    return [
        _name(0, f"rank {rank}, killed"),
        _bar(x(start_ms), x(0), 0, "alive"),
        _bar(x(0), x(kernel_ms), 0, "dying", "the kernel ends it"),
    ]


def _survivor(x: Scale, start_ms: float, row: int, event: dict[str, object], noticed_ms: float) -> list[str]:
    phases = event["phases"]
    assert isinstance(phases, dict)
    parts = [_bar(x(start_ms), x(0), row, "alive")]
    parts.append(_bar(x(0), x(noticed_ms), row, "detect", _words("detect", noticed_ms)))
    at_ms = noticed_ms
    for phase in PHASES[1:]:
        ms = float(phases[phase])
        parts.append(_bar(x(at_ms), x(at_ms + ms), row, phase, _words(phase, ms)))
        at_ms += ms
    return parts


def _words(phase: str, ms: float) -> str:
    return f"{phase.replace('_', '-')} {ms:.0f} ms" if ms >= 1 else ""


def _name(row: int, text: str) -> str:
    return f'<text x="{LEFT - 10}" y="{TOP + ROW * row + 24}" text-anchor="end">{escape(text)}</text>'


def _bar(left: float, right: float, row: int, kind: str, text: str = "") -> str:
    """A bar, with its words in it as far as they fit: in full, the number alone, or as a tooltip only."""
    y, width = TOP + ROW * row + (ROW - BAR) / 2 - 3, max(0.0, right - left)
    number = text.split(" ", 1)[-1].removesuffix(" ms")
    shown = next((words for words in (text, number) if 6.3 * len(words) + 6 <= width), "")
    title = f"<title>{escape(text)}</title>" if text else ""
    bar = f'<rect class="{kind}" x="{left:.1f}" y="{y:g}" width="{width:.1f}" height="{BAR}">{title}</rect>'
    if shown:
        bar += f'<text x="{(left + right) / 2:.1f}" y="{y + 16:g}" text-anchor="middle">{escape(shown)}</text>'
    return bar


def _mark(at: float, bottom: float, text: str, level: int, anchor: str = "start") -> list[str]:
    y = TOP - 26 + 18 * level
    shift = 4 if anchor == "start" else -4
    return [
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 10}" y2="{bottom}"/>',
        f'<text x="{at + shift:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>',
    ]


def _legend(y: float) -> list[str]:
    parts, at = [], float(LEFT)
    for phase in PHASES:
        text = f"{phase.replace('_', '-')}: {WHAT[phase]}"
        parts.append(f'<rect class="{phase}" x="{at:.0f}" y="{y - 10:g}" width="11" height="11"/>')
        parts.append(f'<text class="faint" x="{at + 15:.0f}" y="{y:g}" font-size="10.5">{escape(text)}</text>')
        at += 32 + 5.6 * len(text)
    return parts
