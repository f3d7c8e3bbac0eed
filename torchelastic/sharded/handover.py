"""How the ranks of a new group come by their parts of the chosen state: what each offers, and who gets what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchelastic.checkpoint.engine.read_rules import StoredParts
from torchelastic.checkpoint.format.header import Entry
from torchelastic.errors import NonRetryableException
from torchelastic.model.stored_form import OF_EACH_RANK
from torchelastic.sharded.built import Built
from torchelastic.sharded.commit_rule import ChosenState
from torchelastic.sharded.companions import companions_in, from_bytes, to_bytes
from torchelastic.sharded.heirs import heirs
from torchelastic.sharded.offers import (
    STORED,
    Layout,
    Offer,
    OfferedState,
    Phase,
    Piece,
    Version,
    layout_at,
    pieces_for,
)
from torchelastic.sharded.plain_tensors import PARAMETERS, digests_of, name_of_own, own_names, pieces_of_own
from torchelastic.sharded.stored_names import name_of_stored, names_in_shard
from torchelastic.sharded.transfers import broadcast_bytes, exchange_bytes, move


@dataclass(frozen=True)
class HeldState:
    """Parts that this rank holds of one state, wherever they are.

    Attributes:
        version: of the state.
        layout: which parts.
        tensors: the parts, by name.
        companions: what goes with them; empty: this rank has not got it.
        is_live: see `OfferedState`.
        is_copy: see `OfferedState`.
        owner: see `OfferedState`.
        is_own: whether the companions are complete, and the random numbers among them are this rank's.
    """

    version: Version
    layout: Layout
    tensors: Mapping[str, torch.Tensor]
    companions: bytes
    is_live: bool = False
    is_copy: bool = False
    is_own: bool = True
    owner: int | None = None


def offer_of(
    held: Sequence[HeldState],
    phase: Phase,
    needed: Layout,
    *,
    generation: int,
    token: int,
    domain: str,
    lost: int,
    step: int,
    rank: int,
) -> Offer:
    """What this rank says of itself; arguments as for `Offer`."""
    layouts: list[Layout] = []
    holdings = []
    for each in held:
        number = next((n for n, layout in enumerate(layouts) if layout is each.layout), len(layouts))
        if number == len(layouts):
            layouts.append(each.layout)
        digests = digests_of(each.layout, each.tensors)
        has_companions = bool(each.companions)
        kinds = each.is_live, each.is_copy, has_companions
        holdings.append(OfferedState(each.version, number, *kinds, digests, each.owner, each.is_own))
    return Offer(phase, tuple(holdings), tuple(layouts), generation, token, needed, domain, lost, step, rank)


def control_group() -> dist.ProcessGroup:
    """The group for small messages on the CPU; called on every rank of a new group.

    Raises:
        NonRetryableException: there is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise NonRetryableException("a ShardedState needs a process group: use a coordinator that makes one")
    world = dist.group.WORLD
    assert world is not None
    return world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def check_same_models(offers: Sequence[Offer]) -> None:
    """Raise NonRetryableException where `build` has made another model on some rank."""
    first = {name: (part.shape, part.dtype) for name, part in offers[0].needed.items()}
    for rank, offer in enumerate(offers):
        other = {name: (part.shape, part.dtype) for name, part in offer.needed.items()}
        differing = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if differing:
            name = differing[0].removeprefix(PARAMETERS)
            raise NonRetryableException(
                f"build(mesh) has made another model on rank {rank} than on rank 0: the parameter {name!r} is "
                f"{_form_text(other.get(differing[0]))} there and {_form_text(first.get(differing[0]))} here; it must "
                "make the same one on every rank"
            )


def _form_text(form: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if form is None else f"a {form[1]} of shape {form[0]}"


def held_of_checkpoint(
    tree: Mapping[str, Any] | None, parts: Sequence[StoredParts], step: int, built: Built
) -> list[HeldState]:
    """What this rank has read of a checkpoint, of a `ShardedState` or of a `ModelState`.

    Args:
        tree: see `State.load_checkpoint_parts`.
        parts: the same.
        step: the same.
        built: whose optimizers it belongs to.

    Raises:
        NonRetryableException: the checkpoint is of another model or of other optimizers.
    """
    companions = b""
    if tree is not None:
        companions = to_bytes(companions_in(tree, built))
    held = []
    for each in parts:
        layout: dict[str, Entry] = {}
        tensors = {}
        is_sharded = any(entry.is_shard for stored, entry in each.entries.items() if stored.startswith(PARAMETERS))
        names = names_in_shard(each, built)
        for stored, entry in each.entries.items():
            name = name_of_stored(stored, built, names)
            if name is not None and name not in layout:
                is_shard = entry.is_shard if is_sharded else built.is_split(name, entry.shape)
                layout[name] = Entry.of(name, entry.dtype, entry.shape, entry.region, is_shard=is_shard)
                tensors[name] = each.tensors[stored]
        for stored, entry in each.entries.items():
            if (name := name_of_own(stored)) is not None:
                layout[name] = Entry.of(name, entry.dtype, entry.shape, entry.region, is_shard=False)
                tensors[name] = each.tensors[stored]
        held.append(HeldState(Version(STORED, step, 0), layout, tensors, companions, is_own=False))
    return held


def rows_in(parts: Sequence[StoredParts]) -> list[tuple[int, bytes]]:
    """The random numbers among what this rank has read of a checkpoint, and which rank had saved each."""
    return [
        (each.entries[name].region.offsets[0] + number, row.numpy().tobytes())
        for each in parts
        for name, tensor in each.tensors.items()
        if name == f"{OF_EACH_RANK}random"
        for number, row in enumerate(tensor)
    ]


@dataclass(frozen=True)
class Taken:
    """What has come to this rank.

    Attributes:
        companions: of the state, as bytes.
        with_random: whether the random numbers among them are this rank's.
        received_bytes: how much came from other ranks.
        own: names of the optimizers' plain tensors that are each rank's own.
    """

    companions: bytes
    with_random: bool
    received_bytes: int
    own: Collection[str]


def take_over(
    built: Built,
    held: Mapping[int, HeldState],
    offers: Sequence[Offer],
    choice: ChosenState,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Taken:
    """Fill what was built for a new group with the state that was chosen; called on every rank of it.

    Args:
        built: its tensors are overwritten.
        held: what this rank has of the state that was chosen, by its number in the rank's offer.
        offers: of all ranks.
        choice: made of them.
        group: of CPU tensors.
        device: where messages of the default group must lie.

    Raises:
        NonRetryableException: the state is of another model.
        RuntimeError: a peer is lost; what is held is as it was.
    """
    rank = dist.get_rank(group)
    mine = [] if rank in choice.completing else list(held.values())
    given_on = next(each.companions for each in mine if each.companions) if rank == choice.source else None
    from_source = broadcast_bytes(group, given_on, choice.source)
    own = next((each.companions for each in mine if each.is_own and each.companions), None)
    wanted = heirs(offers, choice)
    given_to = {heir: held[number].companions for heir, (source, number) in wanted.items() if source == rank}
    left = exchange_bytes(group, given_to, wanted[rank][0] if rank in wanted else None)
    own = own if left is None else left
    companions = from_source if own is None else own
    tree = from_bytes(companions)
    built.put_groups(tree["groups"])
    layout = layout_at(offers, choice.holds)
    own_plain = own_names(offers, choice.holds, choice.completing)
    of_own = pieces_of_own(rank, own_plain, offers, choice.holds)
    layout |= {piece.name: part for piece, part in of_own}
    regions = built.regions_for(layout)
    built.make_optimizer_state(layout, tree["values"])
    built.put_others(tree["others"] or [{} for _ in built.optimizers.objects])
    targets = built.tensors()

    def given(piece: Piece) -> torch.Tensor:
        source = held[piece.holding]
        return source.tensors[piece.name][piece.region.within(source.layout[piece.name].region)]

    def target(piece: Piece) -> torch.Tensor:
        return targets[piece.name][piece.region.within(regions[piece.name])]

    alike = {name: region for name, region in regions.items() if name not in own_plain}
    pieces = pieces_for(rank, alike, offers, choice.holds) + [piece for piece, _ in of_own]
    received_bytes = move(pieces, group=group, device=device, given=given, target=target)
    return Taken(companions, own is not None, received_bytes, own_plain)
