"""ML Flashpoint's guide for `torch.distributed.checkpoint`, with our import lines; a script: [BASE [LONG_TERM]]."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
from torch import multiprocessing as torch_mp
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageReader,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import ReplicationManager


def initialize() -> Any:
    checkpoint_object_manager = CheckpointObjectManager()
    replication_manager = ReplicationManager()
    replication_manager.initialize(checkpoint_object_manager)

    memory_storage_writer = MemoryStorageWriter(
        checkpoint_saver=DefaultCheckpointSaver(
            global_rank_getter=torch.distributed.get_rank,
            local_rank_getter=torch.distributed.get_node_local_rank,
            global_barrier_func=lambda: torch.distributed.barrier(),
            ckpt_obj_manager=checkpoint_object_manager,
            replication_manager=replication_manager,
            # initial_buffer_size_bytes=initial_write_buffer_size_bytes,  # never a limit here
        ),
        mp_manager=torch_mp.Manager(),
    )

    checkpoint_loader = DefaultCheckpointLoader(
        checkpoint_object_manager=checkpoint_object_manager,
        replication_manager=replication_manager,
    )
    memory_storage_reader = MemoryStorageReader(
        path=None,  # or the container of a checkpoint; `checkpoint_id` says it below
        checkpoint_loader=checkpoint_loader,
    )
    return memory_storage_writer, checkpoint_loader, memory_storage_reader


def save(state_dict: Any, base_container: Any, current_step: int, memory_storage_writer: Any) -> Any:
    # base_container is the CheckpointContainerId used for all checkpoints of the current job, e.g. "/dev/shm/jobs/145"
    curr_step_checkpoint_id = CheckpointContainerId.create_child(
        base_container, CheckpointContainerId.format_version_container(current_step)
    )

    metadata = dcp_save(state_dict, checkpoint_id=str(curr_step_checkpoint_id), storage_writer=memory_storage_writer)
    assert metadata is not None

    next_step_checkpoint_id = CheckpointContainerId.create_child(
        base_container, CheckpointContainerId.format_version_container(current_step + 1)
    )

    return dcp_async_save(
        state_dict,
        checkpoint_id=str(next_step_checkpoint_id),
        storage_writer=memory_storage_writer,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )


def recover(
    state_dict: Any,
    checkpoint_base_container: Any,
    checkpoint_loader: Any,
    memory_storage_reader: Any,
    long_term_checkpoint_path: str,
) -> Any:
    latest_saved_checkpoint_id = checkpoint_loader.get_latest_complete_checkpoint(checkpoint_base_container)

    if latest_saved_checkpoint_id:
        dcp_load(state_dict, checkpoint_id=str(latest_saved_checkpoint_id), storage_reader=memory_storage_reader)
    else:
        dcp_load(state_dict, checkpoint_id=str(long_term_checkpoint_path))
    return latest_saved_checkpoint_id


def main() -> None:
    if "RANK" not in os.environ:  # no launcher: one rank
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo")
    # job-specific, the same after a restart, on tmpfs: see job_container() in docs/checkpoint-interfaces.md
    base_container = CheckpointContainerId(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    writer, loader, reader = initialize()
    state_dict: dict[str, Any] = {"weight": torch.arange(6.0).reshape(2, 3), "step": 20}
    long_term_path = sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()
    dcp_save(state_dict, checkpoint_id=long_term_path)

    assert recover(dict(state_dict), base_container, loader, reader, long_term_path) is None
    future = save(state_dict, base_container, 20, writer)
    state_dict["weight"] += 1  # not what is saved: a checkpoint has the values of the moment of the call
    future.result()

    state_dict = {"weight": torch.zeros(2, 3), "step": 0}
    latest = recover(state_dict, base_container, loader, reader, long_term_path)
    assert str(latest) == f"{base_container}/step-21_ckpt"
    assert torch.equal(state_dict["weight"], torch.arange(6.0).reshape(2, 3))
    assert state_dict["step"] == 20
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
