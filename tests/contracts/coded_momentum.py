"""An optimizer whose momentum is a tensor that is made of others, as that of 8-bit optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_ATEN = torch.ops.aten


class Coded(torch.Tensor):
    """Whole numbers from -127 to 127, and what one of them is worth."""

    codes: torch.Tensor
    worth: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, worth: torch.Tensor, has_sign: bool) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, worth: torch.Tensor, has_sign: bool) -> None:
        self.codes, self.worth, self.has_sign = codes, worth, has_sign

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "worth"], [self.has_sign]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, _size: Any, _stride: Any) -> Coded:
        (has_sign,) = context
        return cls(inner["codes"], inner["worth"], has_sign)

    def decoded(self) -> torch.Tensor:
        return self.codes.float() * self.worth

    def encode(self, values: torch.Tensor) -> None:
        self.worth.copy_(values.abs().max() / 127 + 1e-12)
        self.codes.copy_((values / self.worth).round())

    @classmethod
    def __torch_dispatch__(cls, function: Any, *arguments: Any) -> Any:
        args, kwargs = arguments[1], arguments[2] if len(arguments) > 2 else {}
        first = args[0]
        if function in (_ATEN.detach.default, _ATEN._to_copy.default):
            return cls(first.codes, first.worth, first.has_sign)
        if function is _ATEN.clone.default:
            return cls(first.codes.clone(), first.worth.clone(), first.has_sign)
        args, kwargs = tree_map_only(cls, cls.decoded, (args, kwargs))
        return function(*args, **kwargs)


class CodedMomentum(torch.optim.Optimizer):
    """SGD with such a momentum."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it returns no loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = Coded(
                        torch.zeros_like(parameter, dtype=torch.int8), torch.ones(()), has_sign=True
                    )
                state["momentum"].encode(0.9 * state["momentum"].decoded() + parameter.grad)
                parameter.sub_(group["lr"] * state["momentum"].decoded())
