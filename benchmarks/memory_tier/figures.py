"""What is measured, and what the figures say. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: How many times the bytes of a rank a contender needs while it works: two checkpoints, one that is staged, and room.
STATES_PER_RANK = 4
#: With a replica: two of them beside that.
STATES_PER_REPLICATED_RANK = 6

Row = dict[str, float]


@dataclass(frozen=True)
class Part:
    """One measurement.

    Attributes:
        contenders: who takes part.
        questions: what each is asked in a round, with details; the last answer is the figure.
        targets: the most that a figure of ours may be, by its name.
        ranks: how many, each on a host of its own.
        cpu_of: a contender whose CPU time ours is compared with.
    """

    contenders: tuple[str, ...]
    questions: tuple[tuple[str, dict[str, Any]], ...]
    targets: Mapping[str, float] = field(default_factory=dict)
    ranks: int = 1
    cpu_of: str | None = None

    def row(self, answers: Sequence[Sequence[Mapping[str, float]]]) -> Row:
        """The figures of a round: times of the slowest rank, as ratios to its floor."""
        last = max(answers[-1], key=lambda answer: answer["ms"])
        row = {name: value for name, value in last.items() if name.startswith("memcpy")}
        for name in last.keys() - row.keys():
            row[f"{name.removesuffix('ms')}x"] = last[name] / last["memcpy_ms"]
        if "memcpy_alone_ms" in last:
            row["x_alone"] = last["ms"] / last["memcpy_alone_ms"]
        return dict(sorted(row.items()))


ALL = ("ours", "dcp", "flashpoint_pool", "flashpoint")
_SAVE: tuple[str, dict[str, Any]] = ("save", {})

PARTS = {
    "save": Part(ALL, (_SAVE,), {"x": 1.6}),
    "async_thread": Part(
        ALL, (("background", {"checkpointer": "thread"}),), {"x": 1.15, "cpu_ratio": 0.7}, cpu_of="flashpoint_pool"
    ),
    "async_process": Part(
        ALL[:3], (("background", {"checkpointer": "process"}),), {"x": 1.15, "cpu_ratio": 0.7}, cpu_of="flashpoint_pool"
    ),
    "load": Part(ALL, (_SAVE, ("load", {})), {"x": 1.6}),
    # the floor is a memcpy of the tensors, of which nothing is loaded: only `ours_over_dcp` says something
    "load_values": Part(("ours", "dcp"), (("load_values", {"count": 2000}),)),
    "find_and_load": Part(("ours",), (_SAVE, ("find_and_load", {}))),
    "replicated": Part(("ours", "flashpoint_pool", "flashpoint"), (_SAVE,), {"x": 5.0}, ranks=2),
}


def batches(names: Sequence[str], size_bytes: int, ranks: int, available_bytes: int) -> list[list[str]]:
    """Who is measured in turn: all, or, where memory does not suffice for that, one after the other."""
    shared = size_bytes * (ranks + 1)
    each = size_bytes * ranks * (STATES_PER_RANK if ranks == 1 else STATES_PER_REPLICATED_RANK)
    if shared + each * len(names) <= available_bytes:
        return [list(names)]
    return [[name] for name in names]


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians of the rounds, and the best of each figure."""
    medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    best = {
        f"best_{name}": round(min(row[name] for row in rows), 3) for name in rows[0] if not name.startswith("memcpy")
    }
    return medians | best | {"runs": len(rows)}


def verdicts(part: Part, rows: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """How ours does beside its targets and, round by round, beside the others."""
    ours = rows.get("ours")
    if not ours:
        return {"targets": dict(part.targets)}
    figures = {name: statistics.median(row[name] for row in ours) for name in ours[0]}
    found: dict[str, Any] = {}
    for name, theirs in rows.items():
        if name != "ours":
            ratios = [mine["x"] / other["x"] for mine, other in zip(ours, theirs, strict=True)]
            found[f"ours_over_{name}"] = round(statistics.median(ratios), 3)
    if part.cpu_of is not None and part.cpu_of in rows:
        cpu = [mine["cpu_x"] / other["cpu_x"] for mine, other in zip(ours, rows[part.cpu_of], strict=True)]
        figures["cpu_ratio"] = statistics.median(cpu)
        found["cpu_ratio"] = round(figures["cpu_ratio"], 3)
    met = {name: figures[name] <= most for name, most in part.targets.items() if name in figures}
    return found | {"targets": dict(part.targets), "met": met}
