"""Where a run of NeMo goes on: from memory, or from long-term storage if that is newer or all there is."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo.lightning import AutoResume
from nemo.utils.exp_manager import NotFoundError

from torchelastic.adapters.lightning.memory_resume import path_to_resume, step_of_checkpoint
from torchelastic.adapters.values import CONTEXT_FILE, unpack

log = logging.getLogger(__name__)

_COMMON_STATE = "common.pt"


@dataclass(kw_only=True)
class MemoryAutoResume(AutoResume):  # type: ignore[misc] # NeMo has no types
    """NeMo's AutoResume, which finds the newest complete checkpoint in memory first. `setup` is called on all ranks.

    One in long-term storage is taken where none is in memory, or where it is of a later step: steps at which both would
    be saved belong to long-term storage. What is in memory is this job's own, so `resume_if_exists` need not be set for
    it; whether and where long-term storage is looked into is said by the fields of AutoResume.

    Made by `wrap_trainer_and_auto_resume`.

    Args:
        trainer: wrapped.
        checkpoint_io: its plugin for checkpoints in memory.
        default: asked for the checkpoint in long-term storage, if it is of a class derived from AutoResume; None: this
            object's own fields say where it is.
    """

    trainer: Any = field(repr=False)
    checkpoint_io: Any = field(repr=False)
    default: Any = None
    _found: Path | None = field(default=None, init=False, repr=False)
    _context: Any = field(default=None, init=False, repr=False)

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Tells the trainer where to go on. Called on all ranks; as AutoResume's."""
        callback = trainer.checkpoint_callback
        if callback is None:  # AutoResume takes one for granted
            path = self.get_trainer_ckpt_path(model)
            if path is not None:
                trainer.ckpt_path = path
            return
        last = callback.last_model_path
        super().setup(trainer, model)
        if self._found is not None:
            callback.last_model_path = last  # it thinks that one its own, to be removed when it saves the next

    def get_trainer_ckpt_path(self, model: Any = None) -> Any:
        """The path of the checkpoint from which training goes on, or None. Called on all ranks.

        Raises:
            ValueError: the run is over, as AutoResume finds (`resume_past_end`).
            NotFoundError: there is none, and `resume_ignore_no_checkpoint` is not set.
        """
        long_term, problem = None, None
        try:
            long_term = self.get_long_term_path(model)
        except (NotFoundError, ValueError) as error:
            if isinstance(error, ValueError) and self._is_over(model):
                raise
            problem = error
        path = path_to_resume(self.trainer, self.checkpoint_io, long_term, _global_step_of)
        self._found = Path(path) if path is not None and self.checkpoint_io.is_in_memory(path) else None
        if self._found is None:
            if problem is not None:
                raise problem
            return long_term
        if problem is not None:
            log.warning("going on from memory; long-term storage has nothing to offer: %s", problem)
        return self._found

    def get_long_term_path(self, model: Any = None) -> Any:
        """The path that AutoResume alone would find, or None. Raises: as AutoResume."""
        if self.default is not None:
            return self.default.get_trainer_ckpt_path(model)
        return super().get_trainer_ckpt_path(model)

    def get_context_path(self, model: Any = None) -> Any:
        """The folder with the context of the checkpoint that was found last. Raises: as AutoResume."""
        file = None if self._found is None else self._found / CONTEXT_FILE
        if file is None or not file.exists():
            return super().get_context_path(model) if self.default is None else self.default.get_context_path(model)
        self._context = tempfile.TemporaryDirectory(prefix="torchelastic-context-")  # lives as long as this object
        unpack(file, Path(self._context.name))
        return Path(self._context.name)

    def _is_over(self, model: Any) -> bool:
        """Whether that the run is over is what AutoResume complains of, rather than an unfinished checkpoint."""
        patient = replace(self if self.default is None else self.default, resume_past_end=True)
        try:
            patient.get_long_term_path(model) if self.default is None else patient.get_trainer_ckpt_path(model)
        except ValueError:
            return False
        return not self.resume_past_end


def _global_step_of(path: Any) -> int | None:
    """The step of a checkpoint of NeMo's or Lightning's; None if it cannot be found out. Asked on rank 0."""
    folder = Path(str(path))
    common = folder / _COMMON_STATE
    return step_of_checkpoint(common if common.is_file() else folder)
