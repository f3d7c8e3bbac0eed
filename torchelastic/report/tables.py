"""The tables of the page."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from torchelastic.ledger.accounts import Account, Amounts
from torchelastic.report.charts import phase_bar
from torchelastic.report.comparing import Compared, Comparison
from torchelastic.report.markup import Child, node
from torchelastic.report.model import PHASES, Incident, Report, SaveRow
from torchelastic.report.words import counted, exact, percent
from torchelastic.status.run_status import EventLine
from torchelastic.text import duration

#: So many failures are listed; of more, those that cost most.
MOST_FAILURES = 60
#: So many checkpoints and lines of events are listed: the newest.
MOST_SAVES, MOST_LINES = 40, 300


def ledger_table(report: Report) -> Element:
    """Where every second of every worker went; each row with its check."""
    used = [account for account in Account if report.seen.amounts[account]]
    heads = ("worker", "steps", *(account.label for account in used), "sum = wall time, s")
    rows = [
        _ledger_row(life.name, f"{life.committed}", life.amounts, life.wall_ns, used, life.end or "no end known")
        for life in report.lives
    ]
    rows += [
        _ledger_row(f"{row.host}: {lives}", f"{row.committed}", row.amounts, row.wall_ns, used, "added up")
        for row in report.earlier
        for lives in (counted(row.lives, "earlier life", "earlier lives"),)
    ]
    seen = report.seen
    total = _ledger_row("all", f"{seen.committed}", seen.amounts, seen.worker_ns, used, "")
    total.set("class", "sum")
    return _table(heads, [*rows, total])


def _ledger_row(name: str, steps: str, amounts: Amounts, wall_ns: int, used: Sequence[Account], about: str) -> Element:
    is_exact = sum(amounts) == wall_ns
    cells = [
        node("td", duration(amounts[account]), title=f"{exact(amounts[account])} s")
        if amounts[account] else node("td", node("span", "0", class_="none"))
        for account in used
    ]  # fmt: skip
    return node(
        "tr",
        node("td", name, title=about),
        node("td", steps),
        *cells,
        node(
            "td",
            f"{exact(wall_ns)} ✓" if is_exact else f"{exact(sum(amounts))} of {exact(wall_ns)} ✗",
            class_="good" if is_exact else "bad",
            title="checked: the accounts sum to the wall time",
        ),
    )


def failure_table(incidents: Sequence[Incident]) -> Element:
    """One row per failure."""
    longest_ns = max((one.down_ns for one in incidents), default=0)
    listed = incidents
    if len(incidents) > MOST_FAILURES:
        costly = sorted(incidents, key=lambda one: -(one.down_ns + one.replayed_ns))[:MOST_FAILURES]
        listed = sorted(costly, key=lambda one: one.number)
    heads = ("", "after", "step", "who and why", "to the next committed step", "", "undone", "workers after")
    return _table(heads, [_failure_row(one, longest_ns) for one in listed], left=(3, 4))


def _failure_row(one: Incident, longest_ns: int) -> Element:
    why: list[Child] = [node("b", one.who) if one.who else None]
    told = list(one.causes)
    if told:
        why.append(node("div", told[0], class_="small"))
    if len(told) > 1:
        others = [node("div", cause, class_="small faint") for cause in told[1:]]
        why.append(node("details", node("summary", "what workers noticed", class_="small faint"), *others))
    if not one.who and not told:
        why.append("nothing is known of the cause")
    went_on = one.outlived_by and not one.noticed_by
    down: tuple[Child, ...] = (
        "the others trained on" if went_on else "nobody trained again after it, as far as is known",
    )
    if one.phases_ns:
        texts = ", ".join(f"{name} {duration(ns)}" for name, ns in one.phases_ns.items() if ns)
        down = (phase_bar(one.phases_ns, longest_ns), node("span", texts, class_="small faint"))
    return node(
        "tr",
        node("td", str(one.number)),
        node("td", duration(one.at_ns)),
        node("td", _known(one.step)),
        node("td", *why, class_="wrap"),
        node("td", *down, class_="phases wrap"),
        node("td", node("b", duration(one.down_ns)) if one.down_ns else "-"),
        node("td", *_undone(one)),
        node("td", str(one.world_size) if one.world_size else "-"),
    )


def _undone(one: Incident) -> list[Child]:
    attempts = f"a step of {counted(one.noticed_by, 'worker')}" if one.noticed_by else "no step"
    parts: list[Child] = [attempts, node("div", f"{duration(one.replayed_ns)} of work", class_="small faint")]
    if one.steps_back:
        parts.append(node("div", f"back by {counted(one.steps_back, 'step')}", class_="bad"))
    if one.restored_from:
        parts.append(node("div", f"state from a {one.restored_from}", class_="small faint"))
    return parts


def causes_table(incidents: Sequence[Incident]) -> Element:
    """Failures by cause, for runs with many of them."""
    groups: dict[str, list[Incident]] = {}
    for one in incidents:
        how = one.lost[0].how if one.lost else one.causes[0] if one.causes else "not known"
        groups.setdefault(how, []).append(one)
    rows = []
    for how, group in sorted(groups.items(), key=lambda item: -len(item[1])):
        downs = sorted(one.down_ns for one in group if one.down_ns)
        mean = duration(sum(downs) // len(downs)) if downs else "-"
        worst = duration(downs[-1]) if downs else "-"
        back = sum(one.steps_back for one in group)
        cells = (str(len(group)), mean, worst, str(back))
        rows.append(node("tr", node("td", how, class_="wrap"), *(node("td", cell) for cell in cells)))
    return _table(("cause", "failures", "mean time to train again", "longest", "steps lost"), rows)


def save_table(saves: Sequence[SaveRow]) -> Element:
    """The newest checkpoints."""
    rows = [
        node("tr", *(node("td", text) for text in (
            str(one.step), duration(one.at_ns), one.tier or "-", str(one.workers), duration(one.mean_ns),
            duration(one.longest_ns),
        )))
        for one in saves[-MOST_SAVES:]
    ]  # fmt: skip
    return _table(("after step", "at", "to", "workers", "mean stall", "longest stall"), rows)


def comparison_table(report: Report, comparison: Comparison) -> Element:
    """Two runs side by side."""
    heads = ("", f"this run: {report.run_id}", f"the other one: {comparison.other.run_id}", "difference", "")
    table = _table(heads, [_compared(row) for row in comparison.rows])
    table.set("class", "scroll whole")
    return table


def _compared(row: Compared) -> Element:
    verdict = {True: ("better", "good"), False: ("worse", "bad"), None: ("", "")}[row.is_better]
    difference = "-"
    if row.this is not None and row.other is not None:
        by = row.this - row.other
        sign = "+" if by > 0 else "-" if by < 0 else ""
        points = f"{100 * abs(by):.1f} points" if row.unit == "share" else _amount(abs(by), row)
        difference = f"{sign}{points}"
    return node(
        "tr",
        node("td", row.name),
        node("td", _amount(row.this, row)),
        node("td", _amount(row.other, row)),
        node("td", difference),
        node("td", verdict[0], class_=verdict[1]),
    )


def _amount(value: float | None, row: Compared) -> str:
    if value is None:
        return "-"
    if row.unit == "share":
        return percent(value)
    return duration(value * 1e9) if row.unit == "s" else f"{value:.2f}".removesuffix(".00")


def event_table(lines: Sequence[EventLine], began_ns: int) -> Element:
    """The newest lines of what has happened."""
    rows = [
        node("tr", *(node("td", text) for text in (duration(max(0.0, line.at_s * 1e9 - began_ns)), line.kind, line.host,
             line.worker.rpartition("/")[2] or "-", _known(line.step))), node("td", line.text, class_="wrap"))
        for line in lines[-MOST_LINES:]
    ]  # fmt: skip
    return _table(("after", "what", "host", "worker", "step", ""), rows, left=(1, 2, 5))


def legend_of_phases() -> Element:
    """The colours of phases."""
    items = [node("li", node("span", class_=f"swatch {name}"), f"{name}: {_PHASES[name]}") for name in PHASES]
    return node("ul", *items, class_="legend")


_PHASES = {
    "detect": "until it was noticed",
    "agree": "undo the step, agree who is left",
    "restart": "new processes, until they are in a group (no member of the old one was left)",
    "re_form": "connect the new group",
    "sync": "bring the state level",
    "step": "the next step, up to its commit",
}


def _known(step: int) -> str:
    return str(step) if step >= 0 else "-"


def _table(heads: Sequence[str], rows: Sequence[Element], left: Sequence[int] = ()) -> Element:
    head = node("tr", *(node("th", text, class_="left" if place in left else "") for place, text in enumerate(heads)))
    for row in rows:
        for place in left:
            row[place].set("class", f"{row[place].get('class', '')} left".strip())
    return node("div", node("table", node("thead", head), node("tbody", *rows)), class_="scroll")
