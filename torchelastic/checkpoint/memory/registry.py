"""What the processes of one program know together of their containers: where each is, and in which epoch they save.

A trainer and the helpers that it starts (`AsyncCheckpointerType.PROCESS`) open the same containers, and only one of
them hears of a checkpoint's path. So this lies in memory that all of them have open, and goes with the last of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class KnownContainer:
    """One container.

    Attributes:
        root: its folder.
        group: as members of which group of ranks this program saved there last; "": in none.
        epoch: in which epoch that was; 0: in none.
    """

    root: str
    group: str = ""
    epoch: int = 0


class ContainerRegistry:
    """The containers of one program by name; may be used by several threads, and by the processes that it pickles to.

    A process that it reaches when its sender has ended goes on with what was sent.
    """

    def __init__(self) -> None:
        self._keep(os.memfd_create("torchelastic-containers"))

    def _keep(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        weakref.finalize(self, os.close, descriptor)

    def known(self) -> dict[str, KnownContainer]:
        """What is known now."""
        with self._locked():
            return self._read()

    def root_of(self, name: str) -> Path | None:
        """The folder of a container; None: none of this name is known."""
        known = self.known().get(name)
        return Path(known.root) if known is not None else None

    def add(self, root: Path) -> None:
        """A container is in use from now on; knowing it already, this does nothing."""
        with self._changed() as known:
            known.setdefault(root.name, KnownContainer(str(root)))

    def forget(self, name: str) -> None:
        """A container is not in use any more."""
        with self._changed() as known:
            known.pop(name, None)

    def joined(self, name: str) -> tuple[str, int]:
        """As members of which group this program saves in a container, and in which epoch."""
        known = self.known().get(name, KnownContainer(""))
        return known.group, known.epoch

    def join(self, root: Path, group: str, epoch: int) -> None:
        """The same from now on."""
        with self._changed() as known:
            known[root.name] = KnownContainer(str(root), group, epoch)

    @contextmanager
    def _changed(self) -> Iterator[dict[str, KnownContainer]]:
        with self._locked():
            known = self._read()
            yield known
            self._write(known)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # other processes have opened it for themselves
            try:
                yield
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _read(self) -> dict[str, KnownContainer]:
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0) or b"{}"
        return {name: KnownContainer(*known) for name, known in json.loads(data).items()}

    def _write(self, known: dict[str, KnownContainer]) -> None:
        data = json.dumps({name: astuple(one) for name, one in known.items()}).encode()
        os.pwrite(self._descriptor, data.ljust(os.fstat(self._descriptor).st_size), 0)

    def __getstate__(self) -> dict[str, Any]:
        status = os.fstat(self._descriptor)
        where = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return {"where": where, "file": (status.st_dev, status.st_ino), "known": self.known()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        try:
            status = Path(state["where"]).stat()
            if (status.st_dev, status.st_ino) != state["file"]:
                raise ProcessLookupError("another process has its number by now")
            self._keep(os.open(state["where"], os.O_RDWR | os.O_CLOEXEC))
        except OSError:  # the sender has ended
            self._keep(os.memfd_create("torchelastic-containers"))
            self._write(state["known"])
