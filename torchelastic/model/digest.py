"""Whether all members of a group are in sync, and what differs: digests of their bytes, compared after each sync.

The digest is a sum of the bytes, taken as 64-bit integers, with a weight that depends on the position: a change of one
element always changes it, a few independent changes do but for one case in 2**60 or so. It finds mistakes and broken
memory; it is no protection against somebody who wants to be overlooked.

Parts: "module" (parameters), "frozen" (those that require no gradient), "buffers", "optimizer", "scheduler", "sampler"
and "extra" (objects with a state of their own). Buffers are compared and never found fault with: DDP makes running
statistics rank 0's before each forward pass, and then each rank's take in its own batch, unless the module has
SyncBatchNorm. Random numbers and plain values of `extra` are each rank's own and not compared; nor are modes of
modules, for one rank alone may have evaluated last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch

from torchelastic.model.transfer import gathered_numbers
from torchelastic.odd_one_out import alone_in_result
from torchelastic.torch_internals.tensors import tensors_within

PARTS = ("module", "frozen", "buffers", "optimizer", "scheduler", "sampler", "extra")
#: Parts that may differ from rank to rank.
OWN = ("buffers",)
#: What a quick comparison reads at most of each member's tensors, all together ..
SAMPLE_BYTES = 4 * 1024 * 1024
#: .. in pieces of this size, spread over each tensor.
PIECE_BYTES = 4096
#: Most names of differing tensors in a message.
MAX_NAMES = 3

_COLUMNS = 1024
_JOIN_BYTES = 256 * 1024
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: spreads consecutive numbers over all bits

Leaves = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class ReplicaComparison:
    """What a comparison has found; equal on all ranks.

    Attributes:
        thorough: whether every byte was read, or a sample.
        differing: for each part that differs, the ranks that differ from the most (from rank 0's side in a tie).
        names: for each part that differs, the first tensors or values that do; empty if the ranks hold different ones.
    """

    thorough: bool
    differing: Mapping[str, tuple[int, ...]]
    names: Mapping[str, tuple[str, ...]]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The parts that differ and must not."""
        return tuple(part for part in self.differing if part not in OWN)

    @property
    def is_in_sync(self) -> bool:
        """Whether nothing differs but what may."""
        return not self.wrong

    def __str__(self) -> str:
        """One sentence."""
        found = []
        for part in self.wrong:
            ranks = ", ".join(map(str, self.differing[part]))
            names = ", ".join(self.names.get(part, ())) or "it has other parts there"
            found.append(f"{part} differs on rank {ranks} ({names})")
        return "; ".join(found) if found else "all members are in sync"


def compare(parts: Mapping[str, Any], *, world_size: int, device: torch.device, thorough: bool) -> ReplicaComparison:
    """Compare the parts of a state with those of all other members; called on every rank of the default group.

    Args:
        parts: nested states by name, names from PARTS; a part may be None or missing.
        world_size: of the group.
        device: where messages must lie for the group's backend.
        thorough: read every byte; else a sample of at most SAMPLE_BYTES.

    Raises:
        RuntimeError: a peer is lost.
    """
    if world_size == 1:
        return ReplicaComparison(thorough, {}, {})
    leaves = {part: list(leaves_of(parts.get(part))) for part in PARTS}
    tensors = sum(isinstance(leaf, torch.Tensor) for part in leaves.values() for _, leaf in part)
    piece_bytes = None if thorough else _bytes_of_each(tensors)
    mine = [value for part in PARTS for value in (len(leaves[part]), digest(leaves[part], piece_bytes))]
    gathered = gathered_numbers([*map(as_word, mine)], world_size, device)
    differing: dict[str, tuple[int, ...]] = {}
    names: dict[str, tuple[str, ...]] = {}
    for number, part in enumerate(PARTS):
        of_ranks = [tuple(values[2 * number : 2 * number + 2]) for values in gathered]
        odd = _odd_ones(of_ranks)
        if not odd:
            continue
        differing[part] = odd
        if part not in OWN and len({size for size, _ in of_ranks}) == 1:
            names[part] = _differing_names(leaves[part], piece_bytes, world_size, device)
    return ReplicaComparison(thorough, differing, names)


def sample_digest(tensors: Sequence[torch.Tensor]) -> int:
    """A `digest` of a sample of these, of at most SAMPLE_BYTES."""
    return digest(list(leaves_of(tensors)), _bytes_of_each(len(tensors)))


def _bytes_of_each(tensors: int) -> int:
    return max(PIECE_BYTES, SAMPLE_BYTES // max(tensors, 1))


def _differing_names(
    leaves: Leaves, sample_bytes: int | None, world_size: int, device: torch.device
) -> tuple[str, ...]:
    mine = [as_word(digest([leaf], sample_bytes)) for leaf in leaves]
    gathered = gathered_numbers(mine, world_size, device)
    odd = [name for (name, _), values in zip(leaves, zip(*gathered, strict=True), strict=True) if len(set(values)) > 1]
    named = tuple(odd[:MAX_NAMES])
    return (*named, f"and {len(odd) - MAX_NAMES} more") if len(odd) > MAX_NAMES else named


def _odd_ones(values: Sequence[Any]) -> tuple[int, ...]:
    """The ranks whose value is not that of the most; where nobody knows which is right, not that of the first."""
    odd = alone_in_result(dict(enumerate(values)))
    return odd.suspects if odd.agreeing else tuple(rank for rank, value in enumerate(values) if value != values[0])


# --- digests, pure ----------------------------------------------------------------------------------------------------


def leaves_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and plain values of a nested state, with their dotted names.

    A dict's keys are sorted: their order is not part of a state, and loading may change it.
    """
    if isinstance(tree, Mapping):
        for key, value in sorted(tree.items(), key=lambda item: str(item[0])):
            yield from leaves_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from leaves_of(value, f"{name}.{number}" if name else str(number))
    elif isinstance(tree, torch.Tensor) and (within := tensors_within(tree)) is not None:
        tensors, context = within
        yield from leaves_of(context, f"{name}.{type(tree).__name__}")
        yield from leaves_of(tensors, name)
    else:
        yield name, tree


def digest(leaves: Leaves, sample_bytes: int | None = None) -> int:
    """A 64-bit number for tensors and plain values with their names.

    Args:
        leaves: see `leaves_of`. Other things than tensors and plain values count by their type alone.
        sample_bytes: read at most about so much of each tensor; None: all.
    """
    return begun_digest(leaves, sample_bytes)()


@torch.no_grad()
def begun_digest(leaves: Leaves, sample_bytes: int | None = None) -> Callable[[], int]:
    """As `digest`; what is returned waits for a GPU, which computes meanwhile."""
    outline = hashlib.blake2b(digest_size=8)
    sums: list[torch.Tensor] = []
    small: list[torch.Tensor] = []
    small_bytes = 0
    for name, leaf in leaves:
        outline.update(_outline(name, leaf))
        if not isinstance(leaf, torch.Tensor) or not leaf.numel():
            continue
        flat = _sampled(_as_bytes(leaf), sample_bytes)
        if flat.numel() >= _JOIN_BYTES:
            sums.append(_weighted_sum(flat))
            continue
        # joined, because access to a small tensor takes longer than reading it
        if small and (small_bytes + flat.numel() > 4 * _JOIN_BYTES or small[0].device != flat.device):
            sums.append(_weighted_sum(torch.cat(small)))
            small, small_bytes = [], 0
        small.append(flat)
        small_bytes += flat.numel()
    if small:
        sums.append(_weighted_sum(torch.cat(small)))
    of_names = int.from_bytes(outline.digest(), "little")

    def finished() -> int:
        factors = ((2 * number + 1) * _FACTOR for number in range(len(sums)))
        total: int = of_names + sum(map(mul, factors, _to_host(sums)))
        return total & _MASK

    return finished


def _outline(name: str, leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        return f"{name}|{leaf.dtype}|{tuple(leaf.shape)}\n".encode()
    plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes))
    return f"{name}|{leaf!r}\n".encode() if plain else f"{name}|{type(leaf).__qualname__}\n".encode()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.resolve_neg().view(torch.uint8)


def _sampled(flat: torch.Tensor, sample_bytes: int | None) -> torch.Tensor:
    """Pieces in equal distances, and the very last bytes."""
    if sample_bytes is None or flat.numel() <= sample_bytes:
        return flat
    pieces = flat[: flat.numel() // PIECE_BYTES * PIECE_BYTES].view(-1, PIECE_BYTES)
    every = -(-len(pieces) // max(1, sample_bytes // PIECE_BYTES))
    return torch.cat([pieces[::every].reshape(-1), flat[-PIECE_BYTES:]])


def _weighted_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum of 64-bit words, each times an odd number that depends on its place; two passes of reading, no copy."""
    left_over = flat.numel() % 8
    if left_over:
        end = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        end[:left_over] = flat[flat.numel() - left_over :]
        flat, last = flat[: flat.numel() - left_over], end.view(torch.int64)
    else:
        last = flat.new_empty(0).view(torch.int64)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64)
    in_rows = words.numel() // _COLUMNS * _COLUMNS
    rows = words[:in_rows].view(-1, _COLUMNS)
    tail = torch.cat([words[in_rows:], last])
    # odd for the column and even for the row: the factor of each word, their sum, is odd, so no change can vanish in it
    result = (rows.sum(0) * _odd_numbers(_COLUMNS, flat.device)).sum()
    result = result + (rows.sum(1) * (2 * _odd_numbers(len(rows), flat.device))).sum()
    return result + (tail * (3 * _odd_numbers(len(tail), flat.device))).sum()


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    return (2 * torch.arange(count, dtype=torch.int64, device=device) + 1) * as_word(_FACTOR)


def _to_host(sums: Sequence[torch.Tensor]) -> list[int]:
    """All at once: each access to a device's memory waits for all that it has to do."""
    if len({value.device for value in sums}) > 1:
        sums = [value.cpu() for value in sums]
    return torch.stack(list(sums)).tolist() if sums else []


def as_word(value: int) -> int:
    """A digest as a number of 64 bits with a sign: for a message."""
    value &= _MASK
    return value - (1 << 64) if value >= 1 << 63 else value
