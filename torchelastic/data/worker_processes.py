"""The worker processes of a DataLoader: whether they are alive, and the transfer of their batches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")

#: A tensor of up to so many bytes goes through the pipe. Shared memory, by which torch hands tensors over, costs a
#: connection and a descriptor for each of them, whatever its size.
BY_VALUE_BYTES = 2**20


class WorkerProcesses:
    """The persistent worker processes of one DataLoader, which does not expose them."""

    def __init__(self) -> None:
        self._processes: set[BaseProcess] = set()

    def started_by(self, start: Callable[[], T]) -> T:
        """Call this: the processes that it starts are the DataLoader's; without any, the previous ones stay."""
        others = set(multiprocessing.active_children())
        result = start()
        self._processes = set(multiprocessing.active_children()) - others or self._processes
        return result

    def have_died(self) -> bool:
        """Whether one is gone. DataLoader would notice too, but only after waiting five seconds for its answer."""
        return not all(process.is_alive() for process in self._processes)

    def forget(self) -> None:
        """The processes are no longer used."""
        self._processes = set()


def by_value(batch: Any) -> Any:
    """The same with arrays in place of small tensors, which pickle as what they hold. `joined` is the inverse."""

    def value(leaf: Any) -> Any:
        is_small = isinstance(leaf, torch.Tensor) and leaf.nbytes <= BY_VALUE_BYTES and not leaf.requires_grad
        try:
            return leaf.numpy() if is_small else leaf
        except (TypeError, RuntimeError):  # a dtype that numpy has not, such as bfloat16
            return leaf

    return _mapped(batch, value)


def joined(parts: Sequence[Any]) -> Any:
    """Several batches that `default_collate` made, one behind the other; None for none.

    Args:
        parts: as `by_value` gave them, or as they were.

    Raises:
        TypeError: batches of another kind.
    """
    if len(parts) < 2:
        return _mapped(parts[0], _tensor) if parts else None
    first = parts[0]
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return torch.cat([_tensor(part) for part in parts])
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        if all(isinstance(value, (str, bytes)) for value in first):
            return type(first)(value for part in parts for value in part)
        columns = [joined(list(column)) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    raise TypeError(f"default_collate made a {type(first).__name__}: give a collate_fn of your own")


def _tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [_mapped(value, function) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return function(tree)
