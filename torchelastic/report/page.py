"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from itertools import pairwise
from xml.etree.ElementTree import Element

from torchelastic.ledger.accounts import Account
from torchelastic.ledger.book import share
from torchelastic.ledger.figures import Figure
from torchelastic.report import tables
from torchelastic.report.charts import account_bar, loss_chart, share_bar
from torchelastic.report.comparing import Comparison
from torchelastic.report.lacks import clock
from torchelastic.report.markup import Child, node, write
from torchelastic.report.model import Report
from torchelastic.report.style import SCRIPT, style
from torchelastic.report.timeline import about_rows, legend_of_accounts, legend_of_marks, timeline
from torchelastic.report.words import counted, percent
from torchelastic.text import duration
from torchelastic.version import __version__

#: From so many failures on they are also listed by cause.
_MANY_FAILURES = 12
_NAMES = {
    "goodput": "Goodput",
    "ettr": "ETTR",
    "step_efficiency": "Step efficiency",
    "participation": "Participation",
    "whole_job_s": "Whole job",
}
_SAYS = {
    "goodput": "of all worker time went into steps that lasted",
    "ettr": "effective training time ratio: productive time, had all {workers} been there all the time",
    "step_efficiency": "of the attempted steps were committed",
    "participation": "of the configured workers were in a group, on average",
    "whole_job_s": "from the first start to the last end",
}


def html_page(report: Report, comparison: Comparison | None = None) -> str:
    """The whole file as text, to be written as UTF-8.

    Args:
        report: the run.
        comparison: with another one; None: there is none.
    """
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = node(
        "head",
        node("meta", charset="utf-8"),
        _meta({"http-equiv": "Content-Security-Policy", "content": policy}),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", f"{report.run_id}: report"),
        _raw("style", style()),
    )
    body = node(
        "body", _header(report), _lacks(report), *_sections(report, comparison), _footer(report), _raw("script", SCRIPT)
    )
    return "<!doctype html>\n" + write(node("html", head, body, lang="en")) + "\n"


def _sections(report: Report, comparison: Comparison | None) -> Iterator[Element]:
    yield _section("How well it went", node("div", *(_card(one, report) for one in report.figures), class_="cards"))
    amounts = report.seen.amounts
    yield _section("Where the time went", account_bar(amounts), legend_of_accounts(amounts))
    marks = node("ul", *legend_of_marks(report.marks), class_="legend")
    yield _section("Time line", node("p", about_rows(report), class_="faint small"), timeline(report), marks)
    yield _failures(report)
    if report.losses is not None and report.losses.points:
        yield _losses(report)
    yield _saves(report)
    yield _ledger(report)
    if comparison is not None:
        yield _section("Compared with another run", tables.comparison_table(report, comparison))
    yield _events(report)


# --- the top ----------------------------------------------------------------------------------------------------------


def _header(report: Report) -> Element:
    hosts = len({part.host for part in report.hosts})
    places = len({life.place for life in report.lives})
    facts = " · ".join((
        f"{clock(report.began_ns)} to {clock(report.began_ns + report.until_ns)}",
        duration(report.until_ns),
        counted(hosts, "host"),
        counted(places, "worker"),
        counted(report.steps, "step") if report.steps >= 0 else "steps not known",
        counted(report.seen.failures, "failure"),
    ))  # fmt: skip
    badge = ("ended", "good") if report.is_over else ("not ended, as far as the journals tell", "bad")
    title = node("h1", report.run_id, node("span", badge[0], class_=f"badge {badge[1]}"))
    return node("header", title, node("p", facts, class_="faint"), node("p", *_verdict(report), class_="verdict"))


def _verdict(report: Report) -> list[Child]:
    goodput, amounts = report.figures.goodput, report.seen.amounts
    rest = [account for account in Account if account is not Account.PRODUCTIVE]
    worst = max(rest, key=lambda account: amounts[account])
    found: list[Child] = [
        node("b", percent(goodput.value)),
        f" of all worker time went into steps that lasted; with the failures and costs that were seen, "
        f"{percent(goodput.attainable)} could have. ",
    ]
    if amounts[worst]:
        found += ["Most of the rest is ", node("b", f"{worst.label} ({percent(share(amounts, worst))})"), ". "]
    downs = [one.down_ns for one in report.incidents if one.down_ns]
    if downs:
        more = f" on average, {duration(max(downs))} at worst" if len(downs) > 1 else ""
        found.append(f"After a failure the next step was committed {duration(sum(downs) // len(downs))} later{more}.")
    return found


def _lacks(report: Report) -> Element | None:
    told = list(report.lacks)
    wrong = report.why_wrong()
    if wrong:
        told.append(f"The accounts of {wrong} do not sum to its wall time, which should never be.")
    if not told:
        return None
    items = node("ul", *(node("li", sentence) for sentence in told))
    return node("div", node("b", "What this report lacks"), items, class_="lacks")


def _card(figure: Figure, report: Report) -> Element:
    is_time = figure.name == "whole_job_s"
    value = duration(figure.value * 1e9) if is_time else percent(figure.value)
    bound = duration(figure.attainable * 1e9) if is_time else percent(figure.attainable)
    workers = counted(round(report.seen.wanted_workers), "worker")
    shares = (figure.of_attainable, 1.0) if is_time else (figure.value, figure.attainable)
    return node(
        "div",
        node("div", _NAMES[figure.name], class_="name"),
        node("div", value, class_="value"),
        share_bar(*shares),
        node("div", f"attainable: {bound}", class_="small"),
        node("div", _SAYS[figure.name].format(workers=workers), class_="says"),
        node("details", node("summary", "why this bound"), node("p", figure.because)),
        class_="card",
    )


# --- the rest ---------------------------------------------------------------------------------------------------------


def _failures(report: Report) -> Element:
    incidents = report.incidents
    if not incidents:
        return _section("Failures", node("p", "No group broke, and no worker was lost."))
    parts: list[Child] = [tables.legend_of_phases()]
    if len(incidents) > _MANY_FAILURES:
        parts += [tables.causes_table(incidents), node("p")]
    if len(incidents) > tables.MOST_FAILURES:
        parts.append(node("p", f"The {tables.MOST_FAILURES} of {len(incidents)} that cost most:", class_="faint"))
    parts.append(tables.failure_table(incidents))
    parts.append(node("p", "Phases are those of the worker that took longest.", class_="faint small"))
    return _section("Failures", *parts, class_="long")


def _losses(report: Report) -> Element:
    curve = report.losses
    assert curve is not None, "checked by the caller"
    left_out = f"; {counted(curve.left_out, 'value')} left out that are no numbers" if curve.left_out else ""
    about = f"{counted(curve.steps, 'step')}{left_out}. Numbered lines are failures, at the newest committed step."
    return _section("Loss", loss_chart(curve, report.incidents), node("p", about, class_="faint small"))


def _saves(report: Report) -> Element:
    saves = report.saves
    if not saves:
        return _section("Checkpoints", node("p", "No save is in the journals."))
    mean_ns = sum(one.mean_ns for one in saves) // len(saves)
    longest = max(saves, key=lambda one: one.longest_ns)
    gaps = [later.at_ns - one.at_ns for one, later in pairwise(saves)]
    every = f" one every {duration(sum(gaps) / len(gaps))};" if gaps else ""
    about = (
        f"{counted(len(saves), 'checkpoint')},{every} training stood still for {duration(mean_ns)} on average and "
        f"{duration(longest.longest_ns)} at most (after step {longest.step})."
    )
    newest = "all of them" if len(saves) <= tables.MOST_SAVES else f"the newest {tables.MOST_SAVES}"
    listed = node("details", node("summary", newest), tables.save_table(saves))
    return _section("Checkpoints", node("p", about), listed, class_="long")


def _ledger(report: Report) -> Element:
    wrong = report.why_wrong()
    verdict = (
        node("p", f"Every row sums to the wall time of its worker exactly, to the nanosecond: "
             f"{counted(len(report.lives), 'life', 'lives')} checked.", class_="good")
        if not wrong else node("p", f"{wrong} does not sum to its wall time.", class_="bad")
    )  # fmt: skip
    about = "A worker's name ends in the number of its life in that place. Point at a number for its nanoseconds."
    table = tables.ledger_table(report)
    table.set("class", "scroll ledger")
    return _section("Ledger", verdict, node("p", about, class_="faint small"), table, class_="long")


def _events(report: Report) -> Element:
    counts = ", ".join(f"{count} {kind}" for kind, count in report.event_counts.items())
    lines = report.events
    newest = "all lines" if len(lines) <= tables.MOST_LINES else f"the newest {tables.MOST_LINES} lines"
    listed = node("details", node("summary", newest), tables.event_table(lines, report.began_ns))
    return _section("Events", node("p", f"In the journals: {counts}." if counts else "None."), listed, class_="long")


def _footer(report: Report) -> Element:
    journals = ", ".join(f"{part.journal} ({part.host})" for part in report.hosts)
    return node(
        "footer",
        node("p", f"From {journals}. Clocks of hosts are tied by their time of the day. Written by torchelastic "
             f"{__version__}; its docs/ledger.md explains the figures and the page."),
    )  # fmt: skip


def _section(title: str, *parts: Child, class_: str = "") -> Element:
    return node("section", node("h2", title), *parts, class_=class_)


def _raw(tag: str, text: str) -> Element:
    """A style sheet or script of ours; these are not escaped."""
    made = Element(tag)
    made.text = text
    return made


def _meta(attributes: dict[str, str]) -> Element:
    return Element("meta", attributes)
