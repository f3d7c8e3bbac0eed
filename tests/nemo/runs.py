"""What a run of NeMo in a test is, and how its ranks are started; needs no NeMo."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchelastic.network.ports import unused_ports

STEPS = 8
MEMORY_EVERY, DURABLE_EVERY = 2, 4
RUN_S = 80  # some 10 on a machine with nothing else to do


@dataclass(frozen=True)
class Run:
    """A run, up to its end or until it is killed.

    Attributes:
        folder: of this run; the durable checkpoints are in it, and a container for each host.
        hosts: how many, with one rank each.
        has_memory: whether the callback is there.
        async_save: of checkpoints in memory.
        durable_async: of the others.
        killed_at: the step before which all ranks are killed.
        breaks: on the last rank, reading checkpoints in memory fails: the tensors ("read_data") or the common state
            ("load_common").
        keep: leave the container when the run is over.
        options: for `wrap_trainer_and_auto_resume`.
    """

    folder: Path
    hosts: int = 1
    has_memory: bool = True
    async_save: bool = True
    durable_async: bool = False
    killed_at: int | None = None
    breaks: str = ""
    keep: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def container(self, host: int = 0) -> Path:
        return self.folder / f"host-{host}" / "job-7"

    def result(self, rank: int = 0) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / f"result-{rank}.json").read_text())
        return content

    def weights(self, rank: int = 0) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = torch.load(self.folder / f"weights-{rank}.pt", weights_only=True)
        return weights


def in_forks(count: int, function: str, *arguments: Any, log: Path) -> list[int | None]:
    """The exit codes of processes that call a function of `small_run` with their rank; they print into the log."""
    (port,) = unused_ports("127.0.0.1")
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_one, args=(function, arguments, rank, count, port, log)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + RUN_S
    try:
        for process in processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(10)
    return [process.exitcode for process in processes]


def _one(function: str, arguments: tuple[Any, ...], rank: int, ranks: int, port: int, log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # instead of pytest's
    logging.getLogger("torchelastic").addHandler(logging.StreamHandler(sys.stderr))
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="nemo-test",
        TORCHELASTIC_FAILURE_DOMAIN=f"host-{rank}",
    )
    getattr(importlib.import_module("tests.nemo.small_run"), function)(*arguments, rank)
