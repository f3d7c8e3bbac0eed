"""What a checkpoint and its manager are, and how the train loop uses them.

Save and load are pure effects: no collective, no rank. Who calls them, and when, is decided by the caller.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import BinaryIO, Protocol

from torchelastic.checkpoint.errors import CheckpointError, CorruptCheckpointError
from torchelastic.checkpoint.failures import Failures
from torchelastic.checkpoint.two_states import SavedStates

log = logging.getLogger(__name__)

DEFAULT_KEY = "default"
"""The key of the stream that `save` writes and `load_latest` reads."""


class SavableState(Protocol):
    """What a checkpoint needs from a state; `torchelastic.State` has it."""

    def save(self, stream: BinaryIO, /) -> object:
        """Writes everything that `load` needs into the stream."""

    def load(self, stream: BinaryIO, /) -> object:
        """Sets the whole state from what `save` wrote."""


class Checkpoint(ABC):
    """One saved state: a set of named byte streams that become visible together, or not at all.

    Derive from it to save elsewhere. The train loop commits before it closes the stream, which it has flushed.
    """

    @abstractmethod
    def open_output_stream(self, key: str) -> BinaryIO:
        """Opens a new stream for writing. What is written counts only after `commit`.

        Args:
            key: its name; the train loop uses `DEFAULT_KEY`.
        """

    @abstractmethod
    def open_input_stream(self, key: str) -> BinaryIO:
        """Opens a stream of a committed checkpoint for reading, positioned at its beginning.

        Args:
            key: the name under which it was written.

        Raises:
            CorruptCheckpointError: what is stored is not what was saved. Raise it for nothing else, and before a byte
                is handed out: `load_latest` then turns to an older checkpoint.
        """

    @abstractmethod
    def commit(self) -> None:
        """Publishes what was written. When it returns, the checkpoint is durable; if it raises, do not count on it."""

    @abstractmethod
    def discard(self) -> None:
        """Throws away what was written and not committed. Does nothing after `commit`, or when called again."""


class CheckpointManager(ABC):
    """Creates checkpoints and finds them again.

    Attributes:
        saves_on_every_rank: whether it is a `TieredCheckpointManager`, which takes a share of the state on every rank.
        place: where it saves, for one state of this process at a time: `save` refuses another one; None: it does not.
    """

    saves_on_every_rank = False
    place: str | None = None

    @cached_property  # and nothing that `__init__` makes: managers of users need not call it
    def failures(self) -> Failures:
        """The latest failures of the train loop's saves on this rank, oldest first, in words; none of them ends it."""
        return Failures()

    @abstractmethod
    def create_checkpoint(self) -> Checkpoint:
        """Returns a new checkpoint to write, newer than all others."""

    @abstractmethod
    def get_checkpoint(self, sequence_id: int) -> Checkpoint | None:
        """Returns the checkpoint with this id; None if there is none."""

    @abstractmethod
    def get_latest_checkpoint(self) -> Checkpoint | None:
        """Returns the newest committed checkpoint; None if there is none."""

    @abstractmethod
    def list_checkpoints(self) -> Sequence[Checkpoint]:
        """Returns the committed checkpoints, newest first."""

    def take_over(self, run_id: str) -> None:  # noqa: B027 - 0.1 has no such method, and its managers run unchanged
        """From now on this process saves for a run: one that did before, and is only paused, must publish nothing.

        The train loop calls it on the rank that saves, each time a group of workers has formed. The default does
        nothing.

        Args:
            run_id: names the run; other runs may save into the same place.
        """

    def list_candidates(self) -> Iterable[Checkpoint]:
        """Returns what `load_latest` tries, newest first: the committed checkpoints and those that are damaged.

        A manager that can tell damaged ones from committed ones lists both here, so that a damaged one is reported and
        not just passed over. `open_input_stream` of a damaged one raises `CorruptCheckpointError`.
        """
        latest = self.get_latest_checkpoint()
        if latest is not None:
            yield latest  # 0.1 asked for no other one, and managers written for it list in any order, or not at all
            yield from self.list_checkpoints()[1:]


def save(manager: CheckpointManager, state: SavableState) -> Checkpoint:
    """Saves a state as a new checkpoint, which is durable when this returns.

    Called by the one rank that saves. If anything fails, nothing of the new checkpoint remains.

    Args:
        manager: creates the checkpoint.
        state: its `save` fills the stream.

    Returns:
        The committed checkpoint.

    Raises:
        CheckpointError: in `manager.place` another state of this process has saved, which this one has not loaded.
        BaseException: whatever `state.save` or the checkpoint raised first. If the stream itself failed (a full disk,
            for example), that error is raised even where `state.save` hid it behind another one, as torch.save does.
    """
    place = manager.place
    if place is not None:
        _states.require_successor(place, state, lambda: _name_of(manager.get_latest_checkpoint()))
    checkpoint = manager.create_checkpoint()
    stream: BinaryIO | None = None
    try:
        stream = checkpoint.open_output_stream(DEFAULT_KEY)
        state.save(stream)
        if not stream.closed:  # by the state itself, as 0.1 allowed
            stream.flush()
        checkpoint.commit()  # 0.1 commits before it closes: a checkpoint of a user's own may take the content only now
    except BaseException as error:
        _discard(checkpoint, stream)
        failure = getattr(stream, "failure", None)
        if isinstance(failure, CheckpointError) and failure is not error:
            raise failure from error
        raise
    stream.close()
    if place is not None:
        _states.saved(place, state, repr(checkpoint))
    return checkpoint


def load_latest(manager: CheckpointManager, state: SavableState) -> Checkpoint | None:
    """Loads the newest checkpoint that is intact.

    A damaged one is reported by a warning and the next older one is taken. Integrity is decided before `state.load` is
    called, so what `state.load` raises on intact bytes is a fault of the program (or of its version) and propagates.

    Called by the rank that restores, before it shares the state with its peers.

    Args:
        manager: where to look.
        state: its `load` is called, at most once.

    Returns:
        The checkpoint that was loaded; None if there is no checkpoint at all, and only then.

    Raises:
        CorruptCheckpointError: there are checkpoints, and every one is damaged. It names them all.
        CheckpointError: the newest one cannot be read for a reason that is no damage, such as a refused permission.
        BaseException: whatever `state.load` raised.
    """
    damages: list[str] = []
    for checkpoint in manager.list_candidates():
        try:
            stream = checkpoint.open_input_stream(DEFAULT_KEY)
        except CorruptCheckpointError as error:
            log.warning("%s; trying the next older checkpoint", error)
            damages.append(str(error))
            continue
        with stream:
            state.load(stream)
        if manager.place is not None:
            _states.loaded(manager.place, state, repr(checkpoint))
        if damages:
            log.warning(
                "%r is loaded in place of %d newer one(s): what came after it is trained again",
                checkpoint,
                len(damages),
            )
        return checkpoint
    if damages:
        raise CorruptCheckpointError(
            f"no checkpoint can be loaded: {'; '.join(damages)}. Restore one of them from a copy; to start from "
            "scratch instead, move them away"
        )
    return None


def _discard(checkpoint: Checkpoint, stream: BinaryIO | None) -> None:
    """Cleans up after a failure; its own failures are logged, since the first one is what the caller must see."""
    try:
        checkpoint.discard()
        if stream is not None:
            stream.close()
    except Exception:  # user-defined checkpoints may fail in any way
        log.warning("could not delete %r completely", checkpoint, exc_info=True)


def _name_of(checkpoint: Checkpoint | None) -> str | None:
    return None if checkpoint is None else repr(checkpoint)


_states = SavedStates()  # of this process, whichever manager they are saved by
_manager: CheckpointManager | None = None


def set_checkpoint_manager(checkpoint_manager: CheckpointManager | None) -> None:
    """Sets the manager that `torchelastic.train` uses where it is given none; None means: save no checkpoints.

    Called on every rank, before `train`.
    """
    global _manager  # one manager per process is what 0.1 promises
    _manager = checkpoint_manager


def get_checkpoint_manager() -> CheckpointManager | None:
    """Returns what `set_checkpoint_manager` was given last; None at first."""
    return _manager
