"""The private names themselves: what each is for, since which torch it is there, and what is lost without it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from packaging.version import Version

from torchelastic.torch_internals.module_names import CHECKPOINTED, COMPILED


class NameKind(Enum):
    """How a torch can be asked whether it has a name, without making an object."""

    #: It is an attribute of the module or class before it, or a module.
    ATTRIBUTE = "attribute"
    #: It is an attribute of instances: the code of the class before it mentions it.
    OF_INSTANCES = "of instances"
    #: It is an argument of the function or class before it.
    ARGUMENT = "argument"


@dataclass(frozen=True)
class PrivateName:
    """One of them.

    Attributes:
        path: with its module, separated by dots.
        purpose: what it is needed for; completes "which is needed for ...".
        without: what happens where torch does not have it; a sentence for the log.
        since: the oldest torch that has it, of those whose sources were read: 2.6, 2.9, 2.13 and 2.15.
        before: used with older torches than this only; empty: with any.
        is_needed: whether nothing works without it.
        kind: what it is.
        only_with: the path of what a build of torch must have for this name to be expected; empty: any.
    """

    path: str
    purpose: str
    without: str
    since: str = "2.6"
    before: str = ""
    is_needed: bool = False
    kind: NameKind = NameKind.ATTRIBUTE
    only_with: str = ""

    def is_expected(self, torch_version: str) -> bool:
        """Whether a torch of this version (as `torch.__version__`) should have it."""
        release = Version(torch_version).release
        return release >= Version(self.since).release and not (self.before and release >= Version(self.before).release)

    @property
    def owner(self) -> str:
        """The path without the last part."""
        return self.path.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        """The last part."""
        return self.path.rpartition(".")[2]


def _needed(path: str, purpose: str) -> PrivateName:
    return PrivateName(path, purpose, "Nothing works.", is_needed=True)


_C10D = "torch.distributed.distributed_c10d"
_ENGINES = "A peer that is lost while torch's older engine for NCCL connects may hold the others up."
_ABORT = "aborting a group of processes in the middle of an operation"

PROCESS_GROUPS = (
    _needed(f"{_C10D}._world", "forming a group of processes again"),
    _needed(f"{_C10D}._world.pg_map", _ABORT),
    _needed(f"{_C10D}._world.group_count", "forming a group of processes again, with the names that its peers use"),
    _needed(f"{_C10D}._new_process_group_helper", _ABORT),
    _needed(f"{_C10D}._get_default_store", "naming the rank that a collective waits for"),
    _needed("torch.distributed.ProcessGroup._register_backend", _ABORT),
    _needed("torch.distributed.ProcessGroup._set_default_backend", _ABORT),
    PrivateName(
        f"{_C10D}._world.pg_names",
        "leaving a lost group of NCCL without waiting for it",
        "Leaving a lost group of NCCL may wait until its communicators have freed their memory.",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._set_group_name",
        "naming a group in the messages of torch",
        "The messages of torch about a group do not name it.",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._set_group_desc",
        "describing a group in the messages of torch",
        "The messages of torch about a group do not describe it.",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._allgather_base",
        "aborting an all_gather_into_tensor",
        "A worker that waits in all_gather_into_tensor for a lost peer may wait until the time-out of the group.",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._reduce_scatter_base",
        "aborting a reduce_scatter_tensor",
        "A worker that waits in reduce_scatter_tensor for a lost peer may wait until the time-out of the group.",
    ),
    PrivateName(
        "torch.distributed.Work._source_rank",
        "telling who has sent what dist.recv() received from any rank",
        "dist.recv() from any rank may not say which rank has sent.",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._get_backend",
        "finding the NCCL communicators of a group",
        "Groups with GPU tensors are refused.",
    ),
    PrivateName(
        "torch.distributed.ProcessGroupNCCL._comm_ptr",
        "noticing that torch has aborted an NCCL communicator by itself",
        "That torch aborts an NCCL communicator is noticed by its error alone.",
        since="2.9",
        only_with="torch.distributed.ProcessGroupNCCL",
    ),
    PrivateName(
        "torch.distributed.Backend._plugins",
        "knowing which of torch's engines for NCCL a name makes",
        _ENGINES,
        since="2.14",
    ),
    PrivateName(
        f"{_C10D}._create_nccl_process_group",
        "knowing which of torch's engines for NCCL a name makes",
        _ENGINES,
        since="2.14",
        only_with="torch.distributed.ProcessGroupNCCL",
    ),
)

_BUCKETS = "gradient buckets that are final from the first step on"
_OTHER_BITS = "The first step after a change of the group may differ in the last bits from that of an undisturbed run."
_NO_SYNC = "forming a group without torch 2.6's own comparison of the models"
_SYNCS = "With torch 2.6, workers of one group wait for each other for ever."

GRADIENTS = (
    PrivateName("torch.nn.parallel.DistributedDataParallel._build_params_for_reducer", _BUCKETS, _OTHER_BITS),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel._sync_module_buffers",
        "sending rank 0's buffers before each forward pass whatever their type and size",
        "Buffers of types that gloo does not know are refused, and those whose size differs by rank end the process.",
    ),
    PrivateName("torch.distributed.Reducer._push_all_rebuilt_params", _BUCKETS, _OTHER_BITS),
    PrivateName("torch.distributed.Reducer._rebuild_buckets", _BUCKETS, _OTHER_BITS),
    PrivateName(
        "torch.distributed.Reducer._remove_autograd_hooks",
        "taking the hooks of DistributedDataParallel off a model when its group is over",
        "Whoever keeps the DistributedDataParallel of an earlier group (a traceback does) makes later steps fail.",
    ),
    PrivateName("torch.nn.parallel.distributed._verify_param_shape_across_processes", _NO_SYNC, _SYNCS, before="2.9"),
    PrivateName("torch.nn.parallel.distributed._sync_module_states", _NO_SYNC, _SYNCS, before="2.9"),
    PrivateName(
        "torch._C._current_graph_task_id",
        "knowing whether an optimizer steps inside a backward pass",
        "An optimizer that steps in a hook of a gradient is not refused by that name.",
    ),
    PrivateName(
        "torch.amp.GradScaler._per_optimizer_states",
        "repeating a failed step with a GradScaler",
        "A step that fails between unscale_() and update() of a GradScaler cannot be repeated.",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch.amp.GradScaler._device",
        "repeating a failed step with a GradScaler that is not for CUDA",
        "A GradScaler is taken for one of CUDA.",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch._dynamo",
        "importing what the first DistributedDataParallel imports before other workers wait for this one",
        "The first step of a new worker may take two seconds longer, and all wait for it.",
    ),
    PrivateName(
        f"torch._dynamo.eval_frame.OptimizedModule.{COMPILED}",
        "the names of the parameters of a compiled model",
        "Checkpoints of a compiled model load only into a compiled one.",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        f"torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper.{CHECKPOINTED}",
        "the names of the parameters of a model with activation checkpointing",
        "Checkpoints of a model with activation checkpointing load only into such a one.",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
        "knowing which parameters DistributedDataParallel does not keep equal",
        "A checkpoint of Lightning in memory may take such a parameter from any rank.",
        kind=NameKind.OF_INSTANCES,
    ),
)

_LOADER = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
_DATA = "replacing a data worker process that has died"
_NO_DATA = "A data worker process that dies fails the step in which it is noticed, and the end of a loader may wait."

DATA_WORKERS = (
    PrivateName(_LOADER, _DATA, _NO_DATA),
    PrivateName(f"{_LOADER}._workers", _DATA, _NO_DATA, kind=NameKind.OF_INSTANCES),
    PrivateName(f"{_LOADER}._workers_done_event", _DATA, _NO_DATA, kind=NameKind.OF_INSTANCES),
    PrivateName(f"{_LOADER}._worker_pids_set", _DATA, _NO_DATA, kind=NameKind.OF_INSTANCES),
    PrivateName(f"{_LOADER}._rcvd_idx", _DATA, _NO_DATA, kind=NameKind.OF_INSTANCES),
    PrivateName(f"{_LOADER}._shutdown_workers", _DATA, _NO_DATA),
    PrivateName("torch._C._set_worker_pids", _DATA, _NO_DATA),
    _needed("torch._utils.ExceptionWrapper", "handing over the errors of data worker processes"),
    PrivateName("torch._C._remove_worker_pids", _DATA, _NO_DATA),
)

_QUANTIZED = "loading quantized tensors"
_NOT_QUANTIZED = "A checkpoint with quantized tensors is not loaded."
_SLOTS = "undoing what a failed step has done to a model's modules, and initializing one that is on the meta device"
_NO_SLOTS = "What a failed step has done to flags, hooks and buffers' slots stays; ShardedState refuses meta models."
_STORAGE = "sending a checkpoint request to its worker process"
_TREES = "walking through the states of optimizers and the outputs of models"

TENSORS = (
    _needed("torch.utils._pytree.tree_map", _TREES),
    _needed("torch.utils._pytree.tree_map_only", _TREES),
    _needed("torch.utils._pytree.tree_flatten", _TREES),
    _needed("torch.utils._pytree.tree_unflatten", _TREES),
    _needed("torch.Tensor._version", "knowing whether a step has changed a weight"),
    PrivateName(
        "torch._foreach_copy_",
        "copying many small tensors at once",
        "Saving a state of many small tensors takes about twice as long.",
    ),
    PrivateName("torch._make_per_tensor_quantized_tensor", _QUANTIZED, _NOT_QUANTIZED),
    PrivateName("torch._make_per_channel_quantized_tensor", _QUANTIZED, _NOT_QUANTIZED),
    PrivateName(
        "torch.Tensor._indices",
        "saving a sparse tensor as it is",
        "A sparse tensor is saved coalesced.",
    ),
    PrivateName(
        "torch.Tensor._values",
        "saving a sparse tensor as it is",
        "A sparse tensor is saved coalesced.",
    ),
    PrivateName(
        "torch.UntypedStorage._cdata",
        "knowing which tensors share memory in a checkpoint request",
        "Tensors that share memory are known by the address of their memory.",
    ),
    PrivateName(
        "torch.storage.TypedStorage._untyped_storage",
        _STORAGE,
        "Torch warns of its typed storages when a checkpoint request is sent to its worker process.",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch.storage.TypedStorage._internal",
        _STORAGE,
        "Torch warns of its typed storages when a checkpoint request arrives in its worker process.",
        kind=NameKind.ARGUMENT,
    ),
    PrivateName(
        "torch.nn.Module._metadata",
        "the versions of modules in a state_dict",
        "States of older versions of a module are not brought up to date when they are loaded.",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch.nn.Module._parameters",
        _SLOTS,
        _NO_SLOTS,
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch.nn.Module._buffers",
        _SLOTS,
        _NO_SLOTS,
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch.nn.Module._modules",
        _SLOTS,
        _NO_SLOTS,
        kind=NameKind.OF_INSTANCES,
    ),
)

_FSDP = "torch.distributed.fsdp._fully_shard"
_FLAT = "giving back the memory of an FSDP2 model when its group is over"
_LATER = "The memory of an FSDP2 model is released later, so a change of the group needs more of it."
_STALE = "forgetting how DTensors were computed in an earlier group"
_WRONG = "A worker that has another rank than in an earlier group of the same size may compute DTensors wrongly."

SHARDING = (
    PrivateName(
        "torch.distributed.tensor.DTensor._local_tensor",
        "reading the memory of a DTensor without a copy of its description",
        "Copies of sharded tensors take longer.",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch.distributed.tensor.DTensor._spec",
        "copying DTensors for async_save",
        "Copies of DTensors are described by their mesh and their placements.",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "knowing which part of a DTensor a rank holds",
        "The part of a DTensor that a rank holds is asked of the DTensor itself.",
    ),
    PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", _FLAT, _LATER),
    PrivateName(
        f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups", _FLAT, _LATER, since="2.13", kind=NameKind.OF_INSTANCES
    ),
    PrivateName(
        f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_group",
        _FLAT,
        _LATER,
        before="2.13",
        kind=NameKind.OF_INSTANCES,
    ),
    PrivateName(f"{_FSDP}._fsdp_param.FSDPParam._sharded_param_data", _FLAT, _LATER, kind=NameKind.OF_INSTANCES),
    PrivateName("torch.distributed.tensor.debug._clear_sharding_prop_cache", _STALE, _WRONG, since="2.13"),
    PrivateName("torch.distributed.tensor.DTensor._op_dispatcher", _STALE, _WRONG, before="2.13"),
    PrivateName("torch.distributed.tensor._redistribute._gen_transform_infos", _STALE, _WRONG),
    PrivateName(
        "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache", _STALE, _WRONG, since="2.13"
    ),
    PrivateName(
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
        "recognizing the sharded tensors of FSDP1 in a checkpoint of Lightning",
        "The sharded tensors of FSDP1 in a checkpoint of Lightning are not recognized.",
    ),
)

_DCP = "torch.distributed.checkpoint"
_CONVERT = "reading a folder of torch.distributed.checkpoint in one process"
_NOT_CONVERTED = "`torchelastic checkpoint` refuses folders of torch.distributed.checkpoint."
#: What torch keeps of the plans of earlier saves, by the class of the planner.
PLANS = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)
_OLD_PLANS = "A save of DCP with enable_plan_caching=True fails in a new group, or lacks shards."
_HELPER = "replacing a dead helper process of async_save"
_NO_HELPER = "A dead helper process of async_save (AsyncCheckpointerType.PROCESS) is not replaced."

CHECKPOINTS = (
    PrivateName(f"{_DCP}.default_planner._EmptyStateDictLoadPlanner", _CONVERT, _NOT_CONVERTED),
    PrivateName(f"{_DCP}.state_dict_loader._load_state_dict", _CONVERT, _NOT_CONVERTED),
    PrivateName(
        f"{_DCP}._traverse.set_element",
        "loading small values without encoding them again",
        "Loading many small values from memory takes longer.",
    ),
    PrivateName(
        "torch.save._use_new_zipfile_serialization",
        "encoding small values in the shorter format",
        "Loading many small values from memory takes longer.",
        kind=NameKind.ARGUMENT,
    ),
    PrivateName(f"{_DCP}._async_process_executor._CHECKPOINT_PROCESS", _HELPER, _NO_HELPER, since="2.9"),
    PrivateName(
        f"{_DCP}._async_process_executor._AsyncCheckpointProcess._save_process",
        _HELPER,
        _NO_HELPER,
        since="2.9",
        kind=NameKind.OF_INSTANCES,
    ),
)
CACHED_PLANS = tuple(
    PrivateName(f"{_DCP}.planner.SavePlanner.{name}", "saving with cached plans in a new group", _OLD_PLANS, "2.9")
    for name in PLANS
)

#: All of them.
NAMES = PROCESS_GROUPS + GRADIENTS + DATA_WORKERS + TENSORS + SHARDING + CHECKPOINTS + CACHED_PLANS
