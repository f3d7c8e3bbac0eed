"""A report as plain values for JSON: the same content as the page. Times are nanoseconds; names end in their unit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torchelastic.observe.ledger.accounts import Amounts, by_label
from torchelastic.observe.report.comparing import Comparison
from torchelastic.observe.report.losses import LossCurve
from torchelastic.observe.report.model import AttemptRow, Incident, Report
from torchelastic.observe.status.status_format import event_to_plain, figure_to_plain, with_labels

#: Of this document; it grows by names, and is counted up when one changes its meaning.
VERSION = 1


def to_plain(report: Report, comparison: Comparison | None = None) -> dict[str, Any]:
    """The whole report, for `json.dumps(.., allow_nan=False)`.

    Args:
        report: the run.
        comparison: with another one.
    """
    plain: dict[str, Any] = {
        "version": VERSION,
        "run_id": report.run_id,
        "began_ns": report.began_ns,
        "wall_ns": report.until_ns,
        "is_over": report.is_over,
        "lacks": list(report.lacks),
        "sums_are_exact": not report.why_wrong(),
        "figures": {figure.name: figure_to_plain(figure) for figure in report.figures},
        "seen": with_labels(report.seen),
        "hosts": [asdict(host) for host in report.hosts],
        "workers": [_life(row) for row in report.lives],
        "earlier": [{"host": host, **with_labels(sums)} for host, sums in report.earlier.items()],
        "failures": [_incident(one) for one in report.incidents],
        "saves": [asdict(row) for row in report.saves],
        "marks": [asdict(mark) for mark in report.marks],
        "event_counts": dict(report.event_counts),
        "events": [event_to_plain(line) for line in report.events],
        "losses": None if report.losses is None else _losses(report.losses),
    }
    if comparison is not None:
        rows = [{**asdict(row), "is_better": row.is_better} for row in comparison.rows]
        plain["comparison"] = {"other": to_plain(comparison.other), "rows": rows}
    return plain


def _life(row: AttemptRow) -> dict[str, Any]:
    cells = [[cell.from_ns, cell.to_ns, _short(cell.amounts)] for cell in row.cells]
    return {**with_labels(row, "cells"), "wall_ns": row.wall_ns, "cells": cells}


def _short(amounts: Amounts) -> dict[str, int]:
    return {label: ns for label, ns in by_label(amounts).items() if ns}


def _incident(one: Incident) -> dict[str, Any]:
    return {**asdict(one), "phases_ns": dict(one.phases_ns), "down_ns": one.down_ns}


def _losses(curve: LossCurve) -> dict[str, Any]:
    points = [[point.step, point.mean, point.low, point.high] for point in curve.points]
    return {"steps": curve.steps, "left_out": curve.left_out, "points": points}
