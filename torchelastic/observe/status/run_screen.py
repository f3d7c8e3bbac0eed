"""A run on a terminal: who is in, how fast it goes, where the time went, what happened last. Drawn by rich."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from torchelastic.observe.ledger.accounts import STYLES, Account, Amounts
from torchelastic.observe.ledger.figures import Figures
from torchelastic.observe.status.run_progress import rate_text
from torchelastic.observe.status.run_status import (
    BAD,
    MOST_EVENTS,
    WARNING,
    EventLine,
    RunStatus,
    WorkerStatus,
    notes_of,
)
from torchelastic.rendezvous.records import NO_ROUND, RoundState
from torchelastic.text import age_text, percent, printable

_STATES = {RoundState.RUNNING: "bold green", RoundState.GATHERING: "bold yellow", RoundState.CLOSED: "bold"}
_GRADES = {BAD: "red", WARNING: "yellow"}
#: Lines of events that are there before all workers are, and from how many lines on for both.
_LEAST_EVENTS, _LEAST_FOR_EVENTS = 3, 6
#: With fewer lines for workers and events than that, only what is most needed is shown above and below them.
_LEAST_LINES = 4
#: A width in which nothing is cut, for a pipe or a file; and how long the bar is then.
UNCUT_WIDTH, _UNCUT_BAR = 10_000, 100
#: Columns, with the width of the terminal from which on they are shown.
_COLUMNS: tuple[tuple[str, int], ...] = (
    ("rank", 0), ("host", 0), ("step", 0), ("steps/s", 60), ("now", 36), ("loss", 70), ("restarts", 90), ("pid", 100),
    ("since", 110),
)  # fmt: skip


class Screen:
    """The display of one moment, for `rich.console.Console.print` and `rich.live.Live`.

    Args:
        status: of the run.
        height: lines that there are; None: as many as are needed.
        away_s: since when etcd has not answered, in seconds; 0: it does.
        footer: the last line.
        local_time: as `time.localtime`.
    """

    def __init__(
        self,
        status: RunStatus,
        *,
        height: int | None = None,
        away_s: float = 0.0,
        footer: str = "",
        local_time: Callable[[float], time.struct_time] = time.localtime,
    ) -> None:
        self._status, self._height, self._away_s, self._footer = status, height, away_s, footer
        self._local_time = local_time

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it in the width that there is."""
        status, width = self._status, options.max_width
        bar = _UNCUT_BAR if width == UNCUT_WIDTH else width
        ledger = ledger_lines(status.seen.amounts, status.figures, bar, console.color_system is not None)
        is_over = status.round.state is RoundState.CLOSED or status.left
        if is_over and not (status.hosts or status.silent):
            ledger = [Text("where its time went: torchelastic report DIR, of each host's --log-dir", style="dim")]
        because = [_one_line(printable(status.round.because), "dim")] if status.round.because else []
        above: list[Text] = [headline(status), *because, *self._warnings(), Text()]
        below = [Text(), *ledger]
        footer = [Text(self._footer, style="dim")] if self._footer else []
        events = [self._event(line) for line in status.events[-MOST_EVENTS:]]
        rows = rows_of(status)
        if self._height is not None:
            left = self._height - _lines(console, [*above, *below, *footer], width)
            if left < _LEAST_LINES:
                above, below = [headline(status), *self._warnings()], ledger[:2]
                left = self._height - _lines(console, [*above, *below, *footer], width)
            rows, events = _fitted(rows, events, left)
        gap = [Text()] if events else []
        yield Group(*above, _table(rows, width), *below, *gap, *events, *footer)

    def _warnings(self) -> Iterable[Text]:
        if self._away_s:
            yield _one_line(f"etcd has not answered for {age_text(self._away_s)}: this is how things were", "bold red")
        for note in notes_of(self._status):
            text, colour = printable(note.text), _GRADES.get(note.grade)
            yield Text(text, f"bold {colour}") if colour else _one_line(text, "dim")

    def _event(self, line: EventLine) -> Text:
        clock = time.strftime("%H:%M:%S", self._local_time(line.at_s))
        return _one_line(f"{clock}  {event_text(line)}", _GRADES.get(line.grade, ""))


def headline(status: RunStatus) -> Text:
    """The run in one line."""
    state = status.round.state
    text = Text(overflow="fold")
    text.append(f"run {printable(status.run_id)}", "bold")
    parts: list[tuple[str, str]] = [(state.value, _STATES.get(state, "bold red"))]
    if status.round == NO_ROUND:
        parts = [("waits for workers", "bold yellow")]
    if status.round_since_s:
        parts.append((f"for {age_text(max(0.0, status.at_s - status.round_since_s))}", ""))
    parts.append((f"round {status.round.number}", ""))
    parts.append((f"world size {status.world_size}", ""))
    parts += [(part, "") for part in status.progress.parts()]
    for what, style in parts:
        text.append("  ").append(what, style)
    return text


def event_text(line: EventLine) -> str:
    """One event without its time."""
    who = printable(line.worker or line.host)
    rank = f" (rank {line.rank})" if line.rank >= 0 else ""
    return f"{who}{rank}: {printable(line.text)}"


def rows_of(status: RunStatus) -> list[dict[str, str]]:
    """One row for each worker, by rank; members that no host reports, such as those without a launcher, too."""
    rows = [(worker.rank, _row(worker, status.at_s)) for worker in status.workers]
    known = {worker.rank for worker in status.workers}
    host_of = {member.member_id: member.host for member in status.members}
    for rank, member_id in enumerate(status.round.roster):
        if rank not in known and member_id in host_of:
            rows.append((rank, {"rank": str(rank), "host": printable(host_of[member_id])}))
    return [row for _, row in sorted(rows, key=lambda one: (one[0] < 0, one[0]))]


def _row(worker: WorkerStatus, at_s: float) -> dict[str, str]:
    return {
        "rank": str(worker.rank) if worker.rank >= 0 else "-",
        "host": printable(worker.host),
        "step": str(worker.step) if worker.step >= 0 else "-",
        "steps/s": rate_text(worker.steps_per_s),
        "now": worker.account,
        "loss": f"{worker.values['loss']:.4g}" if "loss" in worker.values else "",
        "restarts": str(worker.restarts),
        "pid": str(worker.pid or ""),
        "since": age_text(max(0.0, at_s - worker.began_s)) if worker.began_s else "",
    }


def _table(rows: Sequence[dict[str, str]], width: int) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    shown = [title for title, least in _COLUMNS if width >= least and (title != "loss" or any(map(_has_loss, rows)))]
    for title in shown:
        is_text = title in ("host", "now")
        # of all columns rich makes those narrower first that may wrap: the name of a host is cut, and no number
        drawn.add_column(title, justify="left" if is_text else "right", no_wrap=title != "host", overflow="ellipsis")
    for row in rows:
        style = "" if row.get("now", "productive") in ("productive", "data_wait", "save_stall") else "yellow"
        drawn.add_row(*(_one_line(row.get(title, "")) for title in shown), style=style)
    return drawn


def _has_loss(row: dict[str, str]) -> bool:
    return bool(row.get("loss"))


def ledger_lines(amounts: Amounts, figures: Figures, width: int, has_colours: bool) -> list[Text]:
    """Where the time went: a bar so wide, what its parts are, and how good that is."""
    bar, legend = Text(no_wrap=True), Text(overflow="fold")
    for account, cells in zip(Account, cells_of(amounts, width), strict=True):
        style = STYLES[account]
        bar.append((" " if has_colours else style.letter) * cells, f"on {style.terminal}" if has_colours else "")
    total = sum(amounts)
    for account in sorted(Account, key=lambda account: -amounts[account]):
        if not amounts[account]:
            continue
        style = STYLES[account]
        legend.append("  " if len(legend) else "").append("■ " if has_colours else f"{style.letter} ", style.terminal)
        legend.append(f"{account.label} {percent(amounts[account] / total)}")
    quality = Text("was / attainable:", overflow="fold")
    for figure in figures:
        if figure.is_share:
            quality.append(f"  {figure.name} ").append(percent(figure.value).removesuffix(" %"), "bold")
            quality.append(f" / {percent(figure.attainable)}")
    return [bar, legend, quality] if total else [Text("no worker has reported yet where its time goes", style="dim")]


def cells_of(amounts: Sequence[int], width: int) -> list[int]:
    """So many cells for each amount that they are `width` together, and none that is not 0 is left without one.

    >>> cells_of([900, 99, 1, 0], 10)
    [8, 1, 1, 0]
    """
    total, wanted = sum(amounts), [index for index, amount in enumerate(amounts) if amount]
    if not total or len(wanted) > width:
        return [0] * len(amounts)
    cells = [max(1, width * amount // total) if amount else 0 for amount in amounts]
    while sum(cells) != width:
        step = 1 if sum(cells) < width else -1
        # where the next cell is missed most, or the last one least
        index = max(wanted, key=lambda index: step * (width * amounts[index] / total - cells[index]))
        if step < 0 and cells[index] == 1:
            index = max(wanted, key=cells.__getitem__)
        cells[index] += step
    return cells


def _one_line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _lines(console: Console, texts: Sequence[Text], width: int) -> int:
    """How many lines these take, and the table's head."""
    options = console.options.update(width=width)
    return 1 + sum(len(console.render_lines(text, options, pad=False)) for text in texts)


def _fitted(rows: list[dict[str, str]], events: list[Text], lines: int) -> tuple[list[dict[str, str]], list[Text]]:
    """As many rows and events as there is place for: some events, then the workers, then more events."""
    for_events = min(len(events), _LEAST_EVENTS) + 1 if events and lines >= _LEAST_FOR_EVENTS else 0
    most_rows = max(1, lines - for_events)
    if len(rows) > most_rows:
        left_out = len(rows) - most_rows + 1
        rows = [*rows[: most_rows - 1], {"rank": "..", "host": f"and {left_out} more"}]
    kept = max(0, min(len(events), lines - len(rows) - 1))  # one line is between
    return rows, events[len(events) - kept :]
