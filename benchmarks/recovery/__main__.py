"""What a killed worker costs: from kill -9 of one of four to the next committed step of all survivors, per phase.

    python -m benchmarks.recovery [--model 1M] [--kills 20] [--load 0] [--salvage discard,drop,recompute]
        [--timeline FILE.svg]
    python -m benchmarks.recovery --peers torchrun,torchft --peers-python FOLDER/bin/python

A DDP model on gloo under one agent and a real etcd; each step sleeps besides computing, as one does that waits for an
accelerator. In each run one worker, rank 0 in turn too, is killed by SIGKILL. Then another process, which waits with
all its imports done, joins, and the next run comes. (The killed one is started again too, but imports only between
runs: with four workers on two cores, several runs would share the cores with it.)

* kill_to_committed: from just before the signal until the last survivor has committed its next step. Target: 150 ms and
  one undisturbed step of the survivors.
* end_of_process_to_all_know: from the moment at which the kernel tells of the process's end (its pidfd gets readable;
  the benchmark holds one) until the last survivor knows. Target: 10 ms. Negative: they knew before, because the
  kernel closes a dying process's connections before it tells of its end. What it takes for that is
  kill_to_end_of_process.
* phases: of the last survivor: detect (signal to its noticing), agree, re_form, sync, step.
* floors, in the same run: an undisturbed step, an all-reduce of as many numbers as the model has, one etcd commit, a
  gloo group with one barrier.

Each mode gets `--kills` runs. Every figure has p50, p95, p99 (nearest rank, see `benchmarks.environment.percentile`)
and max. `slowest_kill` has the Python stacks of the survivors, taken 1 s and 5 s after the kill, if it took so long.

No time limit makes an error of a slow recovery. One that has not ended after 15 minutes, or whose job ends before, is
in `censored`; it counts as longer than all others, so that a percentile that falls on it is null. If there is no full
group again, the mode's run ends there and says so in `ended_early`. The exit code is 0 unless nothing was measured.

`--load N` has N processes with a busy loop share the cores with the job from the first full group to the last kill (the
floors etcd_commit and gloo are taken without them). Progress is shown on stderr while it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import describe, print_result, summary
from benchmarks.job.processes import exit_on_signals
from benchmarks.recovery import floors, ours, timeline
from benchmarks.recovery.peers import measure_peers
from benchmarks.recovery.progress import Progress
from benchmarks.rendezvous.crowd import TooSlowError

TARGETS = {"beyond_one_step_ms": 150, "end_of_process_to_all_know_ms": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["1M", "25M"], default="1M", help="parameters")
    parser.add_argument("--kills", type=int, default=20, help="in each mode")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy processes beside the job")
    parser.add_argument("--salvage", default="discard,drop,recompute")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step sleeps besides computing")
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="draw the run in the middle")
    parser.add_argument("--peers", default="", help="torchrun, torchft")
    parser.add_argument("--peers-python", type=Path, help="an interpreter that has torch, and torchft if it is wanted")
    parser.add_argument("--peer-runs", type=int, default=5)
    options = parser.parse_args()
    exit_on_signals()
    before = describe()
    salvage = options.salvage.split(",")
    modes: dict[str, Any] = {}
    with Progress(len(salvage), options.kills) as progress:
        for mode in salvage:
            progress.mode_begins(mode)
            figures = ours.measure(
                options.model, mode, options.kills, options.workers, options.step_ms, options.load, progress
            )
            modes[mode] = figures.document()
            if options.timeline and mode == salvage[0] and figures.kills.recoveries:
                by_length = sorted(figures.kills.recoveries, key=lambda recovery: recovery.total_ms)
                options.timeline.write_text(timeline.draw(by_length[len(by_length) // 2]))
    first = next((figures for figures in modes.values() if figures["kill_to_committed_ms"]), None)
    print_result(
        "recovery",
        model=options.model,
        workers=options.workers,
        load_processes=options.load,
        modes=modes,
        **(_compared(first, options) if first else {}),
        targets=TARGETS,
        environment_before=before,
    )
    if not any("slowest_kill" in figures for figures in modes.values()):
        reasons = [f"{mode}: {figures['ended_early']['reason']}" for mode, figures in modes.items()]
        sys.exit("nothing was measured; " + "; ".join(reasons))


def _compared(figures: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Floors and peers, and how often they fit into the median of one mode's figures."""
    ours_ms = figures["kill_to_committed_ms"]["median"]
    floors_ms = {
        "undisturbed_step": figures["survivors_step_ms"],
        "all_reduce": figures["all_reduce_ms"],
        "etcd_commit": _floor(floors.etcd_commits_ms, 3),
        f"gloo_group_of_{options.workers - 1}_and_barrier": _floor(lambda: floors.gloo_forms_ms(options.workers - 1)),
    }
    ratios = {name: round(ours_ms / values["median"], 1) for name, values in floors_ms.items() if values}
    peers = measure_peers(options, ours_ms) if options.peers else {}
    return {"floors_ms": floors_ms, "ratios_to_floors": ratios, "peers": peers}


def _floor(measure: Callable[[], Sequence[float]], digits: int = 2) -> dict[str, Any] | None:
    """A floor's summary; None: it took too long, which is no reason to lose what was measured before."""
    try:
        return summary(measure(), digits)
    except TooSlowError:
        return None


if __name__ == "__main__":
    main()
