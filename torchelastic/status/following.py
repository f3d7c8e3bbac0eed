"""Events of a run as they come: each line once, when it says all that it will say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torchelastic.status.run_status import MOST_EVENTS, EventLine

#: So many lines are remembered for each host that was ever seen: what a host tells is always among its newest.
_REMEMBERED = 4 * MOST_EVENTS

#: What tells one event from another while the text of its line still grows.
_Key = tuple[str, str, float, int]


@dataclass
class Following:
    """Which lines are new. A line of several workers grows while they tell, so it is shown when it has stayed as it is.

    Attributes:
        shown: by host, the newest that were given out.
        waiting: lines that are new, as they were last seen.
    """

    shown: dict[str, list[_Key]] = field(default_factory=dict)
    waiting: dict[_Key, EventLine] = field(default_factory=dict)

    def news(self, lines: Sequence[EventLine], *, is_last: bool = False) -> list[EventLine]:
        """The lines that are to be shown now, oldest first.

        Args:
            lines: all that the hosts tell at the moment.
            is_last: whether nothing will be asked for any more: whatever is new is shown as it is.
        """
        found = {_key(line): line for line in lines if _key(line) not in self.shown.get(line.host, ())}
        # who has ended since tells nothing more: its line stays as it is, too
        settled = {key: line for key, line in self.waiting.items() if found.get(key, line) == line}
        if is_last:
            settled = {**settled, **found}
        self.waiting = {key: line for key, line in found.items() if key not in settled}
        for key, line in settled.items():
            self.shown[line.host] = [*self.shown.get(line.host, ()), key][-_REMEMBERED:]
        return sorted(settled.values(), key=lambda line: line.at_s)


def _key(line: EventLine) -> _Key:
    return (line.host, line.kind, line.at_s, line.round)
