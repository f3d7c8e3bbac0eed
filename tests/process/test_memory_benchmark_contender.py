"""A contender of the memory tier's benchmark: what is wrong does not become a figure, and all processor time counts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory_tier.contender import Answers, Contender, Place
from benchmarks.memory_tier.crew import Member, NotMeasuredError, Setting
from benchmarks.memory_tier.processor_time import family_cpu_s
from benchmarks.memory_tier.shared_bytes import SharedBytes, create, tensors_of

BOUND_S = 60.0


class InMemory(Contender):
    """Keeps its checkpoint in a list."""

    saves = loads = True

    def save(self) -> None:
        self.step += 1
        if self.saves:
            self.checkpoint = {name: tensor.clone() for name, tensor in self.state.items()}
            self.commit_file().touch()

    def begin(self, checkpointer: Any) -> Future[Any]:
        assert checkpointer.name == "THREAD"
        self.save()
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    def load(self) -> None:
        if self.loads:
            for name, tensor in self.memory.target.items():
                tensor.copy_(self.checkpoint[name])

    def commit_file(self) -> Path:
        return self.place.folder / str(self.step)


@pytest.fixture
def memory(tmp_path: Path) -> SharedBytes:
    for name in ("source", "target"):
        create(tmp_path / name, 1)
    return SharedBytes(tmp_path / "source", tmp_path / "target", 4)


@pytest.fixture
def contender(tmp_path: Path, memory: SharedBytes) -> InMemory:
    return InMemory(Place(tmp_path), memory)


@pytest.fixture
def answers(contender: InMemory, memory: SharedBytes) -> Answers:
    return Answers(contender, contender.place, memory)


def test_the_state_is_the_same_memory_for_all_who_open_it(tmp_path: Path, memory: SharedBytes) -> None:
    others = tensors_of(tmp_path / "source", 4)
    memory.payload.change()
    assert list(others) == list(memory.payload.tensors)
    assert all(torch.equal(others[name], tensor) for name, tensor in memory.payload.tensors.items())
    assert memory.payload.size_bytes == 2**20


def test_each_tensor_has_a_storage_of_its_own(memory: SharedBytes) -> None:
    for tensor in memory.payload.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == 2**18
    assert len({tensor.data_ptr() for tensor in memory.payload.tensors.values()}) == 4


def test_a_save_and_a_load_are_timed_beside_a_copy(answers: Answers) -> None:
    for figures in (answers.save(), answers.background("thread"), answers.load()):
        assert figures["memcpy_ms"] > 0
        assert figures["ms"] > 0


def test_a_save_that_was_left_out_is_no_figure(answers: Answers, contender: InMemory) -> None:
    contender.saves = False
    with pytest.raises(RuntimeError, match="nothing was saved"):
        answers.save()
    with pytest.raises(RuntimeError, match="nothing was saved"):
        answers.background("thread")


def test_a_load_that_does_nothing_is_no_figure(answers: Answers, contender: InMemory) -> None:
    answers.save()
    contender.loads = False
    with pytest.raises(RuntimeError, match="not what was saved"):
        answers.load()


def test_a_load_of_older_values_is_no_figure(answers: Answers, contender: InMemory) -> None:
    answers.save()
    older = contender.checkpoint
    answers.save()
    contender.checkpoint = older
    with pytest.raises(RuntimeError, match="not what was saved"):
        answers.load()


def others_s() -> float:
    """Processor time of other processes than this one."""
    return family_cpu_s() - time.process_time()


@pytest.fixture
def busy() -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A process that has computed for a while and lives, and what `others_s` said before it began."""
    before_s = others_s()
    program = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\nsys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        yield process, before_s
    finally:
        process.kill()
        process.wait(BOUND_S)


def test_the_time_of_a_child_counts_while_it_lives_and_afterwards(busy: tuple[subprocess.Popen[bytes], float]) -> None:
    process, before_s = busy
    assert others_s() - before_s > 0.29
    process.communicate(b"", BOUND_S)
    assert others_s() - before_s > 0.29


def test_a_contender_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    setting = Setting(tmp_path, 1, 4, flashpoint_python=Path(sys.executable))
    for name in ("source-0", "target"):
        create(tmp_path / name, 1)
    member = Member("flashpoint", setting)
    try:
        with pytest.raises(NotMeasuredError, match="ml_flashpoint"):
            member.start()
    finally:
        member.close()


def test_a_contender_whose_process_ends_says_so(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 1\n")
    program.chmod(0o700)
    member = Member("flashpoint", Setting(tmp_path, 1, 4, flashpoint_python=program))
    try:
        with pytest.raises(NotMeasuredError, match="no such luck"):
            member.start()
    finally:
        member.close()
