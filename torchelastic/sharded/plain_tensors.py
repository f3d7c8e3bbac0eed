"""The optimizers' tensors that are no DTensors: equal on all ranks, such as a count of steps, or each rank's own.

Nothing in such a tensor says which it is, so the ranks compare them. One that differs, such as a scale of the rank's
own shard, belongs to the part of the parameter that the rank holds, and goes with it: to a rank that has the same part
in the next group. Where parts are cut anew it would mean nothing, and is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import torch
import torch.distributed as dist
import xxhash

from torchelastic.checkpoint.format.header import Entry
from torchelastic.checkpoint.format.regions import Region
from torchelastic.checkpoint.format.tensor_parts import ShardOf
from torchelastic.errors import NonRetryableException
from torchelastic.inventory.copies import bytes_of, is_dense
from torchelastic.model.stored_form import OF_RANKS
from torchelastic.sharded.offers import Layout, Offer, Piece
from torchelastic.sharded.transfers import all_gather
from torchelastic.text import shortlist

PARAMETERS, OPTIMIZER = "module/", "optimizer/"

log = logging.getLogger(__name__)

#: Steps of a group before which the ranks compare, counted from its first one; and then before each that many.
_EARLY, _EVERY = range(1, 4), 64


def split_name(name: str) -> tuple[int, str, str]:
    """Number of the optimizer, name of the parameter, key of the value.

    >>> split_name("optimizer/0/layers.1.weight/step")
    (0, 'layers.1.weight', 'step')
    """
    number, rest = name.removeprefix(OPTIMIZER).split("/", 1)
    parameter, key = rest.rsplit("/", 1)
    return int(number), parameter, key


def own_tree(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, dict[str, ShardOf]]:
    """What a checkpoint has of the plain tensors of a rank: written by each rank, though they are no DTensors."""
    marked = {name: ShardOf(one, tuple(one.shape), (0,) * one.ndim) for name, one in tensors.items()}
    return {str(rank): marked} if marked else {}


def name_of_own(stored: str) -> str | None:
    """The name of a plain tensor, given that in a checkpoint, of any rank; None: it is none of these.

    >>> name_of_own("optimizer_of_ranks/3/optimizer~10~1layers.1.weight~1scale")
    'optimizer/0/layers.1.weight/scale'
    """
    kind, *rest = stored.split("/")
    return rest[-1].replace("~1", "/").replace("~0", "~") if kind == OF_RANKS and len(rest) == 2 else None


def plain_names(layout: Layout) -> list[str]:
    """Those of a layout that are whole on the rank that has them."""
    return [
        name
        for name, part in layout.items()
        if name.startswith(OPTIMIZER) and not part.is_shard and part.region.sizes == part.shape
    ]


def digests_of(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """What stands for the bytes of each plain tensor, by name."""
    return {name: _digest(layout[name], tensors[name]) for name in plain_names(layout)}


def _digest(part: Entry, tensor: torch.Tensor) -> int:
    local = tensor.detach()
    memory = bytes_of(local if is_dense(local) and local.is_contiguous() else local.contiguous()).cpu().numpy()
    return xxhash.xxh3_64_intdigest(memory.tobytes() + repr((part.dtype, part.shape)).encode())


def differing(digests: Iterable[Mapping[str, int]]) -> set[str]:
    """The names that do not mean the same bytes everywhere. Pure.

    >>> differing([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {}])
    {'b'}
    """
    seen: dict[str, int] = {}
    return {name for each in digests for name, digest in each.items() if seen.setdefault(name, digest) != digest}


def own_names(offers: Sequence[Offer], holds: Sequence[Sequence[int]], completing: Collection[int]) -> set[str]:
    """Which plain tensors of a state are each rank's own. Pure.

    Args:
        offers: of all ranks.
        holds: for each rank, which of its holdings are of the state.
        completing: ranks that have yet to make the last step of it: theirs are of before.
    """
    found = set[str]()
    for is_behind in (False, True):
        found |= differing(
            offer.holdings[number].digests
            for rank, (offer, numbers) in enumerate(zip(offers, holds, strict=True))
            if (rank in completing) is is_behind
            for number in numbers
        )
    return found


def pieces_of_own(
    rank: int, own: Collection[str], offers: Sequence[Offer], holds: Sequence[Sequence[int]]
) -> list[tuple[Piece, Entry]]:
    """Where a rank gets those plain tensors that belong to its parts. Pure; raises on every rank what it raises on one.

    Args:
        rank: who needs them.
        own: their names.
        offers: of all ranks.
        holds: for each rank, which of its holdings are of the state.

    Raises:
        NonRetryableException: parts are cut in another way than they were; names the tensors.
    """
    found: list[tuple[Piece, Entry]] = []
    lacking = []
    for name in sorted(own):
        parameter = PARAMETERS + split_name(name)[1]
        sources = list(_sources(name, parameter, offers, holds))
        for receiver, offer in enumerate(offers):
            needed = offer.needed[parameter].region
            fitting = [each for each in sources if is_same_part(each[2], needed)]
            if not fitting:
                lacking.append(name.removeprefix(OPTIMIZER))
                break
            if receiver == rank:
                source, number, _, part = min(fitting, key=lambda each: (each[0] != rank, each[0]))
                found.append((Piece(source, number, name, part.region), part))
    if lacking:
        raise NonRetryableException(
            f"the optimizer keeps plain tensors that differ from rank to rank ({shortlist(lacking)}): they belong to "
            f"parts of parameters that are cut in another way with {len(offers)} workers. Start as many workers as "
            "before, or use an optimizer that keeps DTensors"
        )
    return found


def _sources(
    name: str, parameter: str, offers: Sequence[Offer], holds: Sequence[Sequence[int]]
) -> Iterable[tuple[int, int, Region, Entry]]:
    for rank, (offer, numbers) in enumerate(zip(offers, holds, strict=True)):
        for number in numbers:
            layout = offer.layouts[offer.holdings[number].layout]
            if name in layout and parameter in layout:
                yield rank, number, layout[parameter].region, layout[name]


def is_same_part(one: Region, other: Region) -> bool:
    """Whether two parts of a tensor are the same, or are both empty."""
    return one == other or (one.numel == other.numel == 0)


class PlainTensorComparison:
    """What the ranks of a run know of these tensors; the same on all of them. On the training thread.

    Attributes:
        equal: names of those that were equal when they were compared last.
        own: names of those that were not, at any time in this group.
    """

    def __init__(self) -> None:
        self.equal: set[str] = set()
        self.own: set[str] = set()
        self._steps = 0
        self._has_told = False

    def enter_group(self, names: Iterable[str], own: Collection[str]) -> None:
        """A new group is in sync, and has compared what it has taken over; nothing else counts: some ranks are new."""
        self._say(own)
        self.own = set(own)
        self.equal = set(names) - self.own
        self._steps = 0

    def _say(self, own: Collection[str]) -> None:
        if own and not self._has_told:
            self._has_told = True
            names = sorted(name.removeprefix(OPTIMIZER) for name in own)
            log.warning(
                "the optimizer keeps plain tensors that differ from rank to rank (%s): they belong to the parts that "
                "the ranks hold, so this run can go on, or resume, with as many workers only", shortlist(names),
            )  # fmt: skip

    def begin_step(self) -> bool:
        """The optimizers are about to step: whether to compare first, which is the same on all ranks."""
        number, self._steps = self._steps, self._steps + 1
        return number in _EARLY or (number > 0 and number % _EVERY == 0)

    def compare(self, layout: Layout, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
        """Called on every rank of the group.

        Raises:
            RuntimeError: a peer is lost.
        """
        mine = digests_of(layout, tensors)
        all_of_mine = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(sorted(mine.items()))) >> 1
        bounds = torch.tensor([all_of_mine, -all_of_mine])
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=group)
        everywhere = set(mine)
        if int(bounds[0]) != -int(bounds[1]):
            said = all_gather(group, mine, dict[str, int])
            everywhere = set.intersection(*map(set, said))
            self.own |= differing(said)
            self._say(self.own)
        self.equal = everywhere - self.own
