"""torch's two engines for NCCL: which of them a name makes, and whether a communicator of the older one is gone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torchelastic.torch_internals.canary import check_torch, found

check_torch()


def connects_when_made(name: str) -> bool:
    """Whether torch makes a backend of this name that connects in its constructor, unless its options are lazy.

    So does the engine of NCCL that "nccl" is from torch 2.15 on, and "nccl2"; the older one is "nccl-legacy" there.
    """
    is_nccl = name.startswith("nccl") and dist.is_nccl_available() and dist.is_backend_available(name)
    if not is_nccl or not hasattr(dist.ProcessGroupNCCL.Options, "lazy_init"):
        return False
    plugins = found("torch.distributed.Backend._plugins") or {}
    older = found("torch.distributed.distributed_c10d._create_nccl_process_group")
    return older is None or name.upper() not in plugins or plugins[name.upper()].creator_fn is not older


def is_gone(backend: Any) -> bool:
    """Whether torch has given up a communicator of the older engine, or is about to: then this waits until it is gone.

    False for what is no such engine.
    """
    try:
        getattr(backend, "_comm_ptr", int)()
    except RuntimeError:
        return True
    return False
