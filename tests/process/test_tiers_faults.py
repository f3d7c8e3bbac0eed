"""Writers that are killed at any call, disks that are full or read-only: each with the real thing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.tier_saves import context_of, hidden_in, name_at, restore, save
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.policy import KeepLast
from torchelastic.checkpoint.store import DiskTier, DurableTier, MemoryTier, Tier

ROOT = Path(__file__).parents[2]


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder without a slow disk below it, if there is one: what a kill leaves behind does not depend on the disk."""
    parent = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=parent if parent.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shared", "private", "memory"])
def test_a_writer_killed_at_every_call_leaves_the_old_checkpoint_or_the_new_one(kind: str, memory_folder: Path) -> None:
    command = [sys.executable, "-m", "tests.process.killed_saves", kind, str(memory_folder / "tier")]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60)
    outcomes = json.loads(ran.stdout)
    assert len(outcomes) > 25
    for committed, found, hidden, damage in outcomes:
        assert found in (committed, committed + 1)
        assert hidden == []
        assert damage == []
    advances = [found - committed for committed, found, *_ in outcomes]
    assert advances == sorted(advances)  # from some call on it is the new one
    assert (advances[0], advances[-1]) == (0, 1)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with these options; needs root."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
            pytest.skip("mounting a tmpfs needs root, with CAP_SYS_ADMIN")
        return folder

    yield mount
    while os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def tiers_on(folder: Path) -> list[Tier]:
    return [
        DiskTier(folder / "shared", KeepLast(2)),
        DiskTier(folder / "private", KeepLast(2), shared=False),
        MemoryTier(folder / "memory"),
        DurableTier(f"file://{folder}/durable", KeepLast(2)),
    ]


def fill(folder: Path) -> Path:
    """Writes a file until nothing more fits."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.parametrize("number", range(4))
def test_a_full_disk_leaves_the_checkpoint_before_and_the_next_save_works(
    number: int, mounted: Callable[[str], Path]
) -> None:
    folder = mounted("size=512k")
    tier = tiers_on(folder)[number]
    context = context_of(tier)
    tier.prepare(context)
    save([tier], name_at(1, epoch=context.epoch))
    ballast = fill(folder)
    with pytest.raises(CheckpointError) as raised:
        save([tier], name_at(2, epoch=context.epoch))
    assert raised.value.errno == errno.ENOSPC or "No space left" in str(raised.value)
    tier.abandon(name_at(2, epoch=context.epoch))
    assert restore(tier) == 1
    ballast.unlink()
    save([tier], name_at(3, epoch=context.epoch))
    assert restore(tier) == 3
    tier.close()
    assert hidden_in(folder) == []


@pytest.mark.parametrize("number", range(4))
def test_a_folder_that_is_read_only_is_named_and_can_be_read(number: int, mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=1m")
    tier = tiers_on(folder)[number]
    context = context_of(tier)
    tier.prepare(context)
    save([tier], name_at(1, epoch=context.epoch))
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    reader = tiers_on(folder)[number]
    assert restore(reader) == 1
    with pytest.raises(CheckpointError, match=r"[Rr]ead-only") as raised:
        reader.prepare(context_of(reader, epoch=context.epoch + 1))
    assert str(folder) in str(raised.value)
