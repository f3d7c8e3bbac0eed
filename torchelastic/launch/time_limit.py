"""`torchelastic run --time-limit S`: a deadline for the workers of this host, besides those that they find."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

from torchelastic.launch.options import UsageError, add
from torchelastic.lifetime.sources.detection import TERMINATION_TIME_VARIABLE


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    """Add the option to `run`."""
    text = "this host ends so long after the launcher has begun: scripts that look for deadlines save and stop before"
    add(parser, "time-limit", type=float, metavar="S", help=text)


def limited(environment: Mapping[str, str], limit_s: float | None, now_s: float) -> dict[str, str]:
    """What to tell the workers: the end of their time; of two ends the nearer one. Empty: nothing but what they have.

    Args:
        environment: variables that they have anyway.
        limit_s: seconds from now; None: there is no limit.
        now_s: Unix seconds.

    Raises:
        UsageError: the limit is no time, or the variable holds no number.

    >>> limited({}, 60.0, now_s=1000.0)
    {'TORCHELASTIC_TERMINATION_TIME': '1060.000'}
    >>> limited({"TORCHELASTIC_TERMINATION_TIME": "1010"}, 60.0, now_s=1000.0)
    {}
    """
    if limit_s is None:
        return {}
    if not 0.0 < limit_s < math.inf:
        raise UsageError(f"--time-limit is {limit_s:g}: give seconds, above 0")
    end_s = now_s + limit_s
    text = environment.get(TERMINATION_TIME_VARIABLE, "").strip()
    try:
        known_s = float(text or "nan")
    except ValueError:
        raise UsageError(f"{TERMINATION_TIME_VARIABLE} is {text!r}: give Unix seconds, or unset it") from None
    is_known_nearer = now_s < known_s < end_s  # one in the past is left from an earlier life
    return {} if is_known_nearer else {TERMINATION_TIME_VARIABLE: f"{end_s:.3f}"}
