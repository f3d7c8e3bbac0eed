"""The pages for those who move over: each name of ours in their tables is there, and "the same" are the same names."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

import pytest

PAGES = {page.stem: page for page in sorted((Path(__file__).parents[2] / "docs" / "migrating").glob("*.md"))}
#: The five systems that live on here: their pages name every public name.
WITH_EVERY_NAME = ("ml-flashpoint", "nvrx", "pyrecover", "torchelastic-0.1", "velastic")
#: Needs a package that the tests do not have.
NEEDS_NEMO = "torchelastic.adapters.nemo"


def rows(page: Path) -> list[list[str]]:
    """Of all tables: what stands in their cells."""
    return [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_each_name_of_ours_in_a_table_is_there(page: Path) -> None:
    cells = [cell for row in rows(page) for cell in row[1:]]  # the first one is of theirs
    names = {name for cell in cells for name in re.findall(r"`(torchelastic(?:\.\w+)+)", cell)}
    for name in names:
        if not name.startswith(NEEDS_NEMO):
            pkgutil.resolve_name(name)  # raises ImportError or AttributeError, which name it


@pytest.mark.parametrize("name", WITH_EVERY_NAME)
def test_the_pages_of_the_five_systems_have_a_table_of_every_name(name: str) -> None:
    assert "## Every public name" in PAGES[name].read_text()


def test_what_is_the_same_as_in_0_1_is_there_under_its_name() -> None:
    checked = 0
    for theirs, ours, *_ in rows(PAGES["torchelastic-0.1"]):
        module, colon, names = theirs.strip().removeprefix("`").partition("`: ")
        if ours.strip() == "the same" and colon:
            for name in re.findall(r"`(\w+)`", names):
                pkgutil.resolve_name(f"{module}.{name}")
                checked += 1
    assert checked > 60


MEMORY = "torchelastic.checkpoint.memory"
#: Of what the page of ML Flashpoint calls the same: the parameters there, in their order; ours may have more behind.
OF_FLASHPOINT = {
    f"{MEMORY}.CheckpointContainerId": "string",
    f"{MEMORY}.CheckpointContainerId.create_child": "parent_container_id child_id",
    f"{MEMORY}.CheckpointContainerId.format_version_container": "step",
    f"{MEMORY}.CheckpointContainerId.get_parent": "self levels_up",
    f"{MEMORY}.CheckpointContainerId.parse_version_container_step": "name",
    f"{MEMORY}.CheckpointObjectId": "string",
    f"{MEMORY}.CheckpointObjectId.from_container": "parent_container_id object_name",
    f"{MEMORY}.DefaultCheckpointSaver": "global_rank_getter local_rank_getter global_barrier_func ckpt_obj_manager "
    "replication_manager initial_buffer_size_bytes use_optimized_save",
    f"{MEMORY}.DefaultCheckpointSaver.initialize_checkpoint": "self checkpoint_id",
    f"{MEMORY}.DefaultCheckpointSaver.stage_data": "self checkpoint_id state_dict non_blocking",
    f"{MEMORY}.DefaultCheckpointSaver.async_replicate_object": "self object_id",
    f"{MEMORY}.DefaultCheckpointSaver.finalize_checkpoint": "self checkpoint_id",
    f"{MEMORY}.DefaultCheckpointLoader": "checkpoint_object_manager replication_manager global_rank_getter "
    "local_rank_getter broadcast_object_list_func all_gather_object_func world_size_getter",
    f"{MEMORY}.DefaultCheckpointLoader.read_metadata": "self checkpoint_id object_name",
    f"{MEMORY}.DefaultCheckpointLoader.get_latest_complete_checkpoint": "self checkpoint_base_container",
    f"{MEMORY}.DefaultCheckpointLoader.get_candidate_checkpoints": "self checkpoint_base_container",
    f"{MEMORY}.DefaultCheckpointLoader.get_checkpoint_objects_by_rank": "self checkpoint_container_id",
    f"{MEMORY}.CheckpointObjectManager": "pool_config",
    f"{MEMORY}.CheckpointObjectManager.acquire_buffer": "self object_id buffer_size overwrite",
    f"{MEMORY}.CheckpointObjectManager.get_buffer": "self object_id",
    f"{MEMORY}.CheckpointObjectManager.close_buffer": "self buffer_io skip_close_if_symlink truncate",
    f"{MEMORY}.CheckpointObjectManager.delete_container": "self container_id",
    f"{MEMORY}.CheckpointObjectManager.delete_object": "self object_id",
    f"{MEMORY}.CheckpointObjectManager.teardown_pool": "self",
    f"{MEMORY}.buffer_io.BufferIO.write": "self data",
    f"{MEMORY}.buffer_io.BufferIO.read": "self size",
    f"{MEMORY}.buffer_io.BufferIO.readinto": "self b",
    f"{MEMORY}.buffer_io.BufferIO.seek": "self offset whence",
    f"{MEMORY}.buffer_io.BufferIO.next_buffer_slice": "self size",
    f"{MEMORY}.buffer_io.BufferIO.close": "self truncate",
    f"{MEMORY}.buffer_io.BufferIO.resize": "self new_size",
    f"{MEMORY}.buffer_io.BufferIO.set_format_signature": "self signature",
    f"{MEMORY}.MemoryStorageReader": "path checkpoint_loader",
    f"{MEMORY}.MemoryStorageWriter": "checkpoint_saver mp_manager_future thread_count",
    "torchelastic.checkpoint.replication.PairwiseReplicationStrategy": "replication_service_addresses "
    "processes_per_node",
    "torchelastic.checkpoint.replication.ReplicationRetryConfig": "max_retries timeout_seconds",
    "torchelastic.checkpoint.replication.ReplicationManager.initialize": "self checkpoint_object_manager listen_port "
    "retry_config replication_transfer_service repl_strategy",
    "torchelastic.checkpoint.replication.ReplicationManager.sync_bulk_retrieve": "self source_global_rank "
    "object_ids_to_retrieve container_ids_to_retrieve retrieved_object_ids retrieved_container_ids",
    "torchelastic.adapters.megatron.MegatronAsyncSaveStrategy": "storage_writer backend version "
    "use_cached_ckpt_structure",
    "torchelastic.adapters.megatron.MegatronLoadStrategy": "replication_manager checkpoint_loader",
    "torchelastic.adapters.megatron.save_local_aware_megatron_checkpoint": "checkpoint checkpoint_dir save_strategy "
    "async_save",
}


@pytest.mark.parametrize(("name", "theirs"), OF_FLASHPOINT.items(), ids=OF_FLASHPOINT)
def test_what_is_the_same_as_in_ml_flashpoint_takes_the_same_arguments(name: str, theirs: str) -> None:
    ours = list(inspect.signature(pkgutil.resolve_name(name)).parameters)
    assert ours[: len(theirs.split())] == theirs.split()
