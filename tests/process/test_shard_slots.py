"""Slots: used again and again, and never under the eyes of a reader."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.process.open_files import open_files
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format.header import Header, lay_out
from torchelastic.checkpoint.format.pool import SlotPool, remove_left_overs
from torchelastic.checkpoint.format.stage import Stage
from torchelastic.checkpoint.shards import ShardReader, flatten, load_tree


def layout(tree: Any, meta: dict[str, Any] | None = None) -> tuple[Header, list[torch.Tensor]]:
    flat = flatten(tree)
    return lay_out(flat, meta or {}), [named.tensor for named in flat.tensors]


def filled(pool: SlotPool, tree: Any) -> Stage:
    header, sources = layout(tree)
    stage = pool.take(header)
    stage.copy(sources)
    return pool.seal(stage, header)


def save(pool: SlotPool, path: Path, tree: Any) -> Stage:
    stage = filled(pool, tree)
    pool.publish(stage, path)
    return stage


def state(number: int, length: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((length,), float(number)), "n": number}


def shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_thousand_saves_take_two_files_and_no_memory(tmp_path: Path) -> None:
    pool, process, inodes = SlotPool(tmp_path), psutil.Process(), set()
    for number in range(1000):
        save(pool, tmp_path / str(number), state(number, 5000))
        if number:
            pool.delete(tmp_path / str(number - 1))
        inodes.add((tmp_path / str(number)).stat().st_ino)
        if number == 10:
            before = open_files(tmp_path), process.memory_info().rss
    assert len(inodes) == 2
    assert len(names(tmp_path)) == 2
    assert open_files(tmp_path) == before[0]
    assert process.memory_info().rss - before[1] < 200 * 20_000, "it grew by a fifth of what was saved"
    assert load_tree(tmp_path / "999")["n"] == 999
    pool.close()
    assert names(tmp_path) == ["999"]
    assert (open_files(tmp_path), before[0]) == (0, 4), "a slot has two: its own, and that of its map"


def test_a_slot_is_not_used_again_while_a_tensor_that_was_mapped_lives(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    save(pool, tmp_path / "0", state(0))
    inode = (tmp_path / "0").stat().st_ino
    with ShardReader(tmp_path / "0") as reader:
        mapped = reader.map()
    pool.delete(tmp_path / "0")
    save(pool, tmp_path / "1", state(1))
    assert torch.equal(mapped["w"], torch.zeros(1000))
    assert (tmp_path / "1").stat().st_ino != inode
    del mapped
    gc.collect()
    inode = (tmp_path / "1").stat().st_ino
    pool.delete(tmp_path / "1")
    save(pool, tmp_path / "2", state(2))
    assert (tmp_path / "2").stat().st_ino == inode
    pool.close()


def test_readers_that_race_with_a_writer_never_see_a_mixture(tmp_path: Path) -> None:
    """The names are used again as well, as those of slots in memory are."""
    pool, stop, seen, faults = SlotPool(tmp_path), threading.Event(), [0, 0], []

    def read_on() -> None:
        while not stop.is_set():
            for name in ("a", "b"):
                try:
                    loaded = load_tree(tmp_path / name)
                except CorruptCheckpointError as error:
                    faults.append(error)
                except CheckpointError:
                    seen[1] += 1  # gone, or being removed
                else:
                    seen[0] += 1
                    if not bool((loaded["w"] == loaded["n"]).all()):
                        faults.append(loaded)

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(20_000):
        if number >= 1500 and seen[0] > 50:
            break
        name, other = ("a", "b") if number % 2 else ("b", "a")
        save(pool, tmp_path / name, state(number, 2000))
        if number:
            pool.delete(tmp_path / other)
    stop.set()
    for reader in readers:
        reader.join(20)
    assert not faults
    assert seen[0] > 50, "the readers hardly read"
    assert len(names(tmp_path)) <= 4
    pool.close()


def test_what_is_copied_is_not_read_before_it_is_sealed(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    stage = save(pool, tmp_path / "0", state(0))
    pool.delete(tmp_path / "0")
    header, sources = layout(state(1))
    again = pool.take(header)
    assert again.slot is stage.slot
    again.copy(sources)
    pool.publish(again, tmp_path / "torn")
    with pytest.raises(CorruptCheckpointError, match="does not begin like a finished shard"):
        load_tree(tmp_path / "torn")
    pool.close()


def test_a_slot_whose_file_somebody_else_has_replaced_is_given_back_and_not_used_again(tmp_path: Path) -> None:
    """As another process of the host does with a damaged shard: what has its name then is not the slot."""
    pool, other = SlotPool(tmp_path), SlotPool(tmp_path)
    for number in range(2):
        save(pool, tmp_path / str(number), state(number))
    (tmp_path / "0").unlink()
    (tmp_path / "1").unlink()
    save(other, tmp_path / "1", state(7))
    pool.delete(tmp_path / "1")
    assert names(tmp_path) == []
    save(pool, tmp_path / "2", state(2))
    assert load_tree(tmp_path / "2")["n"] == 2
    other.close()
    gc.collect()
    assert open_files(tmp_path) == 2, "one slot: its file and its map"
    pool.close()


def test_left_overs_of_the_living_stay(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    stage = filled(pool, state(0))
    (tmp_path / ".tmp-1-dead").write_bytes(b"x")
    (tmp_path / ".tmp-2-folder").mkdir()
    (tmp_path / ".tmp-3-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"y")
    assert remove_left_overs(tmp_path) == 1
    pool.publish(stage, tmp_path / "0")
    assert load_tree(tmp_path / "0")["n"] == 0
    assert (tmp_path / "elsewhere").exists()
    assert remove_left_overs(tmp_path / "absent") == 0
    pool.close()


def test_memory_that_is_discarded_goes_at_once_although_a_view_of_it_is_held() -> None:
    pool, process = SlotPool(None, at_once=True), psutil.Process()
    stages = [filled(pool, state(number, 16 * 2**20)) for number in (1, 2)]
    views = [stage.places[0] for stage in stages]
    before_bytes = process.memory_info().rss
    pool.release_memory(stages[0])
    pool.release(stages[1])
    pool.release_free_memory()
    assert before_bytes - process.memory_info().rss > 1.9 * views[0].nbytes
    assert not any(view.any() for view in views)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_change_after_the_copy_does_not_reach_the_shard(tmp_path: Path, at_once: bool) -> None:
    pool = SlotPool(tmp_path)
    tensors = {"own": torch.ones(400_000), "shared": shared(torch.ones(1000)), "view": torch.ones(9)[::2]}
    header, sources = layout(tensors)
    stage = pool.take(header)
    checksums = []
    if at_once:
        checksums = stage.copy_and_hash(sources)
    else:
        stage.copy(sources)
    for tensor in tensors.values():
        tensor.zero_()
    stage.seal(header.with_checksums(checksums) if checksums else header)
    pool.publish(stage, tmp_path / "0")
    assert all(bool((tensor == 1).all()) for tensor in load_tree(tmp_path / "0").values())
    pool.close()


def test_slots_that_are_dropped_with_their_pool_let_their_files_go(tmp_path: Path) -> None:
    for number in range(5):
        pool = SlotPool(tmp_path)
        save(pool, tmp_path / str(number), state(number))
        pool.release(filled(pool, state(9)))
        taken = filled(pool, state(9))
        del pool, taken
        gc.collect()
    assert names(tmp_path) == [str(number) for number in range(5)]
    assert open_files(tmp_path) == 0


def test_a_forked_child_that_drops_a_pool_leaves_its_parents_slots(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    stage = filled(pool, state(0))
    child = os.fork()
    if not child:
        try:
            del pool, stage
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    pool.publish(stage, tmp_path / "0")
    assert load_tree(tmp_path / "0")["n"] == 0
    pool.close()


def test_a_pool_gives_back_what_is_far_too_large_for_the_states_of_now(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path)
    for number in range(6):
        save(pool, tmp_path / str(number), state(number, 2**22 if number < 3 else 1000))
        if number:
            pool.delete(tmp_path / str(number - 1))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2**20
    pool.close()


@pytest.mark.parametrize("at_once", [1, 30])
def test_a_pool_gives_back_what_it_needed_for_a_while_and_no_more(tmp_path: Path, at_once: int) -> None:
    pool, inodes = SlotPool(tmp_path), set()
    for stage in [filled(pool, state(0)) for _ in range(2 * at_once + 3)]:
        pool.release(stage)
    for number in range(12 if at_once > 1 else 60):
        for part in range(at_once):
            save(pool, tmp_path / f"{number}-{part}", state(number))
        inodes |= {path.stat().st_ino for path in tmp_path.iterdir()}
        for path in tmp_path.glob(f"{number - 1}-*"):
            pool.delete(path)
    assert len(names(tmp_path)) == 2 * at_once
    assert len(inodes) == 2 * at_once + 3, "nothing was allocated anew"
    pool.close()
