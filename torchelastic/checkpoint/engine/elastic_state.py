"""What a manager whose saves all ranks take part in needs of a state, and whom it tells. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    from torchelastic.checkpoint.engine.read_rules import StoredParts


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

    def of_each_rank(self, names: Sequence[str]) -> Collection[str]:
        """Of which tensors of the tree each rank has its own."""

    def check_savable(self) -> None:
        """Raises UnsavableError for content that `save` could not write, or `load` would refuse."""

    def save(self, stream: BinaryIO, /) -> object:
        """Writes everything into a stream."""

    def load(self, stream: BinaryIO, /) -> object:
        """The inverse."""


class Observe(Protocol):
    """Called in the background with a save that is durable in a tier."""

    def __call__(self, tier: str, *, stall_s: float, durable_s: float) -> None:
        """Called once for each tier."""
