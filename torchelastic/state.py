"""State: everything of a job that must survive a failure, with the five hooks that make it survive."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from torchelastic.errors import NonRetryableException
from torchelastic.rendezvous.records import StateStatus

if TYPE_CHECKING:
    from torchelastic.checkpoint.engine.read_rules import StoredParts
    from torchelastic.group.rollback import Rollback
    from torchelastic.group.step_course import StepCourse


class ReplicaDigests(NamedTuple):
    """Numbers of at most 62 bits that stand for a state; equal where the states are equal.

    Attributes:
        state: of what has to be equal on all ranks.
        torch: of what this rank draws from torch's generators.
        python: the same of Python's.
        numpy: the same of numpy's.
    """

    state: int
    torch: int
    python: int
    numpy: int


class State(ABC):
    """Subclass this, or use `ModelState`, which has all five hooks done.

    Two pairs and one single: `snapshot`/`apply` undo a failed step in memory, `save`/`load` keep the state on storage,
    `sync` brings all members of a new group level. Subclasses written for torchelastic 0.1, which spell the first
    pair `capture_snapshot`/`apply_snapshot`, work unchanged.
    """

    #: What this rank does in a step, compared with the others; None: it is not known.
    step_course: StepCourse | None = None
    #: Whether the run is to go back to an older checkpoint; None: it never does.
    rollback: Rollback | None = None

    @property
    def status(self) -> StateStatus:
        """How complete this state is, as a source for others; COMPLETE unless a subclass knows better."""
        return StateStatus.COMPLETE

    @abstractmethod
    def sync(self, *args: Any) -> Any:
        """Synchronize all members of the new group; called on every rank of every new group, inside the group.

        Write it as `sync(self)` or as `sync(self, world_size, rank)`. Rank 0 always has the best state that there is,
        so broadcasting from rank 0 is right. Steps are not synchronised here: gradients are the step's business. A
        RuntimeError (a peer died meanwhile) is undone with `apply` and tried again in the next group.
        """

    def snapshot(self) -> Any:
        """What `apply` needs to undo a step; taken before each step. None: no undo, `sync` alone repairs."""
        return self.capture_snapshot()

    def apply(self, snapshot: Any) -> None:
        """Go back to a snapshot; called on the ranks whose step failed, while the old group object still exists."""
        self.apply_snapshot(snapshot)

    def commit(self) -> None:  # noqa: B027 - a hook, most states need none
        """Called when a step has succeeded on this rank and will not be undone; for counters, cursors and the like."""

    def skip(self, snapshot: Any) -> int:
        """Undo the step that began with this snapshot, and go on behind its batches; for states with a `step_course`.

        Returns:
            How many samples are left out, over all ranks; 0: not known.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot leave a step out")

    def rehearsed(self, snapshot: Any) -> None:
        """Undo the step that began with this snapshot, which comes again in the same group; see `ComputeCheck`."""
        raise NotImplementedError(f"{type(self).__name__} cannot repeat a step")

    def hand_over(self, leaving: bool) -> None:  # noqa: B027 - as above
        """Called on every rank, inside the group, when all are about to leave it after a committed step.

        For states of which each rank holds a part: what a rank holds that does not come back has to stay.

        Args:
            leaving: whether a rank is known here to leave the run; another one may know it earlier.
        """

    def begin_replica_comparison(self) -> Callable[[], ReplicaDigests] | None:
        """Begin to compute digests of this state; every rank, after the same committed step, now and then.

        Returns:
            What waits for them, some steps later, when a GPU has had the time. None, the default: nothing is compared.
        """
        return None

    def end_replica_comparison(self, *, are_equal: bool, draw_alike: Collection[str]) -> None:  # noqa: B027 - as above
        """Called when all digests are known; on every rank after the same committed step, inside the group.

        Args:
            are_equal: whether the digests of the states are.
            draw_alike: the generators of random numbers whose digests are: of "torch", "python" and "numpy".
        """

    def capture_snapshot(self) -> Any:
        """0.1's name of `snapshot`."""
        return None

    def apply_snapshot(self, capture_snapshot: Any) -> None:
        """0.1's name of `apply`."""
        if capture_snapshot is not None:
            raise NotImplementedError(f"{type(self).__name__}.snapshot() returns a value: write apply(snapshot) too")

    def save(self, stream: BinaryIO) -> None:
        """Write the state to a file-like object; on rank 0 only. The default writes what `snapshot` returns.

        Raises:
            TypeError: the default `load` would refuse it; names what it is.
        """
        import torch

        from torchelastic.checkpoint.format import torch_stream

        if type(self).load is State.load:
            torch_stream.write(self.snapshot(), stream)
        else:
            torch.save(self.snapshot(), stream)

    def load(self, stream: BinaryIO) -> None:
        """The inverse of `save`; on rank 0 only, when nobody in the group has progress.

        The default executes no pickled code: a snapshot of other things than tensors and plain values is refused when
        it is saved; write your own pair for those.
        """
        from torchelastic.checkpoint.format import torch_stream

        self.apply(torch_stream.read(stream))

    #: Goes up when the state has got content of a new kind: then it is tried again whether that can be saved.
    content_changes: int = 0

    def check_savable(self) -> None:
        """Find content that `save` could not write or `load` would refuse, without writing anything.

        Called on every rank when a run begins with a checkpoint manager, after its first step, and when
        `content_changes` has gone up; not where a `TieredCheckpointManager` has the `checkpoint_tree`. The default
        tries what `snapshot` returns, and nothing where `save` or `load` is your own.

        Raises:
            UnsavableError: there is such content; names it.
        """
        if type(self).save is State.save and type(self).load is State.load:
            from torchelastic.checkpoint.format import torch_stream

            torch_stream.check(self.snapshot())

    def checkpoint_tree(self) -> Any:
        """The whole state as plain values and tensors (not copied), for a `TieredCheckpointManager`.

        Called on every rank after the same committed step, and when a run begins, to see whether it can be saved. None:
        there is no such thing, and rank 0 calls `save`.
        """
        return None

    def load_checkpoint_tree(self, tree: Any) -> None:
        """The inverse of `checkpoint_tree`; on rank 0 only, when nobody in the group has progress."""
        raise NotImplementedError(
            f"{type(self).__name__} has no load_checkpoint_tree: write it beside checkpoint_tree, as load beside save"
        )

    #: Whether no rank can hold the whole state, so that every one takes what it reads (`load_checkpoint_parts`).
    loads_parts: bool = False

    def load_checkpoint_parts(self, tree: Any, parts: Sequence[StoredParts], step: int) -> None:
        """As `load_checkpoint_tree`, on every rank, where `loads_parts`; the sync moves the parts to where they belong.

        Args:
            tree: on one rank: the state, with empty tensors in place of those that are among the parts; else None.
            parts: what this rank has read.
            step: committed steps of the checkpoint.
        """
        raise NotImplementedError(f"{type(self).__name__} has loads_parts: write load_checkpoint_parts too")

    def replicated(self, names: Sequence[str]) -> Collection[str]:  # noqa: ARG002 - part of the contract
        """Which of these tensors of the tree every rank holds with the same bits, so that each may write a part.

        Names are paths, such as "module/0.weight". The default: none, so rank 0 writes all.
        """
        return ()

    def of_each_rank(self, names: Sequence[str]) -> Collection[str]:  # noqa: ARG002 - part of the contract
        """Of which of these tensors of the tree each rank has its own, of one shape on all: every rank's is saved.

        `load_checkpoint_tree` gets one tensor of it with a row for each rank that has saved. The default: of none, so
        rank 0's are saved.
        """
        return ()

    def checkpoint_metrics(self) -> Mapping[str, float]:
        """What was measured of this state, by name: for `KeepBest`, and `torchelastic checkpoint ls`.

        Called on every rank when a `TieredCheckpointManager` is to save it; what rank 0 says counts. The default: the
        numbers in `extra`, where the state has one, as a `ModelState`.
        """
        extra = getattr(self, "extra", None)
        values = extra.items() if isinstance(extra, Mapping) else ()
        return {str(name): number for name, value in values if (number := _number(value)) is not None}

    def should_save_checkpoint(self, rank: int) -> bool:  # noqa: ARG002 - part of the contract
        """Whether to save after this step; the answer of rank 0 counts."""
        return False


def _number(value: Any) -> float | None:
    """As a float; None for what is none, or is too large for one."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    with suppress(OverflowError):
        return float(value)
    return None


def call_sync(state: State, world_size: int, rank: int) -> None:
    """Call `state.sync` in whichever of its two forms it is written."""
    try:
        inspect.signature(state.sync).bind(world_size, rank)
    except TypeError:
        state.sync()
    else:
        state.sync(world_size, rank)


def check_can_roll_back(state: State, snapshot: Any) -> None:
    """Raise NonRetryableException, before anything is trained, if a snapshot is taken that could not be applied."""
    kind = type(state)
    if snapshot is not None and kind.apply is State.apply and kind.apply_snapshot is State.apply_snapshot:
        raise NonRetryableException(
            f"{kind.__name__}.snapshot() returns a value, but apply(snapshot) is not written, so a failed step could "
            f"not be undone: write {kind.__name__}.apply, or return None from snapshot()"
        )


def tensor_versions(snapshot: Any) -> list[tuple[Any, int]]:
    """The tensors in a snapshot of plain containers, with torch's count of the changes that each has seen."""
    torch = sys.modules.get("torch")  # who has not imported it has no tensors
    if isinstance(snapshot, dict):
        snapshot = list(snapshot.values())
    if type(snapshot) in (list, tuple):
        return [pair for value in snapshot for pair in tensor_versions(value)]
    is_counted = torch is not None and isinstance(snapshot, torch.Tensor) and not snapshot.is_inference()
    if not is_counted:
        return []
    from torchelastic.torch_internals.tensors import version_of

    return [(snapshot, version_of(snapshot))]


def have_changed(referred: Sequence[tuple[Any, int]]) -> bool:
    """Whether any of the tensors that `tensor_versions` has found was changed since."""
    if not referred:
        return False
    from torchelastic.torch_internals.tensors import version_of

    return any(version_of(tensor) != at for tensor, at in referred)


#: How the loop calls the hooks of a state, beside `sync`: the names of the arguments, for people.
_HOOKS: Mapping[str, tuple[str, ...]] = {
    "snapshot": (),
    "apply": ("snapshot",),
    "commit": (),
    "capture_snapshot": (),
    "apply_snapshot": ("snapshot",),
    "should_save_checkpoint": ("rank",),
}
#: The same of those that only a checkpoint manager asks for.
_SAVING_HOOKS: Mapping[str, tuple[str, ...]] = {
    "save": ("stream",),
    "load": ("stream",),
    "checkpoint_tree": (),
    "load_checkpoint_tree": ("tree",),
    "replicated": ("names",),
    "check_savable": (),
    "checkpoint_metrics": (),
}


def check_hooks(state: State, *, saves: bool) -> None:
    """Find a hook that cannot be called, before this worker asks for a group: it would fail at every start.

    Args:
        state: the user's.
        saves: whether there is a checkpoint manager, which calls `save`, `load` and their kind.

    Raises:
        TypeError: names the hook and how to write it.
    """
    for name, arguments in {**_HOOKS, **(_SAVING_HOOKS if saves else {})}.items():
        hook = getattr(state, name)
        if not _takes(hook, len(arguments)):
            wanted = ", ".join(("self", *arguments))
            raise TypeError(f"{_written(state, hook)} must be written as {name}({wanted}), as it is called so")
    if not _takes(state.sync, 2) and not _takes(state.sync, 0):
        raise TypeError(
            f"{_written(state, state.sync)} must be written as sync(self), or as sync(self, world_size, rank)"
        )


def check_train_step(train_step: Callable[[Any], Any]) -> None:
    """Find a train step that cannot be called with the state alone. Raises TypeError: says how to write it."""
    if not callable(train_step):
        kind = type(train_step).__name__
        raise TypeError(
            f"train_step is a {kind}: call train(coordinator, train_step, state), with the function itself and not "
            "what it returns"
        )
    if not _takes(train_step, 1):
        name = getattr(train_step, "__name__", type(train_step).__name__)
        raise TypeError(f"{name}{_signature(train_step)} must be written as {name}(state), as it is called so")


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many positional arguments; True where nothing is known of it."""
    try:
        signature = _signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Of what is called: a decorator may add arguments to what it wraps."""
    return inspect.signature(function, follow_wrapped=False)


def _written(state: State, hook: Callable[..., Any]) -> str:
    return f"{type(state).__name__}.{hook.__name__}{_signature(hook)}"
