"""Which ranks keep copies of each other's states, and the copying itself, through collectives.

`LocalCheckpointManager` only asks a strategy who belongs to a clique, and moves the bytes itself, over sockets and in
the background. `replicate` and `retrieve_execute` are for who does that by hand, on the thread that trains.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from torchelastic.checkpoint.local.names import CkptID
from torchelastic.checkpoint.replication.cliques import holders_of, parse_group_sequence
from torchelastic.checkpoint.replication.exchange import ExchangePlan, retrieve_plan
from torchelastic.checkpoint.replication.group_wrapper import GroupWrapper

if TYPE_CHECKING:
    import torch

    from torchelastic.checkpoint.local.base_state_dict import TensorAwareStateDict


class ReplicationStrategy(ABC):
    """Says who holds copies of what, and makes them. Names and meanings are NVRx's."""

    @abstractmethod
    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: CkptID
    ) -> tuple[list[TensorAwareStateDict], list[CkptID]]:
        """Exchanges states with the other ranks that keep copies. Collective of these.

        Args:
            local_ckpt: the state of this rank; it stays as it is.
            id_: what it is.

        Returns:
            All states that this rank is to keep, as copies, and what they are, in the same order.
        """

    @abstractmethod
    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Collection[CkptID]], wanted: Sequence[CkptID]
    ) -> ExchangePlan[CkptID]:
        """Plans who gives whom what. Collective of the ranks that keep copies for each other.

        Args:
            globally_available_ids: per global rank, what it holds.
            wanted: what this rank wants.

        Raises:
            NoReplicasAvailableError: nobody among them holds what one of them wants; on all of them.
        """

    @abstractmethod
    def retrieve_execute(
        self, plan: ExchangePlan[CkptID], my_data: Mapping[CkptID, TensorAwareStateDict]
    ) -> dict[CkptID, TensorAwareStateDict]:
        """Does what was planned. Collective of the same ranks.

        Args:
            plan: of `retrieve_plan`.
            my_data: what this rank has to give: at least `plan.required_ids()`.

        Returns:
            What this rank wanted.
        """

    def clique(self, rank: int, world_size: int) -> list[int]:
        """The ranks that keep copies of a rank's state, itself included. Not a collective.

        Raises:
            NotImplementedError: this strategy has none, and cannot be used by `LocalCheckpointManager`.
        """
        raise NotImplementedError(
            f"{type(self).__qualname__} has no method clique(rank, world_size), which tells a LocalCheckpointManager "
            f"where the copies of rank {rank} of {world_size} go: write it, or derive from CliqueReplicationStrategy"
        )


class CliqueReplicationStrategy(ReplicationStrategy):
    """Every member of a clique holds the states of all of them.

    Args:
        local_group: the clique of this rank.
        target_device: where the tensors of copies are to be.
    """

    def __init__(
        self, local_group: dist.ProcessGroup | GroupWrapper, target_device: str | torch.device = "cpu"
    ) -> None:
        self.local_group = GroupWrapper.wrap(local_group)
        self.target_device = target_device
        self._parameters: tuple[int, int] | None = None

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> CliqueReplicationStrategy:
        """Cuts the world into cliques; see `parse_group_sequence`. Needs the default process group; no collective.

        Args:
            replication_jump: distance between two members; None: the number of ranks on a host (LOCAL_WORLD_SIZE, or 1
                where no launcher set it), so that members are on different hosts.
            replication_factor: how many ranks hold each state.

        Raises:
            ValueError: the world is no multiple of jump times factor.
        """
        jump = default_jump() if replication_jump is None else replication_jump
        cliques = parse_group_sequence(jump, replication_factor, dist.get_world_size())
        made = cls(GroupWrapper.from_list_of_groups(cliques))
        made._parameters = jump, replication_factor
        return made

    def clique(self, rank: int, world_size: int) -> list[int]:
        """See `ReplicationStrategy`.

        Raises:
            ValueError: this is the strategy of another rank's clique.
        """
        if self._parameters is not None:  # the group may have been formed anew since
            return holders_of(rank, *self._parameters, world_size)
        ranks = self.local_group.ranks
        if rank not in ranks or max(ranks) >= world_size:
            raise ValueError(
                f"rank {rank} of {world_size} is not in the clique {ranks} of this strategy: make a new one"
            )
        return ranks

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: CkptID
    ) -> tuple[list[TensorAwareStateDict], list[CkptID]]:
        """See `ReplicationStrategy`; a few large broadcasts, each state once per clique."""
        states, names = self.local_group.all_gather_states(local_ckpt, id_, self.target_device)
        return states, [CkptID(*name) for name in names]

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Collection[CkptID]], wanted: Sequence[CkptID]
    ) -> ExchangePlan[CkptID]:
        """See `ReplicationStrategy`; the members' own copies are preferred."""
        group = self.local_group
        wishes = [[CkptID(*id_) for id_ in each] for each in group.all_gather_object([list(id_) for id_ in wanted])]
        available = {rank: globally_available_ids.get(rank, ()) for rank in group.ranks}
        plan: ExchangePlan[CkptID] = ExchangePlan(group.my_global_rank)
        for number in range(max(map(len, wishes), default=0)):
            some = {
                rank: each[number] if number < len(each) else None
                for rank, each in zip(group.ranks, wishes, strict=True)
            }
            for entry in (part := retrieve_plan(available, some)).entries:
                others = part.candidates(entry.receiver, entry.id_)[1:]
                plan.plan(entry.sender, entry.receiver, entry.id_, fallbacks=others)
        return plan

    def retrieve_execute(
        self, plan: ExchangePlan[CkptID], my_data: Mapping[CkptID, TensorAwareStateDict]
    ) -> dict[CkptID, TensorAwareStateDict]:
        """See `ReplicationStrategy`."""
        return self.local_group.execute_plan(plan, my_data, self.target_device)


class LazyReplicationStrategyBuilder(ReplicationStrategy):
    """A strategy that is made when it is first needed, so it can be given away before the process group is there.

    It is made anew when the number of ranks, or this process's rank, has changed.
    """

    def __init__(self) -> None:
        self._built: ReplicationStrategy | None = None
        self._built_for = (-1, -1)

    @abstractmethod
    def _eager_build(self) -> ReplicationStrategy:
        """Makes the strategy."""

    @property
    def replication_strategy(self) -> ReplicationStrategy:
        """The strategy itself. Needs the default process group."""
        here = (dist.get_rank(), dist.get_world_size())
        if self._built is None or self._built_for != here:
            self._built, self._built_for = self._eager_build(), here
        return self._built

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: CkptID
    ) -> tuple[list[TensorAwareStateDict], list[CkptID]]:
        """See `ReplicationStrategy`."""
        return self.replication_strategy.replicate(local_ckpt, id_)

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Collection[CkptID]], wanted: Sequence[CkptID]
    ) -> ExchangePlan[CkptID]:
        """See `ReplicationStrategy`."""
        return self.replication_strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_execute(
        self, plan: ExchangePlan[CkptID], my_data: Mapping[CkptID, TensorAwareStateDict]
    ) -> dict[CkptID, TensorAwareStateDict]:
        """See `ReplicationStrategy`."""
        return self.replication_strategy.retrieve_execute(plan, my_data)


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder):
    """`CliqueReplicationStrategy.from_replication_params`, made when it is first needed; same arguments."""

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        super().__init__()
        self.replication_jump = replication_jump
        self.replication_factor = replication_factor

    def clique(self, rank: int, world_size: int) -> list[int]:
        """See `ReplicationStrategy` and `holders_of`; a process that is alone is its own clique."""
        jump = default_jump() if self.replication_jump is None else self.replication_jump
        return holders_of(rank, jump, self.replication_factor, world_size)

    def _eager_build(self) -> ReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(self.replication_jump, self.replication_factor)


def default_jump() -> int:
    """How many ranks this host has, as the launcher says; 1 without one."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
