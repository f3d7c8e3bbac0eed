"""Modules that have moved: whoever imports one by its old path gets the module of the new one, and no second copy.

Paths that the documentation names are files of their own where they were promised (`checkpoint.memory` and others);
these here are kept for one release: 1.1.0 has them no more.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

#: Where a module, or a package with all that is in it, has gone; the longest entry that fits counts.
MOVED = {
    "adapters.hugging_face.state": "adapters.hugging_face.rank_state",
    "agent.etcd_connection": "agent.etcd_opening",
    "agent.events": "agent.host_events",
    "checkpoint.async_ckpt": "checkpoint.compat.nvrx.async_ckpt",
    "checkpoint.async_ckpt.agreement": "checkpoint.compat.nvrx.async_ckpt.call_agreement",
    "checkpoint.async_ckpt.errors": "checkpoint.compat.nvrx.async_ckpt.failed_call",
    "checkpoint.background": "checkpoint.engine.background",
    "checkpoint.command.dead_jobs": "checkpoint.command.prune_dead",
    "checkpoint.command.errors": "checkpoint.command.command_error",
    "checkpoint.command.shards": "checkpoint.command.shard_checkpoints",
    "checkpoint.command.streams": "checkpoint.command.stream_checkpoints",
    "checkpoint.compat.velastic.fitting": "inventory.optimizer_values",
    "checkpoint.durable_copies": "checkpoint.engine.durable_copies",
    "checkpoint.file_system": "checkpoint.compat.elastic01.file_system",
    "checkpoint.in_loop": "checkpoint.loop_checkpoints",
    "checkpoint.kinds": "checkpoint.store.kinds",
    "checkpoint.local": "checkpoint.compat.nvrx.local",
    "checkpoint.memory": "checkpoint.compat.flashpoint",
    "checkpoint.memory.dead_jobs": "checkpoint.store.host_memory.dead_jobs",
    "checkpoint.memory.objects": "checkpoint.compat.flashpoint.object_manager",
    "checkpoint.memory.received": "checkpoint.compat.flashpoint.received_objects",
    "checkpoint.memory.room": "checkpoint.store.host_memory.room",
    "checkpoint.memory.staging": "checkpoint.compat.flashpoint.staged_items",
    "checkpoint.output_stream": "checkpoint.compat.elastic01.output_stream",
    "checkpoint.policy.failures": "checkpoint.policy.failure_rate",
    "checkpoint.replication": "checkpoint.replicas",
    "checkpoint.replication.client": "checkpoint.replicas.replica_client",
    "checkpoint.replication.errors": "checkpoint.replicas.replication_errors",
    "checkpoint.replication.group_wrapper": "checkpoint.compat.nvrx.local.group_wrapper",
    "checkpoint.replication.manager": "checkpoint.replicas.replication_manager",
    "checkpoint.replication.server": "checkpoint.replicas.replica_server",
    "checkpoint.replication.strategies": "checkpoint.compat.nvrx.local.strategies",
    "checkpoint.restore": "checkpoint.engine.restorer",
    "checkpoint.restore_plan": "checkpoint.store.restore_plan",
    "checkpoint.schedule": "checkpoint.engine.schedule",
    "checkpoint.shards": "checkpoint.format",
    "checkpoint.shards.objects": "checkpoint.format.described_objects",
    "checkpoint.shards.reading": "checkpoint.format.shard_reader",
    "checkpoint.shards.tensors": "checkpoint.format.tensor_parts",
    "checkpoint.shards.writing": "checkpoint.format.shard_writing",
    "checkpoint.staging": "checkpoint.compat.elastic01.staging",
    "checkpoint.store.disk": "checkpoint.store.disk_tier",
    "checkpoint.store.durable": "checkpoint.store.durable_tier",
    "checkpoint.store.folder": "checkpoint.store.folder_tier",
    "checkpoint.store.memory": "checkpoint.store.memory_tier",
    "checkpoint.store.received": "checkpoint.store.received_shards",
    "checkpoint.tiered": "checkpoint.engine",
    "checkpoint.tiered.agreement": "checkpoint.engine.save_agreement",
    "checkpoint.tiered.api": "checkpoint.engine.elastic_state",
    "checkpoint.tiered.manager": "checkpoint.engine.tiered_manager",
    "checkpoint.tiered.reading": "checkpoint.engine.read_rules",
    "checkpoint.tiered.restoring": "checkpoint.engine.tiered_restore",
    "checkpoint.training_state": "checkpoint.compat.velastic",
    "checkpoint.training_state.fitting": "inventory.optimizer_values",
    "checkpoint.training_state.objects": "checkpoint.compat.velastic.training_objects",
    "checkpoint.training_state.state": "checkpoint.compat.velastic.bcp_state",
    "checkpoint.verification": "checkpoint.compat.elastic01.verification",
    "doctor.folder": "doctor.folder_rules",
    "doctor.host": "doctor.host_rules",
    "doctor.screen": "doctor.findings_screen",
    "ledger": "observe.ledger",
    "ledger.events": "observe.ledger.ledger_events",
    "ledger.page": "observe.ledger.shared_counts",
    "lifetime.in_loop": "lifetime.loop_lifetime",
    "lifetime.progress": "lifetime.progress_file",
    "model.module_state": "inventory.module_state",
    "model.shards": "model.logical_shards",
    "network.choice": "network.interface_choice",
    "p2p.agreement": "p2p.step_agreement",
    "p2p.peers": "p2p.group_peers",
    "page": "observe.page",
    "page.requests": "observe.page.http_request",
    "page.server": "observe.page.page_server",
    "rendezvous.choice": "rendezvous.roster_choice",
    "report": "observe.report",
    "report.failures": "observe.report.incidents",
    "report.page": "observe.report.html_page",
    "report.reading": "observe.report.journals",
    "sharded.state": "sharded.sharded_state",
    "status": "observe.status",
    "status.host": "observe.status.host_view",
    "status.progress": "observe.status.run_progress",
    "status.reading": "observe.status.status_reader",
    "status.screen": "observe.status.run_screen",
}

#: What checkpoints say of modules whose classes they name, (now, in files): as in 1.0, for good and in both directions.
IN_FILES = {
    "torchelastic.checkpoint.compat.nvrx.local.names": "torchelastic.checkpoint.local.names",
    "torchelastic.checkpoint.compat.nvrx.local.state_dict": "torchelastic.checkpoint.local.state_dict",
}
_FROM_FILES = {stored: now for now, stored in IN_FILES.items()}

#: Packages whose old path is promised to callers: a module of its own, with the public names alone. What was in such a
#: package has moved, and is found as if it still were one.
FRONT_DOORS = frozenset(
    {"checkpoint.memory", "checkpoint.local", "checkpoint.async_ckpt", "checkpoint.shards", "checkpoint.replication"}
)


def new_path(old: str) -> str | None:
    """Where a module of the package is now, both with their whole names; None: where it always was."""
    head = old.removeprefix("torchelastic.")
    rest = ""
    while head:
        if head in MOVED and (rest or head not in FRONT_DOORS):
            return f"torchelastic.{MOVED[head]}{rest}"
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    return None


def path_in_files(module: str) -> str:
    """What a checkpoint says of a module, whose name is whole here; of most what it is called."""
    return IN_FILES.get(module, module)


def path_from_files(stored: str) -> str:
    """The inverse of `path_in_files`."""
    return _FROM_FILES.get(stored, stored)


class _Finder:
    """Finds what has moved, before the file system is searched: a folder that has moved still has its own modules.

    A finder and a loader by its methods: `importlib.abc` would load thirty modules more into each process of ours.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of a moved module: one whose loader is this; of a front door, its own, as of an empty package."""
        if not fullname.startswith("torchelastic."):
            return None
        if fullname.removeprefix("torchelastic.") in FRONT_DOORS:
            door = PathFinder.find_spec(fullname, path, target)
            if door is not None:  # from its first moment: another thread may import what was below it just then
                door.submodule_search_locations = []
            return door
        new = new_path(fullname)
        return None if new is None else ModuleSpec(fullname, cast("Loader", self), loader_state=new)

    def create_module(self, spec: ModuleSpec) -> None:
        """Import the module at its new path; the empty one that stands for it is made by default.

        It is not returned from here: the import system would write the old path into it, which another thread sees.
        """
        importlib.import_module(spec.loader_state)

    def exec_module(self, module: ModuleType) -> None:
        alias = module.__spec__
        if alias is not None:  # whoever imports gets what is in `sys.modules` now
            sys.modules[alias.name] = sys.modules[alias.loader_state]


def find_moved() -> None:
    """From now on old paths are found; a second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
