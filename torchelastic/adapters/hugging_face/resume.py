"""What Transformers' Trainer resumes from: its own durable checkpoints, and a folder like one made from memory.

The layout is that of `Trainer._save_checkpoint` of transformers 5: model.safetensors, optimizer.pt, scheduler.pt,
scaler.pt, trainer_state.json, and rng_state.pth, or rng_state_<rank>.pth for several ranks. The `.pt` and `.pth` files
hold plain values and tensors only, as `torch.load(weights_only=True)` wants them.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchelastic.adapters.hugging_face.rank_state import without_arrays
from torchelastic.adapters.values import json_like
from torchelastic.checkpoint.errors import torch_reason
from torchelastic.torch_internals.tensors import tree_flatten

log = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STATE_FILE = "trainer_state.json"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "adapter_model.bin", "*/adapter_model.*")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_*")


@dataclass(frozen=True, order=True)
class Durable:
    """A checkpoint that the Trainer has saved itself; one that can be resumed from in full sorts after one that cannot.

    Attributes:
        is_full: whether the optimizer's state is in it (it is not, with `save_only_model`).
        step: of the checkpoint.
    """

    is_full: bool
    step: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"checkpoint-{self.step}"


def best_of_all(seen: Sequence[Iterable[Durable]]) -> Durable | None:
    """The best durable checkpoint of those that all ranks see (`seen` is by rank); None if there is none.

    >>> best_of_all([[Durable(True, 5)], [Durable(True, 5), Durable(True, 10)]])
    Durable(is_full=True, step=5)
    """
    return max(set.intersection(*(set(each) for each in seen)), default=None)


def step_to_compare(durable: Durable | None, max_steps: int = -1) -> int | None:
    """Of a durable checkpoint, for the choice between it and memory; None: take it only where memory has nothing.

    From that of the last of `max_steps` (-1: not given) the Trainer would train one step more, in an unfinished epoch.
    """
    if durable is None or not durable.is_full or 0 < max_steps <= durable.step:
        return None
    return durable.step


def durable_checkpoints(output_dir: str | Path | None) -> list[Durable]:
    """The complete checkpoints of a Trainer in a folder: with weights, and with the state, which is written last."""
    if output_dir is None:
        return []
    return sorted(one for path in _entries(Path(output_dir)) if (one := _look_at(path)) is not None)


def checked_resume(wanted: Any, output_dir: str | Path | None) -> Any:
    """What to resume from in place of a checkpoint of this Trainer that was only half written, as its writer was lost.

    Args:
        wanted: `resume_from_checkpoint` of `Trainer.train`.
        output_dir: of the Trainer.

    Returns:
        The newest complete checkpoint of that folder; None, if all are half written; `wanted`, if it is another one.
    """
    if not wanted or output_dir is None:
        return wanted
    folder = Path(output_dir)
    newest = None if wanted is True else Path(wanted)
    if newest is None:
        numbers = [int(match[1]) for path in _entries(folder) if (match := _CHECKPOINT.fullmatch(path.name))]
        newest = folder / f"checkpoint-{max(numbers)}" if numbers else None
    is_own = newest is not None and newest.absolute().parent == folder.absolute() and newest.is_dir()
    if newest is None or not is_own or _look_at(newest) is not None:
        return wanted
    complete = max(durable_checkpoints(folder), key=lambda one: one.step, default=None)
    instead = None if complete is None else str(folder / complete.folder)
    log.warning("%s is incomplete, since its writer was lost: training resumes from %s", newest, instead or "nothing")
    return instead


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _look_at(path: Path) -> Durable | None:
    match = _CHECKPOINT.fullmatch(path.name)
    if match is None or not _has_any(path, _WEIGHTS):
        return None
    try:
        state = json.loads((path / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(state, dict) or state.get("global_step") != int(match[1]):
        return None
    return Durable(_has_any(path, _OPTIMIZERS), int(match[1]))


def _has_any(path: Path, patterns: Sequence[str]) -> bool:
    return any(next(path.glob(pattern), None) is not None for pattern in patterns)


def require_loadable(state: Any, what: str, known: set[type]) -> None:
    """Raises TypeError for tensors of a class that `torch.load(weights_only=True)` refuses, as the Trainer calls it.

    Args:
        state: nested values and tensors.
        what: whose it is.
        known: classes that are read; grows.
    """
    smallest: dict[type, torch.Tensor] = {}
    for leaf in tree_flatten(state)[0]:
        if isinstance(leaf, torch.Tensor) and type(leaf) not in known:
            other = smallest.setdefault(type(leaf), leaf)
            smallest[type(leaf)] = min(other, leaf, key=torch.Tensor.numel)
    for kind, tensor in smallest.items():
        stream = io.BytesIO()
        try:
            torch.save(tensor, stream)
            stream.seek(0)
            torch.load(stream, weights_only=True)
        except Exception as error:  # of the user's class
            name = f"{kind.__module__}.{kind.__qualname__}"
            raise TypeError(
                f"{what} holds tensors of the class {name}, which the Trainer could not load again (torch.load with "
                f"weights_only=True: {torch_reason(error)}): call torch.serialization.add_safe_globals for it"
            ) from error
        known.add(kind)


def write_folder(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes what all ranks of a host read; the Trainer's state last. What was there before is removed.

    Args:
        folder: of the checkpoint.
        content: "model" and, as they were saved, "optimizer", "scheduler", "scaler" (or None) and "trainer_state".

    Raises:
        OSError: the file system refuses.
    """
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    save_file(_without_aliases(content["model"]), folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer", "scheduler", "scaler"):
        if content[name] is not None:
            torch.save(without_arrays(content[name]), folder / f"{name}.pt")
    state = json_like(content["trainer_state"], lambda _place, _value: None)  # it was said when it was saved
    text = json.dumps(state, indent=2, sort_keys=True) + "\n"
    (folder / _STATE_FILE).write_text(text, encoding="utf-8")


def _without_aliases(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors by name, each once (tied weights have several names); safetensors wants them contiguous."""
    seen: set[int] = set()
    tensors = {}
    for name, value in model.items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.contiguous()
    return tensors


def rng_file(rank: int, world_size: int) -> str:
    """The name under which the Trainer looks for the random numbers of a rank."""
    return "rng_state.pth" if world_size <= 1 else f"rng_state_{rank}.pth"


def trainer_rng(state: Mapping[str, Any], *, is_distributed: bool) -> dict[str, Any]:
    """The random numbers of a rank as the Trainer stores them.

    Args:
        state: as `state.rng_state` made it.
        is_distributed: whether the Trainer runs one process for each device; else it stores one CUDA device only.
    """
    converted = {"python": state["python"], "numpy": without_arrays(state["numpy"]), "cpu": state["torch"]}
    if "cuda" in state:
        devices = state["cuda"]
        converted["cuda"] = devices if is_distributed else devices[state["cuda_device"]]
    return converted
