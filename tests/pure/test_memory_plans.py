"""What ranks tell each other before a save, and how what they write is laid out."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from torchelastic.checkpoint.memory import plans
from torchelastic.checkpoint.memory.items import (
    BYTES_ENTRY,
    CachedLayout,
    Resolved,
    entries_in_place,
    entries_of_pickles,
    resolve,
)
from torchelastic.checkpoint.memory.plans import CoordinatorDecision, NotSavedError, RankReport, epoch_of, refusal
from torchelastic.checkpoint.memory.room import DEFAULT_MARGIN_BYTES, Free, NotSaved
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
    assert refusal([report(0), report(1)], [None, None]) is None
    refused = refusal([report(0), report(1), report(2)], [None] * 3)
    assert refused is not None
    assert (refused.reason, "'a'" in refused.because) == ("tmpfs", True)
    assert refusal([report(0), report(1, "b"), report(2, "c")], [None] * 3) is None


def test_the_fullest_view_of_a_host_counts() -> None:
    refused = refusal([report(0), report(1, free=Free(2 * GIB, GIB + DEFAULT_MARGIN_BYTES))], [None, None])
    assert refused is not None
    assert refused.reason == "ram"


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
    assert refusal([report(0), report(1, refused=why)], [None, None]) == why


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
