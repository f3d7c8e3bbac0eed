"""One contender in a process of its own: it is told what to do, and answers, in one line of JSON each.

It needs torch and the standard library and, of this project, only the benchmarks: it also runs under the interpreter
that ML Flashpoint was installed for. What the contenders have in common is here; what they do is in `ours`, `plain` and
`flashpoint`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.checkpoint.payload import timed_ms
from benchmarks.memory_tier.processor_time import family_cpu_s
from benchmarks.memory_tier.shared_bytes import SharedBytes

dcp: Any = torch.distributed.checkpoint  # its names are not exported explicitly

CONTENDERS = {
    "ours": ("ours", "Ours"),
    "dcp": ("plain", "PlainDcp"),
    "flashpoint": ("flashpoint", "Flashpoint"),
    "flashpoint_pool": ("flashpoint", "FlashpointWithPool"),
}


@dataclass(frozen=True)
class Place:
    """Where a contender works.

    Attributes:
        folder: an empty folder of its own, on tmpfs; ranks of one host share it.
        rank: of this process.
        ranks: how many there are, each on a host of its own.
    """

    folder: Path
    rank: int = 0
    ranks: int = 1


class Contender(ABC):
    """Saves, loads and tidies up.

    Args:
        place: where.
        memory: what is saved, and what it is loaded into.
    """

    def __init__(self, place: Place, memory: SharedBytes) -> None:
        self.place = place
        self.memory = memory
        self.state: dict[str, Any] = dict(memory.payload.tensors)
        self.target: dict[str, Any] = memory.target
        self.step = 0

    @abstractmethod
    def save(self) -> None:
        """`dcp.save` of the next step; with several ranks, it returns when the replicas are acknowledged."""

    @abstractmethod
    def begin(self, checkpointer: Any) -> Future[Any]:
        """`dcp.async_save` of the next step; the result of what is returned means that it is done."""

    @abstractmethod
    def load(self) -> None:
        """`dcp.load` of the newest step into the target."""

    def find_and_load(self) -> None:
        """The same by somebody who does not know which step is the newest."""
        raise NotImplementedError("it has no way to find the newest step")

    @abstractmethod
    def commit_file(self) -> Path:
        """What is there once the newest step is complete."""

    def tidy(self) -> None:  # noqa: B027 - some remove the older step while they save
        """Removes the step before the newest one, where a save does not do that."""

    def close(self) -> None:  # noqa: B027 - not all have something to end
        """Ends what was started."""


class Answers:
    """What can be asked of a contender; each returns plain numbers."""

    def __init__(self, contender: Contender, place: Place, memory: SharedBytes) -> None:
        self._contender = contender
        self._place = place
        self._memory = memory

    def save(self) -> dict[str, float]:
        """A floor, and a save right after it; with several ranks, also the floor of one rank while the others wait."""
        alone = {"memcpy_alone_ms": self._alone_ms()} if self._place.ranks > 1 else {}
        copy_ms = self._prepare()
        before_s = family_cpu_s()
        took_ms = timed_ms(self._contender.save)
        cpu_ms = (family_cpu_s() - before_s) * 1e3
        self._finish()
        return {"memcpy_ms": copy_ms, "ms": took_ms, "cpu_ms": cpu_ms} | alone

    def background(self, checkpointer: str) -> dict[str, float]:
        """A floor, and a save in the background: until training may go on, until it is done, and all its CPU time."""
        copy_ms = self._prepare()
        before_s = family_cpu_s()
        futures: list[Future[Any]] = []
        kind = AsyncCheckpointerType[checkpointer.upper()]
        blocking_ms = timed_ms(lambda: futures.append(self._contender.begin(kind)))
        done_ms = blocking_ms + timed_ms(futures[0].result)
        self._finish()
        return {
            "memcpy_ms": copy_ms,
            "ms": blocking_ms,
            "done_ms": done_ms,
            "cpu_ms": (family_cpu_s() - before_s) * 1e3,
        }

    def load(self) -> dict[str, float]:
        """A floor, and a load, of which every byte is looked at afterwards."""
        return self._load(self._contender.load)

    def load_values(self, count: int) -> dict[str, float]:
        """A floor, and a load of so many plain values, which are no tensors: each is a pickle of its own to DCP."""
        tensors = self._contender.state, self._contender.target
        values = {f"value{number}": number / 2 for number in range(count)}
        self._contender.state, self._contender.target = values, dict.fromkeys(values, -1.0)
        try:
            self._contender.save()
            self._finish()
            took_ms = timed_ms(self._contender.load)
            if self._contender.target != values:
                raise RuntimeError("what was loaded is not what was saved")
        finally:
            self._contender.state, self._contender.target = tensors
        return {"memcpy_ms": self._memory.floor_ms(), "ms": took_ms}

    def find_and_load(self) -> dict[str, float]:
        """The same with the search for the newest step."""
        return self._load(self._contender.find_and_load)

    def endure(self, seconds: float, per_s: float, checkpointer: str) -> dict[str, Any]:
        """Many saves: see `endurance`."""
        from benchmarks.memory_tier.endurance import endure

        return endure(self._contender, self._memory, self._place.folder, seconds, per_s, checkpointer)

    def _load(self, load: Callable[[], None]) -> dict[str, float]:
        copy_ms = self._memory.floor_ms()
        for tensor in self._memory.target.values():
            tensor[:1] = -1  # as many as `change` changes: a load that does nothing is noticed
        took_ms = timed_ms(load)
        if not self._memory.payload.equals(self._memory.target):
            raise RuntimeError("what was loaded is not what was saved")
        return {"memcpy_ms": copy_ms, "ms": took_ms}

    def _prepare(self) -> float:
        """The floor, which all ranks take at once, as they save at once."""
        self._memory.payload.change()
        self._meet()
        copy_ms = self._memory.floor_ms()
        self._meet()
        return copy_ms

    def _finish(self) -> None:
        """A save that was left out returns too, and must not count as a quick one."""
        if not self._contender.commit_file().exists():
            raise RuntimeError(f"nothing was saved: there is no {self._contender.commit_file()}")
        self._contender.tidy()

    def _alone_ms(self) -> float:
        copy_ms = 0.0
        for rank in range(self._place.ranks):
            self._meet()
            if rank == self._place.rank:
                copy_ms = self._memory.floor_ms()
        return copy_ms

    def _meet(self) -> None:
        if self._place.ranks > 1:
            dist.barrier()


def main() -> None:
    """Answers until its input ends."""
    answers_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed by anybody
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_tier.contender", description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--store", type=Path, help="a file by which the ranks meet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = HashStore() if options.ranks == 1 else FileStore(str(options.store), options.ranks)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
    place = Place(options.folder, options.rank, options.ranks)
    try:
        memory = SharedBytes(options.source, options.target, options.tensors)
        contender = _make(options.name, place, memory)
    except Exception as error:  # noqa: BLE001 - that it cannot start is an answer
        traceback.print_exc()
        _say(answers_to, {"failed": repr(error)})
        return
    _say(answers_to, {"ready": True})
    _serve(Answers(contender, place, memory), answers_to)
    contender.close()
    dist.destroy_process_group()


def _make(name: str, place: Place, memory: SharedBytes) -> Contender:
    module, kind = CONTENDERS[name]
    made: Contender = getattr(importlib.import_module(f"benchmarks.memory_tier.{module}"), kind)(place, memory)
    return made


def _serve(answers: Answers, answers_to: TextIO) -> None:
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = getattr(answers, question.pop("ask"))(**question)
        except Exception as error:  # noqa: BLE001 - whatever it raises is its answer
            traceback.print_exc()
            answer = {"failed": repr(error)}
        _say(answers_to, answer)


def _say(answers_to: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers_to, flush=True)


if __name__ == "__main__":
    main()
