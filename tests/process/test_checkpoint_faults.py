"""Writers that are killed, disks that are full, several processes at once: each with the real thing."""

from __future__ import annotations

import itertools
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from torchelastic.checkpoint import CheckpointError, FileSystemCheckpointManager
from torchelastic.checkpoint.api import load_latest, save

# What every child process knows: a state whose content proves that it is whole and which step it is of.
PREAMBLE = """
import json, os, random, resource, signal, sys
from torchelastic.checkpoint import CheckpointError, FileSystemCheckpointManager
from torchelastic.checkpoint.api import load_latest, save

folder = sys.argv[1]

class StepState:
    def __init__(self, step=-1, size_bytes=300_000):
        self.step, self.size_bytes = step, size_bytes
    def content(self):
        header = json.dumps([self.step, self.size_bytes]).encode() + b"\\n"
        return header + random.Random(self.step).randbytes(self.size_bytes)
    def save(self, stream):
        content = self.content()
        for start in range(0, len(content), 65536):
            stream.write(content[start:start + 65536])
    def load(self, stream):
        data = stream.read()
        self.step, self.size_bytes = json.loads(data.split(b"\\n", 1)[0])
        assert data == self.content(), "loaded, but not what was saved"
"""

SAVES_FOREVER = """
manager, state = FileSystemCheckpointManager(folder), StepState()
load_latest(manager, state)
while True:
    state.step += 1
    print(save(manager, state).sequence_id, state.step, flush=True)
"""


class StepState:
    """The same state on this side."""

    def __init__(self) -> None:
        self.step = -1

    def save(self, stream: BinaryIO) -> None:
        raise NotImplementedError

    def load(self, stream: BinaryIO) -> None:
        header, data = stream.read().split(b"\n", 1)
        self.step, size_bytes = json.loads(header)
        assert data == random.Random(self.step).randbytes(size_bytes), "loaded, but not what was saved"


def start(program: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PREAMBLE + program, folder], stdout=subprocess.PIPE)


def run(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", PREAMBLE + program, str(folder)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout.decode()


def test_a_writer_killed_at_any_time_never_loses_what_it_has_committed(tmp_path: Path) -> None:
    chance = random.Random(20)
    reported_id = loaded_step = -1
    for _ in range(20):
        child = start(SAVES_FOREVER, tmp_path)
        assert child.stdout is not None
        first_line = child.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.05))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        first_id, first_step = map(int, first_line.split())
        assert first_id > reported_id
        assert first_step == loaded_step + 1
        rest = child.stdout.read().split(b"\n")[:-1]
        child.stdout.close()
        reported_id, reported_step = map(int, (rest or [first_line])[-1].split())

        state = StepState()
        checkpoint = load_latest(FileSystemCheckpointManager(tmp_path), state)
        assert checkpoint is not None
        loaded_step = state.step
        # A kill between the rename and the report may leave one more, and never one less.
        assert loaded_step in (reported_step, reported_step + 1)
        assert not list(tmp_path.glob(".tmp-*"))
    candidates = FileSystemCheckpointManager(tmp_path).list_candidates()
    assert len(candidates) > 20
    assert [checkpoint.damage() for checkpoint in candidates] == [None] * len(candidates)


# One forked child per call that `save` makes into the operating system or into a file object, killed right there.
KILLED_AT_EVERY_CALL = """
import io

def touches_files(function):
    return function.__module__ in ("posix", "io", "_io") or isinstance(function.__self__, io.IOBase)

state, outcomes = StepState(0, 10_000), []
for killing_call in range(1, 100_000):
    manager = FileSystemCheckpointManager(folder, keep=3)
    expected = state.step = state.step + 1
    save(manager, state)
    pid = os.fork()
    if pid == 0:
        calls = 0
        def kill_at(_frame, event, function):
            global calls
            calls += event == "c_call" and touches_files(function)
            if calls == killing_call:
                os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        sys.setprofile(kill_at)
        save(manager, state)
        sys.setprofile(None)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    manager = FileSystemCheckpointManager(folder, keep=3)
    newest = load_latest(manager, state).sequence_id
    damaged = [c.sequence_id for c in manager.list_candidates() if c.damage()]
    left = [name for name in os.listdir(folder) if name.startswith(".")]
    outcomes.append((newest, state.step, expected, len(manager.list_checkpoints()), damaged, left))
    if os.WIFEXITED(status):
        break
print(json.dumps(outcomes))
"""


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder without a slow disk below it, if there is one: what a kill leaves behind does not depend on the disk."""
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent if parent.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_a_writer_killed_at_every_single_call_leaves_the_old_checkpoint_or_the_new_one(memory_folder: Path) -> None:
    outcomes = json.loads(run(KILLED_AT_EVERY_CALL, memory_folder))
    assert len(outcomes) > 50
    ids = [newest for newest, *_ in outcomes]
    assert all(later > earlier for earlier, later in itertools.pairwise(ids))
    for _, step, expected, kept, damaged, left in outcomes:
        assert step in (expected, expected + 1)
        assert damaged == []
        assert left == []
        assert kept in range(min(3, expected), 5)
    advances = [step - expected for _, step, expected, *_ in outcomes]
    assert 0 in advances
    assert advances[-1] == 1


SAVES_TEN = """
manager = FileSystemCheckpointManager(folder)
print("ready", flush=True)
sys.stdin.readline()
for step in range(10):
    print(save(manager, StepState(int(sys.argv[2]) * 100 + step, 20_000)).sequence_id, flush=True)
"""


def test_writers_in_several_processes_overwrite_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PREAMBLE + SAVES_TEN, str(tmp_path)]
    writers = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for number in range(4)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    outputs = []
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    for writer in writers:
        outputs.append([int(line) for line in writer.communicate(timeout=60)[0].split()])
        assert writer.returncode == 0
    assert sorted(sequence_id for output in outputs for sequence_id in output) == list(range(40))
    assert all(output == sorted(output) for output in outputs)
    steps = set()
    for checkpoint in FileSystemCheckpointManager(tmp_path).list_checkpoints():
        state = StepState()
        with checkpoint.open_input_stream("default") as stream:
            state.load(stream)
        steps.add(state.step)
    assert steps == {number * 100 + step for number in range(4) for step in range(10)}


HITS_THE_FILE_SIZE_LIMIT = """
manager = FileSystemCheckpointManager(folder)
save(manager, StepState(0))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    save(manager, StepState(1))
except CheckpointError as error:
    print(json.dumps([error.errno, str(error), os.listdir(folder)]))
"""


def test_a_file_that_may_not_grow_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    error_number, message, names = json.loads(run(HITS_THE_FILE_SIZE_LIMIT, tmp_path))
    assert error_number == 27
    assert "File too large (raise the limit on file sizes" in message
    assert names == ["0"]
    state = StepState()
    assert load_latest(FileSystemCheckpointManager(tmp_path), state) is not None
    assert state.step == 0


class TensorState:
    """Saved and loaded as users do it."""

    def __init__(self, size_bytes: int) -> None:
        self.tensor = torch.arange(size_bytes // 4, dtype=torch.float32)

    def save(self, stream: BinaryIO) -> None:
        torch.save({"tensor": self.tensor}, stream)

    def load(self, stream: BinaryIO) -> None:
        self.tensor = torch.load(stream, weights_only=True)["tensor"]


def assert_a_large_save_fails_and_a_small_one_stays(folder: Path, reason: str) -> None:
    manager = FileSystemCheckpointManager(folder)
    save(manager, TensorState(1 << 19))
    for _ in range(3):
        with pytest.raises(CheckpointError, match=reason):
            save(manager, TensorState(8 << 20))
        assert [path.name for path in folder.iterdir()] == ["0"]
    state = TensorState(0)
    assert load_latest(manager, state) is not None
    assert torch.equal(state.tensor, TensorState(1 << 19).tensor)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"may not mount here: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_full_disk_is_named_although_torch_save_hides_it(small_disk: Path) -> None:
    assert_a_large_save_fails_and_a_small_one_stays(small_disk, r"No space left on device \(the disk is full")


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("file_size_limit")
def test_a_limit_on_file_sizes_is_named_although_torch_save_hides_it(tmp_path: Path) -> None:
    assert_a_large_save_fails_and_a_small_one_stays(tmp_path, r"File too large \(raise the limit")


@pytest.mark.usefixtures("file_size_limit")
def test_a_stream_whose_error_was_swallowed_cannot_be_committed(tmp_path: Path) -> None:
    checkpoint = FileSystemCheckpointManager(tmp_path).create_checkpoint()
    stream = checkpoint.open_output_stream("default")
    try:
        stream.write(bytes(8 << 20))
    except OSError:
        stream.write(b"and so on")
    with pytest.raises(CheckpointError, match="File too large"):
        checkpoint.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_training(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(8 << 20))
    with pytest.raises(CheckpointError, match=r"could not prepare the folder for checkpoints: No space left"):
        FileSystemCheckpointManager(small_disk)
