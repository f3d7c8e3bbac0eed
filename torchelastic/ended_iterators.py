"""Whether StopIteration is the end of the data, or of an iterator that an error has ended before. Pure.

A generator that has raised is over, as Python has it: asked again it raises StopIteration, and so does the iterator of
a DataLoader whose worker processes have died. In a step that is repeated this would end the run, with data left.
"""

from __future__ import annotations

import inspect
import opcode
from collections.abc import Iterator
from traceback import walk_tb
from types import FrameType

#: Where torch's own iterators are.
_DATALOADER = "torch.utils.data.dataloader"


def ended_by(error: BaseException) -> str:
    """The iterator that an error of a step has ended, or may have ended; empty: none.

    Args:
        error: with its traceback.
    """
    for frame, line in walk_tb(error.__traceback__):
        if _is_of_dataloader(frame):
            return "the iterator of a DataLoader"
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return f"the generator {frame.f_code.co_name} ({frame.f_code.co_filename}, line {line})"
    return ""


def is_of_iterator(stop: StopIteration) -> bool:
    """Whether an iterator of the script's has raised it, and not a `raise` of the script or of torchelastic."""
    frames = list(_frames(stop))
    return any(map(_is_of_dataloader, frames)) or not _raises(stop)


def _is_of_dataloader(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == _DATALOADER


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (frame for frame, _ in walk_tb(error.__traceback__))


def _raises(error: BaseException) -> bool:
    """Whether the last line of its traceback is a `raise`."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    return opcode.opname[traceback.tb_frame.f_code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
