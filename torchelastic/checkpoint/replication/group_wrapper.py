"""A process group through which states travel as whole shards, in a few large messages. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local.base_state_dict import TensorAwareStateDict
from torchelastic.checkpoint.local.basic_state_dict import BasicTensorAwareStateDict
from torchelastic.checkpoint.local.encoding import decode, encode
from torchelastic.checkpoint.local.image import image_of, tensors_of
from torchelastic.checkpoint.replication.exchange import ExchangePlan, Identifier
from torchelastic.checkpoint.shards.recurring import RecurringLayout

#: How much travels in one message, so that little is staged on a GPU.
BUCKET_BYTES = 64 * 2**20
DEFAULT_TIMEOUT_S = 600.0

Id = TypeVar("Id", bound=Identifier)
Self = TypeVar("Self", bound="GroupWrapper")


class GroupWrapper:
    """Ranks that exchange states; members and meanings are NVRx's, as far as they are of use.

    All methods that communicate are collectives of the group (or of the two ranks that they name), in the same order on
    all of its ranks. Give either a group or ranks.

    Args:
        group: an existing group.
        ranks: global ranks, for which a gloo group is made when it is first needed, by these ranks alone.
        timeout_s: for the group that is made.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if (group is None) == (ranks is None):
            raise ValueError("give either a process group or the ranks of one to be made")
        self._group, self._timeout_s = group, timeout_s
        self._ranks = list(ranks if ranks is not None else dist.get_process_group_ranks(group))

    @classmethod
    def wrap(cls: type[Self], group: dist.ProcessGroup | GroupWrapper) -> GroupWrapper:
        """A group as a wrapper; a wrapper as it is."""
        return group if isinstance(group, GroupWrapper) else cls(group)

    @classmethod
    def from_list_of_groups(cls: type[Self], list_of_groups: Sequence[Sequence[int]]) -> Self:
        """The one of several groups of global ranks that this rank is in.

        Raises:
            ValueError: this rank is in none of them, or in several.
        """
        mine = [ranks for ranks in list_of_groups if dist.get_rank() in ranks]
        if len(mine) != 1:
            raise ValueError(f"rank {dist.get_rank()} is in {len(mine)} of the groups: it must be in one")
        return cls(ranks=mine[0])

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; made now if need be, so the first use is a collective of its ranks."""
        if self._group is None:
            self._group = dist.new_group(
                self._ranks,
                timeout=timedelta(seconds=self._timeout_s),
                backend="gloo",
                use_local_synchronization=True,
            )
        return self._group

    @property
    def backend(self) -> str:
        """The name of its backend."""
        return str(dist.get_backend(self.group))

    @property
    def supported_devices(self) -> set[str]:
        """The kinds of devices whose tensors it can send."""
        pairs = dist.get_backend_config(self.group).split(",")
        return {pair.partition(":")[0] for pair in pairs}

    def get_device(self) -> torch.device:
        """Where tensors must be to travel: the CPU if that will do, else this process's accelerator."""
        kinds = self.supported_devices
        return torch.device("cpu" if "cpu" in kinds else sorted(kinds)[0])

    @property
    def ranks(self) -> list[int]:
        """Its global ranks, in the order of the group."""
        return list(self._ranks)

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return len(self._ranks)

    @property
    def my_global_rank(self) -> int:
        """This process's rank in the world."""
        return dist.get_rank()

    @property
    def my_group_rank(self) -> int:
        """This process's rank in the group."""
        return self.get_group_rank(self.my_global_rank)

    def get_group_rank(self, global_rank: int) -> int:
        """The place of a rank in the group. Raises: ValueError if it is no member."""
        return self._ranks.index(global_rank)

    def get_global_rank(self, group_rank: int) -> int:
        """The inverse of `get_group_rank`."""
        return self._ranks[group_rank]

    # --- messages -----------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Fills a contiguous tensor on all ranks with that of one, as bytes, so of any dtype; in buckets.

        Args:
            tensor: of the same size on all ranks, on the CPU.
            src: the global rank that has the content.
        """
        self._in_buckets(tensor, partial(dist.broadcast, src=src, group=self.group))

    def all_gather_object(self, my_object: Any) -> list[Any]:
        """What every rank has to say, by group rank. JSON must be able to hold it: nothing is pickled."""
        return [_as_object(data) for data in self._all_gather(_as_tensor(my_object))]

    def all_gather_batch(
        self, my_tensors: Sequence[torch.Tensor], target_device: str | torch.device | None = None
    ) -> list[list[torch.Tensor]]:
        """The tensors of every rank, by group rank; they may differ in number, shape and dtype.

        Args:
            my_tensors: on any device.
            target_device: where the result is to be; None: on the CPU.
        """
        own = BasicTensorAwareStateDict({"batch": list(my_tensors)})
        states, _ = self.all_gather_states(own, None, target_device or "cpu")
        return [list(state.tensors) for state in states]

    def all_gather_states(
        self, state: TensorAwareStateDict, name: Any, target_device: str | torch.device = "cpu"
    ) -> tuple[list[TensorAwareStateDict], list[Any]]:
        """The states of every rank and their names, by group rank; the given state stays as it is.

        Args:
            state: of this rank.
            name: of this state; JSON can hold it.
            target_device: where the tensors of the result are to be.

        Raises:
            TypeError: the state has no `to_tree`.
            CorruptCheckpointError: something was damaged on its way.
        """
        images = self._all_gather(_packed(state, name))
        received = [_unpacked(image, rank, target_device) for rank, image in zip(self._ranks, images, strict=True)]
        return [state for state, _ in received], [name for _, name in received]

    def send_object(self, my_object: Any, dst: int) -> None:
        """Sends what JSON can hold to another global rank, which calls `recv_object`."""
        self._send(_as_tensor(my_object), dst)

    def recv_object(self, src: int) -> Any:
        """Receives what another global rank sends with `send_object`."""
        return _as_object(self._receive(src))

    def send_state_dict(self, state: TensorAwareStateDict, dst: int, name: Any = None) -> None:
        """Sends a state, which stays as it is, to another global rank, which calls `recv_state_dict`."""
        self._send(_packed(state, name), dst)

    def recv_state_dict(self, src: int, target_device: str | torch.device = "cpu") -> tuple[TensorAwareStateDict, Any]:
        """Receives a state and its name; its tensors go to `target_device`."""
        return _unpacked(self._receive(src), src, target_device)

    def execute_plan(
        self,
        plan: ExchangePlan[Id],
        my_data: Mapping[Id, TensorAwareStateDict],
        target_device: str | torch.device = "cpu",
    ) -> dict[Id, TensorAwareStateDict]:
        """Moves states from who has them to who wants them. Collective.

        Args:
            plan: the same on all ranks; its entries speak of global ranks.
            my_data: what this rank has to give, by id.
            target_device: where the tensors of what is received are to be.

        Returns:
            What this rank wanted; its own are the objects in `my_data`.

        Raises:
            CheckpointError: the plan needs something from this rank that `my_data` lacks; nothing was sent.
        """
        missing = sorted(id_ for id_ in plan.required_ids(self.my_global_rank) if id_ not in my_data)
        if missing:
            raise CheckpointError(f"rank {self.my_global_rank} is to give {missing}, and my_data lacks them")
        received: dict[Id, TensorAwareStateDict] = {}
        for entry in plan.entries:
            if entry.receiver == self.my_global_rank == entry.sender:
                received[entry.id_] = my_data[entry.id_]
            elif entry.sender == self.my_global_rank:
                self.send_state_dict(my_data[entry.id_], entry.receiver)
            elif entry.receiver == self.my_global_rank:
                received[entry.id_], _ = self.recv_state_dict(entry.sender, target_device)
        return received

    def _all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of every rank, by group rank."""
        gathered = []
        for rank in self._ranks:
            size = torch.tensor([own.numel()])
            self.broadcast(size, rank)
            gathered.append(own if rank == self.my_global_rank else torch.empty(int(size), dtype=torch.uint8))
            self.broadcast(gathered[-1], rank)
        return gathered

    def _send(self, data: torch.Tensor, dst: int) -> None:
        send = partial(dist.send, dst=dst, group=self.group)
        self._in_buckets(torch.tensor([data.numel()]), send)
        self._in_buckets(data, send)

    def _receive(self, src: int) -> torch.Tensor:
        receive = partial(dist.recv, src=src, group=self.group)
        size = torch.zeros(1, dtype=torch.int64)
        self._in_buckets(size, receive)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._in_buckets(data, receive)
        return data

    def _in_buckets(self, tensor: torch.Tensor, transfer: Callable[[torch.Tensor], object]) -> None:
        data = tensor.reshape(-1).view(torch.uint8)
        for begin in range(0, data.numel(), BUCKET_BYTES):
            piece = data[begin : begin + BUCKET_BYTES]
            staged = piece.to(self.get_device())
            transfer(staged)
            if staged is not piece:
                piece.copy_(staged)


def _as_tensor(my_object: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(my_object).encode() + b"\n"), dtype=torch.uint8)


def _as_object(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def _packed(state: TensorAwareStateDict, name: Any) -> torch.Tensor:
    header, sources = encode(state, RecurringLayout(), allow_pickles=False)
    named = {**header.meta, "name": list(name) if isinstance(name, tuple) else name}
    return image_of(type(header)(header.structure, header.entries, named), sources)


def _unpacked(image: torch.Tensor, rank: int, target_device: str | torch.device) -> tuple[TensorAwareStateDict, Any]:
    header, tensors = tensors_of(image, f"the state of rank {rank}")
    moved = {name: tensor.to(target_device) for name, tensor in tensors.items()}
    return decode(header, moved, allow_pickles=False), header.meta.get("name")
