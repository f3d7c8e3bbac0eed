"""What saving and restoring together needs of the group: small messages, bytes from one to another, and meeting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Mailbox(Protocol):
    """Notes that every rank of a group can read; may be used by any one thread, also while the training thread works.

    Raises RuntimeError (as the store of a round does) when rank 0 is gone.
    """

    def post(self, key: str, words: bytes) -> None:
        """Leave a note."""

    def look(self, key: str) -> bytes | None:
        """Read a note; None: there is none yet. Never waits for one."""

    def drop(self, key: str) -> None:
        """Throw a note away; there may be none."""


class Peers(Protocol):
    """The ranks of one group, as one of them sees them. Used on the training thread; every rank makes the same calls.

    Whatever waits raises RuntimeError as soon as the group is broken.

    Attributes:
        rank: of this worker.
        world_size: how many there are.
        round_number: of the rendezvous; grows from group to group.
        address: at which the other hosts reach this one.
    """

    rank: int
    world_size: int
    round_number: int
    address: str

    def gather(self, words: bytes) -> Sequence[bytes]:
        """What each rank says, by rank."""

    def tell(self, words: bytes) -> bytes:
        """What rank 0 says; what the others give is ignored."""

    def send(self, data: memoryview, rank: int) -> None:
        """Give bytes to one rank, which calls `receive`."""

    def receive(self, into: memoryview, rank: int) -> None:
        """Take as many bytes from one rank, which calls `send`."""

    def meet(self) -> None:
        """Return when every rank has called it, however long one of them works before it does."""

    def mailbox(self) -> Mailbox:
        """The notes of this group; called once."""


class Drawer:
    """The notes of a group of one."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def post(self, key: str, words: bytes) -> None:
        """See `Mailbox`."""
        self._notes[key] = words

    def look(self, key: str) -> bytes | None:
        """See `Mailbox`."""
        return self._notes.get(key)

    def drop(self, key: str) -> None:
        """See `Mailbox`."""
        self._notes.pop(key, None)


class Alone:
    """A group of one.

    Args:
        round_number: of the rendezvous.
    """

    rank = 0
    world_size = 1
    address = "127.0.0.1"

    def __init__(self, round_number: int = 0) -> None:
        self.round_number = round_number

    def gather(self, words: bytes) -> Sequence[bytes]:
        """See `Peers`."""
        return [words]

    def tell(self, words: bytes) -> bytes:
        """See `Peers`."""
        return words

    def send(self, data: memoryview, rank: int) -> None:
        """Never called: there is nobody else."""
        raise RuntimeError(f"there is no rank {rank} to send {data.nbytes} bytes to: this worker is alone")

    def receive(self, into: memoryview, rank: int) -> None:
        """Never called: there is nobody else."""
        raise RuntimeError(f"there is no rank {rank} to receive {into.nbytes} bytes from: this worker is alone")

    def meet(self) -> None:
        """See `Peers`."""

    def mailbox(self) -> Mailbox:
        """See `Peers`."""
        return Drawer()
