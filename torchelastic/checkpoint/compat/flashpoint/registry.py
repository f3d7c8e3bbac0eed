"""What the processes of one program know together of their containers: where each is, and in which epoch they save.

A trainer and the helpers that it starts (`AsyncCheckpointerType.PROCESS`) open the same containers, and only one of
them learns of a checkpoint's path. So it lies in a folder of the program, as links: each is made, read and replaced in
one step, and no lock is needed.

    <temporary folder>/145      -> /dev/shm/jobs/145     where the container of this name lies
                       .145     -> 3:5f0c1a2b3d4e        in which epoch the program saves there, and as which group
                       .copies/                          which of them are making durable copies; see `DurableCopies`
"""

from __future__ import annotations

import secrets
import tempfile
import weakref
from pathlib import Path

from torchelastic.checkpoint.errors import explained
from torchelastic.processes.own_folder import OwnFolder, make_folder


class ContainerRegistry:
    """The containers of one program by name; may be used by several threads, and by the processes that it pickles to.

    Raises:
        CheckpointError: there is no place for temporary files.
    """

    def __init__(self) -> None:
        with explained("make a folder for the processes of this program", Path(tempfile.gettempdir())):
            own = OwnFolder(make_folder("torchelastic-containers-"))
        self._folder = own.path
        weakref.finalize(self, own.remove)

    @property
    def copies(self) -> Path:
        """The folder of their marks."""
        return self._folder / ".copies"

    def names(self) -> list[str]:
        """Of all containers that are in use, in their order."""
        return sorted(path.name for path in self._folder.glob("[!.]*"))

    def root_of(self, name: str) -> Path | None:
        """The folder of a container; None: none of this name is in use."""
        target = self._target(name)
        return Path(target) if target else None

    def add(self, root: Path) -> None:
        """A container is in use from now on; knowing it already, this does nothing."""
        if not self._target(root.name):
            self._link(root.name, str(root))

    def forget(self, name: str) -> None:
        """A container is not in use any more."""
        for link in (name, f".{name}"):
            (self._folder / link).unlink(missing_ok=True)

    def joined(self, name: str) -> tuple[str, int]:
        """As members of which group this program saves in a container ("": in none), and in which epoch."""
        epoch, _, group = self._target(f".{name}").partition(":")
        return group, int(epoch or 0)

    def join(self, name: str, group: str, epoch: int) -> None:
        """The same from now on."""
        self._link(f".{name}", f"{epoch}:{group}")

    def _target(self, link: str) -> str:
        try:
            return str((self._folder / link).readlink())
        except FileNotFoundError:
            return ""

    def _link(self, link: str, target: str) -> None:
        self._folder.mkdir(exist_ok=True)  # it goes with the program that has made it; a helper may live on for a while
        new = self._folder / f".new-{secrets.token_hex(8)}"
        new.symlink_to(target)
        new.replace(self._folder / link)
