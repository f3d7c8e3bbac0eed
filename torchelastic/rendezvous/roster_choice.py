"""Who is on the next roster where not all fit. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torchelastic.rendezvous.records import Member


def choose(members: Sequence[Member], size: int, multiple_of: int, last: Sequence[str] = ()) -> list[Member]:
    """Put a roster of a given size together.

    The rules; an earlier one outweighs those that follow:

    * One member with the best state of all is in. Where the other rules would leave all of those out, one is the first
      choice, with those of its host that make it whole.
    * `multiple_of` neighbours of the last roster of whom none is lost stay together, as one: where a model is sharded,
      they hold all of it, and others of the same host may hold the same part twice.
    * Whole ones first: `multiple_of` members of one host count as one, and are taken or left together, before members
      of hosts that have fewer than that left over. So of two hosts of two workers, at a multiple of two, the one stays
      that has lost none, and the other one's survivor waits, though it may be older.
    * What hosts have left over is taken all or not at all, in those that fill the roster exactly; where none do, one
      host is taken in part. Of hosts that are all smaller than `multiple_of`, that is the only rule.
    * Who is first in `members` comes first; with a multiple of 1 that is all, but for the best state.

    Args:
        members: from the first choice to the last: survivors by rank, and then newcomers by arrival.
        size: of the roster, a multiple of `multiple_of`: at least 1, at most as many as there are members.
        multiple_of: see above.
        last: the last roster, by rank.

    Returns:
        So many of the members, in their order.
    """
    if len(members) == size:
        return list(members)
    best = max(member.progress for member in members)
    blocks = _blocks(members, multiple_of, last)
    places = _places(members, size, multiple_of, range(len(members)), blocks)
    if all(members[place].progress != best for place in places):
        of_host = Counter(member.host for member in members)
        sources = (place for place, member in enumerate(members) if member.progress == best)
        source = min(sources, key=lambda place: (of_host[members[place].host] < multiple_of, place))
        others = (place for place in range(len(members)) if place != source)
        places = _places(members, size, multiple_of, (source, *others), blocks, source)
    return [members[place] for place in sorted(places)]


def _blocks(members: Sequence[Member], multiple_of: int, last: Sequence[str]) -> list[list[int]]:
    """Places of neighbours of the last roster who are all there."""
    place_of = {member.member_id: place for place, member in enumerate(members)}
    blocks = (last[start : start + multiple_of] for start in range(0, len(last) - multiple_of + 1, multiple_of))
    return [[place_of[name] for name in block] for block in blocks if all(name in place_of for name in block)]


def _places(
    members: Sequence[Member],
    size: int,
    multiple_of: int,
    order: Iterable[int],
    blocks: Sequence[list[int]],
    source: int | None = None,
) -> list[int]:
    """Places in `members` by the other rules; those of the part with the source in it in any case."""
    in_blocks = {place for block in blocks for place in block}
    by_host: dict[str, list[int]] = {}
    for place in order:
        if place not in in_blocks:
            by_host.setdefault(members[place].host, []).append(place)
    parts = [*map(sorted, blocks)] + [
        places[start : start + multiple_of]
        for places in by_host.values()
        for start in range(0, len(places), multiple_of)
    ]
    # a part comes when its last member does: one of survivors alone is before one with a newcomer in it
    parts.sort(key=lambda part: (source not in part, len(part) < multiple_of, max(part)))
    taken = list[int]()
    for part in parts:
        if len(taken) + len(part) <= size and (len(part) == multiple_of or source in part):
            taken += part
    there = set(taken)

    def is_last_of_its_host(part: list[int]) -> bool:
        return len(part) < multiple_of and there.issuperset(by_host[members[part[0]].host][: -len(part)])

    rests = [part for part in parts if part[0] not in there and is_last_of_its_host(part)]
    taken += _filling(rests, size - len(taken))
    there = set(taken)
    # what is still missing comes from one host: the first of those with something left over, or else whole
    left = [place for part in (*rests, *(part for part in parts if len(part) == multiple_of)) for place in part]
    return [*taken, *(place for place in left if place not in there)][:size]


def _filling(parts: Sequence[Sequence[int]], room: int) -> list[int]:
    """The places in the parts that fill the room best, none taken in half; among equals the first ones."""
    # bit n of sums[i]: some of the parts from number i on have n places together
    sums = [1]
    for part in reversed(parts):
        sums.append((sums[-1] | sums[-1] << len(part)) & ((2 << room) - 1))
    sums.reverse()
    left, taken = sums[0].bit_length() - 1, list[int]()
    for part, without in zip(parts, sums[1:], strict=True):
        if len(part) <= left and without >> (left - len(part)) & 1:
            taken += part
            left -= len(part)
    return taken
