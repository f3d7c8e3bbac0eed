"""Local checkpoints in Lightning; see docs/local-checkpoints.md. Works with `lightning` and with `pytorch_lightning`.

The classes are derived from those of the library that the program has imported (`lightning` if it has imported both);
`classes_for` chooses by name. Neither is imported before a name is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from torchelastic.adapters.lightning_local import (
    LOCAL_CHECKPOINT,
    LOCAL_CKPT_OPTS_KEY,
    HierarchicalCheckpointing,
    LocalCheckpointing,
)

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.io import CheckpointIO

    class LocalCheckpointCallback(LocalCheckpointing, Callback):
        """See `LocalCheckpointing`."""

    class HierarchicalCheckpointIO(HierarchicalCheckpointing, CheckpointIO):
        """See `HierarchicalCheckpointing`."""


__all__ = [
    "LOCAL_CHECKPOINT",
    "LOCAL_CKPT_OPTS_KEY",
    "HierarchicalCheckpointIO",
    "LocalCheckpointCallback",
    "classes_for",
]

_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")


@cache
def classes_for(library: str) -> dict[str, Any]:
    """The classes of this module, derived from those of one library.

    Args:
        library: "lightning.pytorch" or "pytorch_lightning".

    Raises:
        ValueError: it is another one.
        ImportError: it is not installed.
    """
    if library not in _LIBRARIES:
        raise ValueError(f"library is {library!r}: give one of {', '.join(map(repr, _LIBRARIES))}")
    bases = {
        "LocalCheckpointCallback": (LocalCheckpointing, importlib.import_module(f"{library}.callbacks").Callback),
        "HierarchicalCheckpointIO": (
            HierarchicalCheckpointing,
            importlib.import_module(f"{library}.plugins.io").CheckpointIO,
        ),
    }
    return {
        name: type(name, classes, {"__module__": __name__, "__doc__": classes[0].__doc__})
        for name, classes in bases.items()
    }


def _library_in_use() -> str:
    loaded = [library for library in _LIBRARIES if library in sys.modules]
    installed = [library for library in _LIBRARIES if importlib.util.find_spec(library.partition(".")[0]) is not None]
    if not installed:
        raise ImportError("neither lightning nor pytorch_lightning is installed: pip install 'torchelastic[lightning]'")
    return (loaded or installed)[0]


def __getattr__(name: str) -> object:
    if name not in ("LocalCheckpointCallback", "HierarchicalCheckpointIO"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return classes_for(_library_in_use())[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
