"""Which ranks keep copies of each other's states, and the copying itself.

`LocalCheckpointManager` only asks a strategy who belongs to a clique, and moves the bytes itself, over sockets and in
the background. `replicate` and `retrieve_execute` are for who does that by hand, on the thread that trains.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch.distributed as dist

from torchelastic.checkpoint.compat.nvrx.local.group_wrapper import GroupWrapper
from torchelastic.checkpoint.compat.nvrx.local.names import CkptID
from torchelastic.checkpoint.replicas.placement import ExchangePlan, holders_of, parse_group_sequence, retrieve_plan

if TYPE_CHECKING:
    import torch

    from torchelastic.checkpoint.compat.nvrx.local.state_dict import TensorAwareStateDict

Eager = TypeVar("Eager", bound="ReplicationStrategy")


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

    def clique(self, rank: int, hosts: Sequence[str]) -> list[int]:
        """The ranks that keep copies of a rank's state, itself included. Not a collective.

        Args:
            rank: whose state.
            hosts: the host of each rank; ranks with the same are lost together.

        Raises:
            NotImplementedError: this strategy has none, and cannot be used by `LocalCheckpointManager`.
        """
        raise NotImplementedError(
            f"{type(self).__qualname__} has no method clique(rank, hosts), which tells a LocalCheckpointManager "
            f"where the copies of rank {rank} of {len(hosts)} go: write it, or derive from CliqueReplicationStrategy"
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
        self._local_group: GroupWrapper | None = GroupWrapper.wrap(local_group)
        self._parameters = (0, 0)
        self.target_device: str | torch.device = target_device

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> CliqueReplicationStrategy:
        """Cuts the world into cliques; see `parse_group_sequence`, and `holders_of` for worlds that it cannot cut.

        Args:
            replication_jump: distance between two members; None: the number of ranks on a host (LOCAL_WORLD_SIZE, or 1
                where no launcher set it), so that members are on different hosts.
            replication_factor: how many ranks hold each state.
        """
        made = cls.__new__(cls)
        made._local_group, made.target_device = None, "cpu"
        made._parameters = default_jump() if replication_jump is None else replication_jump, replication_factor
        return made

    @property
    def local_group(self) -> GroupWrapper:
        """The clique of this rank. Raises: ValueError if the world is no multiple of jump times factor."""
        if self._local_group is None:
            cliques = parse_group_sequence(*self._parameters, dist.get_world_size())
            self._local_group = GroupWrapper.from_list_of_groups(cliques)
        return self._local_group

    def clique(self, rank: int, hosts: Sequence[str]) -> list[int]:
        """See `ReplicationStrategy`.

        Raises:
            ValueError: this is the strategy of another rank's clique, or a number that it was made with is below 1.
        """
        if self._parameters != (0, 0):  # the group may have been formed anew since
            return holders_of(rank, *self._parameters, hosts)
        ranks = self.local_group.ranks
        if rank not in ranks or max(ranks) >= len(hosts):
            raise ValueError(
                f"rank {rank} of {len(hosts)} is not in the clique {ranks} of this strategy: make a new one"
            )
        return ranks

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: CkptID
    ) -> tuple[list[TensorAwareStateDict], list[CkptID]]:
        """See `ReplicationStrategy`; each state goes to each other member of the clique."""
        states, names = self.local_group.all_gather_states(local_ckpt, id_, self.target_device)
        return states, [CkptID(*name) for name in names]

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Collection[CkptID]], wanted: Sequence[CkptID]
    ) -> ExchangePlan[CkptID]:
        """See `ReplicationStrategy`; the members' own copies are preferred."""
        group = self.local_group
        wishes = [[CkptID(*id_) for id_ in each] for each in group.all_gather_object([list(id_) for id_ in wanted])]
        available = {rank: globally_available_ids.get(rank, ()) for rank in group.ranks}
        return retrieve_plan(available, dict(zip(group.ranks, wishes, strict=True)), rank=group.my_global_rank)

    def retrieve_execute(
        self, plan: ExchangePlan[CkptID], my_data: Mapping[CkptID, TensorAwareStateDict]
    ) -> dict[CkptID, TensorAwareStateDict]:
        """See `ReplicationStrategy`."""
        return self.local_group.execute_plan(plan, my_data, self.target_device)


class LazyReplicationStrategyBuilder(ReplicationStrategy, Generic[Eager]):
    """A strategy that is made when it is first needed, so it can be given away before the process group is there.

    It is made anew when the number of ranks, or this process's rank, has changed.
    """

    def __init__(self) -> None:
        self._built: Eager | None = None
        self._built_for = (-1, -1)

    @abstractmethod
    def _eager_build(self) -> Eager:
        """Makes the strategy."""

    @property
    def replication_strategy(self) -> Eager:
        """The strategy itself."""
        here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._built is None or self._built_for != here:
            self._built, self._built_for = self._eager_build(), here
        return self._built

    def clique(self, rank: int, hosts: Sequence[str]) -> list[int]:
        """See `ReplicationStrategy`."""
        return self.replication_strategy.clique(rank, hosts)

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


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder[CliqueReplicationStrategy]):
    """`CliqueReplicationStrategy.from_replication_params`, made when it is first needed; same arguments."""

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        super().__init__()
        self.replication_jump = replication_jump
        self.replication_factor = replication_factor

    def _eager_build(self) -> CliqueReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(self.replication_jump, self.replication_factor)


def default_jump() -> int:
    """How many ranks this host has, as the launcher says; 1 without one."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
