"""A process group among whose ranks states travel as whole shards, over the sockets of replicas. Nothing is pickled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.local.state_dict import BasicTensorAwareStateDict, TensorAwareStateDict, decode, encode
from torchelastic.checkpoint.replication.placement import ExchangePlan
from torchelastic.checkpoint.replication.receive import MemoryShelf
from torchelastic.checkpoint.replication.topology import ReplicationRetryConfig, meet
from torchelastic.checkpoint.restore_plan import Id
from torchelastic.checkpoint.shards.image import image_of, tensors_of
from torchelastic.checkpoint.shards.layout import RecurringLayout
from torchelastic.group.rank_group import RankGroup

DEFAULT_TIMEOUT_S = 600.0
Self = TypeVar("Self", bound="GroupWrapper")


class GroupWrapper:
    """Ranks that exchange states; members and meanings are NVRx's, as far as they are of use.

    All methods that communicate are collectives of the group, in the same order on all of its ranks. If one rank fails,
    they raise on all of them; a rank that does not come is named by an `OutOfStepError`. Give either a group or ranks.

    Args:
        group: an existing group.
        ranks: global ranks, for which a gloo group is made when it is first needed, by these ranks alone.
        timeout_s: for how long a rank is waited for.
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

    def all_gather_object(self, my_object: Any) -> list[Any]:
        """What every rank has to say, by group rank. JSON must be able to hold it: nothing is pickled."""
        return self._members.all_gather("GroupWrapper.all_gather_object()", my_object)

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
            CheckpointError: another rank failed; names it.
        """
        own = cache(partial(_packed, state, name))
        ways = [(sender, receiver) for sender in self._ranks for receiver in self._ranks if sender != receiver]
        moved = self._moved("GroupWrapper.all_gather_states()", ways, lambda _: own())
        images = {ways[number][0]: image for number, image in moved.items()} | {self.my_global_rank: own()}
        received = [_unpacked(images[rank], rank, target_device) for rank in self._ranks]
        return [state for state, _ in received], [name for _, name in received]

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
            CheckpointError: the plan needs something from a rank that its `my_data` lacks.
        """
        entries = plan.entries

        def pack(number: int) -> torch.Tensor:
            return _packed(my_data[entries[number].id_], None)

        def check() -> None:
            missing = sorted(id_ for id_ in plan.required_ids(self.my_global_rank) if id_ not in my_data)
            if missing:
                raise CheckpointError(f"rank {self.my_global_rank} is to give {missing}, and my_data lacks them")

        call = "GroupWrapper.execute_plan()"
        self._members.run_on_all(f"{call}, checking", check)
        moved = self._moved(call, [(entry.sender, entry.receiver) for entry in entries], pack)
        received = {}
        for number, entry in enumerate(entries):
            if number in moved:
                received[entry.id_], _ = _unpacked(moved[number], entry.sender, target_device)
            elif entry.receiver == self.my_global_rank:
                received[entry.id_] = my_data[entry.id_]
        return received

    @cached_property
    def _members(self) -> RankGroup:
        return RankGroup(self.group, self._timeout_s)

    def _moved(
        self, call: str, ways: Sequence[tuple[int, int]], pack: Callable[[int], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Sends images of states from ranks to ranks, over connections that are made for this. Collective.

        Args:
            call: for errors.
            ways: who sends and who receives each; the same on all ranks. What a rank has for itself stays where it is.
            pack: makes the image of one of them, given its number; called on another thread.

        Returns:
            What this rank received, by number.
        """
        shelf = MemoryShelf(sys.maxsize)
        topology, server, _ = meet(self._members, call, lambda: shelf, ReplicationRetryConfig())

        def send() -> None:
            for number, (sender, receiver) in enumerate(ways):
                if sender == self.my_global_rank != receiver:
                    client, content = topology.client(self.get_group_rank(receiver)), pack(number)
                    client.push(str(number), memoryview(content.numpy()), token_round=0)  # type: ignore[arg-type]

        try:
            self._members.run_on_all(f"{call}, sending", send, is_long=True)
        finally:
            if server is not None:
                server.close()
        views = {int(object_id): shelf.source(object_id) for object_id in shelf.ids()}
        return {number: torch.frombuffer(view, dtype=torch.uint8) for number, view in views.items() if view is not None}


def _packed(state: TensorAwareStateDict, name: Any) -> torch.Tensor:
    header, sources = encode(state, RecurringLayout())
    named = {**header.meta, "name": list(name) if isinstance(name, tuple) else name}
    return image_of(type(header)(header.structure, header.entries, named), sources)


def _unpacked(image: torch.Tensor, rank: int, target_device: str | torch.device) -> tuple[TensorAwareStateDict, Any]:
    header, tensors = tensors_of(image, f"the state of rank {rank}")
    moved = {name: tensor.to(target_device) for name, tensor in tensors.items()}
    return decode(header, moved, allow_pickles=False), header.meta.get("name")
