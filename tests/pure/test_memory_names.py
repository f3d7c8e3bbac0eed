"""Ids and names of checkpoints in memory, and the commit as it is stored."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory import CheckpointContainerId, CheckpointObjectId
from torchelastic.checkpoint.memory.commit import (
    Commit,
    CommitHead,
    StoredItem,
    candidate_from,
    commit_from,
    content_of,
    decode_metadata,
    encode_metadata,
    meta_of,
)
from torchelastic.checkpoint.memory.ids import COMMIT_FILE, ObjectName, is_part, meta_of_shard, require_shard
from torchelastic.checkpoint.store.save_id import SaveId, ShardId, file_name_of

BASE = CheckpointContainerId("/dev/shm/jobs/145")
SAVE = SaveId(1, 0, 3, 20, "5f0c1a2b")


def test_an_id_is_a_path_without_slashes_at_its_end() -> None:
    assert str(CheckpointContainerId("/a/b//".rstrip("/") + "/")) == "/a/b"
    assert CheckpointContainerId("/a/b/") == CheckpointContainerId("/a/b") == "/a/b"
    assert CheckpointContainerId("/a/b").name == "b"


@pytest.mark.parametrize("text", ["", "a/b", "/", "//", "/a//b", "/a/.", "/a/..", "/a/../b", "/a./b"])
def test_what_is_no_path_of_a_checkpoint_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="id of a checkpoint"):
        CheckpointContainerId(text)


def test_a_child_lies_in_its_parent() -> None:
    child = CheckpointContainerId.create_child(BASE, CheckpointContainerId.format_version_container(20))
    assert str(child) == "/dev/shm/jobs/145/step-20_ckpt"
    assert child.get_parent() == BASE
    assert child.get_parent(3) == "/dev/shm"
    assert child.get_parent(5) is None
    assert CheckpointContainerId.create_child(BASE, "/") == BASE
    assert str(CheckpointObjectId.from_container(child, "common.pt")) == f"{child}/common.pt"


def test_only_a_container_has_children() -> None:
    with pytest.raises(TypeError, match="str"):
        CheckpointContainerId.create_child("/a", "b")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="str"):
        CheckpointObjectId.from_container("/a", "b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a name"):
        CheckpointObjectId.from_container(BASE, " / ")
    with pytest.raises(ValueError, match="levels_up is 0"):
        BASE.get_parent(0)


@pytest.mark.parametrize(
    "name", ["step-20_ckpt_old", "xstep-20_ckpt", "step-020_ckpt", "step--1_ckpt", "step-20_ckpt\n"]
)
def test_only_the_exact_name_of_a_step_has_a_step(name: str) -> None:
    assert CheckpointContainerId.parse_version_container_step(name) is None


@pytest.mark.parametrize("step", [0, 1, 20, 10**12])
def test_the_name_of_a_step_gives_the_step(step: int) -> None:
    name = CheckpointContainerId.format_version_container(step)
    assert CheckpointContainerId.parse_version_container_step(name) == step
    match = CheckpointContainerId.get_version_container_pattern().fullmatch(name)
    assert match is not None
    assert int(match[1]) == step


@pytest.mark.parametrize("step", [-1, True, 1.0, "1"])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(ValueError, match="is no step"):
        CheckpointContainerId.format_version_container(step)


@pytest.mark.parametrize(
    "text",
    [
        "145/step-20_ckpt/../../etc/passwd",
        "145/step-20_ckpt/common.pt",
        "145/step-20_ckpt/other.shard",
        f"../step-20_ckpt/{COMMIT_FILE}",
        f".job/step-20_ckpt/{COMMIT_FILE}",
        f"145/step-20/{COMMIT_FILE}",
        f"/145/step-20_ckpt/{COMMIT_FILE}",
        f"145/step-20_ckpt/{COMMIT_FILE}/",
        "",
    ],
)
def test_only_shards_and_commits_have_names_between_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="is no object of a checkpoint"):
        ObjectName.parse(text)


def test_the_name_of_an_object_is_read_back() -> None:
    for file in (COMMIT_FILE, file_name_of(ShardId(SAVE, 3, 8))):
        name = ObjectName("job-7", 20, file)
        assert ObjectName.parse(str(name)) == name


@pytest.mark.parametrize("text", ["", ".hidden", "a/b", "a b", "a.", "x" * 129, "ä"])
def test_what_may_not_be_part_of_a_name(text: str) -> None:
    assert not is_part(text)


def tensor_metadata(dtype: torch.dtype = torch.float32) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
        ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3])),
    ]
    properties = TensorProperties(dtype, requires_grad=True, memory_format=torch.channels_last)
    return TensorStorageMetadata(properties, torch.Size([4, 3]), chunks)


def metadata() -> Metadata:
    made = Metadata(
        {"model.weight": tensor_metadata(), "half": tensor_metadata(torch.float8_e4m3fn), "lr": BytesStorageMetadata()},
        planner_data={"model.weight": ("model", "weight"), "lr": ("groups", 0, "lr")},
        storage_data={
            MetadataIndex("model.weight", [0, 0]): StoredItem(file_name_of(ShardId(SAVE, 0, 2)), "model.weight"),
            MetadataIndex("model.weight", [2, 0]): StoredItem(file_name_of(ShardId(SAVE, 1, 2)), "model.weight"),
            MetadataIndex("lr"): StoredItem(file_name_of(ShardId(SAVE, 0, 2)), "lr"),
        },
        storage_meta=StorageMeta(checkpoint_id="/a/b", save_id="1"),
    )
    made.mcore_data = {"layout": (1, 2)}  # type: ignore[attr-defined]
    return made


def commit() -> Commit:
    return Commit(SAVE, 2, metadata(), {"common.pt": b"\x00\x01", "empty": b""})


def test_metadata_are_stored_without_pickles_and_read_back_equal() -> None:
    encoded = encode_metadata(metadata())
    json.loads(encoded)
    found = decode_metadata(encoded)
    assert found == metadata()
    assert found.planner_data["lr"] == ("groups", 0, "lr")
    assert found.mcore_data == {"layout": (1, 2)}  # type: ignore[attr-defined]


def test_a_commit_is_read_back_equal() -> None:
    assert commit_from(meta_of(commit()), content_of(commit())) == commit()


def test_what_a_commit_consists_of_is_known_without_its_content() -> None:
    made = commit()
    assert candidate_from(meta_of(made)) == CommitHead(SAVE, 2)
    assert made.files == [file_name_of(ShardId(SAVE, 0, 2)), file_name_of(ShardId(SAVE, 1, 2))]


class Strange:
    pass


def test_metadata_that_cannot_be_stored_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'lr' by a Strange"):
        encode_metadata(Metadata({"lr": Strange()}))  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="Strange"):
        encode_metadata(Metadata({}, planner_data={"a": Strange()}))
    with pytest.raises(TypeError, match="planner_data of the checkpoint holds tensors"):
        encode_metadata(Metadata({}, planner_data={"a": torch.ones(1)}))


@pytest.mark.parametrize(
    "change",
    [
        {"save": "../etc"},
        {"save": 20},
        {"save": "step-000000020.e1.r0.g4.5f0c1a2b"},
        {"save": "step-000000020.e1.r0.g3.ffffffff"},
        {"world_size": None},
        {"world_size": 1},
        {"world_size": 3},
        {"world_size": 0},
        {"world_size": 10**15},
    ],
)
def test_a_commit_that_makes_no_sense_is_damage(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="its commit makes no sense"):
        commit_from({**meta_of(commit()), **change}, content_of(commit()))


@pytest.mark.parametrize("file", ["../../x", "commit.shard"])
def test_metadata_cannot_lead_to_other_files(file: str) -> None:
    metadata = Metadata({}, storage_data={MetadataIndex("w"): StoredItem(file, "w")})
    content = {
        **content_of(commit()),
        "metadata": torch.frombuffer(bytearray(encode_metadata(metadata)), dtype=torch.uint8),
    }
    with pytest.raises(CorruptCheckpointError, match="is no shard of step-000000020"):
        commit_from(meta_of(commit()), content)


@pytest.mark.parametrize("name", ["commit.shard", "../x", ".job", "a/b", "x.shard"])
def test_an_extra_file_cannot_take_the_place_of_another(name: str) -> None:
    content = content_of(commit())
    content["extras"] = {name: torch.zeros(1, dtype=torch.uint8)}
    with pytest.raises(CorruptCheckpointError, match="cannot be the name of an extra file"):
        commit_from(meta_of(commit()), content)


def test_a_commit_of_a_newer_release_is_named_as_such() -> None:
    with pytest.raises(CheckpointError, match="version 2; this release reads version 1") as error:
        candidate_from({**meta_of(commit()), "version": 2})
    assert not isinstance(error.value, CorruptCheckpointError)


def test_a_shard_of_another_name_is_refused() -> None:
    shard = ShardId(SAVE, 1, 4)
    require_shard(shard, {**meta_of_shard(shard), "more": 1}, "a file")
    with pytest.raises(CorruptCheckpointError, match=r"a file holds another shard .* of rank 2 of 4 of step-000000020"):
        require_shard(shard, {**meta_of_shard(shard), "rank": 2}, "a file")
    with pytest.raises(CorruptCheckpointError, match="renamed or replaced"):
        require_shard(shard, meta_of_shard(ShardId(SaveId(1, 0, 3, 21, "5f0c1a2b"), 1, 4)), "a file")
