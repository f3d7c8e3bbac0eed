"""What every benchmark prints beside its figures: where it was run, and how busy that was."""

from __future__ import annotations

import json
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


def summary(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """Median, extremes and number of some values."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "runs": len(values),
    }


def print_result(name: str, **figures: Any) -> None:
    """One JSON line."""
    print(json.dumps({"benchmark": name, **figures, "environment": describe()}))
