"""A model that Accelerate has sharded by FSDP2: both ranks are killed, one host's memory is lost, and they go on.

Accelerate shards on accelerators only; here it is told that the CPU is one, and then does all that it does there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import accelerate  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin  # type: ignore[import-untyped, unused-ignore]
from torch.distributed.tensor import DTensor

from tests.older_torch import needs_fsdp2_on_cpus
from tests.process.forked_ranks import run_ranks, values
from torchelastic.checkpoint import BCPState, MemoryTier

STEPS = 6


def sharding_accelerator() -> accelerate.Accelerator:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    return accelerator


def train(base: str, kill_at: int | None) -> tuple[int | None, list[float], str]:
    """The program.

    Returns:
        The step that was resumed from, the losses of this start, and a digest of weights and moments at the end.
    """
    accelerator = sharding_accelerator()
    torch.manual_seed(1)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, STEPS)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    done, host = 0, f"host-{accelerator.process_index}"
    torch.manual_seed(100 + accelerator.process_index)
    state = BCPState(
        model,
        optimizer,
        framework="fsdp2",
        get_extra_fn=lambda: {"step": done, "scheduler": scheduler.state_dict()},
        tiers=[MemoryTier(f"{base}/{host}")],
        replicas=1,
        host=host,
    )
    resumed = state.maybe_resume_from_ckpt()
    if resumed is not None:
        done = resumed["step"]
        scheduler.load_state_dict(resumed["scheduler"])
    losses = []
    while done < STEPS:
        if done == kill_at:
            state.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(torch.ones(2, 4)).square().sum()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        done += 1
        losses.append(loss.item())
        if done % 2 == 0:
            state.save(sync=False)
    state.wait()
    digest = hashlib.sha256()
    for value in [*model.parameters(), *(each["exp_avg"] for each in optimizer.state_dict()["state"].values())]:
        digest.update(value.full_tensor().detach().numpy().tobytes())
    return None if resumed is None else resumed["step"], losses, digest.hexdigest()


@pytest.fixture
def base() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield folder


@needs_fsdp2_on_cpus
def test_killed_ranks_of_a_sharded_model_go_on_from_memory_also_where_a_host_is_lost(base: str) -> None:
    undisturbed = values(run_ranks(train, f"{base}/undisturbed", None, ranks=2))
    killed = run_ranks(train, base, 5, ranks=2)
    assert all(one.was_killed for one in killed), killed
    shutil.rmtree(f"{base}/host-1")
    resumed = values(run_ranks(train, base, None, ranks=2))
    for (_, losses, digest), outcome in zip(undisturbed, resumed, strict=True):
        assert outcome == (4, losses[4:], digest)
