"""Two jobs of ours: one whose workers are killed one after the other, and one that copies in several ways."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.job.controller import Job, NotReachedError
from benchmarks.recovery.ours import SPARES, Figures, Kills, kill_in_turn
from benchmarks.recovery.progress import Progress
from benchmarks.sharded.copying import LEAD_IN, WAYS
from benchmarks.sharded.figures import Move, blocks_of, copies_document, memory_document, moves_document

MODULE = "benchmarks.sharded.worker"
#: The longest step that is waited for.
STEP_LIMIT_S = 30.0


def measure_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Kill `options.kills` workers, rank 0, 1, ... in turn; see `benchmarks.recovery.ours`."""
    wanted = {"model": options.model, "step_ms": options.step_ms, "every": options.every, "hybrid": options.hybrid}
    spares = min(options.kills, SPARES)
    with (
        Progress(1, options.kills) as progress,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Job(Path(folder), workers=options.workers, spares=spares, module=MODULE, **wanted) as job,
    ):
        progress.mode_begins("sharded")
        try:
            job.start()
            job.wait_full(steps=1)
            done = kill_in_turn(job, options.kills, progress)
        except NotReachedError as error:
            done = Kills(ended_early=error)
        full = [event["ms"] for event in job.read.of("committed", world=options.workers) if event["number"] >= 5]
        return {**_kills_document(done, full), **_moves_of(job, done)}


def _kills_document(done: Kills, full_steps_ms: list[float]) -> dict[str, Any]:
    document = Figures(0, done, full_steps_ms[:400], []).document()
    for name in ("parameters", "all_reduce_ms"):  # of a DDP model
        del document[name]
    return document


def _moves_of(job: Job, done: Kills) -> dict[str, Any]:
    moves, beyond_ms = [], []
    for recovery in done.recoveries:
        where = {"since_s": recovery.kill.killed_s, "round": recovery.survivors[-1]["round"]}
        events = {kind: job.read.of(kind, **where) for kind in ("moved", "floor", "metric")}
        if events["moved"] and recovery.beyond_one_step_ms is not None:
            moves.append(Move.of(events))
            beyond_ms.append(recovery.beyond_one_step_ms)
    return moves_document(moves, beyond_ms)


def measure_copies(options: argparse.Namespace) -> dict[str, Any]:
    """What copies cost in steps that nothing disturbs, and the memory that they hold."""
    wanted = {"model": options.model, "step_ms": options.step_ms, "rounds": options.rounds + 1, "steps": options.steps}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Job(Path(folder), workers=options.workers, module=MODULE, **wanted) as job,
    ):
        job.start()
        steps = (options.rounds + 1) * len(WAYS) * (options.steps + LEAD_IN)
        job.wait_until(
            lambda: len(job.read.of("memory")) >= options.workers,
            "the end of the steps that copy in several ways",
            STEP_LIMIT_S * steps,
        )
        ends = job.read.of("block_ends")
        pid = statistics.mode(event["pid"] for event in ends)
        blocks = blocks_of(
            [event for event in job.read.all() if event["pid"] == pid and event["e"].startswith("block")]
        )
        stopped = job.read.of("metric", name="sharded.copy.duration.ms")
        document = copies_document(blocks, options.steps, stopped, job.read.of("memcpy"))
        return {"copies": document, "memory": memory_document(job.read.of("memory"))}
