"""Which sample ends the data worker process that reads it: found by reading a batch once more, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from torchelastic.data.worker_processes import WorkerProcesses
from torchelastic.processes.exit_codes import describe_exit

#: What the DataLoader needs to read samples as the one before did.
_SAME = ("multiprocessing_context", "worker_init_fn")


class _Asked(Dataset[str]):
    """A dataset that says how the reading of a sample has ended, in all else the other one."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.__dict__["_asked"] = dataset

    def __getitem__(self, key: Any) -> str:
        try:
            self._asked[key]
        except SystemExit as error:
            return f"SystemExit: {error.code}"
        except Exception:  # noqa: BLE001 - an error ends no process
            return ""
        return ""

    def __getattr__(self, name: str) -> Any:  # of a `worker_init_fn`, by `get_worker_info().dataset`
        if name.startswith("__"):  # while it is being made again in the process
            raise AttributeError(name)
        return getattr(self._asked, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._asked, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def find_deadly(dataset: Dataset[Any], keys: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Read samples in a process of their own until one ends it.

    Args:
        dataset: has them.
        keys: of them, in the order in which they are read.
        options: of the DataLoader whose processes have died.

    Returns:
        The sample and what it does; empty: none of them ends the process.
    """
    processes = WorkerProcesses("this loader")
    same = {name: options[name] for name in _SAME if name in options}
    one_by_one = DataLoader(
        _Asked(dataset), sampler=keys, batch_size=None, num_workers=1, prefetch_factor=1,
        generator=torch.Generator(), **same,
    )  # fmt: skip
    try:
        asked = processes.started_by(one_by_one)
        for key in keys:
            try:
                said = processes.next_of(asked)
            except (RuntimeError, OSError, EOFError):
                said = ", ".join(map(describe_exit, processes.exit_codes()))
            if said:
                return f"sample {key} ends each that reads it ({said})"
    finally:
        processes.end()
    return ""
