"""The process's generators of random numbers: torch's of the CPU and of each GPU, Python's and numpy's."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

#: Of a Mersenne Twister in numpy's memory: 624 words and the position among them.
_TWISTER_BYTES = 624 * 4 + 4


class Generators(NamedTuple):
    """All of them, as they were."""

    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any

    def put(self) -> None:
        """They draw the same numbers again."""
        _put_torch(self.torch_cpu, self.torch_cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def generators() -> Generators:
    """As they are now; some ten microseconds, most of them for Python's."""
    return Generators(*_torchs(), random.getstate(), _numpys.state())


def drawing_torch() -> list[torch.Tensor]:
    """The states of those of torch's that a rank draws from: of the CPU, and of the GPU that it uses, if it does."""
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if uses_gpu else [])]


def put_drawing_torch(states: Sequence[torch.Tensor]) -> None:
    """Draw what another rank draws, whose `drawing_torch` this was."""
    cpu, *of_gpu = states
    torch.set_rng_state(cpu.cpu())
    if of_gpu and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # as above
        torch.cuda.set_rng_state(of_gpu[0].cpu())


def digest_of_drawing_torch() -> int:
    """62 bits that stand for these states."""
    content = b"".join(state.numpy().tobytes() for state in drawing_torch())
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 2


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it torch draws from this seed; after it, as if nothing had been drawn. The others go on as they are."""
    before = _torchs()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        _put_torch(*before)


def _torchs() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]  # torch has no types here
    return torch.get_rng_state(), cuda


def _put_torch(cpu: torch.Tensor, cuda: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


class _NumpyState:
    """The state of numpy's global generator, copied only where it has changed: numpy takes 30 us for a copy.

    Whether it has changed is seen in its memory (`BitGenerator.ctypes`, a public interface). A normal number that is
    drawn already and waits is not in there: once one was seen to wait, the state is copied each time.
    """

    def __init__(self) -> None:
        self._of: Any = None
        self._address = 0
        self._seen = b""
        self._copied: Any = None
        self._draws_pairs = False

    def state(self) -> Any:
        """What `numpy.random.set_state` takes."""
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy has it, and its types have not
        if source is not self._of:
            self._of, self._seen = source, b""
            self._address = source.ctypes.state_address if isinstance(source, np.random.MT19937) else 0
        seen = ctypes.string_at(self._address, _TWISTER_BYTES) if self._address else b""
        if not seen or seen != self._seen or self._draws_pairs:
            self._copied = np.random.get_state(legacy=False)
            self._draws_pairs |= bool(self._copied["has_gauss"])
            if seen and self._copied["state"]["key"].tobytes() != seen[:-4]:
                seen = b""  # this numpy keeps it in another form
            self._seen = seen
        return self._copied


_numpys = _NumpyState()
