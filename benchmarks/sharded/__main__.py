"""What it costs that a sharded model (FSDP2) survives a killed worker: the kill itself, and the copies before it.

    python -m benchmarks.sharded [--model 25M] [--workers 4] [--kills 5] [--every 1] [--rounds 5]
    python -m benchmarks.sharded --peers torchrun,torchft --peers-python FOLDER/bin/python [--peer-runs 3]

A GPT with AdamW in float32, sharded over gloo, under one agent and a real etcd; each step sleeps besides computing, as
one does that waits for an accelerator.

* kills: one worker after the other, rank 0 too, is killed by SIGKILL; then another one, which has imported everything,
  joins. From just before the signal until the last survivor has committed its next step: `kill_to_committed_ms`;
  `beyond_one_step_ms` is that less one undisturbed step of the survivors, `beyond_one_step_and_transfer_ms` (target:
  1000) less the transfer of the parts that moved, too. The floor is measured in the steps after it, in the same
  processes: the same bytes between the same ranks as plain messages of gloo, into warm memory and into fresh memory,
  while no copy is being sent. `transfer_over_floor` has the target 1.5; it has no value for a kill after which nothing
  had to move between processes. `local_bytes` were copied in the survivors' own memory in that time. Phases and
  stacks are as in `benchmarks.recovery`.
* copies: in each round the same processes train `--steps` steps without copies, with one every 20, every 5 and every
  step; the first round is not counted. `relative_to_none` is steps per second beside those without in the same round.
  `stopped_ms` is how long a copy has stopped the training thread (the metric `sharded.copy.duration.ms`, of all ranks),
  `stopped_over_memcpy` (target: 1.15) the median beside that of a copy of the same tensors into warm memory, in the
  same processes, on one thread, on all ranks at once.
* memory: the most that copies have held, as multiples of a rank's shard: its own (target: 2) and all, with those that
  it keeps for its partner (target: 4).
* peers: the same model under torchrun, which starts all workers again; they read a checkpoint of
  torch.distributed.checkpoint, saved to tmpfs every `--every` steps. And under torchft with replicas of two workers,
  each of which is sharded over its two; it loses one replica.

A recovery has no time limit that makes an error of it: see `python -m benchmarks.recovery --help`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import describe, print_result
from benchmarks.job.controller import NotReachedError
from benchmarks.job.processes import exit_on_signals
from benchmarks.sharded import ours
from benchmarks.sharded.peers import REPLICA_SIZE, measure_peers

TARGETS = {
    "beyond_one_step_and_transfer_ms": 1000,
    "transfer_over_floor": 1.5,
    "stopped_over_memcpy": 1.15,
    "own_x": 2,
    "all_x": 4,
}
PARTS = ("kills", "copies")
PEERS = ("torchrun", "torchft")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["1M", "25M", "200M"], default="25M", help="parameters")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=int, default=1, help="steps from one copy to the next while workers are killed")
    parser.add_argument(
        "--hybrid", type=int, default=0, metavar="N", help="HybridShard(N) and no copies; kills only, see below"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of all ways of copying")
    parser.add_argument("--steps", type=int, default=20, help="of each way in a round")
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step sleeps besides computing")
    parser.add_argument("--parts", default=",".join(PARTS), help="any of kills, copies (with the memory)")
    parser.add_argument("--peers", default="", help="torchrun, torchft")
    parser.add_argument("--peers-python", type=Path, help="an interpreter that has torch, and torchft if it is wanted")
    parser.add_argument("--peer-runs", type=int, default=3)
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if not set(options.parts) <= set(PARTS):
        parser.error(f"--parts {','.join(options.parts)}: there are {', '.join(PARTS)}")
    options.peers = [peer for peer in options.peers.split(",") if peer]
    if not set(options.peers) <= set(PEERS):
        parser.error(f"--peers {','.join(options.peers)}: there are {', '.join(PEERS)}")
    if "torchft" in options.peers and (options.workers % REPLICA_SIZE or options.workers < 2 * REPLICA_SIZE):
        parser.error(f"--peers torchft: {options.workers} workers do not make replicas of {REPLICA_SIZE}, two at least")
    if min(options.kills, options.rounds, options.steps, options.peer_runs) < 1 or options.workers < 2:
        parser.error("--kills, --rounds, --steps and --peer-runs are at least 1, --workers at least 2")
    if options.hybrid:
        for count in (options.workers, options.workers - 1):
            if count % options.hybrid:
                parser.error(
                    f"--hybrid {options.hybrid}: a kill leaves {options.workers - 1} of {options.workers} workers, and "
                    f"{count} is no multiple of {options.hybrid}. Groups of multiples only, whose other members wait "
                    "as spares, are not measured here"
                )
        options.parts = [part for part in options.parts if part == "kills"]
    return options


def main() -> None:
    options = parse()
    exit_on_signals()
    before = describe()
    figures: dict[str, Any] = {}
    if "kills" in options.parts:
        figures["kills"] = ours.measure_kills(options)
    if "copies" in options.parts:
        print("copies: training with few and with many", file=sys.stderr, flush=True)
        try:
            figures |= ours.measure_copies(options)
        except NotReachedError as error:  # no reason to lose what was measured before
            figures["copies"] = {"gave_up": str(error)}
    if options.peers:
        print(f"peers: {', '.join(options.peers)}", file=sys.stderr, flush=True)
        of_kills = figures.get("kills", {}).get("kill_to_committed_ms")
        figures["peers"] = measure_peers(options, of_kills and of_kills["median"])
    print_result(
        "sharded",
        model=options.model,
        workers=options.workers,
        every=options.every,
        hybrid=options.hybrid,
        step_sleeps_ms=options.step_ms,
        **figures,
        targets=TARGETS,
        environment_before=before,
    )
    if "kills" in figures and "slowest_kill" not in figures["kills"]:
        sys.exit(f"no kill was measured; {figures['kills']['ended_early']['reason']}")


if __name__ == "__main__":
    main()
