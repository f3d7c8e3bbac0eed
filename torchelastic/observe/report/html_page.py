"""The page: one HTML file that needs nothing else. Its text is in `templates/`, with autoescape."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from torchelastic.observe.ledger.accounts import STYLES, Account, Amounts
from torchelastic.observe.ledger.figures import TITLES
from torchelastic.observe.ledger.host_ledger import share
from torchelastic.observe.report.charts import MOST_FLAGS, account_bar, loss_chart, phase_bar, share_bar
from torchelastic.observe.report.comparing import Compared, Comparison, Unit
from torchelastic.observe.report.gaps import clock
from torchelastic.observe.report.model import Incident, Report
from torchelastic.observe.report.svg import write
from torchelastic.observe.report.timeline import MARKS, mark_sign, timeline
from torchelastic.text import counted, duration, escaped, exact, percent
from torchelastic.version import __version__

#: So many failures are listed; of more, those that cost most. From fewer on they are also listed by cause.
_MOST_FAILURES, _MANY_FAILURES = 60, 12
#: So many checkpoints and lines of events are listed: the newest.
_MOST_SAVES, _MOST_LINES = 40, 300
_FIGURES = {
    "goodput": "of all worker time went into steps that lasted",
    "ettr": "effective training time ratio: productive time, had all {workers} been there all the time",
    "step_efficiency": "of the attempted steps were committed",
    "participation": "of the configured workers were in a group, on average",
    "whole_job_s": "from the first start to the last end",
}
_PHASES = {
    "detect": "until it was noticed",
    "agree": "undo the step, agree who is left",
    "restart": "new processes, until they are in a group (no member of the old one was left)",
    "re_form": "connect the new group",
    "sync": "receive the current state",
    "step": "the next step, up to its commit",
}
#: By class. A phase has the colour of an account; a phase of that name (detect, re_form) that of its own.
_COLOURS = {account.label: style for account, style in STYLES.items()} | {
    "agree": STYLES[Account.DATA_WAIT],
    "restart": STYLES[Account.SAVE_STALL],
    "sync": STYLES[Account.START_UP],
    "step": STYLES[Account.PRODUCTIVE],
    "other": STYLES[Account.IDLE],
}
#: Whatever is folded is shown on paper.
_SCRIPT = 'addEventListener("beforeprint",()=>{for(const one of document.querySelectorAll("details"))one.open=true})'
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_DIGEST}'"


def html_page(report: Report, comparison: Comparison | None = None) -> str:
    """The whole file as text, to be written as UTF-8.

    Args:
        report: the run.
        comparison: with another one; None: there is none.
    """
    amounts, incidents = report.seen.amounts, report.incidents
    wrong = report.why_wrong()
    sums = [f"The accounts of {wrong} do not sum to its wall time, which should never be."] if wrong else []
    return _TEMPLATES.get_template("page.html").render(
        report=report,
        comparison=comparison,
        seen=report.seen,
        host_count=len({part.host for part in report.hosts}),
        place_count=len({life.place for life in report.lives}),
        costliest=max((one for one in Account if one is not Account.PRODUCTIVE), key=lambda one: amounts[one]),
        accounts=[
            {"account": one, "label": one.label, "ns": amounts[one], "share": share(amounts, one)}
            for one in Account
            if amounts[one]
        ],
        wrong=wrong,
        gaps=[*report.lacks, *sums],
        marked={mark.kind for mark in report.marks},
        downs_ns=report.downs_ns,
        longest_ns=max(report.downs_ns, default=0),
        by_cause=_by_cause(incidents) if len(incidents) > _MANY_FAILURES else [],
        costliest_incidents=_costliest(incidents),
        ledger=list(_ledger(report)),
    )


@dataclass(frozen=True)
class _Cause:
    """Failures of one cause; times to the next committed step are 0 where none is known."""

    how: str
    failures: int
    mean_ns: int
    longest_ns: int
    steps_back: int


def _by_cause(incidents: Sequence[Incident]) -> list[_Cause]:
    """For runs with many failures: the most frequent cause first."""
    groups: dict[str, list[Incident]] = {}
    for one in incidents:
        how = one.lost[0].how if one.lost else one.causes[0] if one.causes else "not known"
        groups.setdefault(how, []).append(one)
    rows = []
    for how, group in groups.items():
        downs = [one.down_ns for one in group if one.down_ns]
        mean_ns = sum(downs) // len(downs) if downs else 0
        rows.append(_Cause(how, len(group), mean_ns, max(downs, default=0), sum(one.steps_back for one in group)))
    return sorted(rows, key=lambda row: -row.failures)


def _costliest(incidents: Sequence[Incident]) -> list[Incident]:
    costly = sorted(incidents, key=lambda one: -(one.down_ns + one.replayed_ns))[:_MOST_FAILURES]
    return sorted(costly, key=lambda one: one.number)


@dataclass(frozen=True)
class _LedgerRow:
    """Where the time of a worker, of several or of all went."""

    name: str
    about: str
    committed: int
    amounts: Amounts
    wall_ns: int

    @property
    def sum_ns(self) -> int:
        return sum(self.amounts)


def _ledger(report: Report) -> Iterator[_LedgerRow]:
    for life in report.lives:
        yield _LedgerRow(life.name, life.end or "no end known", life.committed, life.amounts, life.wall_ns)
    for host, sums in report.earlier.items():
        name = f"{host}: {counted(sums.lives, 'earlier attempt', 'earlier attempts')}"
        yield _LedgerRow(name, "added up", sums.committed, sums.amounts, sums.wall_ns)
    yield _LedgerRow("all", "", report.seen.committed, report.seen.amounts, report.seen.worker_ns)


def _duration_of_s(value_s: float) -> str:
    return duration(value_s * 1e9)


def _amount(value: float | None, unit: Unit) -> str:
    """A number of a comparison."""
    if value is None:
        return "-"
    if unit == "share":
        return percent(value)
    return _duration_of_s(value) if unit == "s" else f"{value:.2f}".removesuffix(".00")


def _difference(row: Compared) -> str:
    if row.this is None or row.other is None:
        return "-"
    by = row.this - row.other
    sign = "+" if by > 0 else "-" if by < 0 else ""
    return sign + (f"{100 * abs(by):.1f} points" if row.unit == "share" else _amount(abs(by), row.unit))


# --- templates --------------------------------------------------------------------------------------------------------


def _shown(value: object) -> object:
    """A foreign text must not steer whoever reads it: control characters are written as escapes. Jinja escapes HTML."""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _drawn(draw: Callable[..., Element]) -> Callable[..., Markup]:
    """A drawing for a template: its elements are escaped already."""
    return lambda *values: Markup(write(draw(*values)))  # noqa: S704 - ElementTree escapes


_TEMPLATES = Environment(
    loader=PackageLoader("torchelastic.observe.report"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
    finalize=_shown,
)
_TEMPLATES.filters |= {"clock": clock, "counted": counted, "duration": duration, "exact": exact, "percent": percent}
_TEMPLATES.globals |= {
    **{draw.__name__: _drawn(draw) for draw in (account_bar, share_bar, phase_bar, loss_chart, timeline, mark_sign)},
    **{"amount": _amount, "difference": _difference, "share": share},
    **{"duration_of_s": _duration_of_s, "percent": percent},
    **{"figures": _FIGURES, "titles": TITLES, "phases": _PHASES, "marks": MARKS},
    **{"colours": _COLOURS, "version": __version__},
    **{"policy": Markup(_POLICY), "script": Markup(_SCRIPT)},  # noqa: S704 - constants
    **{"most_flags": MOST_FLAGS, "most_saves": _MOST_SAVES, "most_lines": _MOST_LINES},
}
