"""A core or GPU that computes wrong, as a verb, for the tests of what finds it; see docs/doctor.md.

    fault = flip_bit(tmp_path, party="core 1", work="matmul in float32")
    subprocess.run(["torchelastic", "doctor", "--burn-in", "20"], env={**os.environ, **fault.environment})
    fault.require_struck()

The fault is in the environment: Python processes that are started with it flip one bit of one result, before it is
digested, and leave a file, so that the test can assert that it happened.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE = "torchelastic.doctor.burn_in_party"
_PLAN, _STRUCK = "bit-flip.json", "bit-flip-struck"
#: Python imports it whenever it starts. What else has this name in the environment is not imported then.
_SITE = "from torchelastic.testing.compute_faults import install\ninstall({folder!r})\n"


@dataclass(frozen=True)
class BitFlip:
    """What goes wrong.

    Attributes:
        folder: where the plan is, and where it is noted that it happened.
        party: who computes wrong: "core 1", "GPU 0".
        work: in which kind of work, see `burn_in_party.WORKS`.
        round: in which round, counted from 0; None: in each.
        bit: of the first byte of the result.
    """

    folder: str
    party: str
    work: str
    round: int | None = None
    bit: int = 3

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for the processes that are to have the fault."""
        before = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": os.pathsep.join(filter(None, [self.folder, before]))}

    def require_struck(self) -> None:
        """Raises AssertionError if it has never happened: the test would prove nothing."""
        if not Path(self.folder, _STRUCK).exists():
            raise AssertionError(f"{self} never happened")

    def strikes(self, party: str, work: str, round_: int) -> bool:
        """Whether it is to happen now."""
        return (party, work) == (self.party, self.work) and self.round in (None, round_)


def flip_bit(folder: Path, *, party: str, work: str, at_round: int | None = None) -> BitFlip:
    """Write down a fault of `torchelastic doctor --burn-in`, for processes that are started with its `environment`.

    Args:
        folder: a new one, for its files.
        party: see `BitFlip`, as the others.
        work: kind of work.
        at_round: None: in each round.
    """
    fault = BitFlip(str(folder), party, work, at_round)
    (folder / _PLAN).write_text(json.dumps(asdict(fault)))
    (folder / "sitecustomize.py").write_text(_SITE.format(folder=str(folder)))
    return fault


def install(folder: str) -> None:
    """Have this process meet the fault that was written down in a folder."""
    fault = BitFlip(**json.loads(Path(folder, _PLAN).read_text()))
    sys.meta_path.insert(0, _FaultImporter(fault))


class _FaultImporter(importlib.abc.MetaPathFinder):
    """Wraps one function of one module when that is imported: until then nothing of it is loaded."""

    def __init__(self, fault: BitFlip) -> None:
        self._fault = fault

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if fullname != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            real = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                real(module)
                setattr(module, "computed", _wrong(module.computed, self._fault))  # noqa: B010 - mypy

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrong(real: Any, fault: BitFlip) -> Any:
    def computed(moment: Any, *more: Any) -> Any:
        result = real(moment, *more)
        if fault.strikes(moment.party, moment.work, moment.round):
            import torch

            bits = result.reshape(-1)[:1].view(torch.uint8)  # of the result itself: it has memory of its own
            bits[:1] ^= 1 << fault.bit
            Path(fault.folder, _STRUCK).touch()
        return result

    return computed
