"""Whether a save has room: the decision, and the numbers it is made from."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory.room import Free, cgroup_available_bytes, held_bytes, measure, refused_for
from torchelastic.checkpoint.memory.skipping import SkippedSaves

MIB = 2**20
sizes = st.integers(0, 2**50)


@pytest.mark.parametrize(
    ("needed", "tmpfs", "ram", "reason"),
    [
        (100, 100, 110, None),
        (101, 100, 1000, "tmpfs"),
        (100, 100, 109, "ram"),
        (101, 100, 0, "tmpfs"),
        (100, None, 110, None),
        (100, None, 109, "ram"),
        (0, 0, 0, None),
    ],
)
def test_both_the_tmpfs_and_the_memory_count(needed: int, tmpfs: int | None, ram: int, reason: str | None) -> None:
    why = refused_for(needed, Free(tmpfs, ram), margin_bytes=10)
    assert (why and why.reason) == reason


@given(sizes, st.none() | sizes, sizes, sizes, sizes)
def test_less_need_and_more_room_never_turn_a_yes_into_a_no(
    needed: int, tmpfs: int | None, ram: int, margin: int, change: int
) -> None:
    if refused_for(needed, Free(tmpfs, ram), margin) is None:
        assert refused_for(max(0, needed - change), Free(tmpfs, ram), margin) is None
        assert refused_for(needed, Free(None if tmpfs is None else tmpfs + change, ram + change), margin) is None
        assert needed == 0 or needed + margin <= ram


@pytest.mark.parametrize(
    ("needed", "tmpfs", "ram", "margin"), [(-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)]
)
def test_negative_numbers_are_refused(needed: int, tmpfs: int, ram: int, margin: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        refused_for(needed, Free(tmpfs, ram), margin)


def test_the_reason_tells_need_room_and_remedy() -> None:
    full = str(refused_for(300 * MIB, Free(200 * MIB, 4096 * MIB), 256 * MIB))
    for words in ("300 MiB", "200 MiB", "4.00 GiB", "256 MiB", "size=", "prune --dead"):
        assert words in full
    poor = str(refused_for(300 * MIB, Free(None, 100 * MIB)))
    for words in ("no limit on the tmpfs", "100 MiB of memory", "memory limit", "prune --dead"):
        assert words in poor


# --- measuring --------------------------------------------------------------------------------------------------------


def group(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def stat_text(inactive: int, active: int) -> str:
    return f"anon 5\nshmem 900\ninactive_file {inactive}\nactive_file {active}\nsock 0"


def test_the_strictest_group_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("0::/kubepods/pod7\n")
    root = tmp_path / "cgroup"
    group(root / "kubepods/pod7", max=1000, high="max", current=700, stat=stat_text(50, 30))
    assert cgroup_available_bytes(root, tmp_path / "self") == 1000 - 700 + 80
    group(root / "kubepods/pod7", high=900)
    assert cgroup_available_bytes(root, tmp_path / "self") == 900 - 700 + 80
    group(root / "kubepods", max=2000, current=1900, stat=stat_text(0, 1))
    assert cgroup_available_bytes(root, tmp_path / "self") == 101
    group(root / "kubepods", max=2000, current=2500, stat=stat_text(0, 1))
    assert cgroup_available_bytes(root, tmp_path / "self") == 0


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_available_bytes(tmp_path / "cgroup", tmp_path / "self") is None
    (tmp_path / "self").write_text("nonsense\n\n0::/../..\n")
    assert cgroup_available_bytes(tmp_path / "cgroup", tmp_path / "self") is None


def test_the_lower_of_host_and_group_is_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "self").write_text("0::/\n")
    group(tmp_path / "cgroup", max=1000, current=400)

    def measured(host_bytes: int, blocks: int) -> Free:
        return measure(
            tmp_path,
            statvfs=lambda _: os.statvfs_result((4096, 512, blocks, 30, 20, 0, 0, 0, 0, 255)),
            host_available_bytes=lambda: host_bytes,
            cgroup_root=tmp_path / "cgroup",
            self_cgroup=tmp_path / "self",
        )

    assert measured(500, 100) == Free(20 * 512, 500)
    assert measured(601, 100) == Free(20 * 512, 600)
    assert measured(500, 0).tmpfs_bytes is None


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="room on a file system"):
        measure(tmp_path / "gone")


def test_what_is_held_counts_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "step-1_ckpt").mkdir()
    (tmp_path / "step-1_ckpt" / "a.shard").write_bytes(b"x" * MIB)
    alone = held_bytes(tmp_path)
    assert alone >= MIB
    os.link(tmp_path / "step-1_ckpt" / "a.shard", tmp_path / ".tmp-1")
    assert held_bytes(tmp_path) == alone
    (tmp_path / ".tmp-2").write_bytes(b"x" * MIB)
    assert held_bytes(tmp_path) >= alone + MIB


# --- skipping ---------------------------------------------------------------------------------------------------------


def test_warnings_come_at_powers_of_two_and_metrics_always(caplog: pytest.LogCaptureFixture) -> None:
    published: list[tuple[str, str, float]] = []
    skips = SkippedSaves(lambda *metric: published.append(metric))
    why = refused_for(300 * MIB, Free(200 * MIB, 4096 * MIB))
    assert why is not None
    with caplog.at_level(logging.WARNING):
        for step in range(1, 10):
            skips.skipped(f"step {step}", why.reason, why.because)
    warned = [record.getMessage() for record in caplog.records]
    assert [text.split(" was skipped")[0] for text in warned] == [f"the checkpoint of step {n}" for n in (1, 2, 4, 8)]
    assert why.because in warned[0]
    assert "8 saves have been skipped" in warned[-1]
    assert ("torchelastic", "checkpoint.memory.skipped.tmpfs", 9) in published
    assert len(published) == 18


def test_another_reason_is_heard_at_once(caplog: pytest.LogCaptureFixture) -> None:
    skips = SkippedSaves(lambda *_: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            skips.skipped("step 1", "ram", "little memory")
        skips.skipped("step 5", "replica", "host B does not answer")
    assert [("host B" in record.getMessage()) for record in caplog.records] == [False, False, False, True]
    assert (skips.count(), skips.count("ram"), skips.count("replica"), skips.count("disk")) == (5, 4, 1, 0)


def test_the_gauge_says_what_is_held(tmp_path: Path) -> None:
    published: list[tuple[str, str, float]] = []
    (tmp_path / "a").write_bytes(b"x" * MIB)
    held = SkippedSaves(lambda *metric: published.append(metric)).publish_held(tmp_path)
    assert published == [("torchelastic", "checkpoint.memory.held.bytes", held)]
    assert held >= MIB
