"""Rank 0's buffers for all ranks before each forward pass, as DDP has it, also where they are of other types or sizes.

DDP hands each buffer to gloo as it is: a type that gloo does not know raises, and a size that differs from rank to rank
(a table as long as the longest sequence that the rank has seen) ends the process. Here one message has the bytes of all
buffers, and the number of the layout that follows: where rank 0's buffers have changed their form since the last
forward pass, it says so there, and sends the new layout and the bytes behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash

from torchelastic.checkpoint.format.tensor_parts import dtype_name, dtype_named
from torchelastic.errors import UnfitError
from torchelastic.inventory.module_values import put_buffers
from torchelastic.model.transfer import gathered_numbers
from torchelastic.text import shortlist
from torchelastic.torch_internals.gradients import ignored_by_ddp
from torchelastic.torch_internals.tensors import copy_all

#: Of the number of the layout; as long as the largest element, so that each buffer lies where its type may.
_HEAD_BYTES = 16


class _BufferForm(NamedTuple):
    """A buffer without its content; in each process's own names."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class BufferBroadcast:
    """One per group of more than one rank, in which messages lie on the CPU; on the training thread.

    Args:
        module: the plain module.
        is_source: whether this is rank 0.
    """

    def __init__(self, module: torch.nn.Module, *, is_source: bool) -> None:
        self._module, self._is_source = module, is_source
        self._number = 0
        self._lay_out([])

    @torch.no_grad()
    def bring(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Called on every rank before a forward pass.

        Args:
            buffers: those of the module, by name; written to, but on rank 0.

        Raises:
            RuntimeError: a peer is lost.
        """
        present = {name: buffer for name, buffer in buffers.items() if _is_plain(buffer)}
        forms = [_BufferForm(name, dtype_name(one.dtype), tuple(one.shape)) for name, one in present.items()]
        if not self._is_source:
            self._receive(present, forms)
            return
        in_order = sorted(forms, key=_element_bytes, reverse=True)
        has_changed = in_order != self._forms
        self._number += has_changed
        self._head[0] = self._number
        if not has_changed:
            copy_all(self._views, [present[form.name] for form in self._forms])
            dist.broadcast(self._message, src=0)
            return
        dist.broadcast(self._message, src=0)
        layout = msgspec.msgpack.encode(in_order)
        dist.broadcast(torch.tensor([len(layout)]), src=0)
        dist.broadcast(torch.frombuffer(bytearray(layout), dtype=torch.uint8), src=0)
        self._lay_out(in_order)
        copy_all(self._views, [present[form.name] for form in self._forms])
        dist.broadcast(self._message, src=0)

    def _receive(self, buffers: Mapping[str, torch.Tensor], forms: Sequence[_BufferForm]) -> None:
        dist.broadcast(self._message, src=0)
        if int(self._head[0]) != self._number:
            self._number = int(self._head[0])
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, src=0)
            layout = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(layout, src=0)
            self._lay_out(msgspec.msgpack.decode(layout.numpy().tobytes(), type=list[_BufferForm]))
            dist.broadcast(self._message, src=0)
        own = set(forms)
        views = dict(zip(self._forms, self._views, strict=True))
        same = [form for form in self._forms if form in own]
        copy_all([buffers[form.name] for form in same], [views[form] for form in same])
        if len(same) < len(self._forms):
            others = {form.name: view.clone() for form, view in views.items() if form not in own}
            put_buffers(self._module, others, stored=(), own=buffers.keys())

    def _lay_out(self, forms: Sequence[_BufferForm]) -> None:
        """The memory for a message with these buffers, those of larger elements first."""
        sizes_bytes = [_element_bytes(form) * torch.Size(form.shape).numel() for form in forms]
        self._forms = list(forms)
        self._message = torch.zeros(_HEAD_BYTES + sum(sizes_bytes), dtype=torch.uint8)
        head, *parts = torch.split(self._message, [_HEAD_BYTES, *sizes_bytes])
        self._head = head.view(torch.int64)
        self._views = [
            part.view(dtype_named(form.dtype)).view(form.shape) for form, part in zip(forms, parts, strict=True)
        ]


# --- on GPUs, where DDP sends them ------------------------------------------------------------------------------------

#: What NCCL has a type for; it is given a complex tensor as real numbers, and one of 8 bits as bytes.
_OF_NCCL = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def check_sent_by_nccl(module: torch.nn.Module, world_size: int, device: torch.device) -> None:
    """Refuse, on all ranks, buffers that DDP could not send over NCCL: sizes that differ would end the processes.

    Args:
        module: the plain one.
        world_size: of the group, every rank of which calls this.
        device: where messages must lie.

    Raises:
        UnfitError: names them.
        RuntimeError: a peer is lost.
    """
    sent = dict(module.named_buffers())
    for name in ignored_by_ddp(module):
        sent.pop(name, None)
    unknown = [f"{name} ({dtype_name(one.dtype)})" for name, one in sent.items() if one.dtype not in _OF_NCCL]
    if unknown:
        raise UnfitError(
            f"NCCL cannot send {shortlist(unknown)}, buffers that all ranks get of rank 0 before each forward pass: "
            "make them of another type (int32, float32), or, if they are the same on all ranks anyway, give "
            "ModelState(ddp={'broadcast_buffers': False})"
        )
    check_same_forms(sent, world_size, device)


def check_same_forms(buffers: Mapping[str, torch.Tensor], world_size: int, device: torch.device) -> None:
    """Raise UnfitError, on all ranks, where buffers have another size or type on one rank than on rank 0."""
    forms = {name: f"{dtype_name(one.dtype)} of {list(one.shape)}" for name, one in buffers.items()}
    marks = [xxhash.xxh3_64_intdigest(f"{name} {form}".encode()) >> 1 for name, form in forms.items()]
    most = max(count for (count,) in gathered_numbers([len(marks)], world_size, device))
    rows = gathered_numbers([*marks, *[0] * (most - len(marks))], world_size, device)
    for rank, row in enumerate(rows):
        if row == rows[0]:
            continue
        places = [place for place, (here, there) in enumerate(zip(row, rows[0], strict=True)) if here != there]
        names = [f"{name} (here {forms[name]})" for place, name in enumerate(forms) if place in places]
        raise UnfitError(
            f"buffers differ in size or type between rank 0 and rank {rank}: {shortlist(names) or 'some are missing'}; "
            "build the same module on every worker, or give ModelState(ddp={'broadcast_buffers': False})"
        )


def _element_bytes(form: _BufferForm) -> int:
    return dtype_named(form.dtype).itemsize


def _is_plain(buffer: torch.Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_quantized and type(buffer) is torch.Tensor
