"""What rank 0 of a trainer does alone, where another worker becomes rank 0: log, name files, show progress."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

from torchelastic.adapters.lightning.memory_resume import step_of_checkpoint


def file_names(trainer: Any) -> dict[str, Any]:
    """The names that loggers and checkpoint callbacks have made up for their files, as plain values."""
    return {
        "versions": [_plain(getattr(logger, "version", None)) for logger in trainer.loggers],
        "folders": [_plain(one.dirpath) for one in _with_folders(trainer)],
    }


def take_file_names(trainer: Any, names: dict[str, Any]) -> None:
    """Use those of the worker that was rank 0 first: all write into the same folders."""
    for logger, version in zip(trainer.loggers, names["versions"], strict=False):
        if hasattr(logger, "_version") and getattr(logger, "_experiment", None) is None:
            logger._version = version
    for callback, folder in zip(_with_folders(trainer), names["folders"], strict=False):
        callback.dirpath = folder


def own_checkpoints(trainer: Any) -> tuple[dict[str, int], list[str]]:
    """The steps of those in the folders of checkpoint callbacks, by path; and paths of what is the best so far."""
    found: dict[str, int] = {}
    best: list[str] = []
    for one in _with_folders(trainer):
        folder = str(one.dirpath or "")
        for path in Path(folder).glob("*.ckpt") if folder and "://" not in folder else ():
            if (step := step_of_checkpoint(path)) is not None:
                found[str(path)] = step
        best += [getattr(one, "best_model_path", ""), *getattr(one, "best_k_models", ())]
    return found, [str(path) for path in best]


def _with_folders(trainer: Any) -> list[Any]:
    return [one for one in trainer.checkpoint_callbacks if hasattr(one, "dirpath")]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int) else str(value)


def become_rank_zero(trainer: Any, library: str, *, is_first: bool) -> None:
    """This worker logs and shows progress from now on.

    Args:
        trainer: of this worker.
        library: that it is of.
        is_first: whether the run has only begun.
    """
    for logger in trainer.loggers:
        if not is_first:
            _go_on_in_csv(logger)
    if is_first and trainer.enable_autolog_hparams:
        importlib.import_module(f"{library}.trainer.trainer")._log_hyperparams(trainer)
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.enable()
        if not is_first:
            bar.on_train_start(trainer, trainer.lightning_module)


def _go_on_in_csv(logger: Any) -> None:
    """Lightning's CSVLogger empties the file that it opens: keep what the lost worker has logged."""
    if type(logger).__name__ != "CSVLogger" or getattr(logger, "_experiment", None) is not None:
        return
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.is_file():
        return
    kept = path.with_name(f"{path.name}.of-lost-worker")
    path.replace(kept)
    try:
        writer = logger.experiment
    finally:
        kept.replace(path)
    with path.open(newline="") as file:
        writer.metrics_keys = next(csv.reader(file), [])
