"""The module wrapped for the present group: DDP with a bucket layout that never changes, and weighted gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchelastic.errors import UnfitError
from torchelastic.model.buffer_broadcast import BufferBroadcast, check_sent_by_nccl
from torchelastic.model.ddp_options import PASSED, for_ddp
from torchelastic.model.transfer import message_device
from torchelastic.text import shortlist
from torchelastic.torch_internals.c10d_types import GradBucket
from torchelastic.torch_internals.gradients import (
    ARGUMENTS_OF_DDP,
    REDUCER_SETTING,
    FixedBucketDDP,
    import_what_ddp_imports,
    reducer_of_compiled,
    take_hooks_off,
)


def wrap(
    module: torch.nn.Module,
    hook: Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]],
    options: Mapping[str, Any] | None = None,
) -> DistributedDataParallel:
    """Wrap a module for the default group; every rank calls it.

    Args:
        module: the user's, on one device.
        hook: reduces one bucket of gradients, see `Reduction`.
        options: of DDP, see `ddp_options`.

    Raises:
        UnfitError: see `check_reducible`, and for buffers on GPUs `check_sent_by_nccl`.
    """
    check_reducible(module)
    devices = {parameter.device for parameter in module.parameters()}
    device_ids = [next(iter(devices))] if len(devices) == 1 and next(iter(devices)).type == "cuda" else None
    options = PASSED if options is None else options
    on_cpu = message_device().type == "cpu"  # on a GPU it would wait for all that is under way, to see the layout
    if not on_cpu and options["broadcast_buffers"]:
        check_sent_by_nccl(module, dist.get_world_size(), message_device())
    wrapped = FixedBucketDDP(
        module,
        bring_buffers=BufferBroadcast(module, is_source=dist.get_rank() == 0).bring if on_cpu else None,
        device_ids=device_ids,
        **for_ddp(options, ARGUMENTS_OF_DDP),
    )
    # without annotations: DDP compares them as objects, and ours are strings
    wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return wrapped


def unwrap(wrapped: DistributedDataParallel | None) -> None:
    """Take DDP's hooks off the parameters, whoever may still hold the wrapper (a traceback, the user)."""
    if wrapped is not None:
        take_hooks_off(wrapped)


def warm_up() -> None:
    """Import what the first DDP in a process imports (about two seconds), before others wait for this worker."""
    import_what_ddp_imports()


def check_reducible(module: torch.nn.Module) -> None:
    """Raise UnfitError for gradients that DDP cannot reduce, or not in buckets: a failed step would be half reduced."""
    mode = reducer_of_compiled()
    if mode.startswith("python_reducer"):
        raise UnfitError(
            f"{REDUCER_SETTING} = {mode!r} does not go with ModelState, which reduces gradients in "
            "buckets so that a failed step can be undone: leave it at True, or set it to False"
        )
    for name, parameter in module.named_parameters():
        wanted = parameter.grad_dtype if hasattr(torch.Tensor, "grad_dtype") else None
        if parameter.requires_grad and wanted not in (None, parameter.dtype):
            raise UnfitError(
                f"{name} is {parameter.dtype} and its gradients are {wanted} (grad_dtype), and DDP reduces them in "
                "their parameter's type only: give ModelState logical_shards, which sums them up in their own, or "
                "leave grad_dtype as it is"
            )


def check_made(model: torch.nn.Module) -> None:
    """Raise ValueError for a module that makes parameters or buffers in its first forward pass, each rank its own."""
    made_later = [name for name, one in (*model.named_parameters(), *model.named_buffers()) if is_lazy(one)]
    if made_later:
        raise ValueError(
            f"{shortlist(made_later)}: a lazy module gets the shape of these in its first forward pass, each rank by "
            "itself. Run one before ModelState is made, on every worker, with an input as large as your samples: "
            "`with torch.no_grad(): model(torch.zeros(2, ..))`"
        )


def check_unsharded(model: torch.nn.Module) -> None:
    """Raise ValueError for a module that is wrapped already, or of which this worker has only a part."""
    names = {type(module).__name__ for module in model.modules()}
    if "DistributedDataParallel" in names or "DataParallel" in names:
        raise ValueError("give ModelState the plain module: it wraps it anew for each group")
    sharded = "FullyShardedDataParallel" in names or any(hasattr(p, "device_mesh") for p in model.parameters())
    if sharded:
        raise ValueError(
            "ModelState keeps one whole model per worker, and this module is sharded (FSDP, DTensor): use "
            "torchelastic.ShardedState, which makes it anew for each group (docs/sharded.md)"
        )
