"""NVRx local checkpoints (nvidia-resiliency-ext 0.4.1) on CPU tensors, with nothing inside of it edited.

What its classes want of a GPU is given from outside: a subclass that accepts CPU tensors and copies them, and three
stand-ins for functions of torch.cuda.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoint.payload import Payload
from benchmarks.checkpoint.ways import Deferred, Way, copied


class NvrxSync(Way):
    """Its LocalCheckpointManager, synchronously."""

    def __init__(self, folder: Path, payload: Payload) -> None:
        super().__init__(folder, payload)
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
        base = "nvidia_resiliency_ext.checkpointing"
        state = importlib.import_module(f"{base}.local.basic_state_dict")
        self.state_class = _on_cpu(state.BasicTensorAwareStateDict)
        self.manager = self.make_manager()
        self.removal = Deferred(self.manager)

    def make_manager(self) -> Any:
        """The manager."""
        local = importlib.import_module("nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager")
        return local.LocalCheckpointManager(str(self.folder))

    def save(self) -> None:
        self.number += 1
        self.manager.save(self.state_class(dict(self.payload.tensors)), self.number, is_async=False)

    def tidy(self) -> None:
        self.removal.do()

    def load(self, targets: dict[str, torch.Tensor]) -> None:
        assert self.manager.find_latest() == self.number
        loaded, _ = self.manager.load()
        copied(loaded.state_dict, targets)


class NvrxAsync(NvrxSync):
    """In the background, one fork per save: the only way it has for local checkpoints."""

    is_async = True

    def __init__(self, folder: Path, payload: Payload) -> None:
        super().__init__(folder, payload)
        core = importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
        self.queue: Any = core.AsyncCallsQueue(persistent=False)

    def save(self) -> None:
        self.number += 1
        request = self.manager.save(self.state_class(dict(self.payload.tensors)), self.number, is_async=True)
        self.queue.schedule_async_request(request)

    def wait(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)

    def tidy(self) -> None:
        while not self.removal.is_asked:  # its finalization asks on a thread that nobody waits for
            time.sleep(0.001)
        super().tidy()

    def close(self) -> None:
        self.queue.close()
        super().close()


_ON_CPU: dict[type, type] = {}


def _on_cpu(base: Any) -> type:
    """A subclass of theirs that takes CPU tensors; a module global, since its instances are pickled by name."""
    if base not in _ON_CPU:

        class NvrxOnCpu(base):  # type: ignore[misc]  # imported where it is there
            def __init__(self, state_dict: dict[str, torch.Tensor]) -> None:
                self.state_dict = state_dict
                self._is_hollow = False

            def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: ARG002 - theirs
                self.state_dict = {name: tensor.clone() for name, tensor in self.state_dict.items()}

            def restore_tensor_device(self, non_blocking: bool = True) -> None:
                pass

        NvrxOnCpu.__qualname__ = "NvrxOnCpu"
        globals()["NvrxOnCpu"] = NvrxOnCpu
        _ON_CPU[base] = NvrxOnCpu
    return _ON_CPU[base]
