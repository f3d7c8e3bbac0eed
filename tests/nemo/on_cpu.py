"""Lets Megatron and NeMo train on a CPU, for tests: what asks for a GPU gets the CPU. Install it before using them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.to:
            args = tuple("cpu" if _names_cuda(one) else one for one in args)
        return function(*args, **kwargs)


def _names_cuda(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


class _Stream(contextlib.nullcontext[None]):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: None


def install() -> None:
    """Patches torch, Megatron and NeMo in this process, for good."""
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_, **__: None  # each has a function of its own: torch's compiler has them in a table
    cuda.set_device = lambda *_, **__: None
    cuda.is_initialized = lambda: True
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = lambda *_, **__: _Stream()
    cuda.current_stream = lambda *_, **__: _Stream()
    cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_, **__: self
    tensor.cuda = lambda self, *_, **__: self
    tensor.pin_memory = lambda self, *_, **__: self
    own_type = torch.Tensor.type

    def type_of(self: torch.Tensor, dtype: Any = None, **options: Any) -> Any:
        if dtype is None:  # Megatron's optimizer insists on 'torch.cuda.FloatTensor'
            name = str(own_type(self))
            return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)
        return own_type(self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, **options)

    tensor.type = type_of
    numpy_module: Any = numpy
    numpy_module.product = numpy.prod  # megatron-core 0.15 means numpy 1, which NeMo's other packages cannot have
    import megatron.core.tensor_parallel.random as megatron_random
    from nemo.collections.llm.gpt.data import mock
    from nemo.lightning.io import pl as nemo_io
    from torch.distributed.device_mesh import DeviceMesh

    megatron_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    nemo_io._fix_tensors_device = lambda state: state
    of_group = DeviceMesh.from_group
    mesh: Any = DeviceMesh
    mesh.from_group = lambda group, _, *args, **options: of_group(group, "cpu", *args, **options)
    own_init = mock._MockGPTDataset.__init__

    def init(self: Any, tokenizer: Any, name: str, samples: int, length: int, _: bool = False) -> None:
        own_init(self, tokenizer, name, samples, length, 42, True)  # NeMo gives the mask's flag as the seed

    mock._MockGPTDataset.__init__ = init
    mode: Any = _CudaToCpu()
    mode.__enter__()
