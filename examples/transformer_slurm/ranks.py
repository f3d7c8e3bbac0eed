"""Who this process is among others: under srun, under torchrun, or alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

#: Rank, number of ranks and rank on the host, as torchrun and srun call them.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
DEFAULT_PORT = "29500"


class StartError(ValueError):
    """The processes were not started as they have to be."""


@dataclass(frozen=True)
class Ranks:
    """Attributes: rank of this process, number of them, rank on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def ranks_in(environment: Mapping[str, str], *, distributed: bool) -> Ranks:
    """Finds out who this process is. Pure.

    Args:
        environment: variables; those of torchrun count more than those of srun, in whose tasks it may run.
        distributed: whether ranks train together.

    Raises:
        StartError: several were started, and `distributed` was not asked for; or a variable is no number.
    """
    for names in (_TORCHRUN, _SLURM):
        if all(name in environment for name in names[:2]):
            # in an interactive allocation SLURM_NTASKS is set where nothing was started by srun
            if names is _SLURM and "SLURM_STEP_ID" not in environment:
                continue
            found = Ranks(*(_number(environment, name) for name in names))
            if found.world_size > 1 and not distributed:
                raise StartError(
                    f"{found.world_size} processes were started ({names[1]}), and each would train alone into the same "
                    "folder: add --distributed, or start one"
                )
            return found
    return Ranks()


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isdecimal():
        raise StartError(f"{name}={text!r} in the environment is no number: start with srun or torchrun")
    return int(text)


def join(ranks: Ranks, environment: Mapping[str, str]) -> torch.device:
    """Forms the process group where there are several ranks and it is not formed yet; the device of this rank."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count()) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    if ranks.world_size > 1 and not dist.is_initialized():
        host, port = environment.get("MASTER_ADDR", "127.0.0.1"), environment.get("MASTER_PORT", DEFAULT_PORT)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            # torchrun has a store already, which only env:// finds
            init_method="env://" if _TORCHRUN[0] in environment else f"tcp://{host}:{port}",
            rank=ranks.rank,
            world_size=ranks.world_size,
            device_id=device if is_cuda else None,
        )
    return device
