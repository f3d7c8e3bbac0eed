"""What a killed worker costs: from kill -9 of one of four to the next committed step of all survivors, per phase.

    python -m benchmarks.recovery [--model 1M] [--kills 20] [--salvage discard,drop,recompute] [--timeline FILE.svg]
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

The first mode gets `--kills` runs, the others a quarter of them, at least five.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.environment import describe, print_result, summary
from benchmarks.recovery import floors, ours, timeline
from benchmarks.recovery.peers import measure_peers

TARGETS = {"beyond_one_step_ms": 150, "end_of_process_to_all_know_ms": 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["1M", "25M"], default="1M", help="parameters")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--salvage", default="discard,drop,recompute")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step sleeps besides computing")
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="draw the run in the middle")
    parser.add_argument("--peers", default="", help="torchrun, torchft")
    parser.add_argument("--peers-python", type=Path, help="an interpreter that has torch, and torchft if it is wanted")
    parser.add_argument("--peer-runs", type=int, default=5)
    options = parser.parse_args()
    before = describe()
    modes: dict[str, Any] = {}
    for number, mode in enumerate(options.salvage.split(",")):
        kills = options.kills if number == 0 else min(options.kills, max(5, options.kills // 4))
        figures = ours.measure(options.model, mode, kills, options.workers, options.step_ms)
        modes[mode] = figures.document()
        if options.timeline and number == 0:
            by_length = sorted(figures.recoveries, key=lambda recovery: recovery.total_ms)
            options.timeline.write_text(timeline.draw(by_length[len(by_length) // 2]))
    first = next(iter(modes.values()))
    floor_ms = {
        "undisturbed_step": first["survivors_step_ms"],
        "all_reduce": first["all_reduce_ms"],
        "etcd_commit": summary(floors.etcd_commits_ms(), 3),
        f"gloo_group_of_{options.workers - 1}_and_barrier": summary(floors.gloo_forms_ms(options.workers - 1)),
    }
    peers = measure_peers(options, first["kill_to_committed_ms"]["median"]) if options.peers else {}
    print_result(
        "recovery",
        model=options.model,
        workers=options.workers,
        modes=modes,
        floors_ms=floor_ms,
        ratios_to_floors={
            name: round(first["kill_to_committed_ms"]["median"] / values["median"], 1)
            for name, values in floor_ms.items()
        },
        peers=peers,
        targets=TARGETS,
        environment_before=before,
    )


if __name__ == "__main__":
    main()
