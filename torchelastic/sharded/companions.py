"""What belongs to a state beside the sharded tensors, and is small: the same on all ranks, but for random numbers."""

from __future__ import annotations

import io
from typing import Any

import torch

from torchelastic.model import random_state
from torchelastic.model.extras import Extras, Snapshot, copied
from torchelastic.model.random_state import RandomState
from torchelastic.sharded.built import Built


class Companions:
    """The counters, the sampler and the user's own values of one `ShardedState`; with those of what is built.

    Args:
        sampler: the user's; None: none.
        extra: the user's own values.

    Attributes:
        step: committed steps.
        own_epoch: where the sampler has none.
    """

    def __init__(self, sampler: Any, extra: dict[str, Any]) -> None:
        self.step = 0
        self.own_epoch = 0
        self.sampler = sampler
        self.registered = Extras(extra)

    def count_step(self) -> None:
        """A step has succeeded."""
        self.step += 1
        if hasattr(self.sampler, "commit"):
            self.sampler.commit()

    # --- undoing a step -----------------------------------------------------------------------------------------------

    def snapshot(self, built: Built | None) -> Snapshot:
        """What undoes a step, but for the sharded tensors."""
        return Snapshot(
            step=self.step,
            epoch=self.own_epoch,
            buffers=() if built is None else tuple(buffer.clone() for buffer in built.model.buffers()),
            random=random_state.capture(),
            groups=() if built is None else built.optimizers.hyperparameters(),
            scheduler=None if built is None else copied(built.schedulers.state_dict()),
            sampler=None if self.sampler is None else copied(self.sampler.state_dict()),
            extra=self.registered.capture(),
            full=None,
            replaced=0,
        )

    def restore(self, snapshot: Snapshot, built: Built | None) -> None:
        """The inverse."""
        self.step, self.own_epoch = snapshot.step, snapshot.epoch
        random_state.restore(snapshot.random)
        if built is not None:
            with torch.no_grad():
                for buffer, value in zip(built.model.buffers(), snapshot.buffers, strict=True):
                    buffer.copy_(value)
            built.optimizers.restore_hyperparameters(snapshot.groups)
            built.schedulers.load_state_dict(copied(snapshot.scheduler))
        if self.sampler is not None:
            self.sampler.load_state_dict(copied(snapshot.sampler))
        self.registered.restore(snapshot.extra)

    # --- for other ranks, and for later -------------------------------------------------------------------------------

    def tree(self, built: Built) -> dict[str, Any]:
        """All of it, as plain values and tensors; the tensors are not copied."""
        return {
            "buffers": dict(built.model.named_buffers()),
            "settings": built.optimizers.settings(),
            "optimizer_steps": built.optimizers.usual,
            "values": built.plain_values(),
            "scheduler": built.schedulers.state_dict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "extra": self.registered.state_dict(),
            "step": self.step,
            "epoch": self.own_epoch,
            "random": random_state.capture().cpu,
        }

    def checkpoint_tree(self, built: Built) -> dict[str, Any]:
        """The whole state in the form of `ModelState`'s, with DTensors; the tensors are not copied."""
        tree = self.tree(built)
        return {
            "module": built.model.state_dict(),
            "optimizer": built.optimizers.state_dict(),
            **{
                key: tree[key]
                for key in ("optimizer_steps", "scheduler", "sampler", "extra", "step", "epoch", "random")
            },
        }

    def to_bytes(self, built: Built) -> bytes:
        """The tree, written."""
        return to_bytes(self.tree(built))

    def load(self, tree: dict[str, Any], built: Built, *, with_random: bool) -> None:
        """The inverse of `tree`, into what was built for a new group; `values` are the optimizers' (see `Built`).

        Args:
            tree: of this rank or of another one.
            built: for the new group.
            with_random: the random numbers too: not those of another rank, or two would draw alike.
        """
        with torch.no_grad():
            for name, buffer in built.model.named_buffers():
                if name in tree["buffers"]:
                    buffer.copy_(tree["buffers"][name])
        built.schedulers.load_state_dict(copied(tree["scheduler"]))
        built.optimizers.load_settings(tree["settings"])
        built.optimizers.usual = tree["optimizer_steps"]
        if self.sampler is not None:
            self.sampler.load_state_dict(tree["sampler"])
        self.registered.load_state_dict(tree["extra"])
        self.step, self.own_epoch = int(tree["step"]), int(tree["epoch"])
        if with_random:
            random_state.restore(RandomState(tree["random"], ()))


def to_bytes(tree: dict[str, Any]) -> bytes:
    """A tree of plain values and tensors, written; the inverse of `from_bytes`."""
    stream = io.BytesIO()
    torch.save(tree, stream)
    return stream.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """The inverse of `to_bytes`. Raises pickle.UnpicklingError for anything but plain values and tensors."""
    tree: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return tree
