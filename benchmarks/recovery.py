"""What a killed worker costs: from kill -9 of one of four to the next committed step of the survivors, per phase.

    python -m benchmarks.recovery [--kills 7] [--workers 4] [--hidden 768]

A DDP model (1M parameters by default, gloo) under one agent and a real etcd. In each round one worker, rank 0 in turn
too, is killed by SIGKILL; the time runs from just before the signal to the moment the last survivor has committed its
next step. The same run prints what a whole step and one all-reduce of the gradients take: the floors. The killed worker
is started again and joins before the next kill. Target: at most 500 ms (median).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import print_result, summary

PHASES = ("detect", "agree", "re_form", "sync", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--events", type=Path, help="internal: be one worker and write events here")
    options = parser.parse_args()
    if options.events:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = run(options, Path(folder))
    print_result(
        "recovery",
        workers=options.workers,
        parameters=results["parameters"],
        kill_to_committed_ms=summary([kill["total"] for kill in results["kills"]]),
        phases_ms={phase: summary([kill[phase] for kill in results["kills"]]) for phase in PHASES},
        plain_step_ms=summary(results["steps_ms"]),
        all_reduce_ms=summary(results["all_reduces_ms"], 3),
        target_ms=500,
    )


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torchelastic.launch", "run", "-v", "--standalone", "--max-restarts", "1000"]
    command += ["--nproc-per-node", str(options.workers), "-m", "benchmarks.recovery", "--events", str(folder)]
    command += ["--hidden", str(options.hidden), "--step-ms", str(options.step_ms)]
    command += ["--workers", str(options.workers)]
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "agent.txt").open("wb"))
    try:
        kills = []
        for number in range(options.kills):
            wait_for_full_group(folder, options.workers)
            kills.append(kill_one(folder, options.workers, number % options.workers))
            time.sleep(0.2)
        events = read(folder)
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(30)
    steps_ms = [e["ms"] for e in events if e["e"] == "committed" and e["world"] == options.workers]
    return {
        "kills": kills,
        "steps_ms": steps_ms[:200],
        "all_reduces_ms": [e["ms"] for e in events if e["e"] == "all_reduce"],
        "parameters": next(e["parameters"] for e in events if e["e"] == "started"),
    }


def read(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    events = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return sorted(events, key=lambda event: float(event["t"]))


def wait_for_full_group(folder: Path, workers: int) -> None:
    """Until all workers of the newest group have committed a few steps in it."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        committed = [e for e in read(folder) if e["e"] == "committed"]
        if committed:
            newest = max(e["round"] for e in committed)
            counts = [sum(1 for e in committed if e["round"] == newest and e["rank"] == r) for r in range(workers)]
            if min(counts) >= 5:
                return
        time.sleep(0.1)
    raise SystemExit(f"the group was not complete in time:\n{(folder / 'agent.txt').read_text()[-3000:]}")


def kill_one(folder: Path, workers: int, rank: int) -> dict[str, float]:
    newest = max((e for e in read(folder) if e["e"] == "committed" and e["rank"] == rank), key=lambda e: e["t"])
    round_number = newest["round"]
    killed_s = time.monotonic()
    os.kill(newest["pid"], signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        recovered = [e for e in read(folder) if e["e"] == "recovered" and e["t"] > killed_s]
        if len(recovered) >= workers - 1:
            last = max(recovered, key=lambda e: float(e["t"]))
            phases = {phase: float(last["phases"][phase]) for phase in PHASES[1:]}
            return {
                "total": 1000 * (last["t"] - killed_s),
                "detect": 1000 * (last["noticed"] - killed_s),
                **phases,
            }
        time.sleep(0.02)
    agents_words = (folder / "agent.txt").read_text()[-3000:]
    raise SystemExit(f"no recovery from the loss of rank {rank} in round {round_number}:\n{agents_words}")


def work(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import torchelastic
    from torchelastic.p2p import CoordinatorP2P

    torch.set_num_threads(1)
    width = options.hidden
    model = torch.nn.Sequential(
        torch.nn.Linear(256, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 256),
    )  # fmt: skip
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    state = torchelastic.ModelState(model, optimizer)
    batch = torch.randn(32, 256)
    file = (options.events / f"{os.getpid()}.jsonl").open("ab", buffering=0)

    def note(event: str, **fields: Any) -> None:
        file.write(json.dumps({"e": event, "t": time.monotonic(), "pid": os.getpid(), **fields}).encode() + b"\n")

    class Noted(CoordinatorP2P):
        began_s = 0.0

        def step_committed(self) -> None:
            before = self.last_recovery
            super().step_committed()
            recovery = self.last_recovery
            if recovery is not None and recovery is not before:
                note("recovered", noticed=recovery.noticed_s, phases=recovery.phases_ms)
            number = self.rendezvous.joined.number
            ms = 1000 * (time.monotonic() - self.began_s)
            note("committed", round=number, rank=self.rank, world=self.world_size, ms=ms)

    coordinator = Noted(process_group_timeout=30000)
    note("started", parameters=parameters)

    def train_step(state: Any) -> None:
        coordinator.began_s = time.monotonic()
        time.sleep(options.step_ms / 1000)
        loss = state.model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.step < 10 and coordinator.world_size > 1:
            flat = torch.zeros(parameters)
            began_s = time.monotonic()
            dist.all_reduce(flat)
            note("all_reduce", ms=1000 * (time.monotonic() - began_s))

    torchelastic.train(coordinator, train_step, state)


if __name__ == "__main__":
    main()
