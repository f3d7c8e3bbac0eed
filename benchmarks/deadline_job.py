"""A rank of the job of `benchmarks.deadlines`: trains a small model until its `IterManager` tells it to save and stop.

Iterations wait besides computing, some of them long, and now and then one evaluates; the seed says how long.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from torchelastic.checkpoint import BCPState
from torchelastic.lifetime import IterManager

FEATURES = 1024
#: The iteration in which a rank says that it is at work, before which its life is not counted.
READY_AT = 5
_EVALUATE_EVERY, _EVALUATE_S = 50, 0.6


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Model and optimizer, 25 MB with its moments; the same on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(FEATURES, FEATURES) for _ in range(2)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def waits_s(draw: random.Random, step: int) -> float:
    """How long an iteration waits besides computing."""
    return 0.015 * draw.paretovariate(2.2) + (_EVALUATE_S if step % _EVALUATE_EVERY == _EVALUATE_EVERY - 1 else 0.0)


def main() -> None:
    folder, rank, ranks, seed, reserve_s = Path(sys.argv[1]), *map(int, sys.argv[2:5]), float(sys.argv[5])
    torch.set_num_threads(1)
    life = Path(sys.argv[6])
    dist.init_process_group("gloo", init_method=f"file://{life}/store", rank=rank, world_size=ranks)
    plain, optimizer = build()
    model = torch.nn.parallel.DistributedDataParallel(plain)
    done = 0
    state = BCPState(model, optimizer, "ddp", lambda: {"done": done}, folder / "checkpoint")
    extra = state.maybe_resume_from_ckpt()
    done = 0 if extra is None else extra["done"]
    manager = IterManager(redundant_time=reserve_s, velastic_dir=folder / ".velastic")
    manager.iter_count = done
    draw = random.Random(seed)
    for begun in range(1_000_000):
        if begun == READY_AT:
            (life / f"ready-{rank}").touch()
        manager.iter()
        if manager.should_save_ckpt():
            with manager.saving():
                state.save(sync=True)
        if manager.should_stop:
            break
        time.sleep(waits_s(draw, done))
        optimizer.zero_grad()
        model(torch.ones(4, FEATURES)).square().mean().backward()
        optimizer.step()
        done += 1
    if rank == 0:
        decision = manager.decision
        assert decision is not None
        said = {
            "done": done, "given_up_s": manager.given_up_s, "decision": str(decision),
            "numbers": dict(decision.numbers), "save_s": max(manager.save_times_s["checkpoint"], default=0.0),
            "iterations": begun,
        }  # fmt: skip
        (life / "said.new").write_text(json.dumps(said))
        (life / "said.new").rename(life / "said")
    manager.close()
    state.close()
    dist.destroy_process_group()
    sys.exit(manager.exit_code)


if __name__ == "__main__":
    main()
