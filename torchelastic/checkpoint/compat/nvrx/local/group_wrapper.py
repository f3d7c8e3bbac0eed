"""A process group among whose ranks states travel as whole shards, over the sockets of replicas. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchelastic.checkpoint.compat.nvrx.local.state_dict import (
    BasicTensorAwareStateDict,
    TensorAwareStateDict,
    decode,
    encode,
)
from torchelastic.checkpoint.errors import CheckpointError
from torchelastic.checkpoint.format.layout import RecurringLayout
from torchelastic.checkpoint.format.stage import image_of, tensors_of
from torchelastic.checkpoint.replicas.placement import ExchangePlan
from torchelastic.checkpoint.replicas.receive import MemoryShelf
from torchelastic.checkpoint.replicas.topology import ReplicationRetryConfig, meet
from torchelastic.checkpoint.store.restore_plan import Id
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
        own = self.my_global_rank
        plan: ExchangePlan[int] = ExchangePlan(own)
        for sender in self._ranks:
            for receiver in self._ranks:
                plan.plan(sender, receiver, sender)
        names = self.all_gather_object(name)
        received = self.execute_plan(plan, {own: state}, target_device)
        received[own] = _unpacked(_packed(state), own, target_device)  # a copy, like the others
        return [received[rank] for rank in self._ranks], names

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
        call, own = "GroupWrapper.execute_plan()", self.my_global_rank
        shelf, pack = MemoryShelf(), lru_cache(maxsize=1)(lambda id_: _packed(my_data[id_]))

        def check() -> None:
            missing = sorted(id_ for id_ in plan.required_ids(own) if id_ not in my_data)
            if missing:
                raise CheckpointError(f"rank {own} is to give {missing}, and my_data lacks them")

        self._members.run_on_all(f"{call}, checking", check)
        topology, server, _ = meet(self._members, call, lambda: shelf, ReplicationRetryConfig())

        def send() -> None:
            for number, entry in enumerate(plan.entries):
                if entry.sender == own != entry.receiver:
                    client, content = topology.client(self.get_group_rank(entry.receiver)), pack(entry.id_)
                    client.push(str(number), memoryview(content.numpy()), token_round=0)  # type: ignore[arg-type]

        try:
            self._members.run_on_all(f"{call}, sending", send, is_long=True)
        finally:
            if server is not None:
                server.close()
        received = {}
        for number, entry in enumerate(plan.entries):
            image = shelf.source(str(number))
            if image is not None:
                received[entry.id_] = _unpacked(torch.frombuffer(image, dtype=torch.uint8), entry.sender, target_device)
            elif entry.receiver == own:
                received[entry.id_] = my_data[entry.id_]
        return received

    @cached_property
    def _members(self) -> RankGroup:
        return RankGroup(self.group, self._timeout_s)


def _packed(state: TensorAwareStateDict) -> torch.Tensor:
    return image_of(*encode(state, RecurringLayout()))


def _unpacked(image: torch.Tensor, rank: int, target_device: str | torch.device) -> TensorAwareStateDict:
    header, tensors = tensors_of(image, f"the state of rank {rank}")
    moved = {name: tensor.to(target_device) for name, tensor in tensors.items()}
    return decode(header, moved, allow_pickles=False)
