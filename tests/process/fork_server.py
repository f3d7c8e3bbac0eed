"""Processes that have torch from their first moment: forked from one that has imported it and has done nothing else."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

#: Torch takes a process two seconds, and torch._dynamo, which optimizers and DDP import, two more.
_IMPORTED = [
    "torch",
    "torch.distributed",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "torchelastic.p2p",
]


def fork_server() -> ForkServerContext:
    """The way to start such processes; each process of pytest has one server, with the environment of its start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context
