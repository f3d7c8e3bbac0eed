"""Checkpoints as 0.1 has them, named streams of bytes, on the tiers of this process."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

import torch

from torchelastic.checkpoint.checkpoint_manager import DEFAULT_KEY, Checkpoint
from torchelastic.checkpoint.engine.elastic_state import ElasticState
from torchelastic.checkpoint.engine.read_rules import WholeOnRank0
from torchelastic.checkpoint.engine.tiered_restore import Restored, TieredRestore
from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.format import torch_stream
from torchelastic.checkpoint.store.restore_plan import Candidate, candidates, lacks
from torchelastic.checkpoint.store.rewinds import Rewind, counts
from torchelastic.checkpoint.store.tier import Tier
from torchelastic.group.peers import Alone

log = logging.getLogger(__name__)

#: What a shard says that its checkpoint holds: a state as a tree, or named streams of bytes.
TREE, STREAMS = "tree", "streams"


def streams_of(state: ElasticState, rank: int) -> Mapping[str, bytes]:
    """What a state without a tree has to save: rank 0 writes it, the other ranks nothing."""
    if rank != 0:
        return {}
    stream = io.BytesIO()
    state.save(stream)
    return {DEFAULT_KEY: stream.getvalue()}


def load_restored(state: ElasticState, restored: Restored) -> None:
    """Set a state from what was restored, by whichever of its ways it was saved.

    Raises:
        CheckpointError: one rank alone has saved it, and no rank of this state can hold the whole.
    """
    if state.loads_parts and restored.kind == STREAMS:
        raise CheckpointError(
            f"the checkpoint {restored.name} holds one stream of bytes, which one rank has saved: a state of which "
            "each rank holds a part cannot be loaded from it"
        )
    if state.loads_parts:
        tree, parts = restored.content if restored.content is not None else (None, ())
        state.load_checkpoint_parts(tree, parts, restored.name.step)
    elif restored.kind == STREAMS:
        state.load(io.BytesIO(restored.content[DEFAULT_KEY]))
    else:
        state.load_checkpoint_tree(restored.content)


class NewCheckpoint(Checkpoint):
    """Streams in memory until `commit` saves them.

    Args:
        save: saves streams, and returns when they are durable.
    """

    def __init__(self, save: Callable[[Mapping[str, bytes]], None]) -> None:
        self._save = save
        self._streams: dict[str, io.BytesIO] = {}

    def open_output_stream(self, key: str) -> BinaryIO:
        """Opens a new stream for writing; what is written counts after `commit`."""
        self._streams[key] = _KeptStream()
        return self._streams[key]

    def open_input_stream(self, key: str) -> BinaryIO:
        """Opens a stream that was written, for reading."""
        return io.BytesIO(self._streams[key].getvalue())

    def commit(self) -> None:
        """Saves all streams in all tiers. Raises: CheckpointError if one of the tiers refuses."""
        self._save({key: stream.getvalue() for key, stream in self._streams.items()})

    def discard(self) -> None:
        """Throws away what was written and not committed."""
        self._streams.clear()


class _KeptStream(io.BytesIO):
    """Can be read after it was closed."""

    def close(self) -> None:
        self.flush()


class StoredCheckpoint(Checkpoint):
    """A checkpoint that this host can read, or could if it were not damaged.

    Attributes:
        name: which it is.
        sequence_id: the step at which it was taken.
        damage: why it is not complete; None if it is.
    """

    def __init__(
        self,
        candidate: Candidate,
        tiers: Sequence[Tier],
        rewinds: Sequence[Rewind],
        *,
        allow_pickles: bool,
        damage: str | None = None,
        remarks: Sequence[str] = (),
    ) -> None:
        self.name = candidate.save
        self.sequence_id = candidate.save.step
        self.damage = damage
        self._remarks = tuple(remarks)
        self._candidate = candidate
        self._tiers, self._rewinds = tiers, rewinds
        self._allow_pickles = allow_pickles

    def open_input_stream(self, key: str) -> BinaryIO:
        """Opens a stream for reading; the state of an elastic save is `default`, as `torch.save` writes it.

        Raises:
            CorruptCheckpointError: what is stored is not what was saved.
            CheckpointError: there is no such stream.
        """
        try:
            if self.damage is not None:
                raise CorruptCheckpointError(self.damage)
            restored = TieredRestore(self._tiers, Alone(), WholeOnRank0(self._allow_pickles)).restore_one(
                self._candidate
            )
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"the checkpoint {self.name} is damaged: {error}") from error
        for text in self._remarks:
            log.warning("%s", text)
        for tier in self._tiers:
            tier.seen_rewinds = self._rewinds
        if restored.kind == STREAMS and key in restored.content:
            return io.BytesIO(restored.content[key])
        if restored.kind == TREE and key == DEFAULT_KEY:
            stream = io.BytesIO()
            if self._allow_pickles:
                torch.save(restored.content, stream)
            else:
                torch_stream.write(restored.content, stream)
            stream.seek(0)
            return stream
        there = sorted(restored.content) if restored.kind == STREAMS else [DEFAULT_KEY]
        raise CheckpointError(f"the checkpoint {self.name} has no stream {key!r}; it has {', '.join(map(repr, there))}")

    def open_output_stream(self, key: str) -> BinaryIO:
        """Raises CheckpointError: nothing that was saved is changed."""
        raise CheckpointError(f"the checkpoint {self.name} is saved already, {key!r} cannot be written: create another")

    def commit(self) -> None:
        """Does nothing: it is committed."""

    def discard(self) -> None:
        """Does nothing, as after any commit."""

    def __repr__(self) -> str:
        return f"StoredCheckpoint({str(self.name)!r})"


def stored_here(tiers: Sequence[Tier], *, allow_pickles: bool = False) -> list[StoredCheckpoint]:
    """The complete checkpoints that this host can read and those of which something here is damaged, newest first.

    Raises:
        ForeignCheckpointsError: a tier holds only what something else has saved.
        CheckpointError: a tier is unreadable.
    """
    for tier in tiers:
        tier.require_own()
    stored, private = [], {tier.name for tier in tiers if not tier.is_shared}
    here = [replace(entry, place=tier.name) for tier in tiers for entry in tier.inventory()]
    rewinds = [rewind for tier in tiers for rewind in tier.rewinds()]
    for found in (one for one in candidates([here]) if counts(one.save, rewinds)):
        damage = None if found.is_complete else "; ".join(found.damages)
        if damage != "":  # else the rest of it is on other hosts, or it was never committed
            remarks = [*found.remarks, *lacks(found, here, private, 0, 1)]
            one = StoredCheckpoint(found, tiers, rewinds, allow_pickles=allow_pickles, damage=damage, remarks=remarks)
            stored.append(one)
    return stored
