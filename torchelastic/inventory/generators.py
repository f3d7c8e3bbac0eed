"""The process's generators of random numbers: torch's of the CPU and of each GPU, Python's and numpy's."""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from torchelastic.errors import UnfitStateError

#: The generators, as a script seeds them; torch's is that of the CPU, and of the GPU that a process uses, if it does.
KINDS = ("torch", "python", "numpy")
#: Of a Mersenne Twister in numpy's memory: 624 words and the position among them.
_TWISTER_BYTES = 624 * 4 + 4


class Generators(NamedTuple):
    """All of them, as they were."""

    torch_cpu: torch.Tensor
    torch_cuda: tuple[torch.Tensor, ...]
    python: Any
    numpy: Any

    def draw_as(self, other: Generators) -> bool:
        """Whether nothing was drawn between these; of numpy's it may be said once too often that something was.

        Of a Mersenne Twister a draw moves the place among its words, or makes all of them anew.
        """
        ours, theirs = (self.torch_cpu, *self.torch_cuda), (other.torch_cpu, *other.torch_cuda)
        _, words, waits = self.python
        _, other_words, other_waits = other.python
        return (
            self.numpy is other.numpy  # copied anew only when it has changed
            and (words[-1], waits, words[:4]) == (other_words[-1], other_waits, other_words[:4])
            and len(ours) == len(theirs)
            and all(one.numpy().tobytes() == two.numpy().tobytes() for one, two in zip(ours, theirs, strict=True))
        )

    def put(self) -> None:
        """They draw the same numbers again."""
        _put_torch(self.torch_cpu, self.torch_cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def generators() -> Generators:
    """As they are now; some ten microseconds, most of them for Python's."""
    return Generators(*_torchs(), random.getstate(), _numpys.state())


def digests_of_generators() -> tuple[int, ...]:
    """For each of `KINDS` 62 bits that stand for what this process draws from it."""
    cpu, cuda, *others = _parts()
    digests = (hashlib.blake2b(part, digest_size=8).digest() for part in (cpu + cuda, *others))
    return tuple(int.from_bytes(one, "little") >> 2 for one in digests)


def drawn_alike(digests: Iterable[Sequence[int]]) -> frozenset[str]:
    """Those of `KINDS` from which all ranks draw the same, by the `digests_of_generators` of each. Pure.

    >>> sorted(drawn_alike([(1, 2, 3), (1, 5, 3)]))
    ['numpy', 'torch']
    """
    return frozenset(kind for kind, of in zip(KINDS, zip(*digests, strict=True), strict=True) if len(set(of)) == 1)


def seed_generators(seed: int) -> None:
    """Draw from this seed, 0 to 2**64 - 1, from all of them; of GPUs from those of a process that uses one.

    `torch.manual_seed` leaves the seed for one that is not used yet, too, with the stack as text, in some hundred
    microseconds.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


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


# --- as they are stored -----------------------------------------------------------------------------------------------

#: A row holds the lengths of its parts, and then these; all rows are of one size, whether their ranks use GPUs or not.
ROW_BYTES = 12 * 1024
_LENGTHS = struct.Struct("<4I")
_PYTHON = struct.Struct("<625I?d")  # the words and the place among them, whether a normal number waits, and which
_NUMPY = struct.Struct("<624II?d")


def row_of_generators() -> torch.Tensor:
    """This rank's, as they are now, as one tensor of `ROW_BYTES` bytes."""
    parts = _parts()
    row = _LENGTHS.pack(*map(len, parts)) + b"".join(parts)
    return torch.frombuffer(bytearray(row.ljust(ROW_BYTES, b"\0")), dtype=torch.uint8)


def put_rows_of_generators(rows: torch.Tensor, rank: int) -> None:
    """Draw what this rank drew that was saved; one that was not saved draws from what was, and from its number.

    Where all that were saved drew alike from a generator, so does this one.

    Args:
        rows: of every rank that was saved, by rank, as `row_of_generators` gave them.
        rank: of this process.

    Raises:
        UnfitStateError: these are no such rows; nothing has changed.
    """
    if not len(rows):
        return
    if rank < len(rows):
        put_row_of_generators(rows[rank], KINDS)
        return
    draw_from(b"".join(b"".join(_parts_of(row)) for row in rows), rank)
    put_row_of_generators(rows[0], rows_draw_alike(rows))


def put_row_of_generators(row: torch.Tensor, kinds: Collection[str]) -> None:
    """Draw what another rank draws from these of `KINDS`, whose `row_of_generators` this was.

    Raises:
        UnfitStateError: it is no such row; nothing has changed.
    """
    cpu, cuda, python, numpy = _parts_of(row)
    if "torch" in kinds:
        _put_drawing(cpu, cuda)
    if "python" in kinds and python:
        *words, is_waiting, waiting = _PYTHON.unpack(python)
        random.setstate((3, tuple(words), waiting if is_waiting else None))
    if "numpy" in kinds and numpy:
        *key, position, has_waiting, waiting = _NUMPY.unpack(numpy)
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, int(has_waiting), waiting))


def draw_from(content: bytes, rank: int) -> None:
    """Draw what depends on a checkpoint and on this rank's number alone: this rank was not saved.

    Args:
        content: what stands for the checkpoint.
        rank: of this process.
    """
    seed = int.from_bytes(hashlib.blake2b(content + str(rank).encode(), digest_size=8).digest(), "little")
    torch.manual_seed(seed)  # for a GPU that is not used yet, too
    seed_generators(seed)


def rows_draw_alike(rows: torch.Tensor) -> frozenset[str]:
    """Those of `KINDS` from which all ranks that were saved drew the same; where one was saved, nobody knows."""
    if len(rows) < 2:
        return frozenset()
    first, *others = (_parts_of(row) for row in rows)
    of = {"torch": slice(0, 2), "python": slice(2, 3), "numpy": slice(3, 4)}
    return frozenset(kind for kind in KINDS if all(one[of[kind]] == first[of[kind]] for one in others))


def _parts() -> tuple[bytes, bytes, bytes, bytes]:
    """Of torch's on the CPU, of that on this process's GPU, of Python's and of numpy's, as they are now."""
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types here
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if uses_gpu else b""
    _, words, waiting = random.getstate()
    python = _PYTHON.pack(*words, waiting is not None, waiting or 0.0)
    return torch.get_rng_state().numpy().tobytes(), cuda, python, _numpy_bytes()


def _parts_of(stored: torch.Tensor) -> tuple[bytes, bytes, bytes, bytes]:
    row = stored.cpu().numpy().tobytes()
    lengths = _LENGTHS.unpack_from(row) if len(row) >= _LENGTHS.size else ()
    if not lengths or _LENGTHS.size + sum(lengths) > len(row) or lengths[3] not in (0, _NUMPY.size):
        raise UnfitStateError("the random numbers in the state that is loaded are not in the form that is known here")
    ends = [_LENGTHS.size + sum(lengths[: number + 1]) for number in range(4)]
    cpu, cuda, python, numpy = (row[end - length : end] for end, length in zip(ends, lengths, strict=True))
    return cpu, cuda, python, numpy


def _put_drawing(cpu: bytes, cuda: bytes) -> None:
    if cpu:
        torch.set_rng_state(torch.frombuffer(bytearray(cpu), dtype=torch.uint8))
    if cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # as above
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(cuda), dtype=torch.uint8))


def _numpy_bytes() -> bytes:
    """Nothing where a script has given numpy a generator of another kind."""
    state = _numpys.state()
    if state["bit_generator"] != "MT19937":
        return b""
    inner = state["state"]
    return _NUMPY.pack(*inner["key"].tolist(), inner["pos"], bool(state["has_gauss"]), state["gauss"])


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
