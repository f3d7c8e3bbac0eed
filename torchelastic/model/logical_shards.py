"""Logical shards: gradients that have the same bits for any number of workers.

A global batch is cut into a fixed number of shards. Each shard goes through the model by itself, with random numbers
that depend on (seed, step, shard) alone; the shards' gradients are summed along one fixed binary tree. Which worker
computes which shard does not matter then. (Idea: EasyScale, SC'23.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchelastic.data.shares import CollatedShards
from torchelastic.errors import UnfitError
from torchelastic.group.step_course import FORWARD, REDUCTION, nowhere
from torchelastic.inventory.generators import seed_generators
from torchelastic.model import tree_sum
from torchelastic.model.compute_check.shard_check import ShardCheck
from torchelastic.model.digest import as_word, digest
from torchelastic.model.loss_counts import LossCounts, Tally
from torchelastic.model.transfer import all_gathered
from torchelastic.model.tree_sum import Node
from torchelastic.text import shortlist
from torchelastic.torch_internals.tensors import tree_flatten, tree_unflatten

#: Elements of each node that travel in one message: bounds the memory that the exchange takes.
CHUNK_ELEMENTS = 1 << 20
#: What is summed, one flat tensor for each type.
Flat = dict[torch.dtype, torch.Tensor]


class Summand(NamedTuple):
    """What is known of some shards: the sum of their tensors, and of their losses' counts."""

    flat: Flat
    tally: Tally

    def digest(self) -> int:
        """Of all bits of it."""
        named = [(str(dtype), one) for dtype, one in sorted(self.flat.items(), key=lambda pair: str(pair[0]))]
        return as_word(digest([*named, ("tally", str(self.tally))]))


Nodes = dict[Node, Summand]


class OfStep(NamedTuple):
    """What the shards of one step share.

    Attributes:
        samples: of the step, over all ranks.
        seed: of the run.
        step: committed steps.
    """

    samples: int
    seed: int
    step: int


class LogicalShards:
    """Collects the gradients of one step shard by shard and sums them over all workers; used on the training thread.

    Args:
        module: the plain module.
        shards: how many a global batch has.
        counts: of losses that are sums.

    Attributes:
        at: called before the first forward pass of a step, and on the way into the sum over all workers.
    """

    def __init__(self, module: torch.nn.Module, shards: int, counts: LossCounts) -> None:
        self.shards = shards
        self._module, self._counts = module, counts
        self._nodes: Nodes = {}
        self.at: Callable[[str], None] = nowhere
        self._is_summed = False
        self._buffers: list[torch.Tensor] = []
        self._has_changed: list[float] = []  # for each buffer, in how much of the batch

    def begin_step(self) -> None:
        """A step (or another attempt at one) begins."""
        self._is_summed = False
        self._buffers = []

    @property
    def begun(self) -> int:
        """Sums over all workers that this step has begun."""
        return int(self._is_summed)

    def check_end(self) -> None:
        """The step may end at any time: nothing is reduced before all of a rank's shards are through."""

    def bring(self, nodes: Nodes | None) -> None:
        """Let these nodes count as computed."""
        self._nodes = {} if nodes is None else nodes

    def take(self) -> Nodes | None:
        """Take what has been computed so far, after a step has failed."""
        nodes, self._nodes = self._nodes, {}
        return nodes or None

    def commit(self) -> None:
        """The step has succeeded."""
        self._nodes = {}

    def check_reduced(self, _rank: int) -> None:
        """Asked before the optimizer steps; UnfitError where the shards were not gone through."""
        if not self._is_summed:
            raise UnfitError(
                f"ModelState(logical_shards={self.shards}) needs the step's forward and backward passes inside "
                "`for batch in state.shards(loader):`, gone through to its end before optimizer.step()"
            )

    def each(
        self,
        batch: Any,
        units: Sequence[tuple[int, int]],
        empty: Collection[int],
        of: OfStep,
        check: ShardCheck | None = None,
    ) -> Iterator[Any]:
        """Yield the shards of this rank's batch one by one, and sum up when the last one has been used.

        Args:
            batch: this rank's shards, one behind the other, as the loader made it.
            units: number and samples of each shard that is this rank's and has any.
            empty: shards of the step that have no samples.
            of: the step.
            check: of this step; None: it is not checked.
        """
        self.at(FORWARD)
        self._buffers = [buffer.clone() for buffer in self._module.buffers()]
        parts = parts_of(batch, [size for _, size in units]) if units else []  # it may be padding
        if check is not None:
            check.begin(units, parts, self.shards)
        for (shard, size), part in zip(units, parts, strict=True):
            if check is not None:
                check.begins(shard)
            node = yield from self._computed(shard, size, part, of)
            if check is not None:
                check.computed(shard, node.digest)
            tree_sum.put(self._nodes, (0, shard), node, self.shards, _added)
        if check is not None:
            yield from check.compare(partial(self._digested, of))
        self._sum_up(empty)
        seed_generators(shard_seed(of.seed, of.step, self.shards))  # for what else the step draws

    def _computed(self, shard: int, size: int, part: Any, of: OfStep) -> Generator[Any, None, Summand]:
        seed_generators(shard_seed(of.seed, of.step, shard))
        self._module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in zip(self._module.buffers(), self._buffers, strict=True):
                buffer.copy_(value)
        self._counts.begin_window()
        yield part
        self._check_buffers()
        tally = self._counts.tally_of_shard()
        factor = size / of.samples if tally.plain else self._counts.scale if tally.count else 0.0
        return Summand(self._flat(size / of.samples, factor), tally)

    def _check_buffers(self) -> None:
        """Each shard begins with the buffers of before the step, and their changes are averaged: by place and size."""
        now = dict(self._module.named_buffers())
        other = [
            name for name, before in zip(now, self._buffers, strict=False)
            if now[name].shape != before.shape or now[name].dtype != before.dtype
        ]  # fmt: skip
        other += list(now)[len(self._buffers) :]
        if other or len(now) < len(self._buffers):
            raise UnfitError(
                f"with logical_shards buffers keep number, type and size in a forward pass, and these are others now: "
                f"{shortlist(other) or 'some are gone'}. Run one forward pass before ModelState is made, on every "
                "worker, if the first one makes them (observers of quantization); what grows needs logical_shards left "
                "out"
            )

    def _digested(self, of: OfStep, shard: int, size: int, part: Any) -> Generator[Any, None, int]:
        return (yield from self._computed(shard, size, part, of)).digest()

    def _wanted(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _slots(self) -> list[torch.Tensor]:
        """What is summed: gradients, of which parameters there are any, which buffers have changed, and the buffers.

        Those that have changed become the mean over the shards (running statistics); constants keep their bits.
        """
        wanted = self._wanted()
        slots = [_gradient_of(p, _type_of_gradient(p)) for p in wanted]
        slots += [p.new_tensor([q.grad is not None for q in wanted]) for p in wanted[:1]]
        buffers = list(self._module.buffers())
        changed = [not torch.equal(*pair) for pair in zip(buffers, self._buffers, strict=True)]
        slots += [b.new_tensor(changed, dtype=torch.float64) for b in buffers[:1]]
        return slots + [b.to(_type_of_sum(b)) for b in buffers]

    def _flat(self, weight: float, factor: float) -> Flat:
        """One shard's, copied: its gradients multiplied by the one, all else by the other."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        gradients = len(self._wanted())
        for number, slot in enumerate(self._slots()):
            flat = slot.detach().reshape(-1)
            if factor != weight:
                each = factor if number < gradients else weight
                flat = flat * each if each else torch.zeros_like(flat)  # a shard that counts nothing may have anything
            by_type.setdefault(slot.dtype, []).append(flat)
        if factor != weight:
            return {dtype: torch.cat(parts) for dtype, parts in by_type.items()}
        return {dtype: torch.cat(parts).mul_(weight) for dtype, parts in by_type.items()}

    def _sum_up(self, empty: Collection[int]) -> None:
        self.at(REDUCTION)
        targets = list(self._targets())
        sizes: dict[torch.dtype, int] = {}
        for like, dtype, _ in targets:
            sizes[dtype] = sizes.get(dtype, 0) + like.numel()
        device = targets[0][0].device if targets else torch.device("cpu")
        sums, tally = sum_over_ranks(self._nodes, self.shards, empty, sizes, device)
        self._counts.begin_window()
        factor = self._counts.settle(tally)
        self._counts.raise_error()
        offsets = dict.fromkeys(sizes, 0)
        with torch.no_grad():
            for like, dtype, take in targets:
                start = offsets[dtype]
                offsets[dtype] += like.numel()
                take(sums[dtype][start : start + like.numel()].view(like.shape))
            if factor != 1.0:
                for parameter in self._wanted():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
        self._is_summed = True

    def _targets(self) -> Iterator[tuple[torch.Tensor, torch.dtype, Callable[[torch.Tensor], Any]]]:
        """For each slot of `_slots`: what it looks like, the type in which it is summed, what takes the sum."""
        wanted = self._wanted()
        for parameter in wanted:
            yield parameter, _type_of_gradient(parameter), partial(setattr, parameter, "grad")
        for first in wanted[:1]:
            yield first.new_empty(len(wanted)), first.dtype, partial(_clear_unused, wanted)
        buffers = list(self._module.buffers())
        for one in buffers[:1]:
            yield one.new_empty(len(buffers)), torch.float64, self._take_changes
        for number, buffer in enumerate(buffers):
            yield buffer, _type_of_sum(buffer), partial(self._fill_buffer, number, buffer)

    def _take_changes(self, in_batch: torch.Tensor) -> None:
        self._has_changed = in_batch.tolist()

    def _fill_buffer(self, number: int, buffer: torch.Tensor, value: torch.Tensor) -> None:
        if self._has_changed[number]:
            buffer.copy_(value if buffer.dtype == value.dtype else value.round())


def shard_seed(seed: int, step: int, shard: int) -> int:
    """The seed of one shard of one step, 0 to 2**32 - 1 (torch's CPU generator uses no more). Pure."""
    digest = hashlib.blake2b(f"{seed}/{step}/{shard}".encode(), digest_size=4, person=b"torchelastic").digest()
    return int.from_bytes(digest, "little")


def parts_of(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """The shards of what a loader made, of these many samples each: cut, unless each was collated by itself.

    Raises:
        TypeError: as `split_batch`.
    """
    if not isinstance(batch, CollatedShards):
        return split_batch(batch, sizes)
    leaves, form = tree_flatten(list(batch))
    return list(tree_unflatten([one.clone() if isinstance(one, torch.Tensor) else one for one in leaves], form))


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut what a loader made into consecutive parts of these many samples.

    Tensors are cut along their first dimension and copied, so that a part's place in memory does not depend on who
    computes it; dicts, tuples and lists of tensors are gone through; a list with one entry for each sample is cut.

    Raises:
        TypeError: something in it is none of these, or has another number of samples.
    """
    total = sum(sizes)
    if isinstance(batch, torch.Tensor) and batch.dim() and batch.shape[0] == total:
        return [part.clone() for part in torch.split(batch, list(sizes))]
    if isinstance(batch, dict):
        columns = {key: split_batch(value, sizes) for key, value in batch.items()}
        return [{key: parts[number] for key, parts in columns.items()} for number in range(len(sizes))]
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(v, (torch.Tensor, dict)) for v in batch):
        rows = list(zip(*(split_batch(value, sizes) for value in batch), strict=True))
        named = hasattr(batch, "_fields")
        return [type(batch)(*row) if named else type(batch)(row) for row in rows]
    if isinstance(batch, (tuple, list)) and len(batch) == total:
        ends = torch.tensor(list(sizes)).cumsum(0).tolist()
        return [batch[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    raise TypeError(
        f"state.shards cannot cut a {type(batch).__name__} into shards of {total} samples altogether: have the "
        "loader make tensors with the samples along the first dimension, or dicts, tuples or lists of them"
    )


def sum_over_ranks(
    nodes: Nodes, leaves: int, empty: Collection[int], sizes: dict[torch.dtype, int], device: torch.device
) -> Summand:
    """Sum what all ranks hold along the tree; called on every rank of the default group, if there is one.

    Every rank receives every other one's nodes: at most 2 log2(leaves) times the gradient from each, about one to two
    where the shards are dealt out evenly. In messages of at most `CHUNK_ELEMENTS` elements per node.

    Args:
        nodes: of this rank; together the ranks' cover every leaf once, but for the empty ones. They are left as they
            are.
        leaves: of the tree.
        empty: leaves that count as nothing; the same on all ranks.
        sizes: elements of the result, by type; the same on all ranks.
        device: where messages must lie.

    Raises:
        RuntimeError: a peer is lost.
        ValueError: a leaf is missing, or there twice.
    """
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    mine = sorted(nodes)
    everyones = _gather_names({node: nodes[node].tally for node in mine}, leaves, world_size, device)
    rows = max(len(names) for names in everyones)
    tallies: list[tuple[Node, Tally]] = [((0, leaf), Tally()) for leaf in empty]
    tallies += [pair for names in everyones for pair in names.items()]
    tally = tree_sum.total(tallies, leaves, Tally.plus)
    result: Flat = {}
    for dtype, size in sizes.items():
        result[dtype] = torch.zeros(size, dtype=dtype, device=device)
        for start in range(0, size, CHUNK_ELEMENTS):
            stop = min(start + CHUNK_ELEMENTS, size)
            part = torch.zeros(rows, stop - start, dtype=dtype, device=device)
            for row, node in enumerate(mine):
                part[row] = nodes[node].flat[dtype][start:stop]
            gathered = part
            if world_size > 1:
                gathered = torch.empty(world_size * rows, stop - start, dtype=dtype, device=device)
                _all_gather(gathered, part)
            values = gathered.view(world_size, rows, stop - start)
            known: list[tuple[Node, Any]] = [((0, leaf), None) for leaf in empty]
            known += [
                (node, values[rank, row]) for rank, names in enumerate(everyones) for row, node in enumerate(names)
            ]
            whole = tree_sum.total(known, leaves, _sum_of_known)
            if whole is not None:
                result[dtype][start:stop] = whole
    return Summand(result, tally)


def _all_gather(output: torch.Tensor, mine: torch.Tensor) -> None:
    if hasattr(dist, "all_gather_single"):  # torch 2.13 has renamed it
        dist.all_gather_single(output, mine)
    else:
        dist.all_gather_into_tensor(output, mine)


def _gather_names(
    mine: Mapping[Node, Tally], leaves: int, world_size: int, device: torch.device
) -> list[dict[Node, Tally]]:
    """Which nodes each rank holds, in order, and what they count: bit for bit, as the sum depends on it."""
    names = torch.full((leaves, 6), -1, dtype=torch.int64)
    for row, (node, tally) in enumerate(mine.items()):
        bits = int(torch.tensor(tally.count, dtype=torch.float64).view(torch.int64))
        names[row] = torch.tensor([*node, bits, tally.counted, tally.plain, tally.wrong])
    gathered = all_gathered(names.to(device), world_size)
    return [{(row[0], row[1]): _tally_of(row[2:]) for row in rank.tolist() if row[0] >= 0} for rank in gathered]


def _tally_of(row: Sequence[int]) -> Tally:
    bits, *others = row
    return Tally(float(torch.tensor(bits).view(torch.float64)), *others)


def _clear_unused(parameters: Sequence[torch.nn.Parameter], uses: torch.Tensor) -> None:
    """A parameter that no shard has used has no gradient: with zeros AdamW would decay it."""
    for parameter, weight in zip(parameters, uses.tolist(), strict=True):
        if not weight:
            parameter.grad = None


def _gradient_of(parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=dtype) if parameter.grad is None else parameter.grad.to(dtype)


def _type_of_gradient(parameter: torch.nn.Parameter) -> torch.dtype:
    """The parameter's, unless `parameter.grad_dtype` was set (torch 2.10): None there means any, all summed in one."""
    dtype: torch.dtype | None = parameter.grad_dtype if hasattr(torch.Tensor, "grad_dtype") else parameter.dtype
    return torch.promote_types(parameter.dtype, torch.float32) if dtype is None else dtype


def _type_of_sum(buffer: torch.Tensor) -> torch.dtype:
    return buffer.dtype if buffer.is_floating_point() or buffer.is_complex() else torch.float64


def _sum_of_known(left: Any, right: Any) -> Any:
    if left is None or right is None:  # an empty leaf
        return right if left is None else left
    return left.add_(right)


def _added(left: Summand, right: Summand) -> Summand:
    for dtype, flat in left.flat.items():
        flat.add_(right.flat[dtype])
    return Summand(left.flat, left.tally.plus(right.tally))
