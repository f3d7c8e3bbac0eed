"""Copies of each rank's parts in the memory of other ranks, so that the parts of a lost rank are not lost.

At a step that all ranks agree on, each copies its parts into memory that is kept from copy to copy (that alone stops
the training), and a thread sends them to its partners, in other failure domains, while the training goes on. A copy
counts when every rank has all that it was to get, which the ranks learn in the vote of a later step; only then are
older ones given up. So at every moment there is one state of which each part is on two ranks or more.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from torchelastic.checkpoint.format.copying import PendingCopy
from torchelastic.checkpoint.format.header import Header, encode_header, header_of, placed
from torchelastic.checkpoint.format.pool import SlotPool
from torchelastic.checkpoint.format.stage import Stage
from torchelastic.checkpoint.replicas.placement import partners
from torchelastic.checkpoint.store.host_memory.room import measure
from torchelastic.processes.background import in_background
from torchelastic.sharded.offers import Layout, Version
from torchelastic.text import bytes_text

log = logging.getLogger(__name__)

#: Each message has to arrive within the time-out of collectives.
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class StateCopy:
    """The parts of one rank, of one state of the run.

    Attributes:
        version: of the state.
        stage: its memory, in a slot of a pool.
        layout: of the parts.
        companions: what goes with the parts and is alike on all ranks, as bytes.
        owner: whose parts; None: this rank's own.
    """

    version: Version
    stage: Stage
    layout: Layout
    companions: bytes
    owner: int | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parts, by name."""
        return dict(zip(self.layout, self.stage.places, strict=True))


@dataclass(frozen=True)
class _Form:
    """What a rank's copies look like: the same for all of a group.

    Attributes:
        layout: of the parts.
        header: of the memory of a copy.
        text: the header as it is sent to other ranks.
    """

    layout: Layout
    header: Header
    text: bytes

    @classmethod
    def of(cls, layout: Layout) -> _Form:
        """The form of copies of these parts."""
        header = Header(None, placed(layout.values()), {})
        return cls(layout, header, zlib.compress(encode_header(header), 1))

    @classmethod
    def read(cls, text: bytes) -> _Form:
        """The inverse of `text`."""
        header = header_of(zlib.decompress(text))
        return cls({entry.name: entry for entry in header.entries}, header, text)


@dataclass(frozen=True)
class _Exchange:
    """The copy that is being sent, and those that are being received meanwhile."""

    own: StateCopy
    received: Future[list[StateCopy]]


@dataclass(frozen=True)
class Partners:
    """Who gets this rank's copies, and whose it gets.

    Attributes:
        group: of the copies alone, so that no collective of a step waits behind them; for CPU tensors.
        to: ranks.
        of: ranks.
    """

    group: dist.ProcessGroup
    to: Sequence[int]
    of: Sequence[int]


def copy_partners(domains: Sequence[str], replicas: int) -> Partners | None:
    """Who keeps copies for whom; called on every rank of a new group, which makes a group of its own for them.

    Args:
        domains: the failure domain of each rank. Where there are too few, copies go to the next ranks.
        replicas: how many copies of each rank's parts there are; 0: none, and nothing is made.

    Raises:
        RuntimeError: a peer is lost.
    """
    world_size = len(domains)
    if not replicas or world_size == 1:
        return None
    if len(set(domains)) <= replicas:
        # the next ones: their new parts are neighbours of the lost ones, so that less has to move than from others
        gives_to = [
            [(rank + n + 1) % world_size for n in range(min(replicas, world_size - 1))] for rank in range(world_size)
        ]
    else:
        gives_to = [partners(domains, rank, replicas) for rank in range(world_size)]
    rank = dist.get_rank()
    of = [giver for giver, receivers in enumerate(gives_to) if rank in receivers]
    return Partners(dist.new_group(backend="gloo"), gives_to[rank], of)


def too_little_memory(part_bytes: int, replicas: int, ranks_here: int, available_bytes: int) -> str | None:
    """Pure: what to say before the first step where the copies of a host's ranks do not fit; None: they do.

    Args:
        part_bytes: of one rank's parts.
        replicas: see `copy_partners`.
        ranks_here: how many ranks share this host's memory.
        available_bytes: what this host, or this container, has left.
    """
    # two of its own, two of each whose copies it keeps, and the parts of a new group beside those of the last one
    each_bytes = (2 * (1 + replicas) + 1) * part_bytes
    needed_bytes = ranks_here * each_bytes
    if needed_bytes <= available_bytes:
        return None
    return (
        f"copies of sharded parts need about {bytes_text(needed_bytes)} here ({ranks_here} workers with "
        f"{bytes_text(each_bytes)} each), and {bytes_text(available_bytes)} are left: the kernel may end workers. Give "
        "ShardedState fewer replicas, or 0 with HybridShard; or use more hosts"
    )


def say_if_memory_is_short(part_bytes: int, replicas: int, ranks_here: int) -> None:
    """Warn where `too_little_memory` finds a reason to; arguments as there."""
    problem = too_little_memory(part_bytes, replicas, ranks_here, measure(Path("/")).ram_bytes) if replicas else None
    if problem is not None:
        log.warning("%s", problem)


class Copies:
    """All copies of one process, its own and those of others; used on the training thread.

    Attributes:
        held: those that are whole.
    """

    def __init__(self) -> None:
        self.held: list[StateCopy] = []
        self._partners: Partners | None = None
        self._exchange: _Exchange | None = None
        #: of which state the copy is that was begun last in this group
        self.newest: Version | None = None
        self._started = self._whole = self._has_told = 0
        # of this rank's parts, and of others': these are of other sizes, and a slot that is too small is given back
        self._own: SlotPool | None = None
        self._others = SlotPool(None, at_once=True)
        self._pending = PendingCopy()
        # to write and read a form takes milliseconds, in which the training thread waits for the interpreter's lock
        self._form: _Form | None = None
        self._forms_of_others: dict[int, _Form] = {}

    # --- a group ------------------------------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """The group has ended: what is still under way has failed, or is whole."""
        self.wait_until_copied()  # until then this rank's own copy is none
        self.take_over()
        if self._exchange is not None:
            # its thread ends with the group that was given up, and gives back the memory that it receives into
            self.held.append(self._exchange.own)
            self._exchange = None
        self._partners = self.newest = None
        self._started = self._whole = self._has_told = 0

    def keep_only(self, versions: Collection[Version | None]) -> None:
        """Give up the copies of all other states, and their memory: room for the parts of a new group."""
        self._release_old(lambda copy: copy.version not in versions)
        for pool in (self._own, self._others):
            if pool is not None:
                pool.release_free_memory()

    def enter_group(self, partners: Partners | None, keep: Version | None) -> None:
        """A new group is in sync.

        Args:
            partners: None: no copies are made in this group.
            keep: the state whose copies are whole by themselves; others are given up. None: there is none.
        """
        self._partners = partners
        self._release_old(lambda copy: copy.version != keep)

    # --- copies -------------------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to give copies to."""
        return self._partners is not None

    @property
    def started(self) -> int:
        """How many copies were begun in this group; the same on all ranks."""
        return self._started

    @property
    def finished(self) -> int:
        """How many of them are whole here: this rank has all that it was to get. Says if the last one never will be."""
        if self._exchange is None or self._is_received():
            return self._started
        if self._exchange.received.done() and self._started != self._has_told:
            self._has_told, error = self._started, self._exchange.received.exception()
            text = "the parts of this worker have no new copy, nor will there be one before the next group: %s"
            log.warning(text, str(error) or type(error).__name__)
        return self._started - 1

    def begin(self, version: Version, layout: Layout, tensors: Mapping[str, torch.Tensor], companions: bytes) -> None:
        """Copy this rank's parts and begin to send them; every rank calls it at the same step.

        Not before every rank has said that the copy before is whole.
        """
        assert self._partners is not None
        self.take_over()
        if self._form is None or layout != self._form.layout:
            self._form = _Form.of(layout)
        form = self._form
        self._own = self._own or SlotPool(None, at_once=True)
        stage = self._own.take(form.header)
        # by the names: equal layouts may have another order, as optimizers do whose groups have changed
        self._pending = pending = stage.copy_beside([tensors[name] for name in form.layout])
        own, partners = StateCopy(version, stage, form.layout, companions), self._partners
        self._started, self.newest = self._started + 1, version

        def exchange() -> list[StateCopy]:
            pending.wait()
            return _exchanged(own, form.text, partners, self._others, self._forms_of_others)

        self._exchange = _Exchange(own, in_background(exchange, "sharded-copies"))

    def wait_until_copied(self) -> None:
        """Return when the parts may be changed: a copy from a GPU goes on beside the step until its optimizer."""
        self._pending.wait()

    def wait_until_received(self) -> None:
        """Return when the copy under way is whole here. Raises RuntimeError if a peer is lost."""
        if self._exchange is not None:
            self._exchange.received.result()

    def is_due(self, version: Version, every: int) -> bool:
        """Whether to copy this state: `every` steps after the last copy, if that is whole; the same on all ranks."""
        if self._partners is None or self._whole < self._started:
            return False
        return self.newest is None or version.step >= self.newest.step + every

    def all_have_finished(self, count: int) -> None:
        """Every rank has said that so many copies are whole at it: older ones are given up."""
        if count == self._started and count > self._whole:
            self.take_over()
            self._whole = count
            newest = max(copy.version for copy in self.held)
            self._release_old(lambda copy: copy.version < newest)

    def take_over(self) -> None:
        """If what was begun is whole, it counts from here on."""
        exchange = self._exchange
        if exchange is not None and self._is_received():
            self.held += [exchange.own, *exchange.received.result()]
            self._exchange = None

    def _is_received(self) -> bool:
        exchange = self._exchange
        return exchange is not None and exchange.received.done() and exchange.received.exception() is None

    def _release_old(self, is_old: Callable[[StateCopy], bool]) -> None:
        for copy in self.held:
            pool = self._own if copy.owner is None else self._others
            if pool is not None and is_old(copy):
                pool.release(copy.stage)
        self.held = [copy for copy in self.held if not is_old(copy)]


def _exchanged(
    own: StateCopy, form: bytes, partners: Partners, pool: SlotPool, forms: dict[int, _Form]
) -> list[StateCopy]:
    """Send this rank's copy to its partners and receive theirs; raises RuntimeError if a peer is lost.

    Args:
        own: what is sent.
        form: the text of its form.
        partners: from whom, and to whom.
        pool: for what is received.
        forms: of the others' last copies, by rank; is kept up.
    """
    about = msgspec.msgpack.encode((own.version, own.companions))
    mine = torch.tensor([len(form), len(about)])
    sizes = {giver: torch.empty_like(mine) for giver in partners.of}
    _swap(partners, dict.fromkeys(partners.to, mine), sizes)
    letters = {giver: torch.empty(int(size.sum()), dtype=torch.uint8) for giver, size in sizes.items()}
    _swap(partners, dict.fromkeys(partners.to, _as_tensor(form + about)), letters)
    received: list[StateCopy] = []
    try:
        for giver, letter in letters.items():
            data, end = letter.numpy().tobytes(), int(sizes[giver][0])
            if giver not in forms or forms[giver].text != data[:end]:
                forms[giver] = _Form.read(data[:end])
            form_there = forms[giver]
            version, companions = msgspec.msgpack.decode(data[end:], type=tuple[Version, bytes])
            stage = pool.take(form_there.header)
            received.append(StateCopy(version, stage, form_there.layout, companions, giver))
        memory = {copy.owner: data_of(copy.stage) for copy in received if copy.owner is not None}
        _swap(partners, dict.fromkeys(partners.to, data_of(own.stage)), memory)
    except BaseException:
        for copy in received:
            pool.release_memory(copy.stage)
        raise
    return received


def data_of(stage: Stage) -> torch.Tensor:
    """The bytes of its tensors."""
    return stage.slot.memory[stage.data_offset : stage.data_offset + stage.header.data_bytes]


def _swap(partners: Partners, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
    """Send tensors to some ranks and receive others, all at once; torch names ranks by their number in the world."""
    group = partners.group
    works: list[Any] = []
    for giver, tensor in received.items():
        works += [
            dist.irecv(chunk, group=group, group_src=giver, tag=place) for place, chunk in enumerate(_chunks(tensor))
        ]
    for receiver, tensor in sent.items():
        works += [
            dist.isend(chunk, group=group, group_dst=receiver, tag=place) for place, chunk in enumerate(_chunks(tensor))
        ]
    for work in works:
        work.wait()


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if tensor.numel():
        yield from torch.split(tensor, CHUNK_BYTES)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
