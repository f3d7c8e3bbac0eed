"""What the file system of a folder can do, as far as somebody has found out; pure.

Nothing is tried before it is needed: whoever writes goes by this value, and where a call is refused in the words for
"there is no such call", the value says so from then on and the writer does it in the other way. `FALLBACKS` has these
ways; a call that is not in it has none, and its error ends the attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchelastic.file_systems import Call


@dataclass(frozen=True)
class Fallback:
    """What is done where a file system does not have a call.

    Attributes:
        instead: what is done; completes "so ...".
        costs: whether that is worse for a user, who is told then.
    """

    instead: str
    costs: bool


FALLBACKS: Mapping[Call, Fallback] = {
    Call.FLOCK: Fallback(
        "files beside each lock say which process of which host has it, and left-overs of killed saves stay unless "
        "they are in a shared DiskTier",
        costs=True,
    ),
    Call.LINK: Fallback("a new name is reserved by an empty file, which the file then replaces", costs=False),
    Call.RENAME_OPEN: Fallback("a file is closed before it gets its name", costs=False),
    Call.FSYNC_FOLDER: Fallback(
        "a loss of power can take the newest checkpoints away, as far as the file system orders names by itself",
        costs=True,
    ),
    Call.RENAME_FOLDER: Fallback(
        "a checkpoint is published file by file, its manifest last, which takes a call for each rank", costs=True
    ),
}


@dataclass(frozen=True)
class FolderAbilities:
    """What is known of the file system of one folder.

    Attributes:
        lacking: the calls that were refused, so that nobody tries them again.
        has_modes: whether files have the modes that they are given; not on FAT.
        has_case: whether names that differ in their case alone are two.
        has_free_space: whether it says how much room is left; many in user space do not.

    >>> str(FolderAbilities().without(Call.LINK))
    'no hard links (link)'
    >>> FolderAbilities().has(Call.LINK)
    True
    """

    lacking: frozenset[Call] = frozenset()
    has_modes: bool = True
    has_case: bool = True
    has_free_space: bool = True

    def has(self, call: Call) -> bool:
        """Whether it has the call, as far as anybody knows."""
        return call not in self.lacking

    def without(self, call: Call) -> FolderAbilities:
        """The same, and this call is refused."""
        return replace(self, lacking=self.lacking | {call})

    def __str__(self) -> str:
        """What is not there; "" if all is."""
        others = [
            (self.has_modes, "no modes"),
            (self.has_case, "names in any case are one"),
            (self.has_free_space, "free room unknown"),
        ]
        missing = [f"no {call.value}" for call in Call if call in self.lacking]
        return ", ".join([*missing, *(text for is_there, text in others if not is_there)])


#: Of a folder of which nobody has found out anything.
ALL_ABILITIES = FolderAbilities()
