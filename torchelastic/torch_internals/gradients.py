"""DistributedDataParallel with a layout of its buckets that never changes, and GradScaler.

On the training thread.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel, distributed

from torchelastic.torch_internals.canary import check_torch, found, say_missing

check_torch()

ARGUMENTS_OF_DDP = tuple(inspect.signature(DistributedDataParallel.__init__).parameters)
_DDP = "torch.nn.parallel.DistributedDataParallel"
_MODULE = "torch.nn.parallel.distributed"
_REDUCER = "torch.distributed.Reducer"
#: The number of a backward pass where there is none.
_NO_PASS = -1
#: The user's setting that chooses what reduces the gradients of a compiled model.
REDUCER_SETTING = "torch._dynamo.config.optimize_ddp"
#: What the layout of the buckets is fixed with.
_FIXING = (
    f"{_DDP}._build_params_for_reducer",
    f"{_REDUCER}._push_all_rebuilt_params",
    f"{_REDUCER}._rebuild_buckets",
)


class FixedBucketDDP(DistributedDataParallel):
    """DDP whose gradient buckets are final from the first step on.

    DDP lays its buckets out anew after the first backward pass, in the order in which gradients came. A sum over
    three or more ranks depends in its last bits on where in a bucket an element lies, so the first step after each
    re-form would differ from the same step in an undisturbed run. Here the order is that of the parameters, last
    first, which is about the order in which gradients come; every rank and every generation has the same.

    Args:
        module: the plain one.
        bring_buffers: has all ranks hold rank 0's buffers, which it is given by name, before a forward pass; None: DDP
            does it.
        kwargs: as for DDP.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        bring_buffers: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
        **kwargs: Any,
    ) -> None:
        self._bring_buffers = bring_buffers
        self._has_gone_back = False
        # `ModelState.sync` has made the ranks equal already
        if _HAS_INIT_SYNC:
            super().__init__(module, init_sync=False, **kwargs)
        else:
            with _without_sync():
                # torch 2.6 agrees on the buckets with the interpreter held, which a group of ours needs
                world = dist.group.WORLD
                super().__init__(module, process_group=getattr(world, "_inner", world), **kwargs)
        if all(found(path) is not None for path in _FIXING):
            # what DDP itself would do after the first backward pass, done now, with the order fixed beforehand
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DDP's; within it the module may compute backward passes, see `begin_backward`."""
        _RUNNING.append(self)
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch has no types here
        finally:
            _RUNNING.pop()
            if self._has_gone_back:
                self._has_gone_back = False
                self.require_backward_grad_sync = self.require_forward_param_sync = True

    def begin_backward(self, loss: torch.Tensor) -> None:
        """See the function of this name."""
        is_searched = self.find_unused_parameters and not self.static_graph
        self.reducer.prepare_for_backward([loss] if is_searched else [])
        # or DDP would take what the forward pass returns for the loss of a backward pass that is to come
        self.require_backward_grad_sync = False
        self._has_gone_back = True

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]  # torch has no types here
        return list(reversed(parameters)), list(reversed(expect_sparse))

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if self._bring_buffers is None:
            super()._sync_module_buffers(authoritative_rank)  # type: ignore[no-untyped-call]  # torch has no types here
        else:
            self._bring_buffers(self.named_module_buffers)


#: Those whose forward pass is under way.
_RUNNING: list[FixedBucketDDP] = []


def begin_backward(loss: torch.Tensor) -> None:
    """A backward pass begins inside of DDP's forward pass, which does not know of it: average its gradients.

    Called before each of them, but for those whose gradients stay here. Without DDP there is nothing to average.
    """
    if _RUNNING:
        _RUNNING[-1].begin_backward(loss)


#: Torch 2.6 has no such argument.
_HAS_INIT_SYNC = "init_sync" in ARGUMENTS_OF_DDP
#: What torch 2.6 does in its place; it waits for other ranks with the interpreter held, which a group of ours needs.
_SYNC = ("_verify_param_shape_across_processes", "_sync_module_states")


@contextmanager
def _without_sync() -> Iterator[None]:
    """Meanwhile a DDP that is constructed compares nothing with other ranks, and sends them nothing."""
    usual = {name: getattr(distributed, name) for name in _SYNC if found(f"{_MODULE}.{name}") is not None}
    for name in usual:
        setattr(distributed, name, lambda *_args, **_kwargs: None)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(distributed, name, function)


def take_hooks_off(wrapped: DistributedDataParallel) -> None:
    """Take DDP's hooks off the parameters, whoever may still hold the wrapper."""
    if found(f"{_REDUCER}._remove_autograd_hooks") is not None:
        wrapped.reducer._remove_autograd_hooks()


def import_what_ddp_imports() -> None:
    """Import what the first DDP in a process imports (about two seconds)."""
    try:
        importlib.import_module("torch._dynamo")
    except ImportError:
        say_missing("torch._dynamo")


def reducer_of_compiled() -> str:
    """What reduces the gradients of a compiled model, where the user has chosen it; empty: DDP, as usual."""
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    mode = getattr(config, "optimize_ddp", True)
    return mode if isinstance(mode, str) else ""


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass: in a hook of a gradient, say."""
    number_of = _numbers_of_passes()
    return number_of is not None and number_of() != _NO_PASS


@functools.cache
def _numbers_of_passes() -> Callable[[], int] | None:
    number_of: Callable[[], int] | None = found("torch._C._current_graph_task_id")
    return number_of


def ignored_by_ddp(module: torch.nn.Module) -> set[str]:
    """The names of the parameters and buffers of a module that DDP was set to ignore, and so does not keep equal."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def forget_unfinished_step(scaler: torch.amp.GradScaler) -> None:
    """Have a GradScaler forget which optimizers it has unscaled or stepped in a step that failed.

    It notes that outside its state, and would raise when the step is repeated.
    """
    noted = getattr(scaler, "_per_optimizer_states", None)
    if noted is None:
        say_missing("torch.amp.GradScaler._per_optimizer_states")
    else:
        noted.clear()


def device_of_scaler(scaler: torch.amp.GradScaler) -> str:
    """The kind of device that a GradScaler is for."""
    device = getattr(scaler, "_device", None)
    if device is None:
        say_missing("torch.amp.GradScaler._device")
        return "cuda"
    return str(device)
