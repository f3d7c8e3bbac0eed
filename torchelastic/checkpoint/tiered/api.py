"""What the train loop needs from a checkpoint manager whose saves all ranks take part in. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from torchelastic.checkpoint.api import CheckpointManager
from torchelastic.checkpoint.policy import SavePolicy
from torchelastic.group.peers import Peers

if TYPE_CHECKING:
    from torchelastic.checkpoint.tiered.reading import StoredParts


class ElasticState(Protocol):
    """What is saved and restored; `torchelastic.State` has it.

    Attributes:
        loads_parts: whether every rank takes what it has read (`load_checkpoint_parts`), and not rank 0 all of it.
    """

    loads_parts: bool

    def checkpoint_tree(self) -> Any:
        """The whole state as plain values and tensors; None: `save` writes it."""

    def load_checkpoint_tree(self, tree: Any) -> None:
        """The inverse."""

    def load_checkpoint_parts(self, tree: Any, parts: Sequence[StoredParts], step: int) -> None:
        """The inverse of `checkpoint_tree`, on every rank, where `loads_parts`; see `Restored`."""

    def replicated(self, names: Sequence[str]) -> Collection[str]:
        """Which tensors of the tree every rank holds with the same bits."""

    def save(self, stream: BinaryIO, /) -> object:
        """Writes everything into a stream."""

    def load(self, stream: BinaryIO, /) -> object:
        """The inverse."""


class Observe(Protocol):
    """Hears of a save that is durable in a tier; called in the background."""

    def __call__(self, tier: str, *, stall_s: float, durable_s: float) -> None:
        """Called once for each tier."""


class ElasticCheckpointManager(CheckpointManager):
    """A manager whose saves begin on every rank after the same committed step, and end in the background.

    The methods below are called on the training thread, by every rank of a group, in the order in which they stand
    here; errors of the background never reach it.

    Attributes:
        policy: when the train loop saves; None: when the state or the coordinator asks for it.
    """

    policy: SavePolicy | None = None

    @abstractmethod
    def enter_group(self, peers: Peers) -> None:
        """A new group stands: what older ones have not completed is given up. Raises RuntimeError if a peer is lost."""

    @abstractmethod
    def restore(self, state: ElasticState, peers: Peers) -> int | None:
        """Find the newest checkpoint that can be put together, and set the state of rank 0 from it.

        Returns:
            Its step; None if there is no checkpoint at all.

        Raises:
            CorruptCheckpointError: there are checkpoints, and none of them is intact; on every rank.
            RuntimeError: a peer is lost.
        """

    @abstractmethod
    def save_step(
        self,
        state: ElasticState,
        step: int,
        peers: Peers,
        *,
        everywhere: bool = False,
        observe: Observe | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copy this rank's share of the state; all else happens in the background.

        Args:
            state: may change when this returns.
            step: committed steps of the run.
            peers: of the group of the last `enter_group`, or `Alone`.
            everywhere: in every tier, however rarely it takes part else; what rank 0 says counts.
            observe: hears of the costs.
            metrics: what was measured of this state, by name; what rank 0 says counts.

        Raises:
            CheckpointError: there is no memory or no room for the share, or both slots stay busy.
            TypeError: the state holds something that is not saved.
        """

    @property
    @abstractmethod
    def is_saving(self) -> bool:
        """Whether a save still runs in the background."""

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether one more save would have to wait."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the saves that have begun are done or given up; false: they are not, after that time."""

    @abstractmethod
    def end_run(self) -> None:
        """The run is over for this worker: wait, for a bounded time, until its last save is done everywhere."""
