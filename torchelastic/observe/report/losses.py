"""Reads a loss curve from a file that training has written, and makes it short enough to be drawn."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: So many points are drawn.
MOST_POINTS = 600
#: Above it is nothing that could be drawn.
_LARGEST = 1e100
_STEP_NAMES = ("step", "global_step", "iteration")
_LOSS_NAMES = ("loss", "train_loss", "train/loss")


class LossFileError(ValueError):
    """There are no losses in the file; the message says what it should look like."""


@dataclass(frozen=True)
class LossPoint:
    """Some steps.

    Attributes:
        step: the last of them.
        mean, low, high: of their losses.
    """

    step: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class LossCurve:
    """A loss by step.

    Attributes:
        points: by step.
        steps: how many had one.
        left_out: values that cannot be drawn (NaN, infinity).
    """

    points: tuple[LossPoint, ...]
    steps: int
    left_out: int = 0


def read_losses(path: Path) -> LossCurve:
    """The loss by step; where several ranks report one for the same step, their mean.

    Args:
        path: a CSV file with a head line, JSON lines, or a folder of them (as the imagenet example's events). The step
            is called `step`, `global_step` or `iteration`, the loss `loss`, `train_loss` or `train/loss`; lines and
            fields without them are left out.

    Raises:
        LossFileError: there is no loss in it.
        OSError: it cannot be read.
    """
    files = sorted(one for one in path.iterdir() if one.suffix in (".csv", ".jsonl")) if path.is_dir() else [path]
    try:
        pairs = [pair for file in files for pair in _pairs(file.read_text(encoding="utf-8", errors="replace"))]
    except csv.Error as error:
        raise LossFileError(f"{path} is no CSV file: {error}") from error
    if not pairs:
        raise LossFileError(
            f"there is no loss in {path}: give a CSV file with columns step and loss, or JSON lines with these names"
        )
    return curve_of(pairs)


def curve_of(pairs: Iterable[tuple[int, float]]) -> LossCurve:
    """The curve of (step, loss) pairs in any order.

    >>> curve_of([(1, 0.5), (0, 2.0), (0, 4.0)]).points[0]
    LossPoint(step=0, mean=3.0, low=3.0, high=3.0)
    """
    by_step: dict[int, list[float]] = {}
    left_out = 0
    for step, loss in pairs:
        if abs(loss) < _LARGEST:  # not for NaN either
            by_step.setdefault(step, []).append(loss)
        else:
            left_out += 1
    means = [(step, math.fsum(by_step[step]) / len(by_step[step])) for step in sorted(by_step)]
    width = max(1, math.ceil(len(means) / MOST_POINTS))
    parts = [means[begin : begin + width] for begin in range(0, len(means), width)]
    points = []
    for part in parts:
        values = [value for _, value in part]
        points.append(LossPoint(part[-1][0], math.fsum(values) / len(values), min(values), max(values)))
    return LossCurve(tuple(points), len(means), left_out)


def _pairs(text: str) -> Iterator[tuple[int, float]]:
    rows = _json_rows(text) if text.lstrip().startswith("{") else csv.DictReader(io.StringIO(text))
    for row in rows:
        step, loss = _number(row, _STEP_NAMES), _number(row, _LOSS_NAMES)
        if step is not None and loss is not None and step >= 0 and step.is_integer():
            yield int(step), loss


def _json_rows(text: str) -> Iterator[Mapping[str, Any]]:
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn, as the last line of a killed worker may be
        if isinstance(row, dict):
            yield row


def _number(row: Mapping[str, Any], names: Iterable[str]) -> float | None:
    for name in names:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            continue
        try:
            return float(value)
        except (ValueError, OverflowError):
            continue
    return None
