"""The module wrapped for the present group: DDP with a bucket layout that never changes, and weighted gradients."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger(__name__)


class FixedBucketDDP(DistributedDataParallel):
    """DDP whose gradient buckets are final from the first step on.

    DDP lays its buckets out anew after the first backward pass, in the order in which gradients came. A sum over
    three or more ranks depends in its last bits on where in a bucket an element lies, so the first step after each
    re-form would differ from the same step in an undisturbed run. Here the order is that of the parameters, last
    first, which is about the order in which gradients come; every rank and every generation has the same.
    """

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        super().__init__(module, init_sync=False, **kwargs)  # `ModelState.sync` has made the ranks equal already
        # what DDP itself would do after the first backward pass, done now, with the order fixed beforehand
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]  # torch has no types here
        return list(reversed(parameters)), list(reversed(expect_sparse))


def wrap(
    module: torch.nn.Module,
    hook: Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]],
    *,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """Wrap a module for the default group; every rank calls it.

    Args:
        module: the user's, on one device.
        hook: reduces one bucket of gradients, see `Reduction`.
        find_unused_parameters: as for DDP.
    """
    devices = {parameter.device for parameter in module.parameters()}
    device_ids = [next(iter(devices))] if len(devices) == 1 and next(iter(devices)).type == "cuda" else None
    wrapped = FixedBucketDDP(module, device_ids=device_ids, find_unused_parameters=find_unused_parameters)
    # without annotations: DDP compares them as objects, and ours are strings
    wrapped.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return wrapped


def unwrap(wrapped: DistributedDataParallel | None) -> None:
    """Take DDP's hooks off the parameters, whoever may still hold the wrapper (a traceback, the user)."""
    if wrapped is not None:
        wrapped.reducer._remove_autograd_hooks()


def warm_up() -> None:
    """Import what the first DDP in a process imports (about two seconds), before others wait for this worker."""
    for name in ("torch._dynamo",):
        try:
            importlib.import_module(name)
        except ImportError:
            log.debug("%s is not there in this torch", name)


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
