"""Real small disks: full, read-only, out of file names. They are mounted, which only root may do."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.shards import flatten, load_tree, save_tree
from torchelastic.checkpoint.shards.disk import is_in_memory
from torchelastic.checkpoint.shards.header import lay_out
from torchelastic.checkpoint.shards.pool import SlotPool, remove_left_overs
from torchelastic.checkpoint.shards.slot import Slot

SIZE_BYTES = 2**20

Mount = Callable[[str], Path]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mount]:
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a small disk ({done.stderr.strip()}): run `sudo make test`")
        return folder

    yield mount
    while os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def state(size_bytes: int, number: int = 0) -> dict[str, Any]:
    return {"w": torch.full((size_bytes // 4,), float(number)), "n": number}


def descriptors() -> int:
    gc.collect()  # what tests before this one have left goes now, and not in between
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_full_disk_leaves_nothing_behind_and_the_next_save_works(mounted: Mount) -> None:
    folder = mounted(f"size={SIZE_BYTES}")
    save_tree(folder / "old", state(SIZE_BYTES // 4, 1))
    before = descriptors()
    with pytest.raises(CheckpointError, match="the disk is full; free space") as caught:
        save_tree(folder / "new", state(SIZE_BYTES, 2))
    assert caught.value.errno == errno.ENOSPC
    assert Path(str(caught.value.filename)).parent == folder
    assert [path.name for path in folder.iterdir()] == ["old"]
    assert descriptors() == before
    save_tree(folder / "new", state(SIZE_BYTES // 4, 2))
    assert (load_tree(folder / "old")["n"], load_tree(folder / "new")["n"]) == (1, 2)


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, 4 * SIZE_BYTES])
def test_a_slot_that_does_not_fit_is_an_error_before_anything_is_copied(mounted: Mount, size_bytes: int) -> None:
    folder = mounted(f"size={SIZE_BYTES}")
    before = descriptors()
    with pytest.raises(CheckpointError, match="the disk is full; free space") as caught:
        Slot(size_bytes + 4096, folder / "slot")
    assert caught.value.filename == str(folder / "slot")
    assert not list(folder.iterdir())
    assert descriptors() == before


def test_a_pool_on_a_full_disk_keeps_what_it_has(mounted: Mount) -> None:
    folder = mounted(f"size={SIZE_BYTES}")
    pool = SlotPool(folder)
    for number in range(20):
        flat = flatten(state(SIZE_BYTES // 3, number))
        header = lay_out(flat, {})
        try:
            stage = pool.take(header)
        except CheckpointError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 - the remedy follows
            pool.retire(folder / str(number - 2))
            stage = pool.take(header)
        stage.copy([named.tensor for named in flat.tensors])
        stage = pool.seal(stage, header)
        pool.publish(stage, folder / str(number))
    assert sorted(path.name for path in folder.iterdir()) == ["18", "19"]
    assert [load_tree(folder / name)["n"] for name in ("18", "19")] == [18, 19]


def test_a_disk_without_file_names_left(mounted: Mount) -> None:
    folder = mounted(f"size={SIZE_BYTES},nr_inodes=3")
    save_tree(folder / "one", state(64))
    (folder / "two").touch()
    for make in (lambda: save_tree(folder / "three", state(64)), lambda: Slot(64, folder / "slot")):
        with pytest.raises(CheckpointError, match="the disk is full"):
            make()
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]


def test_a_read_only_disk_can_be_read_and_says_what_to_do(mounted: Mount) -> None:
    folder = mounted(f"size={SIZE_BYTES}")
    save_tree(folder / "old", state(64, 1))
    (folder / ".tmp-1-left").touch()
    mounted("remount,ro")
    for make in (lambda: save_tree(folder / "new", state(64)), lambda: Slot(64, folder / "slot")):
        with pytest.raises(CheckpointError, match="it is mounted read-only; remount it"):
            make()
    assert load_tree(folder / "old")["n"] == 1
    assert remove_left_overs(folder) == 0
    with pytest.raises(CheckpointError, match="read-only"):
        SlotPool(folder).retire(folder / "old")


def test_a_disk_that_became_read_only_keeps_the_published_shard(mounted: Mount) -> None:
    folder = mounted(f"size={SIZE_BYTES}")
    pool = SlotPool(folder)
    flat = flatten(state(64, 5))
    header = lay_out(flat, {})
    stage = pool.take(header)
    stage.copy([named.tensor for named in flat.tensors])
    stage.seal(header)
    pool.publish(stage, folder / "shard")
    stage.slot.flush()
    # a writable map of it is held, so the disk itself cannot be remounted: a read-only bind above it can
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
    with pytest.raises(CheckpointError, match="read-only"):
        pool.retire(folder / "shard")
    assert load_tree(folder / "shard")["n"] == 5
    subprocess.run(["umount", str(folder)], check=True)
    pool.retire(folder / "shard")  # it is still the pool's, and can be retired now
    pool.close()
    assert not list(folder.iterdir())


def test_a_limit_on_file_sizes_is_an_error_and_no_signal(tmp_path: Path) -> None:
    import resource
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as the interpreter does by itself
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE_BYTES, hard))
    try:
        for make in (
            lambda: save_tree(tmp_path / "new", state(2 * SIZE_BYTES)),
            lambda: Slot(2 * SIZE_BYTES, tmp_path / "slot"),
        ):
            with pytest.raises(CheckpointError, match="raise the limit on file sizes"):
                make()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_memory_that_there_is_not_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="map memory for the checkpoint"):
        Slot(2**60)


def test_what_lies_in_memory_is_known(tmp_path: Path) -> None:
    assert is_in_memory(Path("/dev/shm"))
    assert is_in_memory(Path("/dev/shm") / "not" / "there" / "yet")
    assert not is_in_memory(Path("/proc/self"))
