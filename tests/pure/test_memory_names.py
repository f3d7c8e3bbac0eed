"""Ids and names of checkpoints in memory and of their jobs, and the commit as it is stored."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
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

from torchelastic.checkpoint.compat.flashpoint.commit import (
    Commit,
    StoredItem,
    commit_from,
    content_of,
    decode_metadata,
    encode_metadata,
    meta_of,
)
from torchelastic.checkpoint.compat.flashpoint.ids import (
    is_part,
    newest_of_step,
    object_of,
    parse_object,
    parts_of,
    shard_of,
)
from torchelastic.checkpoint.compat.flashpoint.job import container_name, known_run_id
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.memory import CheckpointContainerId, CheckpointObjectId
from torchelastic.checkpoint.store.manifest import Manifest, ShardRecord
from torchelastic.checkpoint.store.save_id import SaveId, shard_file_name

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


@pytest.mark.parametrize("step", [0, 1, 20, 10**12])
def test_the_name_of_a_step_gives_the_step(step: int) -> None:
    name = CheckpointContainerId.format_version_container(step)
    assert CheckpointContainerId.parse_version_container_step(name) == step
    match = CheckpointContainerId.get_version_container_pattern().fullmatch(name)
    assert match is not None
    assert int(match[1]) == step


def test_a_step_may_be_numpy_s_or_torch_s() -> None:
    for step in (np.int64(20), torch.tensor(20)):
        assert CheckpointContainerId.format_version_container(step) == "step-20_ckpt"


@pytest.mark.parametrize("step", [-1, True, 1.0, "1"])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(ValueError, match="is no step"):
        CheckpointContainerId.format_version_container(step)


COMMIT = shard_of(SAVE, 2, 2)


@pytest.mark.parametrize(
    "text",
    [
        f"145/{SAVE}/../../etc/passwd",
        f"145/{SAVE}/common.pt",
        f"145/{SAVE}/manifest.json",
        f"145/{SAVE}/shard-00000-of-00001.shard",
        f"145/{SAVE}/shard-00003-of-00003.shard",
        f"../{COMMIT}",
        f".job/{COMMIT}",
        f"145/step-20_ckpt/{COMMIT}",
        f"/145/{COMMIT}",
        f"145/{COMMIT}/",
        "",
    ],
)
def test_only_shards_have_names_between_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="is no object of a checkpoint"):
        parse_object(text)


def test_the_newest_save_of_a_step_is_that_with_the_greatest_name_of_those_with_a_commit() -> None:
    again, begun = SaveId(2, 0, 4, 20, "00000001"), SaveId(2, 0, 5, 20, "00000002")
    of_each = [shard_of(save, rank, 2) for save in (SAVE, again) for rank in (2, 0, 1)] + [shard_of(begun, 0, 2)]
    later = shard_of(SaveId(3, 0, 9, 30, "00000003"), 2, 2)
    objects = [*(object_of("145", shard) for shard in [*of_each, later]), object_of("146", later), "145/step-20_ckpt/x"]
    assert newest_of_step(objects, "145", 20) == [object_of("145", shard_of(again, rank, 2)) for rank in range(3)]
    assert newest_of_step(objects, "145", 21) == newest_of_step(objects, "146", 20) == []


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
            MetadataIndex("model.weight", [0, 0]): StoredItem(str(shard_of(SAVE, 0, 2)), "model.weight"),
            MetadataIndex("model.weight", [2, 0]): StoredItem(str(shard_of(SAVE, 1, 2)), "model.weight"),
            MetadataIndex("lr"): StoredItem(str(shard_of(SAVE, 0, 2)), "lr"),
        },
        storage_meta=StorageMeta(checkpoint_id="/a/b", save_id="1"),
    )
    made.mcore_data = {"layout": (1, 2)}  # type: ignore[attr-defined]
    return made


def record_of(rank: int) -> ShardRecord:
    return ShardRecord(rank, shard_file_name(rank, 3), 4096 + rank, f"{rank:032x}")


def commit() -> Commit:
    records = (record_of(0), record_of(1))
    return Commit(SAVE, records, metadata(), {"common.pt": b"\x00\x01", "empty": b""}, "job7", 12.5)


def test_metadata_are_stored_without_pickles_and_read_back_equal() -> None:
    encoded = encode_metadata(metadata())
    json.loads(encoded)
    found = decode_metadata(encoded)
    assert found == metadata()
    assert found.planner_data["lr"] == ("groups", 0, "lr")
    assert found.mcore_data == {"layout": (1, 2)}  # type: ignore[attr-defined]


def test_a_commit_is_read_back_equal() -> None:
    assert commit_from(meta_of(commit()), content_of(commit())) == commit()


def test_the_manifest_is_made_of_a_commit_and_its_own_shard() -> None:
    records = (record_of(0), record_of(1), record_of(2))
    assert commit().shard == COMMIT
    assert commit().manifest(record_of(2)) == Manifest(SAVE, "job7", 3, records, saved_s=12.5)


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
        {"checkpoint": "../etc"},
        {"checkpoint": 20},
        {"checkpoint": "step-000000020.e1.r0.g4.5f0c1a2b"},
        {"checkpoint": "step-000000020.e1.r0.g3.ffffffff"},
        {"kind": "local state"},
        {"rank": 1},
        {"world_size": None},
        {"world_size": 3},
        {"shards": []},
        {"shards": [[1, f"{0:032x}"]] * 3},
        {"shards": [[1, "no digest"]] * 2},
        {"shards": [[-1, f"{0:032x}"]] * 2},
        {"shards": 2},
        {"saved_s": "now"},
    ],
)
def test_a_commit_that_makes_no_sense_is_damage(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="its commit is damaged"):
        commit_from({**meta_of(commit()), **change}, content_of(commit()))


@pytest.mark.parametrize("file", ["../../x", str(COMMIT)])
def test_metadata_cannot_lead_to_other_files(file: str) -> None:
    metadata = Metadata({}, storage_data={MetadataIndex("w"): StoredItem(file, "w")})
    content = {**content_of(commit()), "metadata": encode_metadata(metadata)}
    with pytest.raises(CorruptCheckpointError, match="is no shard of step-000000020"):
        commit_from(meta_of(commit()), content)


@pytest.mark.parametrize("name", ["manifest.json", "../x", ".job", "a/b", "x.shard"])
def test_an_attached_file_cannot_take_the_place_of_another(name: str) -> None:
    content = content_of(commit())
    content["extras"] = {name: b"x"}
    with pytest.raises(CorruptCheckpointError, match="cannot be the name of an attached file"):
        commit_from(meta_of(commit()), content)


@pytest.mark.parametrize(
    "content", [{"metadata": 7}, {"extras": {"x": "text"}}, {"extras": [b"x"]}, {"metadata": b"["}]
)
def test_content_that_is_none_is_damage(content: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="its commit is damaged"):
        commit_from(meta_of(commit()), {**content_of(commit()), **content})


def test_a_commit_of_a_newer_release_is_named_as_such() -> None:
    with pytest.raises(CheckpointError, match="version 2; this release reads version 1") as error:
        commit_from({**meta_of(commit()), "version": 2}, content_of(commit()))
    assert not isinstance(error.value, CorruptCheckpointError)


def test_a_checkpoint_is_its_job_s_container_and_a_step() -> None:
    assert parts_of("/dev/shm/jobs/145/step-20_ckpt") == (CheckpointContainerId("/dev/shm/jobs/145"), 20)
    for other in ("/dev/shm/jobs/145/newest", "/step-20_ckpt/x"):
        with pytest.raises(ValueError, match="is no container of a checkpoint"):
            parts_of(other)


# --- the containers of jobs -------------------------------------------------------------------------------------------


ODD_IDS = [
    "a/b",
    "a=2Fb",
    "a=b",
    ".",
    "..",
    ".hidden",
    "end.",
    "=2E",
    "a b",
    "ü",
    "Job",
    "job",
    "=.x",
    "x" * 128,
    "=" * 43,
]


def test_no_two_run_ids_share_a_name() -> None:
    long = ["x" * 129, "x" * 130, "x" * 128 + "/", "=" * 44, "=" * 45, *(f"{'y' * 300}{n}" for n in range(5))]
    ids = ODD_IDS + long
    assert len({container_name(run_id) for run_id in ids}) == len(ids)


@pytest.mark.parametrize("run_id", [None, "", "none"])
def test_a_job_without_a_run_id_is_told_what_to_do(run_id: str | None) -> None:
    with pytest.raises(ValueError, match=r"--rdzv-id.*TORCHELASTIC_RUN_ID.*run_id"):
        container_name(run_id)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "job7", "SLURM_JOB_ID": "145"}, "job7"),
        ({"SLURM_JOB_ID": "145"}, "slurm-145"),
        ({"SLURM_JOB_ID": "145", "SLURM_ARRAY_TASK_ID": "3"}, "slurm-145_3"),
        ({"SLURM_ARRAY_TASK_ID": "3"}, None),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "145"}, "slurm-145"),
        ({"TORCHELASTIC_RUN_ID": "", "SLURM_JOB_ID": ""}, None),
    ],
)
def test_the_run_id_comes_from_the_launcher_or_from_slurm(environment: dict[str, str], expected: str | None) -> None:
    assert known_run_id(environment) == expected
