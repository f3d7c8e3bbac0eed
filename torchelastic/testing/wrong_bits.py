"""A worker that computes wrong, as a verb: one bit of one number is another one, where and when it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

#: Where a bit can be flipped: in what the module gives, in a gradient, in a weight behind the optimizer's step, in a
#: buffer behind the forward pass, in what this process sends to its peers.
PLACES = ("output", "gradient", "weight", "buffer", "sent")


@dataclass
class WrongBits:
    """What was done.

    Attributes:
        flips: how many bits were flipped.
    """

    flips: int = 0


def _flip(tensor: torch.Tensor, bit: int = 13, element: int = 0) -> None:
    """Flip one bit of one number, in place; a backward pass knows nothing of it.

    Args:
        tensor: contiguous, of a type with 32 or 64 bits.
        bit: 0 is the least one.
        element: which number, in the order of memory.
    """
    kind = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    tensor.data.view(-1).view(kind)[element] ^= 1 << bit  # `data`: autograd counts no change


def computes_wrong(
    module: torch.nn.Module,
    at: str,
    when: Callable[[torch.Tensor], bool],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    bit: int = 13,
) -> WrongBits:
    """From now on this process computes wrong; undone by nothing.

    Args:
        module: whose output, parameters and buffers it is; its first of each.
        at: one of `PLACES`.
        when: given what is about to be wrong: whether it is to be.
        optimizer: for "weight".
        bit: see `_flip`.

    Raises:
        ValueError: another place.
    """
    done = WrongBits()

    def strike(tensor: torch.Tensor) -> None:
        if when(tensor):
            _flip(tensor, bit)
            done.flips += 1

    if at == "output":
        module.register_forward_hook(lambda _module, _inputs, output: strike(output))
    elif at == "gradient":
        first: Any = next(module.parameters())
        first.register_post_accumulate_grad_hook(lambda one: strike(one.grad))
    elif at == "weight" and optimizer is not None:
        optimizer.register_step_post_hook(lambda *_: strike(next(module.parameters()).data))
    elif at == "buffer":
        module.register_forward_hook(lambda *_: strike(next(b for b in module.buffers() if b.is_floating_point())))
    elif at == "sent":
        _send_wrong(strike)
    else:
        raise ValueError(f"at={at!r} is not one of {', '.join(PLACES)}, or `weight` lacks its optimizer")
    return done


def _send_wrong(strike: Callable[[torch.Tensor], None]) -> None:
    """What this process gives into a sum or an exchange of floating-point numbers is wrong for the others alone."""
    names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]
    for name in names:
        right = getattr(dist, name)

        def wrong(output: torch.Tensor, mine: torch.Tensor, *rest: Any, _right: Any = right, **named: Any) -> Any:
            if not mine.is_floating_point():
                return _right(output, mine, *rest, **named)
            sent = mine.clone()
            strike(sent)
            result = _right(output, sent, *rest, **named)
            rank, size = dist.get_rank(), mine.numel()
            output.view(-1)[rank * size : (rank + 1) * size] = mine.view(-1)
            return result

        setattr(dist, name, wrong)
