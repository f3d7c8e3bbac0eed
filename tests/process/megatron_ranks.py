"""What each rank does in the tests of the Megatron adapter, inside a gloo group; answers are sent to the test.

Megatron wants a GPU in a few places only: `on_cpu` is all that its queues and its GPTModel need here.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is neither Apex nor Transformer Engine, and that names are deprecated
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelLoadStrategyWrapper,
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

from torchelastic.adapters.megatron import (
    MegatronAsyncSaveStrategy,
    MegatronCommonLoadStrategy,
    MegatronLoadStrategy,
    save_local_aware_megatron_checkpoint,
)
from torchelastic.checkpoint import async_ckpt
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.memory import (
    CheckpointContainerId,
    CheckpointObjectManager,
    DefaultCheckpointLoader,
    DefaultCheckpointSaver,
    MemoryStorageWriter,
)
from torchelastic.checkpoint.replication import ReplicationManager

HOSTS = "abc"
#: By key: the global shape, and (global offset, values) of what one rank has.
Shards = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]]

_async_loop = PersistentAsyncCaller.async_loop


def loop_on_cpu(*arguments: Any) -> None:
    """Megatron's worker, which asks for the number of GPUs first of all."""
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    _async_loop(*arguments)


def on_cpu() -> None:
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value] # for Megatron
    PersistentAsyncCaller.async_loop = staticmethod(loop_on_cpu)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # queues have children


@dataclass
class Memory:
    """The memory tier of one rank on its host."""

    base: CheckpointContainerId
    replication: ReplicationManager
    writer: MemoryStorageWriter
    loader: DefaultCheckpointLoader

    def step(self, number: int) -> str:
        name = CheckpointContainerId.format_version_container(number)
        return str(CheckpointContainerId.create_child(self.base, name))

    def latest(self) -> str | None:
        found = self.loader.get_latest_complete_checkpoint(self.base)
        return None if found is None else str(found)


@contextmanager
def memory(root: str | Path, hosts: str = HOSTS) -> Iterator[Memory]:
    """Rank r is on the r-th of `hosts`; each host has a folder of its own."""
    on_cpu()
    host = hosts[dist.get_rank()]
    os.environ["TORCHELASTIC_FAILURE_DOMAIN"] = host
    base = CheckpointContainerId(f"{root}/{host}/job7")
    manager = CheckpointObjectManager()
    replication = ReplicationManager()
    replication.initialize(manager)
    writer = MemoryStorageWriter(
        checkpoint_saver=DefaultCheckpointSaver(ckpt_obj_manager=manager, replication_manager=replication)
    )
    loader = DefaultCheckpointLoader(checkpoint_object_manager=manager, replication_manager=replication)
    try:
        yield Memory(base, replication, writer, loader)
        dist.barrier()  # nobody goes while another one still asks it for something
    finally:
        replication.shutdown()


class Queue:
    """One of Megatron's queues, or this library's with a thread."""

    def __init__(self, kind: str) -> None:
        self._ours = async_ckpt.AsyncCallsQueue(worker="thread", timeout_s=60) if kind == "thread" else None
        self._megatrons = AsyncCallsQueue(persistent=kind == "persistent")

    def schedule(self, request: Any) -> None:
        if self._ours is not None:
            self._ours.schedule_async_request(async_ckpt.AsyncRequest(*request))
        else:
            self._megatrons.schedule_async_request(request)

    def finalize(self) -> None:
        (self._ours or self._megatrons).maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        (self._ours or self._megatrons).close()


@contextmanager
def queue_of(kind: str) -> Iterator[Queue]:
    queue = Queue(kind)
    try:
        yield queue
    finally:
        queue.close()


# States


@contextmanager
def gpt() -> Iterator[GPTModel]:
    """A small model, tensor-parallel over all ranks; what is not split is the same on each of them."""
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    try:
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            tensor_model_parallel_size=ranks,
        )
        yield GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
    finally:
        parallel_state.destroy_model_parallel()


def of_model(model: GPTModel, iteration: int = 0) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        "model": model.sharded_state_dict(),
        "iteration": iteration,
        "args": {"seed": [1, 2], "mean": torch.full((3,), float(iteration))},
        "rng": ShardedObject("rng", {"rank": rank, "python": random.Random(rank).getstate()}, (ranks,), (rank,)),
    }


def train(model: GPTModel) -> None:
    """In place, as an optimizer does it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(1.0)


def plain_state(value: float) -> dict[str, Any]:
    """One of each kind: split, replicated, with a prepended axis, several shards on a rank, object, factory, common."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(6.0).view(2, 3) + 10 * rank + value

    def halves(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, (0, rank, ranks), replica_id=replica_id)
            for name, part in zip("wv", data.chunk(2), strict=True)
        }

    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, ranks)),
        "half": ShardedTensor.from_rank_offsets("half", rows.to(torch.bfloat16), (1, rank, ranks)),
        "whole": ShardedTensor.from_rank_offsets("whole", torch.full((5,), value), replica_id=rank),
        "layers": [
            ShardedTensor.from_rank_offsets(
                "layers",
                torch.full((2,), value + rank + layer / 10),
                (0, rank * 2 + layer, ranks * 2),
                prepend_axis_num=1,
            )
            for layer in range(2)
        ],
        "glu": ShardedTensorFactory(
            "glu", rows.repeat(2, 1), halves, lambda parts: torch.cat([parts["w"], parts["v"]])
        ),
        "object": ShardedObject("object", {"rank": rank, "value": value}, (ranks,), (rank,)),
        "copied": ShardedObject("copied", {"value": value}, (1,), (0,), replica_id=rank),
        "common": {"value": value, "empty": {}, "list": [1, (2, 3)]},
    }


def plain(state: Any) -> Any:
    """A state with the data of its sharded parts in their places."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    if isinstance(state, (ShardedTensor, ShardedObject, ShardedTensorFactory)):
        return state.data.clone() if isinstance(state.data, torch.Tensor) else state.data
    return state


def shards_of(state: dict[str, Any]) -> Shards:
    """Where in the global tensors this rank's values are."""
    found: Shards = {}
    for one in nested_values(state):
        if isinstance(one, ShardedTensor):
            data = one.data.detach().clone().reshape((1,) * one.prepend_axis_num + one.local_shape)
            found.setdefault(one.key, (tuple(one.global_shape), []))[1].append((tuple(one.global_offset), data))
    return found


def whole(of_ranks: list[Shards]) -> dict[str, torch.Tensor]:
    """The global tensors; all of each is there."""
    tensors: dict[str, torch.Tensor] = {}
    for shards in of_ranks:
        for key, (shape, parts) in shards.items():
            tensor = tensors.setdefault(key, torch.full(shape, float("nan")))
            for offset, data in parts:
                tensor[tuple(slice(o, o + s) for o, s in zip(offset, data.shape, strict=True))] = data.float()
    assert not [key for key, tensor in tensors.items() if tensor.isnan().any()]
    return tensors


# Work


@dataclass
class Found:
    """What a rank loads."""

    latest: str | None
    state: Any = None
    shards: Shards = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def load_with(mem: Memory, state: dict[str, Any], **options: Any) -> Any:
    """As the user guide of ML Flashpoint has it."""
    latest = mem.latest()
    assert latest is not None
    return dist_checkpointing.load(
        sharded_state_dict=state,
        checkpoint_dir=latest,
        sharded_strategy=MegatronLoadStrategy(replication_manager=mem.replication, checkpoint_loader=mem.loader),
        common_strategy=TorchCommonLoadStrategy(),
        **options,
    )


def save_and_train_on(root: str | Path, kind: str) -> Shards:
    """Saves twice, and returns the values at the first save, which is complete; the second one is under way then."""
    tier, queue = memory(f"{root}/{kind}"), Queue(kind)
    _kept.append((tier, queue))  # nothing is closed: the ranks are going to be killed
    mem = tier.__enter__()
    with gpt() as model:
        strategy = MegatronAsyncSaveStrategy(storage_writer=mem.writer)
        at_the_call = shards_of(of_model(model))
        for step in (1, 2):
            request = save_local_aware_megatron_checkpoint(of_model(model, step), mem.step(step), strategy)
            train(model)
            queue.schedule(request)
            train(model)
            if step == 1:
                queue.finalize()
        return at_the_call


_kept: list[Any] = []


def load_gpt(root: str | Path) -> Found:
    with memory(root) as mem, gpt() as model:
        for parameter in model.parameters():
            parameter.data.fill_(-1)
        loaded = load_with(mem, of_model(model))
        model.load_state_dict(loaded.pop("model"))
        return Found(mem.latest(), loaded, shards_of(of_model(model)), files_of(mem))


def save_plain(root: str | Path, hosts: str, values: list[float], fully_parallel: bool = False) -> None:
    """Saves a state for each value, one after the other."""
    with memory(root, hosts) as mem:
        strategy: Any = MegatronAsyncSaveStrategy(mem.writer)
        if fully_parallel:
            strategy = FullyParallelSaveStrategyWrapper(strategy)
        for step, value in enumerate(values, start=1):
            state = plain_state(value)
            before = plain(state)
            assert save_local_aware_megatron_checkpoint(state, mem.step(step), strategy, async_save=False) is None
            assert list(state) == list(before)
            assert isinstance(state["glu"], ShardedTensorFactory), "the caller's containers are his own"


def files_of(mem: Memory) -> list[str]:
    base = Path(str(mem.base))
    return sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())


def load_plain(root: str | Path, hosts: str, fully_parallel: bool = False) -> Found:
    with memory(root, hosts) as mem:
        latest = mem.latest()
        assert latest is not None
        strategy: Any = MegatronLoadStrategy(mem.replication, mem.loader)
        if fully_parallel:
            strategy = FullyParallelLoadStrategyWrapper(
                strategy, exchange_algo="gather_object"
            )  # "broadcast" needs CUDA
        loaded = dist_checkpointing.load(plain_state(-1.0), latest, strategy, MegatronCommonLoadStrategy())
        return Found(latest, loaded, {}, files_of(mem))


def load_as_the_guide_says(root: str | Path, hosts: str, code: str, is_in_memory: bool) -> Found:
    """Runs the snippet with the names that it takes from what stands before it."""
    with memory(root, hosts) as mem:
        elsewhere = CheckpointContainerId(f"{root}/{hosts[dist.get_rank()]}/nothing")
        names: dict[str, Any] = {
            "replication_manager": mem.replication,
            "checkpoint_loader": mem.loader,
            "checkpoint_base_container": mem.base if is_in_memory else elsewhere,
            "sharded_state_dict": plain_state(-1.0),
            "long_term_storage_path": long_term(root),
            "regular_megatron_load_strategy": None,  # Megatron's own
        }
        exec(code, names)
        latest = names["latest_saved_checkpoint_id"]
        return Found(None if latest is None else str(latest), plain(names["state_dict"]))


def long_term(root: str | Path) -> Path:
    return Path(root) / "long-term"


def save_long_term(root: str | Path) -> None:
    """As Megatron does it without us."""
    on_cpu()
    long_term(root).mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(plain_state(1.0), str(long_term(root)))
    dist.barrier()


def warm_up() -> None:
    """Imports are done; on a busy machine not all at the same pace."""
    dist.barrier()


def expected_plain(value: float) -> Any:
    dist.barrier()  # a rank that leaves the group while another one still enters it makes that one fail
    return plain(plain_state(value))


def live(root: str | Path, hosts: str, kind: str) -> list[tuple[str, float]]:
    """Rank 1 finds no room for step 2, and cannot write step 3. Of each save: the latest after it, and its value."""
    after = []
    with memory(root, hosts) as mem, queue_of(kind) as queue:
        strategy = MegatronAsyncSaveStrategy(mem.writer)
        for step in range(1, 5):
            bad = dist.get_rank() == 1
            state = plain_state(float(step))
            with patched(mem.writer.checkpoint_saver, "prepare_write_data", no_room if bad and step == 2 else None):
                request = save_local_aware_megatron_checkpoint(state, mem.step(step), strategy)
            if bad and step == 3:
                request = request._replace(async_fn_args=(Unwritable(*request.async_fn_args),))  # type: ignore[union-attr]
            for tensor in nested_values(state):
                if isinstance(tensor, ShardedTensor):
                    tensor.data.fill_(77)  # training goes on
            queue.schedule(request)
            queue.finalize()
            after.append((Path(str(mem.latest())).name, float(load_with(mem, plain_state(-1.0))["whole"][0])))
    return after


def no_room(*arguments: Any, **options: Any) -> Any:
    raise CheckpointError("there is no room in /dev/shm")


class Unwritable:
    """Stands for what was staged; it cannot be written."""

    def __init__(self, staged: Any) -> None:
        self._staged = staged

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_staged":
            raise AttributeError(name)
        return getattr(self._staged, name)

    def write(self) -> None:
        raise CheckpointError("the disk is on fire")


@contextmanager
def patched(owner: Any, name: str, value: Callable[..., Any] | None) -> Iterator[None]:
    if value is not None:
        setattr(owner, name, value)
    try:
        yield
    finally:
        if value is not None:
            delattr(owner, name)


def flattened(root: str | Path, hosts: str) -> torch.Tensor:
    """Saved as two ranges of one chunk, loaded as two chunks."""
    whole_tensor = torch.arange(24.0).view(4, 6)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(0, 10) if rank == 0 else slice(10, 24)
    with memory(root, hosts) as mem:
        strategy = MegatronAsyncSaveStrategy(mem.writer)
        saved = ShardedTensor.from_rank_offsets_flat("flat", whole_tensor.flatten()[mine], (4, 6), flattened_range=mine)
        unchecked: dict[str, Any] = {
            "validate_access_integrity": False
        }  # Megatron's check of such tensors needs numpy 1
        save_local_aware_megatron_checkpoint({"flat": saved}, mem.step(1), strategy, async_save=False, **unchecked)
        asked = ShardedTensor.from_rank_offsets_flat(
            "flat", torch.zeros(12), (2, 6), (0, rank, ranks), flattened_range=slice(0, 12)
        )
        loaded: torch.Tensor = load_with(mem, {"flat": asked}, **unchecked)["flat"]
        return loaded


def save_as_megatron_does(root: str | Path, hosts: str, kind: str) -> None:
    """`dist_checkpointing.save` itself, with nothing of ours but the strategy."""
    with memory(root, hosts) as mem, queue_of(kind) as queue:
        Path(mem.step(1)).mkdir(parents=True, exist_ok=True)
        request = dist_checkpointing.save(
            plain_state(1.0),
            mem.step(1),
            MegatronAsyncSaveStrategy(mem.writer),
            async_sharded_save=True,
            content_metadata={"kind": "test"},
        )
        queue.schedule(request)
        queue.finalize()


def look_into(root: str | Path, hosts: str) -> dict[str, Any]:
    """What can be asked of a checkpoint without loading it."""
    with memory(root, hosts) as mem:
        latest = mem.latest()
        assert latest is not None
        strategy = MegatronLoadStrategy(mem.replication, mem.loader)
        assert strategy.checkpoint_loader is mem.loader
        strategy.register()
        return {
            "tensors": {
                key: (tuple(one.global_shape), one.dtype)
                for key, one in dist_checkpointing.load_tensors_metadata(latest, strategy).items()
            },
            "all": sorted(load_sharded_metadata(latest)),
            "content": dist_checkpointing.load_content_metadata(latest),
            "refused": [
                message_of(
                    lambda: MegatronLoadStrategy(None, mem.loader, backend="other").check_backend_compatibility("x")
                ),
                message_of(
                    lambda: dist_checkpointing.load({}, latest, MegatronLoadStrategy(None, mem.loader, backend="other"))
                ),
                message_of(lambda: strategy.check_version_compatibility(2)),
                message_of(lambda: load_with(mem, {"rows": wrong_rows()})),
                message_of(lambda: load_with(mem, {"rows": missing()})),
            ],
            "unexpected": sorted(load_with(mem, {"rows": plain_state(0.0)["rows"]}, strict="return_all")[1]),
        }


def wrong_rows() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("rows", torch.zeros(7, 3), (0, dist.get_rank(), dist.get_world_size()))


def missing() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("nowhere", torch.zeros(2), (0, dist.get_rank(), dist.get_world_size()))


def message_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except BaseException as error:  # DCP's is no Exception
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class OfTheUser:
    """A class that torch does not load unless it is told to."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OfTheUser)


def pickled_objects(root: str | Path, hosts: str) -> dict[str, Any]:
    with memory(root, hosts) as mem:
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def state() -> dict[str, Any]:
            return {"object": ShardedObject("object", OfTheUser(), (ranks,), (rank,)), "mine": OfTheUser()}

        saver = mem.writer.checkpoint_saver
        refused = message_of(
            lambda: MegatronAsyncSaveStrategy(mem.writer).save({"object": state()["object"]}, mem.step(1))
        )
        strategy = MegatronAsyncSaveStrategy(MemoryStorageWriter(checkpoint_saver=saver, allow_pickles=True))
        save_local_aware_megatron_checkpoint(
            state(), mem.step(1), strategy, async_save=False, validate_access_integrity=True
        )
        latest = mem.latest()
        assert latest is not None
        trusting = MegatronLoadStrategy(mem.replication, mem.loader, allow_pickles=True)
        loading = {"object": state()["object"]}
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        try:
            return {
                "refused": refused,
                "safe": message_of(lambda: MegatronLoadStrategy(None, mem.loader).load(dict(loading), latest)),
                "trusting": trusting.load(dict(loading), latest)["object"] == OfTheUser(),
                "common": message_of(lambda: MegatronCommonLoadStrategy().load_common(latest)),
                "megatrons": "mine" in TorchCommonLoadStrategy().load_common(latest),
                "nowhere": message_of(lambda: MegatronCommonLoadStrategy().load_common("/nowhere")),
            }
        finally:
            del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]


def program_errors(root: str | Path, hosts: str) -> list[str]:
    """Of which only one rank knows at first; and a save that works afterwards."""
    with memory(root, hosts) as mem:
        strategy = MegatronAsyncSaveStrategy(mem.writer)
        state = {"rows": plain_state(1.0)["rows"]}
        if dist.get_rank() == 1:
            state["rows"].data = None
        messages = [
            message_of(lambda: strategy.async_save(state, mem.step(1))),
            message_of(lambda: save_local_aware_megatron_checkpoint({}, mem.step(1), object())),
            message_of(lambda: strategy.async_save({}, str(mem.base))),
            message_of(lambda: save_local_aware_megatron_checkpoint(written_twice(), mem.step(1), strategy)),
        ]
        save_local_aware_megatron_checkpoint(plain_state(1.0), mem.step(1), strategy, async_save=False)
        return [*messages, str(mem.latest())]


def written_twice() -> dict[str, Any]:
    """Every rank says that it is the one to write this; Megatron's check finds it on rank 0."""
    return {"twice": ShardedTensor.from_rank_offsets("twice", torch.zeros(2))}


def wipe(root: str | Path, host: str) -> None:
    """The host was replaced: nothing is there."""
    shutil.rmtree(Path(root) / host)
