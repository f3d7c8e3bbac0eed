"""The name of a member in a run, `<host>-<place>-<incarnation><number>`: its agent makes it up. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Characters of an agent's incarnation, which tells it from all other agents of the run.
INCARNATION_LENGTH = 8


@dataclass(frozen=True)
class MemberId:
    """A member's name, taken apart; one that is none of ours has empty parts.

    Attributes:
        host: the beginning of its host's name.
        place: its local rank; "p" where no launcher has given it one.
        incarnation: of its agent.
        number: of the process among those that its agent has seen.

    >>> MemberId.of("node-7-0-3f0a77c112")
    MemberId(host='node-7', place='0', incarnation='3f0a77c1', number='12')
    >>> str(MemberId.of("node-7-0-3f0a77c112"))
    'node-7-0-3f0a77c112'
    """

    host: str
    place: str
    incarnation: str
    number: str

    def __str__(self) -> str:
        return f"{self.host}-{self.place}-{self.incarnation}{self.number}"

    @classmethod
    def of(cls, text: str) -> MemberId:
        """The parts of a name."""
        rest, _, last = text.rpartition("-")
        host, _, place = rest.rpartition("-")
        return cls(host, place, last[:INCARNATION_LENGTH], last[INCARNATION_LENGTH:])


def started_again(newcomers: Iterable[str], gone: Iterable[str]) -> frozenset[str]:
    """Which newcomers a launcher has started in the place of a worker of its own that is gone.

    >>> sorted(started_again(["h-0-3f0a77c13", "h-1-3f0a77c14", "other"], ["h-0-3f0a77c11"]))
    ['h-0-3f0a77c13']
    """
    places = {_place_of(name) for name in gone} - {None}
    return frozenset(name for name in newcomers if _place_of(name) in places)


def _place_of(name: str) -> tuple[str, str, str] | None:
    """None: not one that a launcher has given, so that it may be that of several."""
    member = MemberId.of(name)
    return (member.host, member.place, member.incarnation) if member.place.isdecimal() else None
