"""What ranks tell each other before a save, how what they write is laid out, and whether there is room."""

from __future__ import annotations

import io
import logging
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from torchelastic.checkpoint.compat.flashpoint import plans
from torchelastic.checkpoint.compat.flashpoint.items import (
    BYTES_ENTRY,
    CachedLayout,
    Resolved,
    entries_in_place,
    entries_of_pickles,
    resolve,
)
from torchelastic.checkpoint.compat.flashpoint.plans import (
    CoordinatorDecision,
    NotSavedError,
    RankReport,
    epoch_of,
    why_skipped,
)
from torchelastic.checkpoint.compat.flashpoint.skipping import SkippedSaves
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.store.host_memory.room import (
    DEFAULT_MARGIN_BYTES,
    Free,
    NotSaved,
    cgroup_available_bytes,
    held_bytes,
    measure,
    why_no_room,
)
from torchelastic.checkpoint.store.save_id import SaveId

GIB = 2**30


def report(rank: int = 0, host: str = "a", **changes: Any) -> RankReport:
    return replace(RankReport("job/step-1_ckpt", rank, host, -1, (0, 0), GIB, 0, 0, Free(2 * GIB, 64 * GIB)), **changes)


def item(fqn: str, *offset: int, sizes: tuple[int, ...] = (4,), of: tuple[int, ...] | None = None) -> WriteItem:
    offset = offset or (0,) * len(sizes)
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(of or sizes))
    kind = WriteItemType.SHARD if of else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(fqn, torch.Size(offset)), kind, tensor_data=data)


def pickled(fqn: str, size: int) -> tuple[WriteItem, memoryview]:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO), memoryview(bytes(size))


# --- is there room ----------------------------------------------------------------------------------------------------


def test_ranks_of_one_host_need_room_together() -> None:
    assert why_skipped([report(0), report(1)], [None, None]) is None
    why_not = why_skipped([report(0), report(1), report(2)], [None] * 3)
    assert why_not is not None
    assert (why_not.reason, "'a'" in why_not.because) == ("tmpfs", True)
    assert why_skipped([report(0), report(1, "b"), report(2, "c")], [None] * 3) is None


def test_the_fullest_view_of_a_host_counts() -> None:
    why_not = why_skipped([report(0), report(1, free=Free(2 * GIB, GIB + DEFAULT_MARGIN_BYTES))], [None, None])
    assert why_not is not None
    assert why_not.reason == "ram"


@pytest.mark.parametrize(
    ("changes", "share", "expected"),
    [
        ({}, None, GIB),
        ({}, 100, 100),
        ({}, 5 * GIB, GIB),
        ({"warm_bytes": GIB}, None, 0),
        ({"warm_bytes": GIB - 1}, None, GIB),
        ({"copied_bytes": GIB}, None, 0),
        ({"copied_bytes": GIB}, 100, 100),
        ({"copied_bytes": GIB, "warm_bytes": 100}, 100, 0),
    ],
)
def test_what_a_rank_allocates(changes: dict[str, Any], share: int | None, expected: int) -> None:
    assert report(**changes).allocates_bytes(share) == expected


def test_a_rank_that_refuses_is_heard_first() -> None:
    why = NotSaved("ram", "no memory", 1)
    assert why_skipped([report(0), report(1, why_not=why)], [None, None]) == why


def test_plans_that_stand_for_cached_ones_say_nothing_of_shares() -> None:
    plan = SavePlan([item("w", sizes=(2, 3))])
    assert plans.shares_bytes([plan, SavePlan([])]) == [24, 0]
    assert plans.shares_bytes([plan, SavePlan([], usable=False)]) == [None, None]


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        ([(0, 0), (0, 0)], 1),
        ([(3, 3), (3, 3)], 3),
        ([(0, 3), (0, 3)], 4),  # after a start
        ([(3, 3), (0, 3)], 4),  # one rank was replaced
        ([(0, 0), (0, 3)], 4),  # a host has lost its memory
        ([(3, 3), (3, 2)], 4),
    ],
)
def test_ranks_of_which_one_is_new_save_in_an_epoch_of_their_own(epochs: list[tuple[int, int]], expected: int) -> None:
    assert epoch_of([report(rank, epochs=each) for rank, each in enumerate(epochs)]) == expected


# --- messages ---------------------------------------------------------------------------------------------------------


def sent(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))


def test_notes_arrive_though_a_planner_has_dropped_them() -> None:
    first, second = report(0), report(1)
    assert (sent(first), sent(second)) == (first, second)
    assert plans.collect_reports(first.about, [SavePlan([], usable=False)] * 2) == [first, second]
    with pytest.raises(RuntimeError, match="rank 0 has said nothing"):
        plans.collect_reports(first.about, [SavePlan([])] * 2)


def test_a_ticket_that_has_arrived_counts_more_than_an_old_one_in_the_plan() -> None:
    old = CoordinatorDecision("job/step-7_ckpt", 0, 1, SaveId(1, 0, 0, 7))
    new = sent(replace(old, save=SaveId(1, 0, 1, 7)))
    plan = SavePlan([], storage_data=old)
    assert plans.collect_decision(old.about, plan) == new
    assert plans.collect_decision(old.about, plan) == old
    with pytest.raises(RuntimeError, match="said nothing about job/step-8_ckpt"):
        plans.collect_decision("job/step-8_ckpt", plan)


def test_letters_that_nobody_collects_are_few() -> None:
    for step in range(100):
        plans.deliver(CoordinatorDecision(f"job/step-{step}_ckpt", 0, 1, SaveId(1, 0, 0, step)))
        plans.deliver(report(about=f"job/step-{step}_ckpt"))
    assert len(plans._messages) == plans._KEPT


def test_the_reason_of_a_save_that_is_left_out_survives_its_way() -> None:
    why = NotSaved("replica", "no peer", 3)
    error = sent(NotSavedError(why))
    assert (error.why, str(error)) == (why, "rank 3: no peer")


# --- layout -----------------------------------------------------------------------------------------------------------


def resolved(size: int = 100) -> Resolved:
    tensors = [(item("a"), torch.zeros(4)), (item("b", 4, sizes=(2,), of=(8,)), torch.ones(2))]
    return Resolved(tensors, [pickled("p", size), pickled("q", 5)], ["a", "b", "p", "q"])


def test_pickles_lie_behind_the_tensors_which_do_not_move_for_them() -> None:
    layout = CachedLayout()
    header = layout.of_items(resolved(100))
    assert layout.of_items(resolved(200)) is header
    assert [entry.name for entry in header.entries] == ["a", "b", BYTES_ENTRY]
    found = entries_of_pickles(resolved(100), header.entries[-1])
    assert [(entry.name, entry.offset_bytes, entry.size_bytes) for entry in found] == [("p", 128, 100), ("q", 256, 5)]
    assert layout.of_items(resolved(100_000)) is not header


def test_a_change_of_a_tensor_is_laid_out_anew() -> None:
    layout = CachedLayout()
    header = layout.of_items(resolved())
    changed = resolved()
    changed.tensors[0] = (item("a"), torch.zeros(4, dtype=torch.float64))
    assert layout.of_items(changed) is not header
    assert layout.of_items(changed).entries[0].dtype == "float64"


def copied() -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """Memory with two tensors in it, as `stage` lays them out."""
    header = CachedLayout().of_copy([torch.zeros(4), torch.zeros(2)], 2, 1000)
    memory = torch.zeros(header.data_bytes, dtype=torch.uint8)
    places = [memory[e.offset_bytes : e.offset_bytes + e.size_bytes].view(torch.float32) for e in header.entries[:-1]]
    return memory, header, places


def test_a_copy_of_all_that_is_planned_is_the_shard() -> None:
    memory, header, (a, b) = copied()
    items = [(item("b", 4, sizes=(2,), of=(8,)), b), (item("a"), a), (item("e", sizes=(0,)), torch.empty(0))]
    found = entries_in_place(Resolved(items, [], ["b", "a", "e"]), header, memory.data_ptr())
    assert found is not None
    entries, names = found
    assert [(e.name, e.offset_bytes, e.shape, e.region.offsets) for e in entries[:2]] == [
        ("a", 0, (4,), (0,)),
        ("b", 64, (8,), (4,)),
    ]
    assert (names, entries[2].name, entries[2].size_bytes) == (["b", "a", "e"], "e", 0)


class Planner(DefaultSavePlanner):
    """Gives what it is told to."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.value


def test_pickles_that_may_run_code_are_refused() -> None:
    content = io.BytesIO()
    torch.save({"f": print}, content)
    plan = SavePlan([pickled("f", 0)[0]])
    with pytest.raises(TypeError, match=r"'f' .*allow_pickles=True"):
        resolve(plan, Planner(content))
    assert resolve(plan, Planner(content), allow_pickles=True).names == ["f"]


# --- whether a save has room: the decision, and the numbers it is made from -------------------------------------------


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
    why = why_no_room(needed, Free(tmpfs, ram), margin_bytes=10)
    assert (why and why.reason) == reason


@given(sizes, st.none() | sizes, sizes, sizes, sizes)
def test_less_need_and_more_room_never_turn_a_yes_into_a_no(
    needed: int, tmpfs: int | None, ram: int, margin: int, change: int
) -> None:
    if why_no_room(needed, Free(tmpfs, ram), margin) is None:
        assert why_no_room(max(0, needed - change), Free(tmpfs, ram), margin) is None
        assert why_no_room(needed, Free(None if tmpfs is None else tmpfs + change, ram + change), margin) is None
        assert needed == 0 or needed + margin <= ram


@pytest.mark.parametrize(
    ("needed", "tmpfs", "ram", "margin"), [(-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)]
)
def test_negative_numbers_are_refused(needed: int, tmpfs: int, ram: int, margin: int) -> None:
    with pytest.raises(ValueError, match="negative"):
        why_no_room(needed, Free(tmpfs, ram), margin)


def test_the_reason_tells_need_room_and_remedy() -> None:
    full = str(why_no_room(300 * MIB, Free(200 * MIB, 4096 * MIB), 256 * MIB))
    for words in ("300 MiB", "200 MiB", "4.00 GiB", "256 MiB", "size=", "prune --dead"):
        assert words in full
    poor = str(why_no_room(300 * MIB, Free(None, 100 * MIB)))
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
    why = why_no_room(300 * MIB, Free(200 * MIB, 4096 * MIB))
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
