"""Checkpoints on file systems as they are: an overlay whose lower layer has folders, and FAT in a file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contracts.facades import KINDS, outcome
from tests.contracts.faults import in_child
from tests.process.small_tmpfs import small_tmpfs
from torchelastic.doctor.folder_rules import gather_folder
from torchelastic.file_systems import Call

AS_ROOT = "run `sudo .venv/bin/python -m pytest tests/process/test_real_file_systems.py`"


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Something on a folder; where that is impossible the test is skipped, with the reason."""
    folder.mkdir()
    done = subprocess.run(["mount", *arguments, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount ({done.stderr.strip()}): {AS_ROOT}, with a kernel that has {arguments[1]}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_folders_of_a_lower_layer_which_overlayfs_does_not_rename_are_replaced_by_newer_ones(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "layers", 2**26) as layers:  # an overlay takes no upper layer of another overlay
        lower, upper, work = (layers / name for name in ("lower", "upper", "work"))
        for folder in (lower, upper, work):
            folder.mkdir()
        in_child(lambda: KINDS["training"].save(lower / "saved", 1))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        with mounted(tmp_path / "merged", "-t", "overlay", "overlay", "-o", options) as merged:
            saved = merged / "saved"
            with pytest.raises(OSError, match="cross-device"):
                saved.rename(merged / "elsewhere")  # the fault happens
            told = in_child(lambda: outcome(lambda: KINDS["training"].save(saved, 2))).value
            assert "error" not in told, told
            assert in_child(lambda: KINDS["training"].resume(saved)).value == 2
            steps = [path.name for path in saved.iterdir() if "step-" in path.name]
            assert [".e2." in name for name in steps] == [True], "the one of the lower layer is gone"


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_disk_of_fat_has_no_links_and_no_modes_and_keeps_checkpoints(name: str, tmp_path: Path) -> None:
    if shutil.which("mkfs.vfat") is None:
        pytest.skip(f"no mkfs.vfat: `apt-get install dosfstools`, then {AS_ROOT}")
    image = tmp_path / "image"
    with image.open("wb") as file:
        os.truncate(file.fileno(), 2**26)
    subprocess.run(["mkfs.vfat", str(image)], check=True, capture_output=True)
    with mounted(tmp_path / "fat", "-t", "vfat", "-o", "loop", str(image)) as fat:
        facts = gather_folder(fat)
        assert not facts.failed
        assert Call.LINK in facts.abilities.lacking
        assert (facts.abilities.has_modes, facts.abilities.has_case) == (False, False)
        for step in (1, 2):
            told = in_child(lambda step=step: outcome(lambda: KINDS[name].save(fat / "saved", step))).value  # type: ignore[misc]
            assert "error" not in told, told
        assert in_child(lambda: KINDS[name].resume(fat / "saved")).value == 2
