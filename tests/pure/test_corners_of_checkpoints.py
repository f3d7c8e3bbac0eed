"""Checkpoints where something is missing, twice there, alone, or of a kind that nobody expects."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torchelastic.checkpoint.command.command_error import underlying
from torchelastic.checkpoint.compat.flashpoint.commit import StoredItem, records_of, storage_data_of
from torchelastic.checkpoint.compat.flashpoint.ids import CheckpointId
from torchelastic.checkpoint.compat.flashpoint.plans import tensor_bytes
from torchelastic.checkpoint.compat.flashpoint.staged_items import result_of
from torchelastic.checkpoint.compat.nvrx.local.names import header_meta
from torchelastic.checkpoint.compat.nvrx.local.state_dict import BasicTensorAwareStateDict
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError, explained
from torchelastic.checkpoint.format.tree import flatten, unflatten
from torchelastic.checkpoint.store import SaveId, ShardRecord
from torchelastic.checkpoint.store.host_memory.room import held_bytes
from torchelastic.checkpoint.store.save_id import ShardId, shard_file_name
from torchelastic.group.notes import Drawer
from torchelastic.group.peers import Alone

NAME = SaveId(1, 2, 3, 4)

# --- names and records ------------------------------------------------------------------------------------------------


def test_the_fence_orders_checkpoints_by_epoch_and_round_alone() -> None:
    assert NAME.token == (1, 2)


@pytest.mark.parametrize(
    ("rank", "size_bytes", "digest"), [(-1, 5, "0" * 32), (0, -5, "0" * 32), (0, 5, "0" * 31), (0, 5, "x" * 32)]
)
def test_a_record_of_no_shard_is_refused(rank: int, size_bytes: int, digest: str) -> None:
    with pytest.raises(ValueError, match="is no record of a shard"):
        ShardRecord(rank, shard_file_name(0, 1), size_bytes, digest)


def test_a_local_shard_says_which_it_is_in_its_header() -> None:
    shard = ShardId(SaveId(epoch=1, round=2, generation=7, step=40, nonce="0a1b2c3d"), 2, 4)
    assert header_meta(shard, "session") == {
        "kind": "local state",
        "session": "session",
        "checkpoint": "step-000000040.e1.r2.g7.0a1b2c3d",
        "iteration": 40,
        "rank": 2,
        "world_size": 4,
    }


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_without_a_number_keeps_its_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"could not read at .*: odd"), explained("read", tmp_path):
        raise OSError("odd")
    with pytest.raises(CheckpointError) as caught, explained("read", tmp_path):
        raise OSError(errno.ENOSPC, "words of a library")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("below", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_under_the_error_of_a_library_lies_what_the_system_said(below: BaseException) -> None:
    of_the_library, outer = RuntimeError("the writer was not closed"), ValueError("no checkpoint")
    of_the_library.__context__ = below
    outer.__cause__ = of_the_library
    assert underlying(outer) is below
    assert underlying(below) is below
    of_the_library.__context__ = None
    assert underlying(outer) is outer


# --- replicas and tiers -----------------------------------------------------------------------------------------------


def test_a_worker_alone_hears_itself() -> None:
    alone = Alone(round_number=3)
    assert alone.all_gather(("a", 1)) == [["a", 1]]  # as from another rank
    assert isinstance(alone.mailbox(), Drawer)
    alone.barrier()  # there is nobody to wait for
    assert alone.round_number == 3


# --- memory -----------------------------------------------------------------------------------------------------------


def test_only_tensors_count_as_tensor_bytes() -> None:
    properties = TensorProperties(torch.float32)
    whole = TensorWriteData(None, properties, torch.Size((3, 2)))  # type: ignore[arg-type]  # as caches of planners do
    items = [
        WriteItem(MetadataIndex("w"), WriteItemType.TENSOR, tensor_data=whole),
        WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO),
    ]
    assert tensor_bytes(SavePlan(items)) == 24


def test_a_file_that_goes_away_while_memory_is_counted_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stays").write_bytes(b"x" * 5000)
    (tmp_path / "goes").write_bytes(b"x" * 5000)
    both = held_bytes(tmp_path)
    lstat = Path.lstat

    def lstat_of_what_is_there(path: Path) -> object:
        if path.name == "goes":
            raise FileNotFoundError(errno.ENOENT, "gone")
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", lstat_of_what_is_there)
    assert 0 < held_bytes(tmp_path) < both


# --- shards -----------------------------------------------------------------------------------------------------------


def test_keys_that_are_written_alike_are_two_tensors() -> None:
    flat = flatten({math.nan: torch.zeros(1), float("nan"): torch.ones(1)})  # two keys: no NaN equals another
    names = [named.name for named in flat.tensors]
    assert names == ["~nan", "~nan~2"]
    back = unflatten(flat.structure, {named.name: named.tensor for named in flat.tensors})
    assert [float(value) for value in back.values()] == [0.0, 1.0]


def test_a_tensor_that_is_read_in_place_stays_the_one_that_was_given() -> None:
    flat = flatten({"w": torch.ones(2, 3).t()})
    (named,) = flat.tensors
    given = torch.zeros(3, 2)
    assert unflatten(flat.structure, {named.name: given}, in_place={named.name})["w"] is given
    assert unflatten(flat.structure, {named.name: given})["w"] is not given


# --- states -----------------------------------------------------------------------------------------------------------


def test_a_state_that_was_read_for_other_devices_keeps_those_it_has() -> None:
    tree = {"w": torch.zeros(2)}
    for devices, expected in (([torch.device("meta")], "meta"), ([], "cpu"), ([torch.device("meta")] * 2, "cpu")):
        made = BasicTensorAwareStateDict.from_tree(tree, devices)
        made.restore_tensor_device(non_blocking=False)
        assert [tensor.device.type for tensor in made.tensors] == [expected]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_tensor_goes_back_to_the_accelerator_that_is_here(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is played: where a tensor is sent is written down. A torch built for GPUs names one without any, too."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: is_there)
    moved: list[object] = []

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        moved.append((device, non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    for device in ("xpu", "cuda"):
        BasicTensorAwareStateDict.from_tree({"w": torch.zeros(2)}, [torch.device(device)]).restore_tensor_device()
    assert moved == ([(torch.device("xpu"), True)] if is_there else [])


def test_an_id_of_a_checkpoint_is_a_path_to_whoever_opens_it() -> None:
    assert Path(CheckpointId("/dev/shm/jobs/145/")) == Path("/dev/shm/jobs/145")


def test_what_is_explained_once_is_not_explained_again(tmp_path: Path) -> None:
    corrupt = CorruptCheckpointError("torn")
    with pytest.raises(CorruptCheckpointError) as caught, explained("read", tmp_path):
        raise corrupt
    assert caught.value is corrupt


def test_where_everything_lies_is_told_by_all_ranks() -> None:
    results = [
        [WriteResult(MetadataIndex(name), 4, StoredItem(f"{name}.shard", name)) for name in names]
        for names in (("a", "b"), ("c",))
    ]
    records = [ShardRecord(rank, shard_file_name(rank, 3), 64, f"{rank:032x}") for rank in (1, 0)]
    results += [[result_of(record)] for record in records]
    assert {index.fqn: item.entry for index, item in storage_data_of(results).items()} == {"a": "a", "b": "b", "c": "c"}
    assert records_of(results) == tuple(records[::-1])
