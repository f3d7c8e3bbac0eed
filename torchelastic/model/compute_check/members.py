"""The workers of a group, as far as a check goes by them: who is of one kind, who shares a host, and their names."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from torchelastic.model.compute_check.worker_kind import kind_of_worker, number_of
from torchelastic.model.transfer import all_gathered, gathered_numbers
from torchelastic.processes.identity import host_id
from torchelastic.processes.local_rank import local_rank_of

#: Of a text so many bytes are sent.
_TEXT_BYTES = 160


@dataclass(frozen=True)
class CheckMembers:
    """By rank: see above.

    Attributes:
        rank: of this process.
        kinds: equal numbers compute the same bits.
        hosts: a number for each host.
        names: for people.
    """

    rank: int
    kinds: tuple[int, ...]
    hosts: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Of the group."""
        return len(self.kinds)

    @property
    def without_match(self) -> tuple[str, ...]:
        """The names of those that nobody else is of one kind with.

        >>> CheckMembers(0, (5, 5, 7), (1, 1, 2), ("a", "b", "c")).without_match
        ('c',)
        """
        pairs = zip(self.kinds, self.names, strict=True)
        return tuple(name for kind, name in pairs if self.kinds.count(kind) == 1)


def gather_members(rank: int, world_size: int, device: torch.device) -> CheckMembers:
    """Called on every rank of a group, once in it.

    Args:
        rank: of this process.
        world_size: of the group.
        device: where messages must lie.

    Raises:
        RuntimeError: a peer is lost.
    """
    local_rank = local_rank_of(os.environ)
    of_host = "" if local_rank is None else f", worker {local_rank}"
    on = f", cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else ""
    names = gathered_texts(f"{socket.gethostname()}{of_host}{on}", world_size, device)
    rows = gathered_numbers([number_of(kind_of_worker()), number_of(host_id())], world_size, device)
    return CheckMembers(
        rank,
        tuple(row[0] for row in rows),
        tuple(row[1] for row in rows),
        tuple(f"rank {each} ({called})" for each, called in enumerate(names)),
    )


def gathered_texts(text: str, world_size: int, device: torch.device) -> list[str]:
    """By rank, what each gives, cut to what a message takes. Called on every rank; raises RuntimeError."""
    data = text.encode()[:_TEXT_BYTES]
    letters = torch.tensor([*data, *[0] * (_TEXT_BYTES - len(data))], dtype=torch.uint8, device=device)
    rows = all_gathered(letters, world_size)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def gathered(values: Sequence[int], members: CheckMembers, device: torch.device) -> list[list[int]]:
    """By rank, what each gives: as many numbers of 64 bits with a sign. Called on every rank; raises RuntimeError."""
    return gathered_numbers(values, members.world_size, device)


def wait_for_verdict(members: CheckMembers, device: torch.device) -> None:
    """Wait until every rank has what a verdict follows from: whoever acts on it before cuts the others' messages."""
    with suppress(RuntimeError):  # somebody has it, and is gone
        gathered([0], members, device)
