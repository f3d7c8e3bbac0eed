"""What every benchmark prints beside its figures: where it was run, and how busy that was."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import psutil


def describe() -> dict[str, Any]:
    """The machine and its load at this moment."""
    return {
        "cores": os.cpu_count(),
        "load_1min": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile: the smallest of the values that at least `percent` % of them do not exceed.

    Nothing is interpolated, so it is always a value that was measured. Of fewer than 100 values p99 is the maximum.

    Args:
        values: in any order; at least one.
        percent: 1 to 100.

    >>> percentile([15, 20, 35, 40, 50], 30), percentile([15, 20, 35, 40, 50], 95)
    (20, 50)
    """
    return sorted(values)[max(1, -(-percent * len(values) // 100)) - 1]


def summary(values: Sequence[float], digits: int = 2, censored: int = 0) -> dict[str, Any]:
    """Median, nearest-rank percentiles (see `percentile`), extremes and number of some values.

    Args:
        values: at least one.
        digits: after the decimal point.
        censored: how many measurements ended without a value, because what was measured had not happened by then. They
            count as larger than every value: a percentile or maximum that falls on one of them is None. The median,
            the minimum and `runs` are of the values alone.
    """
    all_values = [*values, *[math.inf] * censored]
    tail = {f"p{percent}": percentile(all_values, percent) for percent in (50, 95, 99)} | {"max": max(all_values)}
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        **{name: None if value == math.inf else round(value, digits) for name, value in tail.items()},
        "runs": len(values),
        **({"censored": censored} if censored else {}),
    }


def print_result(name: str, **figures: Any) -> None:
    """One JSON line."""
    print(json.dumps({"benchmark": name, **figures, "environment": describe()}))
