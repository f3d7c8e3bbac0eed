"""What a train loop says of itself as it goes: to the ledger, the metrics, its checkpoints and its deadlines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchelastic.coordinator import GroupMembership
    from torchelastic.state import State


class LoopObserver:
    """Notified of each event; override what matters to you. All are called on the training thread, on every rank."""

    __slots__ = ()

    def group_wanted(self) -> None:
        """The loop asks for a group, its first one or another."""

    def group_formed(self, membership: GroupMembership, rank: int, world_size: int) -> None:
        """The process group is there; next come the checkpoint, if one is wanted, and the sync."""

    def sync_begins(self) -> None:
        """`State.sync` is called now."""

    def in_sync(self, state: State) -> None:
        """All ranks of the group have the same state now: steps begin."""

    def step_begins(self) -> None:
        """The snapshot is taken; next comes the user's code."""

    def step_ends(self) -> None:
        """The user's code has returned or raised."""

    def step_committed(self) -> None:
        """A step has succeeded on this rank and will not be undone."""

    def step_skipped(self, reason: str, samples: int) -> None:
        """A step is left out, by all ranks, and counts as committed; `samples` of all ranks; 0: not known."""

    def step_undone(self, cause: str, *, is_undone: bool = True) -> None:
        """The step that began last has failed of `cause`; `is_undone`: the state goes back to its snapshot."""

    def group_left(self) -> None:
        """No more steps in this group."""

    def training_done(self) -> None:
        """This worker has no more to train, and waits for the others to finish."""

    def over(self) -> None:
        """The loop has ended, in whichever way. May come twice."""

    def returns(self, *, has_left: bool) -> None:
        """The loop has ended without an error; `has_left`: this worker was asked to leave a run that goes on."""


def notify_all(*observers: LoopObserver) -> LoopObserver:
    """Who tells several observers, in their order; one that does not listen to an event costs nothing."""
    told = _AllObservers()
    for event, silent in vars(LoopObserver).items():
        if not event.startswith("_"):
            hooks = [getattr(observer, event) for observer in observers]
            hooks = [hook for hook in hooks if getattr(hook, "__func__", hook) is not silent]
            setattr(told, event, hooks[0] if len(hooks) == 1 else _to_all(hooks))
    return told


class _AllObservers(LoopObserver):
    """Its events are attributes: those of who listens."""


def _to_all(hooks: list[Callable[..., None]]) -> Callable[..., None]:
    def notify(*arguments: Any, **named: Any) -> None:
        for hook in hooks:
            hook(*arguments, **named)

    return notify
