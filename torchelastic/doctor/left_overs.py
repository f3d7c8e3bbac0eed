"""What dead jobs have left in this host's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchelastic.checkpoint.memory.job import DEFAULT_ROOT, ROOT_VARIABLE
from torchelastic.checkpoint.memory.owner import find_dead
from torchelastic.doctor.findings import Finding, Level
from torchelastic.text import bytes_text, shortlist

NAME = "left-overs"
#: As a part of the file system: from here on they are in the way of the next job.
MUCH = 0.1


@dataclass(frozen=True)
class LeftOverFacts:
    """What there is.

    Attributes:
        root: where was looked.
        jobs: run id (None: it had none) and size in bytes of each dead job.
        size_bytes: of the file system; None: it has no limit, or is not there.
    """

    root: str
    jobs: tuple[tuple[str | None, int], ...]
    size_bytes: int | None


def judge_left_overs(facts: LeftOverFacts) -> Finding:
    """Whether dead jobs hold memory that the next one needs. Pure."""
    if not facts.jobs:
        return Finding(NAME, Level.OK, f"no dead job has left anything in {facts.root}")
    total_bytes = sum(size_bytes for _, size_bytes in facts.jobs)
    is_much = facts.size_bytes is not None and total_bytes > MUCH * facts.size_bytes
    run_ids = list(dict.fromkeys(run_id or "(no run id)" for run_id, _ in facts.jobs))
    what = f"{len(facts.jobs)} dead job(s) hold {bytes_text(total_bytes)} in {facts.root}"
    because = f"of {shortlist(run_ids, 5)}; a job that comes back (requeued, say) wants its memory"
    remedy = f"torchelastic checkpoint prune --dead {facts.root}"
    return Finding(NAME, Level.WARNING if is_much else Level.NOTE, what, because, remedy)


def gather_left_overs(root: Path | None = None) -> LeftOverFacts:
    """Look in the memory root of this host, as `torchelastic checkpoint prune --dead` does; claims nothing."""
    place = root or Path(os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT)
    if not place.is_dir():
        return LeftOverFacts(str(place), (), None)
    status = os.statvfs(place)
    jobs = tuple((dead.run_id, dead.size_bytes) for dead in find_dead(place))
    return LeftOverFacts(str(place), jobs, status.f_blocks * status.f_frsize or None)


def check() -> Sequence[Finding]:
    """Look at this host's memory."""
    return [judge_left_overs(gather_left_overs())]
