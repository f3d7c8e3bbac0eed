"""Layers that cannot do with a batch of one: how many samples a model needs on each rank, and who says so in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchelastic.errors import UnfitError
from torchelastic.text import shortlist

_KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_LEAST = 2
#: What torch says, in every version.
_TOO_FEW = "Expected more than 1 value per channel"

REMEDY = (
    "give the sampler drop_last=True, a larger global_batch_size or one that leaves no single sample, or the model "
    "layers that do without (GroupNorm, LayerNorm; SyncBatchNorm where there are several workers)"
)


class SingleSampleError(UnfitError, ValueError):
    """A layer cannot normalize the one sample that it has got, or is going to get; a ValueError, as torch's own."""


def least_local_batch(module: torch.nn.Module) -> int:
    """How many samples each rank has to have, if it has any: 2 where there is a BatchNorm that is trained, else 1.

    Those that a script keeps in `eval()` while the model trains normalize by what they have learned. A SyncBatchNorm
    has the samples of all ranks.
    """
    return _LEAST if any(True for _ in _trained(module)) else 1


def _trained(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers, by name; of a model that is being evaluated all that there are."""
    for name, one in module.named_modules():
        if isinstance(one, _KINDS) and (one.training or not module.training):
            yield name, one


class SingleSamples:
    """Of a run that is going to have a global batch of one sample: refuses, in its first forward pass, what will fail.

    Not every BatchNorm does: an image has many values for each channel.

    Args:
        module: the user's.
        sampler: the user's.
    """

    def __init__(self, module: torch.nn.Module, sampler: Any) -> None:
        self._module = module
        self._is_checked = not has_single_samples(sampler)

    def called(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `target`, the module or what is around it, returns.

        Raises:
            SingleSampleError: a layer would fail, or has failed, for a batch of one.
        """
        try:
            if self._is_checked or not self._module.training:
                return target(*args, **kwargs)
            hooks = require_several_values(self._module)
            try:
                found = target(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
            self._is_checked = True
            return found
        except ValueError as error:
            if _TOO_FEW not in str(error):
                raise
            names = [name or "the module" for name, _ in _trained(self._module)]
            raise SingleSampleError(
                f"{shortlist(names)} cannot normalize a batch of one sample, and this worker has got one: {REMEDY}"
            ) from error


def has_single_samples(sampler: Any) -> bool:
    """Whether a run is known to have global batches of one sample."""
    return int(getattr(sampler, "smallest_batch", _LEAST)) < _LEAST


def require_several_values(module: torch.nn.Module) -> list[Any]:
    """From now on a layer raises SingleSampleError that gets one value per channel of each sample; returns its hooks.

    Classes that are made of these may do something else with what they get: they fail when the one sample comes.
    """
    return [one.register_forward_pre_hook(_require(name)) for name, one in _trained(module) if type(one) in _KINDS]


def _require(name: str) -> Callable[[torch.nn.Module, Any], None]:
    def require(layer: torch.nn.Module, inputs: Any) -> None:
        values = next((one for one in inputs if isinstance(one, torch.Tensor)), None)
        if layer.training and values is not None and values.shape[2:].numel() == 1:
            raise SingleSampleError(
                f"{name or 'the module'} ({type(layer).__name__}) cannot normalize a batch of one sample, and this run "
                f"has global batches of one: {REMEDY}"
            )

    return require
